"""Watches one rank: its heart, whether it gets ready in time, and its end.

Owns the rank's process and its state. Knows nothing of requests: `on_loaded` and `on_lost` tell others, who do.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from nobiru.engine.messages import Crashed, Loaded, StartFailed
from nobiru.engine.recorder import Recorder

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.5
LAUNCH_TIMEOUT_S = 600.0
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


@dataclass(slots=True, eq=False, kw_only=True)
class Rank:
    """One rank; `rank_id` is never used again. `worker_pids` are known once it has loaded.

    `state` is starting, serving or dead.
    """

    rank_id: str
    process: RankProcess
    recorder: Recorder
    launched_s: float = field(default_factory=time.monotonic)
    worker_pids: list[int] = field(default_factory=list)
    state: str = "starting"
    cause: str | None = None
    permanent: bool = False


class RankSupervisor:
    """Watches from `start` on, until the rank is dead, which `on_lost` hears with what it executed; or until `stop`."""

    def __init__(
        self,
        rank: Rank,
        *,
        rank_timeout_s: float,
        on_loaded: Callable[[Rank, Loaded], None],
        on_lost: Callable[[Rank, Sequence[int]], None],
    ) -> None:
        self.rank = rank
        self._rank_timeout_s = rank_timeout_s
        self._on_loaded = on_loaded
        self._on_lost = on_lost
        self._task: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        self._task = asyncio.create_task(self._until_lost(), name=f"supervisor-{self.rank.rank_id}")
        return self._task

    async def stop(self) -> None:
        """End the rank, by force when it does not end by itself."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.rank.process.close()
        await asyncio.to_thread(self.rank.process.join, STOP_TIMEOUT_S)
        self._end()

    def loaded(self, message: Loaded) -> None:
        self.rank.state = "serving"
        self.rank.worker_pids = message.worker_pids
        self._on_loaded(self.rank, message)

    def says_why(self, message: StartFailed | Crashed) -> None:
        """The rank is about to end, and has named its cause."""
        self.rank.cause = message.message
        self.rank.permanent = isinstance(message, StartFailed) and message.permanent

    # ---- inside -----------------------------------------------------------------------------------------------------

    async def _until_lost(self) -> None:
        rank = self.rank
        watch = asyncio.create_task(self._watch(), name=f"watch-{rank.rank_id}")
        try:
            how = await rank.process.wait_dead()
        finally:
            watch.cancel()
        await asyncio.sleep(0.05)  # its last words may still be on their way
        executing = rank.recorder.seq_ids
        self._end()
        logger.error("rank %s %s%s", rank.rank_id, how, f": {rank.cause}" if rank.cause else "")
        rank.cause = rank.cause if rank.permanent and rank.cause else f"{how}{f': {rank.cause}' if rank.cause else ''}"
        self._on_lost(rank, executing)

    async def _watch(self) -> None:
        """Kill a rank that gives no sign of life, or does not get ready in time."""
        rank = self.rank
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
            elif rank.state == "starting" and now_s - rank.launched_s > LAUNCH_TIMEOUT_S:
                rank.cause = f"not ready after {LAUNCH_TIMEOUT_S:.0f} s"
                rank.process.kill()

    def _end(self) -> None:
        if self.rank.state != "dead":
            self.rank.state = "dead"
            self.rank.process.close()
            self.rank.recorder.close()


def backoff_s(num_deaths: int) -> float:
    """Seconds to wait after so many deaths in a row without work in between: none after the first, then doubling."""
    return 0.0 if num_deaths <= 1 else min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** (num_deaths - 2))
