"""Entry of the `nobiru` command: the version at once, everything else by `nobiru.cli.app`, errors as one line.

Exit codes: 0 done, 1 the work failed, 2 a bad option, model folder or command line, 130 interrupted.
"""

from __future__ import annotations

import sys

from nobiru import __version__
from nobiru.errors import ConfigError, ModelFolderError, NobiruError


def main(arguments: list[str] | None = None) -> None:
    """Run the command with `arguments` (default: those of the process) and exit."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments in (["--version"], ["-V"]):
        print(f"nobiru {__version__}")
        sys.exit(0)
    from nobiru.cli.app import (  # typer takes a quarter of a second, which --version need not wait for
        COMMANDS,
        make_app,
    )

    app = make_app(only=arguments[0] if arguments and arguments[0] in COMMANDS else None)
    try:
        app(args=arguments, prog_name="nobiru")
    except NobiruError as error:
        print(f"nobiru: {error.message}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError | ModelFolderError) else 1)
