"""A group of ranks whose number does not change: each is replaced when it dies, and the others wait for it.

For ranks of several workers, which cannot come and go while others serve yet. It looks like `Controller`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nobiru.config import EngineConfig
from nobiru.engine.controller import Client, FromMember
from nobiru.engine.expert_balance import ExpertBalance
from nobiru.engine.expert_group import ExpertGroup
from nobiru.engine.group import RankGroup
from nobiru.engine.messages import Applied, Loaded, Parked, StoreFailed, StoreReady
from nobiru.engine.recorder import Recorder
from nobiru.engine.supervisor import Rank, RankProcess, RankSupervisor
from nobiru.errors import InvalidRequestError, NotFoundError
from nobiru.folder.state import FileState

logger = logging.getLogger(__name__)


class FixedGroup:
    """`begin_process(rank_id, position, slots)` starts a rank."""

    def __init__(
        self,
        config: EngineConfig,
        client: Client,
        begin_process: Callable[[str, int, list[list[int]] | None], tuple[RankProcess, Recorder]],
        *,
        endpoint: str,
        host: str,
        files: Sequence[FileState],
        environment: Mapping[str, str],
        balance: ExpertBalance | None,
        rank_timeout_s: float,
        max_start_failures: int,
        num_places: Callable[[], int],  # of use once the number can change
        on_loaded: Callable[[Rank, Loaded], None],
        on_lost: Callable[[Rank, Sequence[int]], None],
    ) -> None:
        self.operations = NoOperations()
        self._client = client
        self._begin_process = begin_process
        self._on_loaded = on_loaded
        self._on_lost = on_lost
        self._balance = balance
        self._group = RankGroup(
            self._launch,
            size=config.data_parallel_size,
            needs_all=config.enable_expert_parallel,
            rank_timeout_s=rank_timeout_s,
            max_start_failures=max_start_failures,
            on_loaded=self._loaded,
            on_lost=self._lost,
        )
        self._experts: ExpertGroup | None = None
        if balance is not None:
            self._experts = ExpertGroup(
                size=config.data_parallel_size,
                endpoint=endpoint,
                host=host,
                environment=environment,
                send=client.send_to,
                on_begin=lambda rank_ids: client.takes_requests(list(rank_ids)),
                balance=balance,
            )

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._group.ranks)

    @property
    def failed(self) -> asyncio.Future[str] | None:
        return self._group.failed

    def launch_now(self) -> None:
        self._group.launch_now()

    def start(self) -> None:
        self._group.start()
        if self._experts is not None:
            self._experts.start()

    async def stop(self) -> None:
        await self._group.stop()
        if self._experts is not None:
            await self._experts.stop()

    def give_up_after(self, task: asyncio.Task[None]) -> None:
        self._group.give_up_after(task)

    def find(self, rank_id: str) -> Rank | None:
        return self._group.find(rank_id.encode())

    def supervisor_of(self, rank: Rank) -> RankSupervisor:
        return self._group.supervisor_of(rank)

    def handle(self, rank_id: str, message: FromMember) -> None:
        if self._experts is not None and not isinstance(message, Parked | Applied):
            self._experts.handle(rank_id, message)

    def store_is_ready(self, message: StoreReady) -> None:
        assert self._experts is not None, "only expert-parallel ranks meet"
        self._experts.store_is_ready(message)

    def store_failed(self, message: StoreFailed) -> None:
        logger.error("the rendezvous store cannot be opened: %s", message.message)

    def state_of(self, rank: Rank) -> str:
        return rank.state

    def status(self) -> dict[str, Any]:
        if self._experts is None:
            return {"epoch": self._group.num_restarts}
        return {"epoch": self._experts.epoch, "placement": self._experts.status()}

    def _launch(self, position: int, rank_id: str) -> tuple[RankProcess, Recorder]:
        slots = None if self._balance is None else self._balance.slots_of(position)
        return self._begin_process(rank_id, position, slots)

    def _loaded(self, rank: Rank, message: Loaded) -> None:
        self._on_loaded(rank, message)
        if self._experts is not None:
            assert message.inventory is not None, "an expert-parallel rank has experts"
            self._experts.rank_loaded(rank.rank_id, rank.position, message.inventory)
        else:
            self._client.takes_requests([each.rank_id for each in self if each.state == "serving"])

    def _lost(self, rank: Rank, executing: Sequence[int]) -> None:
        if self._experts is not None:
            self._experts.rank_lost(rank.rank_id)
        self._on_lost(rank, executing)


class NoOperations:
    """Refuses all changes."""

    is_busy = False
    is_settled = False

    def request(self, **asked: Any) -> dict[str, Any]:
        """Refused: `InvalidRequestError`."""
        raise InvalidRequestError("ranks of several workers cannot be added or removed while serving yet")

    def cancel(self, operation_id: str) -> dict[str, Any]:
        raise NotFoundError(f"there is no operation {operation_id[:100]!r}", code="operation_not_found")

    def document(self, operation_id: str) -> dict[str, Any]:
        return self.cancel(operation_id)

    def documents(self) -> list[dict[str, Any]]:
        return []
