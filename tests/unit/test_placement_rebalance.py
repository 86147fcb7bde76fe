"""Rebalancing: never worse, never too many moves, never an expert lost; and good where it can be."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nobiru.errors import ConfigError
from nobiru.parallel.placement import (
    EMPTY,
    Placement,
    balancedness_bound,
    initial_placement,
    layer_balancedness,
    moves,
    rank_loads,
)
from nobiru.parallel.rebalance import rebalance

SHARED = Path(os.environ.get("NOBIRU_SHARED") or Path(__file__).resolve().parents[3] / "shared")


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Any valid placement: experts thrown into slots, then those without a slot into what is left."""
    num_experts = draw(st.integers(1, 9))
    num_ranks = draw(st.integers(1, 4))
    slot_capacity = -(-num_experts // num_ranks) + draw(st.integers(0, 2))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    layers = []
    for _ in range(draw(st.integers(1, 3))):
        num_more = random.integers(0, num_ranks * slot_capacity - num_experts + 1)
        held = np.zeros((num_ranks, num_experts), dtype=bool)
        for expert in [*random.permutation(num_experts), *random.integers(num_experts, size=num_more)]:
            if len(fits := np.flatnonzero(~held[:, expert] & (held.sum(axis=1) < slot_capacity))):
                held[random.choice(fits), expert] = True
        slots = np.full((num_ranks, slot_capacity), EMPTY)
        for rank in range(num_ranks):
            experts = random.permutation(np.flatnonzero(held[rank]))
            slots[rank, random.permutation(slot_capacity)[: len(experts)]] = experts
        layers.append(slots)
    return Placement(slots=np.array(layers), num_experts=num_experts)


@settings(max_examples=150, deadline=None)
@given(
    placement=placements(),
    seed=st.integers(0, 2**32),
    skew=st.sampled_from([0.0, 1.0, 3.0]),
    max_moves=st.integers(0, 12),
    more=st.one_of(st.none(), st.integers(0, 4)),
)
def test_rebalance(placement: Placement, seed: int, skew: float, max_moves: int, more: int | None) -> None:
    placement.validate()
    random = np.random.default_rng(seed)
    shape = (placement.num_layers, placement.num_experts)
    loads = (random.random(shape) ** skew * 1000).astype(np.int64) * random.integers(0, 2, size=shape)
    new = rebalance(placement, loads, max_moves=max_moves, num_redundant=more)
    new.validate()
    assert new.slots.shape == placement.slots.shape
    assert len(moves(placement, new)) <= max_moves
    before, after = rank_loads(placement, loads).max(axis=1), rank_loads(new, loads).max(axis=1)
    assert (after <= before * (1 + 1e-9)).all()
    most = np.maximum(placement.num_replicas, placement.num_experts + (more or 0))
    assert (new.num_replicas <= most).all()
    assert (layer_balancedness(placement, loads) <= balancedness_bound(placement, loads) + 1e-9).all()
    assert new == rebalance(placement, loads, max_moves=max_moves, num_redundant=more), "the same again"
    held = (placement.slots != EMPTY) & (new.held() > 0)[
        np.arange(len(loads))[:, None, None], np.arange(placement.num_ranks)[None, :, None], placement.slots
    ]
    assert (new.slots[held] == placement.slots[held]).all(), "who stays keeps the slot"


def test_a_hot_expert_gets_the_redundant_replicas() -> None:
    placement = initial_placement(num_layers=1, num_experts=4, num_ranks=4, slot_capacity=2, num_redundant=2)
    loads = np.array([[10, 10, 10, 90]])
    new = rebalance(placement, loads, max_moves=8)
    assert len(new.replicas(0, 3)) == 3
    assert rank_loads(new, loads).max() <= 40
    assert new.num_replicas.tolist() == [6]


def test_free_slots_are_filled_only_when_allowed() -> None:
    placement = initial_placement(num_layers=1, num_experts=4, num_ranks=4, slot_capacity=2)
    loads = np.array([[10, 10, 10, 90]])
    assert rebalance(placement, loads, max_moves=8) == placement
    new = rebalance(placement, loads, max_moves=8, num_redundant=2)
    assert len(new.replicas(0, 3)) == 3
    assert new.num_replicas.tolist() == [6]


def test_moves_go_to_the_worst_layer_first() -> None:
    placement = initial_placement(num_layers=2, num_experts=4, num_ranks=2, slot_capacity=3)
    loads = np.array([[5, 6, 4, 5], [9, 9, 1, 1]])
    new = rebalance(placement, loads, max_moves=1)
    assert (new.slots[0] == placement.slots[0]).all()
    assert rank_loads(new, loads)[1].tolist() == [9, 11]


def test_a_move_that_is_not_worth_its_price_is_not_made() -> None:
    placement = initial_placement(num_layers=1, num_experts=4, num_ranks=2, slot_capacity=3)
    loads = np.array([[100, 103, 99, 100]])
    assert moves(placement, rebalance(placement, loads, max_moves=8)) != []
    assert rebalance(placement, loads, max_moves=8, move_price=0.01) == placement


def test_without_any_free_slot_nothing_can_move() -> None:
    placement = initial_placement(num_layers=1, num_experts=4, num_ranks=2, slot_capacity=2)
    loads = np.array([[9, 9, 1, 1]])
    assert rebalance(placement, loads, max_moves=8) == placement


@pytest.mark.parametrize("loads", [np.ones((2, 4)), np.ones(4), -np.ones((1, 4)), np.full((1, 4), np.nan)])
def test_bad_loads(loads: NDArray[np.float64]) -> None:
    placement = initial_placement(num_layers=1, num_experts=4, num_ranks=2, slot_capacity=2)
    with pytest.raises(ConfigError, match="loads must be"):
        rebalance(placement, loads, max_moves=8)


def smallest_max_load(weights: NDArray[np.int64], num_ranks: int) -> int:
    """By trying every way to deal experts without replicas."""
    ways = itertools.product(range(num_ranks), repeat=len(weights) - 1)
    return min(int(np.bincount((0, *way), weights=weights, minlength=num_ranks).max()) for way in ways)


@pytest.mark.parametrize("model", ["stories260K-moe8x-exact", "stories260K-moe8x-noisy"])
def test_measured_loads_of_a_trained_model(model: str) -> None:
    path = SHARED / "models" / "expected.json"
    if not path.exists():
        pytest.skip("the shared models are not here")
    measured = json.loads(path.read_text())[model]
    loads = np.array(next(value for key, value in measured.items() if "expert" in key))
    placement = initial_placement(num_layers=len(loads), num_experts=8, num_ranks=4, slot_capacity=4)
    new = rebalance(placement, loads, max_moves=1000)
    assert layer_balancedness(new, loads).mean() >= 1.3 * layer_balancedness(placement, loads).mean()
    best = np.array([smallest_max_load(weights, 4) for weights in loads])
    assert (rank_loads(new, loads).max(axis=1) <= 1.04 * best).all()
    redundant = rebalance(placement, loads, max_moves=1000, num_redundant=4)
    assert layer_balancedness(redundant, loads).mean() > 0.97
