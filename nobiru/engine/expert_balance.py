"""Which expert is where, as the controller knows it, and how it is changed while the ranks serve.

Owns the committed placement, its version, and the stage in progress. Messages of ranks in, orders to all ranks out;
pure but for the observer and the thread of a search. When and what to move is `nobiru.parallel.balancer`'s.

In a placement, a "rank" is a worker of a rank, in the order of ranks, then workers; everywhere else here, it is a rank.

This is called on the server's event loop, which serves requests, and looking for a better placement takes seconds for a
model of many experts. So that runs in a thread; what it has found is taken up when a rank next reports its load.

A stage is committed when every rank has switched to it. Until then the placement before is the one a new epoch would
begin with: its slots hold what they did, on all ranks, because a stage only fills slots that it leaves empty.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from nobiru.config import EngineConfig
from nobiru.elastic.planner import MembershipPlan, Slots, plan_membership
from nobiru.engine.messages import ExpertLoads, Inventory, Moved, MoveExperts, Switched, Vacate
from nobiru.parallel.balancer import Balancer, BalancerConfig, Search, Stage
from nobiru.parallel.placement import EMPTY, Placement, balancedness, rank_loads

logger = logging.getLogger(__name__)

Order = MoveExperts | Vacate


class ExpertObserver(Protocol):
    """Where measurements of experts go."""

    def observe_experts(self, *, by_expert: Mapping[int, int], by_rank: Mapping[int, int], balance: float) -> None: ...

    def experts_moved(self, *, num_bytes: int, num_rebalances: int) -> None: ...


class ExpertBalance:
    """`handle` the messages of the members of an epoch, by their positions, between its begin and its end."""

    def __init__(self, config: EngineConfig, observer: ExpertObserver) -> None:
        self.version = 0
        self._members: tuple[str, ...] = ()
        self._num_workers = config.tensor_parallel_size
        self._config = config
        self._observer = observer
        self._placement: Placement | None = None
        self._balancer: Balancer | None = None
        self._stage: Stage | None = None
        self._found: Future[Sequence[Stage]] | None = None  # of a search that runs, or has ended
        self._switched: set[int] = set()
        self._may_move = False
        self._held: dict[str, Slots] = {}
        self._num_experts = 0
        self.expert_bytes = 0
        self.stored_expert_bytes = 0
        self._num_rebalances = 0
        self.num_bytes_moved = 0

    @property
    def placement(self) -> Placement | None:
        """The committed one; None before the first epoch."""
        return self._placement

    def _make_balancer(self, placement: Placement) -> Balancer:
        config = BalancerConfig(
            window_steps=self._config.eplb_window_size,
            interval_steps=self._config.eplb_step_interval,
            num_redundant=self._config.num_redundant_experts,
        )
        return Balancer(config, num_layers=placement.num_layers, num_experts=placement.num_experts)

    # ---- a membership that changes -----------------------------------------------------------------------------------

    def rank_holds(self, rank_id: str, inventory: Inventory) -> None:
        """A rank has loaded, with these experts."""
        self._held[rank_id] = np.frombuffer(inventory.slots, "<i4").reshape(inventory.shape).astype(np.int64)
        self._num_experts, self.expert_bytes = inventory.num_experts, inventory.expert_bytes
        self.stored_expert_bytes = inventory.stored_expert_bytes

    def rank_is_gone(self, rank_id: str) -> None:
        self._held.pop(rank_id, None)

    @property
    def num_held(self) -> dict[str, int]:
        """Experts of all layers together on each rank."""
        return {rank_id: int((slots != EMPTY).sum()) for rank_id, slots in self._held.items()}

    def plan(self, members: Sequence[str]) -> MembershipPlan:
        """What these members would hold. Those that have not loaded yet hold nothing; of the first ones all count."""
        if self._placement is None:
            slots = np.concatenate([self._held[rank] for rank in members], axis=1)
            return MembershipPlan(placement=Placement(slots=slots, num_experts=self._num_experts), fills={})
        return plan_membership(
            {
                worker: self._held[rank][:, index]
                for rank in members
                if rank in self._held
                for index, worker in enumerate(self._workers_of(rank))
            },
            [worker for rank in members for worker in self._workers_of(rank)],
            num_layers=self._placement.num_layers,
            num_experts=self._placement.num_experts,
            slot_capacity=self._placement.slot_capacity,
            num_redundant=self._config.num_redundant_experts,
        )

    def slots_of(self, placement: Placement, position: int) -> list[list[int]]:
        """The experts of all workers of the rank at this position, worker by worker, for each MoE layer."""
        own_LWS = placement.slots[:, self._rows(position)]
        slots: list[list[int]] = own_LWS.reshape(len(own_LWS), -1).tolist()
        return slots

    def fills_of(self, plan: MembershipPlan, rank_id: str) -> list[list[tuple[int, int, int]]]:
        """What each worker of a rank has to read, as `Form` says it."""
        return [
            [(fill.layer, fill.expert, fill.slot) for fill in plan.fills.get(worker, ())]
            for worker in self._workers_of(rank_id)
        ]

    def commit(self, plan: MembershipPlan, members: Sequence[str]) -> None:
        """The epoch of `members` begins with this placement, one version on."""
        if self._balancer is None:
            self._balancer = self._make_balancer(plan.placement)
        self._placement, self._members = plan.placement, tuple(members)
        self._held = self._held_by_members(plan.placement)
        self.version += 1
        self.epoch_begins()

    def _held_by_members(self, placement: Placement) -> dict[str, Slots]:
        return {rank: placement.slots[:, self._rows(place)] for place, rank in enumerate(self._members)}

    def _rows(self, position: int) -> slice:
        """Of a rank's workers in a placement."""
        return slice(position * self._num_workers, (position + 1) * self._num_workers)

    def _workers_of(self, rank_id: str) -> list[str]:
        return [f"{rank_id}/{index}" for index in range(self._num_workers)]

    @property
    def is_moving(self) -> bool:
        """Whether a stage is in progress, which would change the placement."""
        return self._stage is not None

    def freeze(self) -> None:
        """Begin no more stages until the next epoch, or until `thaw`."""
        self._may_move = False

    def thaw(self) -> None:
        self.epoch_begins()

    def epoch_begins(self) -> None:
        self._may_move = self._config.enable_eplb and len(self._members) * self._num_workers > 1

    def epoch_ends(self) -> None:
        """A stage in progress never was."""
        self._may_move, self._stage = False, None
        if self._balancer is not None:
            self._balancer.abandon()

    def handle(self, position: int, message: ExpertLoads | Moved | Switched) -> list[Order]:
        """What is to be sent to all ranks."""
        match message:
            case ExpertLoads():
                self._observe(position, message)
                return self._next_stage()
            case Moved():
                self._moved(message)
                return []
            case Switched():
                return self._rank_switched(position, message)

    def status(self) -> dict[str, Any]:
        """For `GET /elastic/status`: the placement by rank, and how balanced it is; empty before there is one."""
        if self._placement is None or self._balancer is None:
            return {}
        loads = self._balancer.window.loads
        return {
            "num_experts": self._placement.num_experts,
            "slot_capacity": self._placement.slot_capacity,
            "slots": {
                rank: self.slots_of(self._placement, place)
                for place, rank in enumerate(self._members)
                if rank in self._held
            },
            "version": self.version,
            "balancedness": round(balancedness(self._placement, loads), 4) if loads.any() else None,
            "num_rebalances": self._balancer.num_rebalances,
            "bytes_moved": self.num_bytes_moved,
        }

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _observe(self, position: int, message: ExpertLoads) -> None:
        assert self._placement is not None and self._balancer is not None
        counts_LE = np.frombuffer(message.counts, dtype="<i8").reshape(message.shape)
        self._balancer.observe(counts_LE, message.num_steps if position == 0 else 0)  # they step together
        loads = self._balancer.window.loads
        by_rank = rank_loads(self._placement, counts_LE).sum(0).reshape(-1, self._num_workers).sum(1)
        self._observer.observe_experts(
            by_expert=dict(enumerate(counts_LE.sum(0).tolist())),
            by_rank={place: round(tokens) for place, tokens in enumerate(by_rank.tolist())},
            balance=balancedness(self._placement, loads) if loads.any() else 1.0,
        )

    def _next_stage(self) -> list[Order]:
        if not self._may_move or self._stage is not None or self._balancer is None or self._placement is None:
            return []
        if self._found is not None and self._found.done():
            found, self._found = self._found.result(), None
            self._balancer.follow(found, self._placement)
        self._stage = self._balancer.next_stage(self._placement)
        if self._stage is None:
            if self._found is None and (search := self._balancer.search(self._placement)) is not None:
                self._found = _in_thread(search)
            return []
        self._switched = set()
        slots = self._stage.after.slots
        order = MoveExperts(
            version=self.version + 1,
            layer=self._stage.layer,
            moves=[
                (move.expert, move.from_rank, move.from_slot, move.to_rank, move.to_slot) for move in self._stage.moves
            ],
            shape=(slots.shape[0], slots.shape[1], slots.shape[2]),
            slots=slots.astype("<i4").tobytes(),
        )
        return [order]

    def _moved(self, message: Moved) -> None:
        if self._stage is None or message.version != self.version + 1:
            return
        self.num_bytes_moved += message.num_bytes
        if message.error is not None:
            logger.warning(
                "experts could not be moved, and stay where they are until the next epoch: %s", message.error
            )
            self.epoch_ends()
        elif message.num_bytes:
            self._observer.experts_moved(num_bytes=message.num_bytes, num_rebalances=0)

    def _rank_switched(self, position: int, message: Switched) -> list[Order]:
        if self._stage is None or message.version != self.version + 1:
            return []
        self._switched.add(position)
        if len(self._switched) < len(self._members):
            return []
        assert self._balancer is not None
        self._placement, self._stage = self._stage.after, None
        self._held |= self._held_by_members(self._placement)
        self.version += 1
        if self._balancer.num_rebalances > self._num_rebalances:
            self._num_rebalances = self._balancer.num_rebalances
            self._observer.experts_moved(num_bytes=0, num_rebalances=1)
        return [Vacate(version=self.version), *self._next_stage()]


def _in_thread(search: Search) -> Future[Sequence[Stage]]:
    """The outcome, or the error, of a search that a thread runs. Nobody waits for it, not even the process' end."""
    future: Future[Sequence[Stage]] = Future()

    def run() -> None:
        try:
            future.set_result(search())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="rebalance", daemon=True).start()
    return future
