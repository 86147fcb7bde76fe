"""The controller's record of experts: a search runs beside the event loop, and its outcome is taken up, or dropped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from nobiru.config import EngineConfig
from nobiru.elastic.planner import MembershipPlan
from nobiru.engine.expert_balance import ExpertBalance, Order
from nobiru.engine.messages import ExpertLoads, Inventory, MoveExperts
from nobiru.parallel.placement import Placement, initial_placement

SKEWED = np.array([[9, 9, 1, 1], [5, 5, 5, 5]])


class Observer:
    def observe_experts(self, *, by_expert: Mapping[int, int], by_rank: Mapping[int, int], balance: float) -> None:
        assert 0 < balance <= 1

    def experts_moved(self, *, num_bytes: int, num_rebalances: int) -> None:
        raise AssertionError("nothing has moved yet")


def balance_of(placement: Placement, num_redundant: int = 0) -> ExpertBalance:
    """That of ranks which hold what `placement` says, in an epoch."""
    config = EngineConfig(
        model="none",
        enable_expert_parallel=True,
        data_parallel_size=placement.num_ranks,
        num_redundant_experts=num_redundant,
        enable_eplb=True,
        eplb_window_size=64,
        eplb_step_interval=16,
    )
    balance = ExpertBalance(config, Observer())
    members = [f"r{position}" for position in range(placement.num_ranks)]
    for position, rank_id in enumerate(members):
        slots = placement.slots[:, position]
        inventory = Inventory(
            num_experts=placement.num_experts,
            expert_bytes=1,
            stored_expert_bytes=1,
            shape=(slots.shape[0], 1, slots.shape[1]),
            slots=slots.astype("<i4").tobytes(),
        )
        balance.rank_holds(rank_id, inventory)
    balance.commit(balance.plan(members), members)
    return balance


def report(balance: ExpertBalance, loads: NDArray[np.int64], num_steps: int = 16) -> list[Order]:
    counts = np.ascontiguousarray(loads, dtype="<i8")
    shape = (counts.shape[0], counts.shape[1])
    return balance.handle(0, ExpertLoads(num_steps=num_steps, shape=shape, counts=counts.tobytes()))


def orders_within(balance: ExpertBalance, loads: NDArray[np.int64], seconds: float) -> list[Order]:
    """What reports lead to, one after the other; of no step, so that no other search is due."""
    end_s = time.monotonic() + seconds
    while not (orders := report(balance, loads, num_steps=0)) and time.monotonic() < end_s:
        time.sleep(0.01)
    return orders


def small() -> Placement:
    return initial_placement(num_layers=2, num_experts=4, num_ranks=2, slot_capacity=3)


def test_what_a_search_finds_is_ordered_at_a_later_report() -> None:
    balance = balance_of(small())
    assert report(balance, SKEWED) == []
    (order,) = orders_within(balance, SKEWED, 20)
    assert isinstance(order, MoveExperts)
    assert order.layer == 0
    assert order.moves
    assert balance.is_moving


def test_what_a_search_finds_for_a_placement_of_the_past_is_dropped() -> None:
    balance = balance_of(small())
    report(balance, SKEWED)
    balance.freeze()
    assert orders_within(balance, SKEWED, 0.2) == [], "a membership is about to change"
    other = Placement(slots=np.roll(small().slots, 1, axis=1), num_experts=4)
    balance.commit(MembershipPlan(placement=other, fills={}), ["r0", "r1"])
    assert orders_within(balance, SKEWED * 0, 0.2) == []
    assert not balance.is_moving


def test_an_error_in_a_search_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> Placement:
        raise MemoryError("no room for a plan")

    monkeypatch.setattr("nobiru.parallel.balancer.rebalance", fail)
    balance = balance_of(small())
    report(balance, SKEWED)
    with pytest.raises(MemoryError, match="no room for a plan"):
        orders_within(balance, SKEWED, 20)


def test_the_event_loop_stays_responsive_for_a_large_model() -> None:
    num_layers, num_experts, num_ranks = 60, 256, 16
    placement = initial_placement(
        num_layers=num_layers, num_experts=num_experts, num_ranks=num_ranks, slot_capacity=24, num_redundant=64
    )
    balance = balance_of(placement, num_redundant=64)
    loads = (np.random.default_rng(0).pareto(1.2, size=(num_layers, num_experts)) * 100 + 1).astype(np.int64)

    async def main() -> tuple[float, float]:
        longest_s = 0.0
        started_s = before_s = time.perf_counter()
        orders = report(balance, loads)
        while not orders:
            await asyncio.sleep(0.005)
            orders = report(balance, loads, num_steps=0)
            now_s = time.perf_counter()
            longest_s, before_s = max(longest_s, now_s - before_s), now_s
            assert now_s - started_s < 60, "a search at this size is bounded"
        assert isinstance(orders[0], MoveExperts)
        return longest_s, time.perf_counter() - started_s

    longest_s, took_s = asyncio.run(main())
    assert longest_s < took_s / 4, f"one turn of the loop took {longest_s} s of a search of {took_s} s"
