"""Change the ranks of a serving model at random, kill some, and see whether anything is lost or left behind.

Starts `nobiru serve MODEL` with two expert-parallel ranks and keeps `--clients` clients busy that stream greedy texts.
Then come `--operations` changes in a row: growth, shrink (drained or not), named ranks removed and replaced, changes
cancelled at a random moment, ranks killed at rest and in the middle of changes, and now and then one that is stopped
(SIGSTOP) until the server takes it for dead. Checks:

* every request was answered, with the text of an undisturbed run, token for token;
* every change ended as it must, and the group was whole again afterwards;
* after as many ranks as at the start serve again, without load: descriptors, threads, processes, files in shared
  memory and keys of the rendezvous store are exactly what they were after the warm-up, and resident memory has grown
  by 3 % at most;
* on SIGTERM the server ended by itself, with exit code 0 and no process left.

    python -m benchmarks.elastic_soak MODEL                          # 100 changes, some 10 minutes
    python -m benchmarks.elastic_soak MODEL --operations 25 --seed 3 # others, fewer
    python -m benchmarks.elastic_soak MODEL --verbose                # a line for every change

MODEL is a folder with experts. The same seed draws the same changes as long as all end the same way. Runs from a
checkout, with the extra `bench`. The last line of output is JSON; exit code 0 when every check held.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.elastic.changes import Change, Outcome, draw, perform
from benchmarks.elastic.clients import Clients
from benchmarks.elastic.footprint import Footprint, differences, measure, processes_of
from benchmarks.elastic.server import ElasticServer, ServerError

START_SIZE = 2
LOAD_S = 3.0  # of work for ranks that are new, before they are measured
SETTLE_S = 30.0
MAX_GROWTH = 0.03


@dataclass(frozen=True, kw_only=True)
class Soak:
    """What is to be done."""

    model: str
    num_operations: int = 100
    duration_s: float = 3600.0
    seed: int = 0
    num_clients: int = 4
    max_tokens: int = 96
    max_size: int = 4
    rank_timeout_s: float = 5.0
    warm_up: tuple[int, ...] = (4, 1, 3)
    log: Path = Path("elastic-soak.log")
    server_arguments: tuple[str, ...] = ("--kv-cache-memory-bytes", "8000000", "--num-threads", "1")


@dataclass(kw_only=True)
class Report:
    """What happened. `problems` is empty when every check held."""

    problems: list[str] = field(default_factory=list)
    num_requests: int = 0
    num_tokens: int = 0
    changes: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    num_failure_epochs: int = 0
    pauses_s: list[float] = field(default_factory=list)
    before: Footprint | None = None
    after: Footprint | None = None
    seconds: float = 0.0


Said = Callable[[int, str], None]


async def run(soak: Soak, say: Said = lambda done, text: None) -> Report:
    """Start, warm up, change, compare. `say` hears what was done and how many changes that makes."""
    report, began_s = Report(), time.monotonic()
    arguments = ("--max-data-parallel-size", str(soak.max_size), "--rank-timeout-s", str(soak.rank_timeout_s))
    server = ElasticServer(soak.model, size=START_SIZE, log=soak.log, arguments=(*arguments, *soak.server_arguments))
    async with server:
        clients = Clients(server.url, count=soak.num_clients, max_tokens=soak.max_tokens)
        await clients.learn()
        try:
            await _warm_up(soak, server, clients)
            report.before = await _footprint_at_rest(server, clients)
            say(0, "warm")
            await _change(soak, server, clients, report, say)
            if not clients.problems:
                await _footprint_after(server, clients, report)
        except (ServerError, TimeoutError) as error:
            report.problems.append(str(error) or "a wait took too long")
        report.problems += clients.problems
        report.num_requests = clients.num_requests
        await _end(server, report)
    report.seconds = round(time.monotonic() - began_s, 1)
    return report


async def _warm_up(soak: Soak, server: ElasticServer, clients: Clients) -> None:
    """Through the largest group, a smaller one and a death: what is made once for good is there afterwards."""
    clients.start()
    for size in soak.warm_up:
        await perform(server, Change(kind="warm-up", body={"data_parallel_size": min(size, soak.max_size)}))
    await perform(server, Change(kind="kill", signal=signal.SIGKILL))
    await _back_to_start(server)
    await asyncio.sleep(LOAD_S)
    await clients.stop()
    clients.forget_ended()


async def _change(soak: Soak, server: ElasticServer, clients: Clients, report: Report, say: Said) -> None:
    rng, ends_s = random.Random(soak.seed), time.monotonic() + soak.duration_s
    clients.start()
    try:
        for number in range(soak.num_operations):
            await asyncio.sleep(rng.uniform(0.0, 1.0))
            change = draw(rng, list(await server.members()), soak.max_size)
            say(number, str(change))
            outcome = await perform(server, change)
            _enter(report, change, outcome)
            say(number + 1, f"{change}: {', '.join([outcome.phase or 'healed', *outcome.notes])}")
            report.num_tokens += sum(len(each.token_ids) for each in clients.streams if each.ended_s is not None)
            clients.forget_ended()
            if clients.problems:
                return  # what comes later says nothing new
            if time.monotonic() > ends_s:
                break
        await _back_to_start(server)
        await asyncio.sleep(LOAD_S)
    finally:
        await clients.stop()


def _enter(report: Report, change: Change, outcome: Outcome) -> None:
    report.changes[change.kind] += 1
    report.ends[outcome.phase or "healed"] += 1
    report.num_failure_epochs += sum(each["origin"] == "failure" for each in outcome.operations)
    planned = [each for each in outcome.operations if each["origin"] in ("user", "heal") and each["phase"] == "done"]
    report.pauses_s += [each["pause_seconds"] for each in planned]


async def _back_to_start(server: ElasticServer) -> None:
    if len(await server.members()) != START_SIZE:
        await perform(server, Change(kind="back", body={"data_parallel_size": START_SIZE}))


async def _footprint_at_rest(server: ElasticServer, clients: Clients) -> Footprint:
    """When nothing changes any more: connections close a moment after the clients have left."""
    deadline_s = time.monotonic() + SETTLE_S
    footprint = measure(server.pid)
    while True:
        await asyncio.sleep(1.5)
        earlier, footprint = footprint, measure(server.pid)
        if not differences(earlier, footprint, max_growth=0.0) or time.monotonic() > deadline_s:
            return footprint


async def _footprint_after(server: ElasticServer, clients: Clients, report: Report) -> None:
    """As before, at the latest after a while: a forgotten attempt may take some seconds to give up."""
    assert report.before is not None
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        report.after = await _footprint_at_rest(server, clients)
        found = differences(report.before, report.after, max_growth=MAX_GROWTH)
        if not found or time.monotonic() > deadline_s:
            report.problems += found
            return


async def _end(server: ElasticServer, report: Report) -> None:
    pids = set(processes_of(server.pid))
    code = await server.stop()
    if code != 0:
        report.problems.append(f"the server ended with code {code}")
    if left := [pid for pid in pids if Path(f"/proc/{pid}").exists() and pid in processes_of(pid)]:
        report.problems.append(f"processes that are left: {left}")


# ---- the command -----------------------------------------------------------------------------------------------------


def summary(soak: Soak, report: Report) -> dict[str, Any]:
    """What the last line says."""

    def held(footprint: Footprint | None) -> dict[str, Any] | None:
        if footprint is None:
            return None
        processes = [
            {
                "role": each.role,
                "descriptors": sum(each.descriptors.values()),
                "threads": each.num_threads,
                "rss_mib": round(each.rss_bytes / 2**20, 1),
            }
            for each in footprint.processes
        ]
        return {"processes": processes, "store_keys": footprint.num_store_keys, "shared_files": len(footprint.shared)}

    return {
        "tool": "elastic_soak",
        "ok": not report.problems,
        "problems": report.problems[:10],
        "operations": sum(report.changes.values()),
        "seed": soak.seed,
        "changes": dict(report.changes),
        "ends": dict(report.ends),
        "failure_epochs": report.num_failure_epochs,
        "requests": report.num_requests,
        "tokens": report.num_tokens,
        "pause_max_s": max(report.pauses_s, default=None),
        "before": held(report.before),
        "after": held(report.after),
        "seconds": report.seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {each.name: each.default for each in dataclasses.fields(Soak)}
    parser.add_argument("model", help="folder of a model with experts")
    parser.add_argument(
        "--operations", type=int, default=defaults["num_operations"], help="changes in a row (%(default)s)"
    )
    parser.add_argument(
        "--duration-s", type=float, default=defaults["duration_s"], help="no more changes then (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=defaults["seed"], help="of the changes (%(default)s)")
    parser.add_argument("--clients", type=int, default=defaults["num_clients"], help="streams at a time (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=defaults["max_tokens"], help="of each text (%(default)s)")
    parser.add_argument("--max-size", type=int, default=defaults["max_size"], help="most ranks (%(default)s)")
    parser.add_argument(
        "--rank-timeout-s", type=float, default=defaults["rank_timeout_s"], help="silence (%(default)s)"
    )
    parser.add_argument("--server-arg", action="append", default=[], help="one more argument of nobiru serve; repeat")
    parser.add_argument("--log", type=Path, help="what the server prints goes here (a new file)")
    parser.add_argument("--verbose", action="store_true", help="a line for every change")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server ends with this process
    log = args.log or Path(tempfile.mkstemp(prefix="elastic-soak-", suffix=".log")[1])
    soak = Soak(
        model=args.model,
        num_operations=args.operations,
        duration_s=args.duration_s,
        seed=args.seed,
        num_clients=args.clients,
        max_tokens=args.max_tokens,
        max_size=args.max_size,
        rank_timeout_s=args.rank_timeout_s,
        log=log,
        server_arguments=(*defaults["server_arguments"], *args.server_arg),
    )
    console = Console(stderr=True)
    console.print(f"the server's log is {log}")
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        task = progress.add_task("warm-up", total=soak.num_operations)

        def say(done: int, text: str) -> None:
            progress.update(task, completed=done, description=text[:60])
            if args.verbose and ":" in text:
                progress.print(f"{done:4} {text}")

        report = asyncio.run(run(soak, say))
    print(json.dumps(summary(soak, report)))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
