"""`nobiru status`: the ranks of a running server as a table. Owns how they look; what is told is the server's."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from nobiru.cli.http import Server, key_for
from nobiru.errors import UnavailableError

REFRESH_S = 1.0
UNKNOWN = "-"
URL_HELP = "The server's address, with or without /v1."
STATE_STYLES = {"serving": "green", "leaving": "yellow", "launching": "cyan", "preparing": "cyan", "dead": "red"}
EPILOG = "The key can be set in the environment: NOBIRU_API_KEY or NOBIRU_ADMIN_KEY, as for the server."

Url = Annotated[str, typer.Option("--url", "--base-url", help=URL_HELP)]
ApiKey = Annotated[
    str | None, typer.Option(help="Key of the server, if it asks for one. NOBIRU_API_KEY hides it better.")
]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Look again every second, until Ctrl-C.")]
Json = Annotated[bool, typer.Option("--json", help="Print what the server tells, as one line of JSON.")]


def status(
    url: Url = "http://127.0.0.1:8000", api_key: ApiKey = None, watch: Watch = False, as_json: Json = False
) -> None:
    """Show the ranks of a running server: processes, states, load, experts, and the change that is running.

    [bold]nobiru status[/bold]  the server on this machine, once

    [bold]nobiru status --watch --url http://10.0.0.7:8000[/bold]  another one, all the time

    [bold]nobiru status --json | jq '.ranks\\[].pid'[/bold]  for programs

    Exit code 0, or 1 when there is no server.
    """
    server = Server(url, key_for(api_key, "api_key", "admin_key"))
    document = server.get("/elastic/status")
    if not watch:
        _print(document, as_json=as_json)
        return
    try:
        _watch(server, document, as_json=as_json)
    except KeyboardInterrupt:  # the way to end it
        sys.exit(0)


def _watch(server: Server, document: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json or not sys.stdout.isatty():
        while True:
            _print(document, as_json=as_json)
            time.sleep(REFRESH_S)
            document = server.get("/elastic/status")
    with Live(render(document), console=Console(), auto_refresh=False) as live:
        while True:
            time.sleep(REFRESH_S)
            try:
                shown = render(server.get("/elastic/status"))
            except UnavailableError as error:  # it may come back
                shown = Text(error.message, style="red")
            live.update(shown, refresh=True)


def _print(document: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(document), flush=True)
        return
    # Where the output is piped, rich assumes 80 columns.
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(render(document))


def render(document: Mapping[str, Any]) -> RenderableType:
    """The document of `GET /elastic/status` for people."""
    placement = document.get("placement") or {}
    slots = placement.get("slots") or {}
    ranks = document.get("ranks") or []
    table = Table("rank")
    has_workers = any(len(rank.get("worker_pids") or ()) > 1 for rank in ranks)
    names = ["pid", *(["worker pids"] if has_workers else []), "node", "state", "outstanding tokens"]
    for name in (*names, *(["experts per layer"] if slots else [])):
        table.add_column(name, justify="left" if name in ("node", "state") else "right")
    for rank in ranks:
        state = _text(rank.get("state"))
        cells = [_text(rank.get("rank_id")), _text(rank.get("pid"))]
        if has_workers:
            cells.append(Text(" ".join(map(str, (rank.get("worker_pids") or ())[1:])) or UNKNOWN))
        cells.append(_text(rank.get("node")))
        cells += [Text(state.plain, STATE_STYLES.get(state.plain, "")), _text(rank.get("outstanding_tokens"))]
        if slots:
            cells.append(_text(_experts(slots.get(rank.get("rank_id")))))
        table.add_row(*cells)
    lines = [*_operation(document.get("operation")), *_autoscaler(document.get("autoscaler"))]
    return Group(Text("   ".join(_facts(document, ranks, placement))), table, *lines)


def _facts(document: Mapping[str, Any], ranks: Sequence[Any], placement: Mapping[str, Any]) -> list[str]:
    facts = [f"epoch {document.get('epoch', UNKNOWN)}"]
    desired = document.get("desired_size")
    facts.append(f"ranks {len(ranks)}" if desired is None else f"ranks {len(ranks)} of {desired}")
    if "num_experts" in placement:
        facts.append(f"experts {placement['num_experts']}")
    if (balancedness := placement.get("balancedness")) is not None:
        facts.append(f"balancedness {balancedness:.3f}")
    return facts


def _operation(operation: Mapping[str, Any] | None) -> list[Text]:
    if operation is None:
        return []
    size = operation["target"].get("data_parallel_size")
    seconds = sum(operation["seconds"].values())
    origin = operation.get("origin")
    name = f"operation {operation['operation_id']} ({origin}): to {size} ranks, {operation['phase']}"
    return [Text(f"{name}, for {seconds:.1f} s", "yellow")]


def _autoscaler(autoscaler: Mapping[str, Any] | None) -> list[Text]:
    if autoscaler is None:
        return []
    dry = ", dry run" if autoscaler["dry_run"] else ""
    head = f"autoscaler: {autoscaler['min']} to {autoscaler['max']} ranks, wait {autoscaler['target_wait_s']:g} s{dry}"
    if autoscaler["error"] is not None:
        return [Text(f"{head}; has ended: {autoscaler['error']}", "red")]
    now, last = autoscaler["now"], autoscaler["last_decision"]
    lines = [head if now is None else f"{head}; now {now['action']}: {now['reason']}"]
    if last is not None:
        ended = f", {last['phase']}" if last["phase"] is not None else ""
        error = f" ({last['error']})" if last["error"] is not None else ""
        when = time.strftime("%H:%M:%S", time.localtime(last["time"]))
        change = f"{last['from_ranks']} -> {last['to_ranks']} ranks{ended}{error}"
        lines.append(f"last decision at {when}: {change}: {last['reason']}")
    return [Text(line) for line in lines]


def _experts(layers: Sequence[Sequence[int]] | None) -> str | None:
    """How many copies of experts a rank holds in each layer; empty slots are -1."""
    counts = [sum(expert >= 0 for expert in layer) for layer in layers or ()]
    if not counts:
        return None
    return f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def _text(value: object) -> Text:
    return Text(UNKNOWN if value is None else str(value))


def ranks_line(ranks: Mapping[str, str]) -> Text:
    """Ranks and their states in one line."""
    parts = [Text.assemble(f"{rank_id} ", (state, STATE_STYLES.get(state, ""))) for rank_id, state in ranks.items()]
    return Text(", ").join(parts)
