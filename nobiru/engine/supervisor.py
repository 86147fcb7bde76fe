"""Keeps one rank running: launches it, watches its heart, restarts it with back-off, gives up when that keeps failing.

Owns the rank's process and its state. Knows nothing of requests: `on_loaded` and `on_lost` tell the client, which does.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from nobiru.engine.messages import Crashed, Loaded, StartFailed
from nobiru.engine.recorder import Recorder

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.5
MAX_BACKOFF_S = 60.0
FIRST_BACKOFF_S = 0.5
STOP_TIMEOUT_S = 5.0


class RankProcess(Protocol):
    """What a launcher gives back. `node` is the address of its machine; both are None until it has a place."""

    @property
    def pid(self) -> int | None: ...

    @property
    def node(self) -> str | None: ...

    async def wait_dead(self) -> str: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...

    def join(self, timeout_s: float) -> bool: ...


Launch = Callable[[str], tuple[RankProcess, Recorder]]


@dataclass(slots=True, eq=False, kw_only=True)
class Rank:
    """One rank: `rank_id` is never used again, `position` is its place in the group.

    `state` is starting, serving or dead.
    """

    rank_id: str
    position: int = 0
    process: RankProcess
    recorder: Recorder
    launched_s: float
    state: str = "starting"
    has_worked: bool = False
    cause: str | None = None
    permanent: bool = False


class RankSupervisor:
    """Runs from `start` to `stop`. `failed` resolves with a message when no rank can be brought up any more.

    `launch(rank_id)` begins a process; `OSError` when the system cannot start one.
    Its ranks get the next of `ids`, which supervisors of one group share, and all have the same `position`. Without
    `restarts` there is one rank, and `on_lost` its last news.
    """

    def __init__(
        self,
        launch: Launch,
        *,
        rank_timeout_s: float,
        max_start_failures: int,
        on_loaded: Callable[[Rank, Loaded], None],
        on_lost: Callable[[Rank, Sequence[int]], None],
        launch_timeout_s: float = 600.0,
        position: int = 0,
        ids: Iterator[int] | None = None,
        restarts: bool = True,
    ) -> None:
        self._launch = launch
        self._position = position
        self._rank_timeout_s = rank_timeout_s
        self._launch_timeout_s = launch_timeout_s
        self._max_start_failures = max_start_failures
        self._on_loaded = on_loaded
        self._on_lost = on_lost
        self._ids = itertools.count() if ids is None else ids
        self._restarts = restarts
        self._task: asyncio.Task[None] | None = None
        self.rank: Rank | None = None
        self.num_restarts = 0
        self.failed: asyncio.Future[str] | None = None

    def launch_now(self) -> None:
        """Start a rank's process before the event loop runs: it loads while the server imports what it needs."""
        self.rank = self._new_rank()

    def start(self) -> None:
        self.failed = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep_running(), name="rank-supervisor")
        self._task.add_done_callback(self.give_up_after)

    async def stop(self) -> None:
        """End the rank, by force when it does not end by itself."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        rank = self.rank
        if rank is not None:
            rank.process.close()
            await asyncio.to_thread(rank.process.join, STOP_TIMEOUT_S)
            self._end(rank)

    def loaded(self, rank: Rank, message: Loaded) -> None:
        rank.state = "serving"
        self._on_loaded(rank, message)

    def give_up_after(self, task: asyncio.Task[None]) -> None:
        """A task without which no rank can serve has ended: by an error, if it was not told to."""
        assert self.failed is not None
        if not task.cancelled() and (error := task.exception()) is not None and not self.failed.done():
            logger.error("%s ended", task.get_name(), exc_info=error)
            self.failed.set_result(f"{task.get_name()} ended with {type(error).__name__}: {error}")

    def says_why(self, rank: Rank, message: StartFailed | Crashed) -> None:
        """A rank that is about to end has named its cause."""
        rank.cause = message.message
        rank.permanent = isinstance(message, StartFailed) and message.permanent

    # ---- inside -----------------------------------------------------------------------------------------------------

    async def _keep_running(self) -> None:
        assert self.failed is not None
        num_start_failures = num_deaths = 0
        try:
            while True:
                rank = self.rank or self._new_rank()
                self.rank = rank
                cause = rank.cause = await self._until_dead(rank)
                worked, loaded = rank.has_worked, rank.state == "serving"
                executing = rank.recorder.seq_ids
                self._end(rank)
                self.rank = None
                self._on_lost(rank, executing)
                num_start_failures = 0 if loaded else num_start_failures + 1
                num_deaths = 1 if worked else num_deaths + 1
                logger.error("rank %s %s", rank.rank_id, cause)
                if not self._restarts:
                    return
                if rank.permanent or num_start_failures >= self._max_start_failures:
                    self.failed.set_result(cause if rank.permanent else f"{num_start_failures} starts failed: {cause}")
                    return
                await asyncio.sleep(backoff_s(num_deaths))
                self.num_restarts += 1
        except OSError as error:
            self.failed.set_result(f"cannot start a rank process: {error}")

    def _new_rank(self) -> Rank:
        rank_id = f"r{next(self._ids)}"
        process, recorder = self._launch(rank_id)
        return Rank(
            rank_id=rank_id,
            position=self._position,
            process=process,
            recorder=recorder,
            launched_s=time.monotonic(),
        )

    async def _until_dead(self, rank: Rank) -> str:
        watch = asyncio.create_task(self._watch(rank), name=f"watch-{rank.rank_id}")
        try:
            how = await rank.process.wait_dead()
        finally:
            watch.cancel()
        await asyncio.sleep(0.05)  # its last words may still be on their way
        return rank.cause if rank.permanent and rank.cause else f"{how}{f': {rank.cause}' if rank.cause else ''}"

    async def _watch(self, rank: Rank) -> None:
        """Kill a rank that gives no sign of life, or does not get ready in time."""
        last_look_s = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            now_s = time.monotonic()
            held_up_s, last_look_s = now_s - last_look_s - WATCH_INTERVAL_S, now_s
            silent_s = now_s - max(rank.recorder.heartbeat_s, rank.launched_s)
            if held_up_s > self._rank_timeout_s / 2:
                continue  # this machine, not the rank, stood still
            if rank.recorder.heartbeat_s and silent_s > self._rank_timeout_s:
                rank.cause = f"no sign of life for {silent_s:.0f} s"
                rank.process.kill()
            elif rank.state == "starting" and now_s - rank.launched_s > self._launch_timeout_s:
                rank.cause = f"not ready after {self._launch_timeout_s:.0f} s"
                rank.process.kill()

    def _end(self, rank: Rank) -> None:
        if rank.state != "dead":
            rank.state = "dead"
            rank.process.close()
            rank.recorder.close()


def backoff_s(num_deaths: int) -> float:
    """Seconds to wait after so many deaths in a row without work in between: none after the first, then doubling."""
    return 0.0 if num_deaths <= 1 else min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** (num_deaths - 2))
