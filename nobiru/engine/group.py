"""The ranks of one service: a supervisor for each place in the group, seen as one.

Owns the ids of ranks, which are never used again. Knows nothing of requests and of what ranks say to each other.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from functools import partial

from nobiru.engine.messages import Loaded
from nobiru.engine.recorder import Recorder
from nobiru.engine.supervisor import Rank, RankProcess, RankSupervisor

Launch = Callable[[int, str], tuple[RankProcess, Recorder]]


class RankGroup:
    """`size` ranks, kept running from `start` to `stop`; `launch(position, rank_id)` begins a process.

    `failed` resolves with a message when one of them cannot be brought up any more, unless others serve without it
    (`needs_all` false).
    """

    def __init__(
        self,
        launch: Launch,
        *,
        size: int,
        needs_all: bool,
        rank_timeout_s: float,
        max_start_failures: int,
        on_loaded: Callable[[Rank, Loaded], None],
        on_lost: Callable[[Rank, Sequence[int]], None],
    ) -> None:
        ids = itertools.count()
        self._needs_all = needs_all
        self._supervisors = [
            RankSupervisor(
                partial(launch, position),
                rank_timeout_s=rank_timeout_s,
                max_start_failures=max_start_failures,
                on_loaded=on_loaded,
                on_lost=on_lost,
                position=position,
                ids=ids,
            )
            for position in range(size)
        ]
        self.failed: asyncio.Future[str] | None = None

    @property
    def ranks(self) -> list[Rank]:
        """Those that live, by position."""
        return [each.rank for each in self._supervisors if each.rank is not None]

    @property
    def num_restarts(self) -> int:
        return sum(each.num_restarts for each in self._supervisors)

    def find(self, identity: bytes) -> Rank | None:
        """The living rank of this id."""
        return next((rank for rank in self.ranks if rank.rank_id.encode() == identity), None)

    def supervisor_of(self, rank: Rank) -> RankSupervisor:
        return self._supervisors[rank.position]

    def launch_now(self) -> None:
        """Start all processes before the event loop runs."""
        for each in self._supervisors:
            each.launch_now()

    def start(self) -> None:
        self.failed = asyncio.get_running_loop().create_future()
        for each in self._supervisors:
            each.start()
            assert each.failed is not None
            each.failed.add_done_callback(self._on_failed)

    async def stop(self) -> None:
        await asyncio.gather(*(each.stop() for each in self._supervisors))

    def give_up_after(self, task: asyncio.Task[None]) -> None:
        """As `RankSupervisor.give_up_after`."""
        self._supervisors[0].give_up_after(task)

    def _on_failed(self, failed: asyncio.Future[str]) -> None:
        assert self.failed is not None
        if failed.cancelled() or self.failed.done():
            return
        others_serve = any(rank.state == "serving" for rank in self.ranks)
        if self._needs_all or not others_serve:
            self.failed.set_result(failed.result())
