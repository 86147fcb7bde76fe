"""The ranks of one service, which come and go: one supervisor for each, seen as one.

Owns the processes. Which ranks there should be, and what they say to each other, others know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from nobiru.engine.messages import Loaded
from nobiru.engine.recorder import Recorder
from nobiru.engine.supervisor import Rank, RankProcess, RankSupervisor


class Ranks:
    """`launch` begins one, `end` ends one; `on_lost` hears of those that end otherwise, with what they executed.

    `begin_process(rank_id)` starts a process. `on_end` gets the tasks that watch over ranks as they end.
    """

    def __init__(
        self,
        begin_process: Callable[[str], tuple[RankProcess, Recorder]],
        *,
        rank_timeout_s: float,
        on_loaded: Callable[[Rank, Loaded], None],
        on_lost: Callable[[Rank, Sequence[int]], None],
        on_end: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self._begin_process = begin_process
        self._rank_timeout_s = rank_timeout_s
        self._on_loaded = on_loaded
        self._on_lost = on_lost
        self._on_end = on_end
        self._supervisors: dict[str, RankSupervisor] = {}
        self._has_started = False
        self._endings: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Rank]:
        """Those that live, oldest first."""
        return iter([each.rank for each in self._supervisors.values()])

    def find(self, rank_id: str) -> Rank | None:
        supervisor = self._supervisors.get(rank_id)
        return None if supervisor is None else supervisor.rank

    def supervisor_of(self, rank: Rank) -> RankSupervisor:
        return self._supervisors[rank.rank_id]

    def launch(self, rank_id: str) -> None:
        """Start the process; `OSError` when the system cannot. Before `start` it is only watched from then on."""
        process, recorder = self._begin_process(rank_id)
        supervisor = RankSupervisor(
            Rank(rank_id=rank_id, process=process, recorder=recorder),
            rank_timeout_s=self._rank_timeout_s,
            on_loaded=self._on_loaded,
            on_lost=self._lost,
        )
        self._supervisors[rank_id] = supervisor
        if self._has_started:
            self._watch(supervisor)

    def start(self) -> None:
        """Watch from now on; there is an event loop."""
        self._has_started = True
        for supervisor in self._supervisors.values():
            self._watch(supervisor)

    def end(self, rank_id: str) -> None:
        """End a rank; nobody hears of it."""
        supervisor = self._supervisors.pop(rank_id, None)
        if supervisor is not None:
            task = asyncio.create_task(supervisor.stop(), name=f"end-{rank_id}")
            self._endings.add(task)
            task.add_done_callback(self._endings.discard)

    async def stop(self) -> None:
        """End all of them."""
        supervisors = list(self._supervisors.values())
        await asyncio.gather(*(each.stop() for each in supervisors), *self._endings)

    def _watch(self, supervisor: RankSupervisor) -> None:
        supervisor.start().add_done_callback(self._on_end)

    def _lost(self, rank: Rank, executing: Sequence[int]) -> None:
        self._supervisors.pop(rank.rank_id, None)
        self._on_lost(rank, executing)
