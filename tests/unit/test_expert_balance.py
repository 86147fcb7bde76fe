"""The controller's record of which expert is where, with ranks of several workers: they come and go as wholes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from nobiru.config import EngineConfig
from nobiru.elastic.forecast import count_experts
from nobiru.engine.expert_balance import ExpertBalance
from nobiru.engine.messages import ExpertLoads, Inventory, Switched
from nobiru.parallel.placement import EMPTY, initial_placement, slot_capacity_for

NUM_EXPERTS, NUM_LAYERS = 8, 2


class Ignored:
    """What the balance tells of measurements."""

    def __init__(self) -> None:
        self.by_rank: Mapping[int, int] = {}

    def observe_experts(self, *, by_rank: Mapping[int, int], **others: Any) -> None:
        self.by_rank = by_rank

    def experts_moved(self, **others: Any) -> None: ...


def inventory(slots_LWS: np.ndarray) -> Inventory:
    return Inventory(
        num_experts=NUM_EXPERTS,
        expert_bytes=10,
        stored_expert_bytes=10,
        shape=slots_LWS.shape,  # type: ignore[arg-type]
        slots=slots_LWS.astype("<i4").tobytes(),
    )


class Group:
    """Members that hold what the balance says."""

    def __init__(self, num_ranks: int, num_workers: int, **options: Any) -> None:
        config = EngineConfig(
            model="none",
            data_parallel_size=num_ranks,
            tensor_parallel_size=num_workers,
            enable_expert_parallel=True,
            **options,
        )
        self.num_workers = num_workers
        self.observer = Ignored()
        self.balance = ExpertBalance(config, self.observer)
        self.capacity = slot_capacity_for(num_experts=NUM_EXPERTS, num_redundant=0, min_ranks=num_workers)
        first = initial_placement(
            num_layers=NUM_LAYERS,
            num_experts=NUM_EXPERTS,
            num_ranks=num_ranks * num_workers,
            slot_capacity=self.capacity,
        )
        self.held: dict[str, np.ndarray] = {}
        for place in range(num_ranks):
            self.loads(f"r{place}", first.slots[:, place * num_workers : (place + 1) * num_workers])
        self.change([*self.held])

    def loads(self, rank_id: str, slots_LWS: np.ndarray) -> None:
        self.held[rank_id] = slots_LWS.copy()
        self.balance.rank_holds(rank_id, inventory(slots_LWS))

    def change(self, members: Sequence[str]) -> None:
        """Newcomers load, others fill, all begin; then every worker holds what the placement gives it."""
        balance = self.balance
        for rank_id in members:
            if rank_id not in self.held:
                planned = balance.slots_of(balance.plan(members).placement, members.index(rank_id))
                self.loads(rank_id, np.array(planned).reshape(NUM_LAYERS, self.num_workers, -1))
        plan = balance.plan(members)
        for rank_id in members:
            fills = balance.fills_of(plan, rank_id)
            assert len(fills) == self.num_workers
            for worker, orders in enumerate(fills):
                for layer, expert, slot in orders:
                    assert self.held[rank_id][layer, worker, slot] == EMPTY, "nobody uses it"
                    self.held[rank_id][layer, worker, slot] = expert
        counts = count_experts(balance.num_held, plan, members)
        assert sum(counts.after.values()) == NUM_LAYERS * NUM_EXPERTS
        assert sum(counts.read.values()) == plan.num_fills
        balance.commit(plan, members)
        self.held = {rank_id: self.held[rank_id] for rank_id in members}
        slots = balance.status()["slots"]
        assert list(slots) == list(members)
        for rank_id, held_LWS in self.held.items():
            given_LWS = np.array(slots[rank_id]).reshape(held_LWS.shape)
            assert (held_LWS == given_LWS)[given_LWS != EMPTY].all()
            held_LWS[given_LWS == EMPTY] = EMPTY  # vacated
        for layer in range(NUM_LAYERS):
            held = np.concatenate([held_LWS[layer].ravel() for held_LWS in self.held.values()])
            assert sorted(held[held != EMPTY].tolist()) == list(range(NUM_EXPERTS))


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_every_expert_is_on_one_worker_through_all_changes(num_workers: int) -> None:
    group = Group(2, num_workers)
    group.change(["r0", "r1", "r2"])
    spread = (np.concatenate([*group.held.values()], axis=1) != EMPTY).sum(2)
    assert spread.max() - spread.min() <= 1
    group.change(["r0", "r2"])
    group.balance.rank_is_gone("r0")
    group.balance.epoch_ends()
    assert list(group.balance.status()["slots"]) == ["r2"]
    group.change(["r2"])
    group.change(["r2", "r5"])


def test_loads_are_those_of_ranks() -> None:
    group = Group(2, 2)
    counts = np.arange(NUM_LAYERS * NUM_EXPERTS, dtype="<i8").reshape(NUM_LAYERS, NUM_EXPERTS)
    message = ExpertLoads(num_steps=1, shape=(NUM_LAYERS, NUM_EXPERTS), counts=counts.tobytes())
    group.balance.handle(1, message)
    expected = {
        place: sum(
            int(counts[layer, expert]) for layer in range(NUM_LAYERS) for expert in held[layer][held[layer] >= 0]
        )
        for place, held in enumerate(group.held.values())
    }
    assert group.observer.by_rank == expected


def test_a_stage_ends_while_a_newcomer_has_loaded() -> None:
    """What the newcomer holds is not taken for a member's, nor the other way round."""
    group = Group(2, 2, enable_eplb=True, eplb_window_size=4, eplb_step_interval=2, num_redundant_experts=0)
    loads = np.zeros((NUM_LAYERS, NUM_EXPERTS), dtype="<i8")
    loads[:, 0] = loads[:, 1] = 1000
    message = ExpertLoads(num_steps=8, shape=(NUM_LAYERS, NUM_EXPERTS), counts=loads.tobytes())
    end_s = time.monotonic() + 20
    while not (orders := group.balance.handle(0, message)):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert group.balance.is_moving
    newcomer = np.full((NUM_LAYERS, 2, group.capacity), EMPTY)
    group.loads("r2", newcomer)
    version = group.balance.version + 1
    assert orders[0].version == version
    for position in (0, 1):
        group.balance.handle(position, Switched(version=version))
    assert group.balance.version == version
    assert list(group.balance.status()["slots"]) == ["r0", "r1"]
    plan = group.balance.plan(["r0", "r1", "r2"])
    assert {worker for worker, fills in plan.fills.items() if fills} == {"r2/0", "r2/1"}
