"""The command line's commands and what `nobiru --help` says."""

from __future__ import annotations

from typing import Annotated

import typer

from nobiru import __version__

EPILOG = "Every option can be set in the environment too: --max-num-seqs is NOBIRU_MAX_NUM_SEQS."
COMMANDS = ("serve", "embed", "scale", "status", "bench")


def make_app(only: str | None = None) -> typer.Typer:
    """The application with all commands, or with one of `COMMANDS`, which need not wait for the others' imports."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(epilog=EPILOG)(nobiru)
    for command in COMMANDS if only is None else [only]:
        _add(command, app)
    return app


def _add(command: str, app: typer.Typer) -> None:
    match command:
        case "serve":
            from nobiru.cli.serve import serve

            app.command(epilog=EPILOG)(serve)
        case "embed":
            from nobiru.cli.embed import embed

            app.command(epilog=EPILOG)(embed)
        case "scale":
            from nobiru.cli import scale

            app.command(epilog=scale.EPILOG)(scale.scale)
        case "status":
            from nobiru.cli import status

            app.command(epilog=status.EPILOG)(status.status)
        case "bench":
            from nobiru.cli import bench

            app.add_typer(bench.app, name="bench")


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"nobiru {__version__}")
        raise typer.Exit


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
