"""Plans an operation before anything starts: what every rank will read and hold, and whether it can be done.

Owns what is known of the ranks' memory and of the folder. Looks at free memory, processes and files, and leaves the
arithmetic to `nobiru.elastic.forecast` and the placement to `ExpertBalance`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nobiru import machine
from nobiru.config import EngineConfig
from nobiru.elastic.forecast import (
    NO_EXPERTS,
    Forecast,
    RankMemory,
    Sizes,
    cache_of_newcomer,
    count_experts,
    expect_pause,
    forecast,
)
from nobiru.elastic.planner import MembershipPlan
from nobiru.engine.expert_balance import ExpertBalance
from nobiru.engine.messages import MemoryUse
from nobiru.engine.supervisor import Rank
from nobiru.errors import ConfigError, ConflictError, InvalidRequestError, ModelFolderError
from nobiru.folder.state import FileState, check_unchanged, num_weight_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationPlan:
    """`document` is what the API shows; `problem` says why it cannot be done."""

    document: dict[str, Any]
    problem: ConflictError | None = None


class Planning:
    """`rank_loaded` and `rank_is_gone` keep it up to date; `plan` looks ahead.

    `files` are those of the model folder when the server started; `host` is this machine, as ranks' nodes name it.
    """

    def __init__(
        self, config: EngineConfig, balance: ExpertBalance | None, *, files: Sequence[FileState], host: str
    ) -> None:
        self._config = config
        self._balance = balance
        self._files = files
        self._host = host
        self._uses: dict[str, tuple[Rank, MemoryUse]] = {}

    def rank_loaded(self, rank: Rank, use: MemoryUse | None) -> None:
        if use is not None:
            self._uses[rank.rank_id] = (rank, use)

    def rank_is_gone(self, rank_id: str) -> None:
        self._uses.pop(rank_id, None)

    def plan(self, present: Sequence[str], members: Sequence[str], *, pauses_s: Sequence[float]) -> OperationPlan:
        """From the `present` members to the next ones; of these, names that are not present are of new ranks.

        `InvalidRequestError` where so many have too few slots for all experts.
        """
        try:
            found = self._forecast(present, members)
        except ConfigError as error:
            raise InvalidRequestError(error.message, param="data_parallel_size") from None
        pause = expect_pause(pauses_s)
        document = {
            "members": list(members),
            **found.document(),
            "expected_pause_seconds": round(pause.seconds, 6),
            "num_pauses_measured": pause.num_measured,
        }
        problem = None
        if found.problem is not None:
            problem = ConflictError(found.problem, code="insufficient_memory")
        elif set(members) - set(present):
            problem = self._folder_problem()
        return OperationPlan(document=document, problem=problem)

    def bytes_to_read(self, present: Sequence[str], members: Sequence[str], plan: MembershipPlan | None) -> int:
        """From the folder, by all members together."""
        return self._forecast(present, members, plan).bytes_to_read

    def _forecast(self, present: Sequence[str], members: Sequence[str], plan: MembershipPlan | None = None) -> Forecast:
        memories = {rank_id: self._memory_of(rank_id) for rank_id in present}
        experts = NO_EXPERTS
        if self._balance is not None and self._balance.placement is not None:
            plan = plan or self._balance.plan(members)
            held = {rank_id: num for rank_id, num in self._balance.num_held.items() if rank_id in memories}
            experts = count_experts(held, plan, members)
        return forecast(
            memories,
            members,
            newcomer=self._newcomer(memories),
            experts=experts,
            sizes=self._sizes(),
            free_bytes=self._free_bytes(),
        )

    def _sizes(self) -> Sizes:
        stored = num_weight_bytes(self._files)
        if self._balance is None or self._balance.placement is None:
            return Sizes(stored_rest_bytes=stored)
        placement, one = self._balance.placement, self._balance.stored_expert_bytes
        num_experts = placement.num_layers * placement.num_experts
        return Sizes(
            expert_bytes=self._balance.expert_bytes,
            stored_expert_bytes=one,
            stored_rest_bytes=max(0, stored - num_experts * one),
        )

    def _memory_of(self, rank_id: str) -> RankMemory:
        if rank_id not in self._uses:  # its memory is a device's, or unknown
            return RankMemory(node=None, base_bytes=0, kv_cache_bytes=0, firm_cache_bytes=0)
        rank, use = self._uses[rank_id]
        node = rank.process.node
        resident = [machine.resident_memory_bytes(pid) for pid in rank.worker_pids] if node == self._host else []
        told = [each for each in resident if each is not None]
        return RankMemory(
            node=node,
            base_bytes=use.base_bytes,
            kv_cache_bytes=use.kv_cache_bytes,
            firm_cache_bytes=use.kv_cache_bytes if use.kv_cache_share is None else use.least_kv_cache_bytes,
            resident_bytes=sum(told) if told and len(told) == len(resident) else None,
        )

    def _newcomer(self, present: Mapping[str, RankMemory]) -> RankMemory:
        """Like the present ones; where it will be is known if there is one machine only."""
        uses = [use for _, use in self._uses.values()]
        node = self._host if uses and self._config.data_parallel_backend == "local" else None
        shares = [use.kv_cache_share for use in uses if use.kv_cache_share is not None]
        largest = max((use.kv_cache_bytes for use in uses), default=0)
        least = max((use.least_kv_cache_bytes for use in uses), default=0)
        cache_bytes = cache_of_newcomer(
            explicit_bytes=None if shares else largest,
            largest_present_bytes=largest,
            least_bytes=least,
            share=max(shares, default=1.0),
            free_bytes=self._free_bytes().get(self._host),
        )
        return RankMemory(
            node=node,
            base_bytes=max((memory.base_bytes for memory in present.values()), default=0),
            kv_cache_bytes=cache_bytes,
            firm_cache_bytes=least if shares else cache_bytes,
        )

    def _free_bytes(self) -> dict[str, int]:
        """By node: now on this machine, on others as it was when their latest rank had loaded."""
        free = {
            rank.process.node: use.free_bytes
            for rank, use in self._uses.values()
            if rank.process.node is not None and use.free_bytes is not None
        }
        now = machine.free_memory_bytes()
        if self._host in free and now is not None:
            free[self._host] = now
        return free

    def _folder_problem(self) -> ConflictError | None:
        try:
            check_unchanged(Path(self._config.model), self._files)
        except ModelFolderError as error:
            return ConflictError(error.message, code="model_folder_changed")
        return None
