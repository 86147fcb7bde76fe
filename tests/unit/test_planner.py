"""Placements from one membership to the next: complete, even, and only empty slots are filled while the old serves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nobiru.elastic.planner import MembershipPlan, plan_membership
from nobiru.errors import ConfigError
from nobiru.parallel.placement import EMPTY


def check(plan: MembershipPlan, held: dict[str, np.ndarray], members: list[str], num_experts: int) -> None:
    slots = plan.placement.slots
    plan.placement.validate()
    for layer in slots:
        assert set(layer[layer != EMPTY].tolist()) == set(range(num_experts))
    for position, rank in enumerate(members):
        if rank not in held:
            assert rank not in plan.fills
            continue
        filled = {(fill.layer, fill.slot): fill.expert for fill in plan.fills[rank]}
        for (layer, slot), expert in filled.items():
            assert held[rank][layer, slot] == EMPTY, "the old epoch does not use it"
            assert slots[layer, position, slot] == expert
        kept = (slots[:, position] == held[rank]) | (slots[:, position] == EMPTY)
        assert all(kept[layer, slot] or (layer, slot) in filled for layer, slot in np.ndindex(kept.shape))


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=6),
    num_experts=st.integers(1, 9),
    redundant=st.integers(0, 3),
    removals=st.randoms(use_true_random=False),
)
def test_a_walk_through_memberships(sizes: list[int], num_experts: int, redundant: int, removals: object) -> None:
    """Ranks come and go in any order; after each change experts are complete and evenly spread."""
    capacity, num_layers, next_id = num_experts + redundant, 2, 0
    held: dict[str, np.ndarray] = {}
    for size in sizes:
        stay = list(held)
        removals.shuffle(stay)  # type: ignore[attr-defined]
        members = stay[:size]
        while len(members) < size:
            members.append(f"r{next_id}")
            next_id += 1
        plan = plan_membership(
            held,
            members,
            num_layers=num_layers,
            num_experts=num_experts,
            slot_capacity=capacity,
            num_redundant=redundant,
        )
        check(plan, held, members, num_experts)
        counts = (plan.placement.slots != EMPTY).sum(2)
        assert (counts.max(1) - counts.min(1)).max() <= 1
        allowed = min(redundant, num_experts * (size - 1))
        assert (counts.sum(1) == num_experts + allowed).all()
        held = {rank: plan.placement.slots[:, position] for position, rank in enumerate(members)}


def test_who_stays_keeps_what_it_holds() -> None:
    first = plan_membership({}, ["a", "b"], num_layers=1, num_experts=8, slot_capacity=8)
    held = {rank: first.placement.slots[:, number] for number, rank in enumerate("ab")}
    grown = plan_membership(held, ["a", "b", "c", "d"], num_layers=1, num_experts=8, slot_capacity=8)
    assert grown.num_fills == 0, "only newcomers read"
    shrunk = plan_membership(held, ["b"], num_layers=1, num_experts=8, slot_capacity=8)
    assert shrunk.num_fills == 4


def test_too_few_slots_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot hold 8 experts"):
        plan_membership({}, ["a"], num_layers=1, num_experts=8, slot_capacity=4)
