"""`nobiru scale`: another number of ranks for a running server, followed until it is reached or undone.

Owns options, display and exit codes. What may be asked and how it happens is the server's to say.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text

from nobiru.cli import options
from nobiru.cli.http import Server, key_for
from nobiru.cli.status import URL_HELP, ranks_line
from nobiru.elastic.membership import ENDED
from nobiru.errors import ConfigError, ConflictError, InvalidRequestError, UnavailableError

POLL_S = 0.2
LOST_S = 30.0  # a server that is silent for so long is given up
DEADLINE_S = 600  # the server's, if none is given
AFTER_DEADLINE_S = 300.0  # an operation that was committed just before may take that long to settle
INTERRUPTED = 130
WHAT, HOW, SERVER = "What", "How", "Server"
EPILOG = "The key can be set in the environment: NOBIRU_ADMIN_KEY, as for the server."

Show = Callable[[Mapping[str, Any]], None]


def _option(panel: str, help_text: str, *flags: str, **more: Any) -> Any:
    return typer.Option(*flags, help=help_text, rich_help_panel=panel, **more)


Size = Annotated[int | None, typer.Argument(min=1, metavar="SIZE", help="Ranks that shall serve.")]
Remove = Annotated[
    list[str] | None, _option(WHAT, "Instead of SIZE: a rank that shall go; repeatable.", metavar="RANK")
]
Replace = Annotated[
    list[str] | None, _option(WHAT, "Instead of SIZE: a rank that a new one shall replace; repeatable.", metavar="RANK")
]
Drain = Annotated[
    bool | None,
    _option(
        HOW,
        "Let ranks that leave finish their requests first. Default: as the server was started.",
        "--drain/--no-drain",
    ),
]
DrainTimeoutS = Annotated[
    int | None,
    _option(HOW, "Seconds they get; what is left runs elsewhere. Implies --drain. Default: 120.", min=0),
]
DeadlineS = Annotated[
    int | None, _option(HOW, f"Undo the change if it is not done by then, in seconds. Default: {DEADLINE_S}.", min=1)
]
DryRun = Annotated[
    bool, _option(HOW, "Only tell what would be read, what memory it takes, and whether it can be done.", "--dry-run")
]
Url = Annotated[str, _option(SERVER, URL_HELP, "--url", "--base-url")]
AdminKey = Annotated[
    str | None, _option(SERVER, "Admin key of the server, if it asks for one. NOBIRU_ADMIN_KEY hides it better.")
]


def scale(
    size: Size = None,
    remove: Remove = None,
    replace: Replace = None,
    drain: Drain = None,
    drain_timeout_s: DrainTimeoutS = None,
    deadline_s: DeadlineS = None,
    dry_run: DryRun = False,
    url: Url = "http://127.0.0.1:8000",
    admin_key: AdminKey = None,
) -> None:
    """Change the number of ranks of a running server, while it serves.

    [bold]nobiru scale 4[/bold]  grow or shrink to 4 ranks; [bold]nobiru status[/bold] shows those there are

    [bold]nobiru scale 2 --drain-timeout-s 30[/bold]  ranks that leave first finish what they can in 30 s

    [bold]nobiru scale --replace r1[/bold]  a new rank takes the place of r1

    [bold]nobiru scale --remove r3 --remove r4 --dry-run[/bold]  only tell what it would cost

    Ctrl-C undoes the change and waits for that; a second Ctrl-C leaves at once.

    Exit code 0 when it is done, 1 when it was undone or failed or would be refused, 2 for options that cannot be.
    """
    asked = make_request(
        size=size,
        remove=remove or (),
        replace=replace or (),
        drain=drain,
        drain_timeout_s=drain_timeout_s,
        deadline_s=deadline_s,
        dry_run=dry_run,
    )
    server = Server(url, key_for(admin_key, "admin_key", "api_key"))
    interrupts = _Interrupts()
    operation_id = None
    try:
        with interrupts.counted():
            document = _begin(server, asked)
            if dry_run:
                _console().print(forecast(document))
                sys.exit(1 if document["error"] else 0)
            operation_id = document["operation_id"]
            with _display() as show:
                give_up_s = (deadline_s or DEADLINE_S) + AFTER_DEADLINE_S
                document = _follow(server, document, show, interrupts, give_up_s)
    except KeyboardInterrupt:
        options.say(f"left; {operation_id or 'a change that has begun'} goes on, and nobiru status shows it")
        sys.exit(INTERRUPTED)
    _end(document)


def make_request(
    *,
    size: int | None,
    remove: Sequence[str],
    replace: Sequence[str],
    drain: bool | None,
    drain_timeout_s: int | None,
    deadline_s: int | None,
    dry_run: bool,
) -> dict[str, Any]:
    """The body of `POST /elastic/operations`; what is not given is left to the server. Raises `ConfigError`."""
    targets = {"SIZE": size, "--remove": list(remove) or None, "--replace": list(replace) or None}
    given = [name for name, value in targets.items() if value is not None]
    if len(given) != 1:
        raise ConfigError(f"{' and '.join(given) or 'nothing'} is given; give one of SIZE, --remove, --replace")
    if drain_timeout_s is not None and drain is False:
        raise ConfigError("--no-drain and --drain-timeout-s are given; give one of them", param="drain_timeout_s")
    fields = {
        "data_parallel_size": size,
        "remove_ranks": targets["--remove"],
        "replace_ranks": targets["--replace"],
        "drain": True if drain_timeout_s is not None else drain,
        "drain_timeout_s": drain_timeout_s,
        "deadline_s": deadline_s,
        "dry_run": dry_run or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


# ---- following an operation ------------------------------------------------------------------------------------------


class _Interrupts:
    """Ctrl-C, counted: the first one is only noted, so that no request is cut short; the next one interrupts."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        before = signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt


