"""How long do clients wait when ranks come, go or die, and how long when the server is started anew instead?

Starts `nobiru serve MODEL`, keeps `--clients` clients busy that stream greedy texts, and goes through one kind of
change `--count` times:

* planned: to 4, 3, 2, 1 and 2 ranks, again and again. *pause* is the server's `pause_seconds`: from the first rank that
  stopped for the commit to the first step of the last one in the new epoch;
* kill: SIGKILL of a random rank of `--size`. *recovery* is from the signal to the first token on every stream that was
  in progress then; the lost rank is replaced before the next kill;
* stop: the same with SIGSTOP, which the server notices after `--rank-timeout-s`;
* restart: the server is ended by SIGTERM and started again with `--size` ranks; clients try again until it answers.

For all of them the *longest gap* is the longest interval without a token for any client, from the begin of the change
to its end. Every text is compared with an undisturbed one.

    python -m benchmarks.elastic_pauses measure planned MODEL --count 20 --save planned.json
    python -m benchmarks.elastic_pauses measure kill MODEL --count 10 --save kill.json
    python -m benchmarks.elastic_pauses measure restart MODEL --count 5 --size 2 --save restart.json
    python -m benchmarks.elastic_pauses report planned.json kill.json restart.json
    python -m benchmarks.elastic_pauses plot planned.json restart.json --output elastic.png

`report` puts together any number of runs: a long measurement can be made in pieces. Ctrl-C ends a run, which keeps what
it has. Runs from a checkout, with the extra `bench`. Exit code 0 when every request was answered with the right text.
Alone on the machine, or the numbers say little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.elastic.clients import Clients
from benchmarks.elastic.intervals import longest_gap_s, recovery_s, tokens_per_bin
from benchmarks.elastic.plot import save_plot
from benchmarks.elastic.recording import BIN_S, Event, Kind, Recording, report
from benchmarks.elastic.server import ElasticServer

SIZES = (4, 3, 2, 1, 2)
USUAL_S = 2.0  # before each change, for comparison
SERVER_ARGUMENTS = ("--num-threads", "1", "--kv-cache-memory-bytes")


class Measurement:
    """One run: `run` performs the changes and keeps what was noticed."""

    def __init__(self, args: argparse.Namespace, server: ElasticServer, clients: Clients) -> None:
        self._args = args
        self._server = server
        self._clients = clients
        self._rng = random.Random(args.seed)
        self._began_s = 0.0
        self.events: list[Event] = []

    async def run(self, progress: Progress) -> None:
        task = progress.add_task(self._args.kind, total=self._args.count)
        self._began_s = time.time()
        self._clients.start()
        sizes = cycle(SIZES)
        for _ in range(self._args.count):
            await asyncio.sleep(USUAL_S + 0.5)
            event = await self._change(sizes)
            self.events.append(event)
            progress.update(task, advance=1, description=_line(event))
        await asyncio.sleep(USUAL_S)
        await self._clients.stop()

    def recording(self) -> Recording:
        """What was measured so far."""
        return Recording(
            model=self._args.model,
            kind=self._args.kind,
            num_clients=self._args.clients,
            rank_timeout_s=self._args.rank_timeout_s,
            num_requests=self._clients.num_requests,
            tokens=tokens_per_bin(self._clients.arrivals_s(), self._began_s, time.time(), BIN_S),
            events=self.events,
            problems=self._clients.problems,
        )

    async def _change(self, sizes: Iterator[int]) -> Event:
        kind: Kind = self._args.kind
        size = len(await self._server.members())
        began_s = time.time()
        match kind:
            case "planned":
                to_size = next(sizes)
                asked = await self._server.request({"data_parallel_size": to_size})
                document = await self._server.ended(asked["operation_id"])
                return await self._event(kind, size, to_size, began_s, document)
            case "kill" | "stop":
                return await self._death(kind, size, began_s)
            case "restart":
                self._clients.may_fail = True
                await self._server.stop()
                self._server.start(size)
                await self._server.wait_whole(size)
                event = await self._event(kind, size, size, began_s, {})
                self._clients.may_fail = False
                return event

    async def _death(self, kind: Kind, size: int, began_s: float) -> Event:
        """Until the survivors serve; then the group becomes whole again, which is not part of the event."""
        pid = self._rng.choice(list((await self._server.members()).values()))
        known = {each["operation_id"] for each in await self._server.operations()}
        began_s = time.time()
        os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        while True:
            new = [each for each in await self._server.operations() if each["operation_id"] not in known]
            if over := [each for each in new if each["origin"] == "failure" and each["to_epoch"] is not None]:
                break
            await asyncio.sleep(0.02)
        await asyncio.sleep(1.0)  # until the first tokens of the new epoch are there
        committed_s = over[0]["timestamps"]["settling"]
        recovered_s = recovery_s(self._clients.streams, began_s, committed_s)
        event = await self._event(kind, size, size - 1, began_s, over[0], recovered_s)
        await self._server.wait_whole()
        return event

    async def _event(
        self,
        kind: Kind,
        size: int,
        to_size: int,
        began_s: float,
        document: Mapping[str, Any],
        recovered_s: float | None = None,
    ) -> Event:
        """What clients noticed, once tokens come again."""
        ended_s = time.time() if kind == "restart" else document["timestamps"]["done"]
        await asyncio.sleep(0.5)
        arrivals_s = self._clients.arrivals_s()
        return Event(
            kind=kind,
            size=size,
            to_size=to_size,
            began_s=began_s - self._began_s,
            ended_s=ended_s - self._began_s,
            longest_gap_s=longest_gap_s(arrivals_s, began_s, ended_s),
            usual_gap_s=longest_gap_s(arrivals_s, began_s - USUAL_S, began_s),
            pause_s=document.get("pause_seconds") if kind == "planned" else None,
            recovery_s=recovered_s,
            phase_s=dict(document.get("seconds", {})),
        )


async def measure(args: argparse.Namespace, progress: Progress) -> Recording:
    arguments = (*SERVER_ARGUMENTS, str(args.kv_cache_memory_bytes), "--rank-timeout-s", str(args.rank_timeout_s))
    log = args.log or Path(tempfile.mkstemp(prefix="elastic-pauses-", suffix=".log")[1])
    progress.print(f"the server's log is {log}")
    server = ElasticServer(args.model, size=args.size, log=log, arguments=(*arguments, *args.server_arg))
    async with server:
        clients = Clients(server.url, count=args.clients, max_tokens=args.max_tokens)
        await clients.learn()
        measurement = Measurement(args, server, clients)
        try:
            await measurement.run(progress)
            await server.stop()
        finally:
            measurement.recording().save(args.save)
    return measurement.recording()


def _line(event: Event) -> str:
    parts = {"pause": event.pause_s, "recovery": event.recovery_s, "longest gap": event.longest_gap_s}
    said = ", ".join(f"{name} {value * 1000:.0f} ms" for name, value in parts.items() if value is not None)
    return f"{event.name}: {said}"


# ---- the command -----------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measured = commands.add_parser("measure", help="one run of one kind of change")
    measured.add_argument("kind", choices=("planned", "kill", "stop", "restart"))
    measured.add_argument("model", help="folder of a model with experts")
    measured.add_argument("--count", type=int, default=10, help="changes (%(default)s)")
    measured.add_argument("--size", type=int, default=2, help="ranks at the start (%(default)s)")
    measured.add_argument("--save", type=Path, required=True, help="where the run is kept, as JSON")
    measured.add_argument("--clients", type=int, default=4, help="streams at a time (%(default)s)")
    measured.add_argument("--max-tokens", type=int, default=200, help="of each text (%(default)s)")
    measured.add_argument("--rank-timeout-s", type=float, default=5.0, help="silence of a dead rank (%(default)s)")
    measured.add_argument("--kv-cache-memory-bytes", type=int, default=8_000_000, help="of each rank (%(default)s)")
    measured.add_argument("--server-arg", action="append", default=[], help="one more argument of nobiru serve; repeat")
    measured.add_argument("--seed", type=int, default=0, help="which ranks are killed (%(default)s)")
    measured.add_argument("--log", type=Path, help="what the server prints goes here (a new file)")
    reported = commands.add_parser("report", help="medians, percentiles and extremes over runs")
    reported.add_argument("runs", type=Path, nargs="+", help="files that measure has saved")
    plotted = commands.add_parser("plot", help="tokens per second over time, a row for each run")
    plotted.add_argument("runs", type=Path, nargs="+", help="files that measure has saved")
    plotted.add_argument("--output", type=Path, required=True, help="a PNG, SVG or PDF")
    plotted.add_argument("--title", default="Output tokens per second while ranks come and go")
    return parser


def main() -> int:
    args = _parser().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server ends with this process
    if args.command == "plot":
        save_plot(args.output, [Recording.load(path) for path in args.runs], title=args.title)
        return 0
    if args.command == "report":
        recordings = [Recording.load(path) for path in args.runs]
    else:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            recordings = [asyncio.run(measure(args, progress))]
    print(json.dumps(report(recordings)))
    return 1 if any(each.problems for each in recordings) else 0


if __name__ == "__main__":
    sys.exit(main())
