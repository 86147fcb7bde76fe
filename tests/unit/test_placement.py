"""Placements: every expert somewhere, loads counted right, and bounds that no placement beats."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nobiru.errors import ConfigError
from nobiru.parallel.placement import (
    EMPTY,
    Placement,
    balancedness,
    balancedness_bound,
    initial_placement,
    layer_balancedness,
    max_load_bound,
    moves,
    rank_loads,
    slot_capacity_for,
)


def layer(*ranks: list[int], num_experts: int) -> Placement:
    """A placement of one layer."""
    return Placement(slots=np.array([ranks]), num_experts=num_experts)


@given(
    num_layers=st.integers(1, 3),
    num_experts=st.integers(1, 12),
    num_ranks=st.integers(1, 6),
    num_redundant=st.integers(0, 12),
    num_spare=st.integers(0, 3),
)
def test_initial_placement(
    num_layers: int, num_experts: int, num_ranks: int, num_redundant: int, num_spare: int
) -> None:
    possible = min(num_redundant, num_experts * (num_ranks - 1))
    least = slot_capacity_for(num_experts=num_experts, num_redundant=possible, min_ranks=num_ranks)
    placement = initial_placement(
        num_layers=num_layers,
        num_experts=num_experts,
        num_ranks=num_ranks,
        slot_capacity=least + num_spare,
        num_redundant=num_redundant,
    )
    placement.validate()  # every expert has a replica, and replicas are on different ranks
    assert placement.slots.shape == (num_layers, num_ranks, least + num_spare)
    assert placement.num_replicas.tolist() == [num_experts + possible] * num_layers
    if not num_redundant:
        sizes = (placement.slots != EMPTY).sum(axis=2)
        assert sizes.max() - sizes.min() <= 1


def test_redundant_experts_go_to_the_emptiest_ranks() -> None:
    placement = initial_placement(num_layers=1, num_experts=5, num_ranks=3, slot_capacity=3, num_redundant=3)
    assert placement.slots.tolist() == [[[0, 1, 2], [2, 3, 1], [4, 0, EMPTY]]]


@pytest.mark.parametrize(("num_experts", "num_ranks", "sizes"), [(8, 3, [3, 3, 2]), (5, 4, [2, 1, 1, 1])])
def test_sizes_that_do_not_divide(num_experts: int, num_ranks: int, sizes: list[int]) -> None:
    placement = initial_placement(num_layers=2, num_experts=num_experts, num_ranks=num_ranks, slot_capacity=4)
    assert (placement.slots[0] != EMPTY).sum(axis=1).tolist() == sizes
    assert (placement.slots[1] != EMPTY).sum(axis=1).tolist() == [sizes[-1], *sizes[:-1]], "the next rank has one more"
    assert placement.slots[0][placement.slots[0] != EMPTY].tolist() == list(range(num_experts))


def test_too_few_slots() -> None:
    with pytest.raises(ConfigError, match=r"slot_capacity is 2; 8 experts and 1 redundant ones on 4 ranks need .* 3"):
        initial_placement(num_layers=1, num_experts=8, num_ranks=4, slot_capacity=2, num_redundant=1)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (layer([0, 1], [EMPTY, 1], num_experts=3), "expert 2 of MoE layer 0 is in no slot"),
        (layer([0, 1], [2, 2], num_experts=3), "rank 1 holds expert 2 of MoE layer 0 more than once"),
    ],
)
def test_what_cannot_serve(placement: Placement, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        placement.validate()


@pytest.mark.parametrize("slots", [[[0, 1]], [[[0, 3]]], [[[0, -2]]], np.zeros((1, 0, 2))])
def test_what_is_no_placement(slots: object) -> None:
    with pytest.raises(ConfigError, match="slots of a placement"):
        Placement(slots=np.array(slots), num_experts=3)


def test_values_are_read_only_and_comparable() -> None:
    slots = np.array([[[0, 1], [1, EMPTY]]])
    placement = Placement(slots=slots, num_experts=2)
    slots[0, 0, 0] = 1
    assert placement.replicas(0, 0) == [(0, 0)]
    assert placement.replicas(0, 1) == [(0, 1), (1, 0)]
    with pytest.raises(ValueError, match="read-only"):
        placement.slots[0, 0, 0] = 1
    same = layer([0, 1], [1, EMPTY], num_experts=2)
    assert placement == same
    assert hash(placement) == hash(same)
    assert placement != layer([0, 1], [EMPTY, 1], num_experts=2)
    assert placement != layer([0, 1], [1, EMPTY], num_experts=3)


def test_moves_name_only_what_changes_and_spread_the_sources() -> None:
    old = layer([0, 1, EMPTY], [0, 2, EMPTY], [3, EMPTY, EMPTY], num_experts=4)
    new = layer([0, 1, 3], [EMPTY, 2, 1], [0, 3, 2], num_experts=4)
    found = [(move.expert, (move.from_rank, move.from_slot), (move.to_rank, move.to_slot)) for move in moves(old, new)]
    assert found == [
        (3, (2, 0), (0, 2)),
        (1, (0, 1), (1, 2)),
        (0, (1, 0), (2, 0)),  # ranks 0 and 1 have it; rank 0 has something to send already
        (3, (2, 0), (2, 1)),  # from slot to slot
        (2, (1, 1), (2, 2)),
    ]
    assert moves(new, new) == []


def test_loads_are_shared_by_replicas() -> None:
    placement = layer([0, 1], [1, 2], num_experts=3)
    loads = np.array([[3, 4, 5]])
    assert rank_loads(placement, loads).tolist() == [[5.0, 7.0]]
    assert layer_balancedness(placement, loads).tolist() == [6 / 7]
    assert balancedness(placement, loads) == 6 / 7
    assert balancedness_bound(placement, loads).tolist() == [1.0]
    nothing = np.zeros((1, 3), dtype=np.int64)
    assert layer_balancedness(placement, nothing).tolist() == balancedness_bound(placement, nothing).tolist() == [1.0]


def smallest_max_load(weights: NDArray[np.int64], num_ranks: int, slot_capacity: int, num_redundant: int) -> float:
    """By trying every set of experts on every rank."""
    num_experts = len(weights)
    sets = [subset for size in range(slot_capacity + 1) for subset in itertools.combinations(range(num_experts), size)]
    rows = np.zeros((len(sets), num_experts))
    for number, subset in enumerate(sets):
        rows[number, list(subset)] = 1
    best = np.inf
    for chosen in itertools.combinations_with_replacement(range(len(sets)), num_ranks):
        holds = rows[list(chosen)]
        counts = holds.sum(axis=0)
        if counts.all() and counts.sum() <= num_experts + num_redundant:
            best = min(best, float((holds @ (weights / counts)).max()))
    return best


@settings(max_examples=40, deadline=None)
@given(
    weights=st.lists(st.integers(0, 20), min_size=3, max_size=5),
    num_ranks=st.integers(2, 3),
    num_spare=st.integers(0, 1),
    num_redundant=st.integers(0, 2),
)
def test_no_placement_beats_the_bound(weights: list[int], num_ranks: int, num_spare: int, num_redundant: int) -> None:
    num_experts = len(weights)
    slot_capacity = num_spare + slot_capacity_for(
        num_experts=num_experts, num_redundant=num_redundant, min_ranks=num_ranks
    )
    if num_ranks == 3 and slot_capacity > 2:
        slot_capacity = 2
        num_redundant = min(num_redundant, num_ranks * slot_capacity - num_experts)
    best = smallest_max_load(np.array(weights), num_ranks, slot_capacity, num_redundant)
    bound = max_load_bound(
        np.array(weights), num_ranks=num_ranks, slot_capacity=slot_capacity, num_redundant=num_redundant
    )
    assert bound <= best + 1e-9


@pytest.mark.parametrize(
    ("weights", "num_ranks", "slot_capacity", "num_redundant", "expected"),
    [
        ([5, 1, 1, 1], 2, 4, 0, 5),  # the hottest expert
        ([6, 1, 1, 1, 1], 2, 4, 1, 5),  # the average, once the hottest has two replicas
        ([9, 1, 1, 1], 4, 4, 2, 3),  # its share of three
        ([4, 4, 4], 2, 4, 0, 8),  # two of three are together
        ([4, 4, 4, 3, 3], 2, 4, 0, 10),  # three of five are
        ([9, 5, 5, 5], 2, 2, 0, 14),  # the hottest has company
    ],
)
def test_bounds_that_are_reached(
    weights: list[int], num_ranks: int, slot_capacity: int, num_redundant: int, expected: float
) -> None:
    bound = max_load_bound(
        np.array(weights), num_ranks=num_ranks, slot_capacity=slot_capacity, num_redundant=num_redundant
    )
    assert bound == expected
    assert smallest_max_load(np.array(weights), num_ranks, slot_capacity, num_redundant) == expected