def _begin(server: Server, asked: dict[str, Any]) -> dict[str, Any]:
    try:
        return server.post("/elastic/operations", asked)
    except InvalidRequestError as error:  # what was asked cannot be: that is a bad option here
        raise ConfigError(error.message, param=error.param) from None


def _follow(
    server: Server, document: dict[str, Any], show: Show, interrupts: _Interrupts, give_up_s: float
) -> dict[str, Any]:
    """Show the operation until it has ended; its last document."""
    path = f"/elastic/operations/{document['operation_id']}"
    heard_s = began_s = time.monotonic()
    is_cancelled = False
    while document["phase"] not in ENDED:
        show(document)
        if time.monotonic() - began_s > give_up_s:
            raise UnavailableError(f"{document['operation_id']} is {document['phase']} after {give_up_s:g} s; left it")
        time.sleep(POLL_S)
        try:
            if interrupts.count and not is_cancelled:
                _cancel(server, path)
                is_cancelled = True
            document = server.get(path)
            heard_s = time.monotonic()
        except UnavailableError as error:  # a server that is busy with the change may be late
            if time.monotonic() - heard_s > LOST_S:
                raise UnavailableError(f"lost sight of {document['operation_id']}: {error.message}") from None
    show(document)
    return document


def _cancel(server: Server, path: str) -> None:
    try:
        server.delete(path)
        options.say("cancelled; waiting until it is undone (Ctrl-C again leaves at once)", level="info")
    except ConflictError as error:
        options.say(f"{error.message}; waiting for its end (Ctrl-C again leaves at once)")


def _end(document: Mapping[str, Any]) -> None:
    if document["phase"] == "done":
        _console().print(summary(document))
        sys.exit(0)
    how = "is undone" if document["phase"] == "rolled_back" else document["phase"]
    options.say(f"{document['operation_id']} {how}: {document['error'] or 'the server told no cause'}", level="error")
    sys.exit(1)


# ---- what is shown ---------------------------------------------------------------------------------------------------


def _console() -> Console:
    # Where the output is piped, rich assumes 80 columns.
    return Console() if sys.stdout.isatty() else Console(width=120)


@contextmanager
def _display(console: Console | None = None) -> Iterator[Show]:
    """Gives the function to call with each new document: on a terminal it redraws, else it prints new phases."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda document: live.update(render(document), refresh=True)


class _Lines:
    """One line for each phase that has begun since the last call, also for those that were over between two calls."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, document: Mapping[str, Any]) -> None:
        began = document["timestamps"]
        for phase, at_s in began.items():
            if phase not in self._told:
                self._told.add(phase)
                states = f" ({ranks_line(document['ranks']).plain})" if phase == document["phase"] else ""
                options.say(f"{at_s - min(began.values()):7.2f} s  {phase}{states}", level="info")


def render(document: Mapping[str, Any]) -> RenderableType:
    """A running operation: its phases with seconds, the ranks with states, the bytes to move."""
    table = Table("phase", box=None, pad_edge=False)
    table.add_column("seconds", justify="right")
    for phase in document["timestamps"]:
        is_present = phase == document["phase"]
        seconds = document["seconds"].get(phase)
        shown = "" if seconds is None else f"{seconds:.2f}"
        table.add_row(Text(phase, "bold" if is_present else "dim"), Text(shown))
    head = Text(f"operation {document['operation_id']}: to {document['target'].get('data_parallel_size')} ranks")
    moved = Text(f"{decimal(document['bytes_moved'])} to read")
    return Group(head, table, ranks_line(document["ranks"]), *([moved] if document["bytes_moved"] else []))


def summary(document: Mapping[str, Any]) -> Text:
    """What an operation that is done has changed, and what it took."""
    parts = [f"{document['target'].get('data_parallel_size')} ranks serve"]
    parts.append(f"epoch {document['from_epoch']} -> {document['to_epoch']}")
    if document["pause_seconds"] is not None:
        parts.append(f"paused {document['pause_seconds'] * 1000:.1f} ms")
    if document["bytes_moved"]:
        parts.append(f"{decimal(document['bytes_moved'])} read")
    return Text(", ".join([*parts, f"{sum(document['seconds'].values()):.2f} s in all"]))


def forecast(document: Mapping[str, Any]) -> RenderableType:
    """The document of a dry run: for each rank what it reads and its memory, for each node what is needed there."""
    plan = document["plan"]
    table = Table("rank", "", "node", box=None, pad_edge=False)
    for name in ("reads", "memory now", "at most", "afterwards"):
        table.add_column(name, justify="right")
    for rank_id, rank in plan["ranks"].items():
        memory = [decimal(rank["memory_bytes"][when]) for when in ("before", "during", "after")]
        table.add_row(rank_id, rank["role"], rank["node"] or "", decimal(rank["bytes_to_read"]), *memory)
    nodes = [
        Text(f"{name}: {decimal(node['needed_bytes'])} more are needed, {decimal(node['available_bytes'])} available")
        for name, node in plan["nodes"].items()
    ]
    measured = plan["num_pauses_measured"]
    basis = f"median of {measured} earlier" if measured else "none measured yet"
    pause = f"pause about {plan['expected_pause_seconds'] * 1000:.1f} ms ({basis})"
    head = f"dry run: {len(plan['members'])} ranks would serve; {decimal(plan['bytes_to_read'])} would be read; {pause}"
    refused = [Text(f"it would be refused: {document['error']}", "bold red")] if document["error"] else []
    return Group(Text(head), table, *nodes, *refused)
