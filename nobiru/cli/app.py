"""The command line's commands and what `nobiru --help` says."""

from __future__ import annotations

from typing import Annotated

import typer

from nobiru import __version__
from nobiru.cli.bench import app as bench_app
from nobiru.cli.embed import embed
from nobiru.cli.scale import EPILOG as SCALE_EPILOG
from nobiru.cli.scale import scale
from nobiru.cli.serve import serve
from nobiru.cli.status import EPILOG as STATUS_EPILOG
from nobiru.cli.status import status

EPILOG = "Every option can be set in the environment too: --max-num-seqs is NOBIRU_MAX_NUM_SEQS."

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog=EPILOG)(serve)
app.command(epilog=EPILOG)(embed)
app.command(epilog=SCALE_EPILOG)(scale)
app.command(epilog=STATUS_EPILOG)(status)
app.add_typer(bench_app, name="bench")


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"nobiru {__version__}")
        raise typer.Exit


@app.callback(epilog=EPILOG)
def nobiru(
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Embedding models and language models, served over HTTP; embedding models run on files too.

    [bold]nobiru serve MODEL_FOLDER[/bold]  starts a server that OpenAI clients can talk to.

    [bold]nobiru embed texts.jsonl -o vectors.jsonl[/bold]  embeds a file.

    [bold]nobiru bench serve[/bold]  measures a running server.

    [bold]nobiru scale 4[/bold]  gives a running server another number of ranks; [bold]nobiru status[/bold] shows them.
    """
