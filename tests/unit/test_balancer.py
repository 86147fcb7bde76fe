"""The balancer: the load of the last steps, plans only when they are due and worth it, and stages that are safe."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nobiru.errors import ConfigError
from nobiru.parallel.balancer import Balancer, BalancerConfig, LoadWindow, Stage, stages
from nobiru.parallel.placement import EMPTY, Placement, balancedness, initial_placement


def random_placement(random: np.random.Generator, num_experts: int, shape: tuple[int, int, int]) -> Placement:
    """Every expert somewhere, replicas on different ranks, slots in any order."""
    num_layers, num_ranks, capacity = shape
    slots = np.full(shape, EMPTY)
    for layer in range(num_layers):
        num_more = int(random.integers(0, num_ranks * capacity - num_experts + 1))
        for expert in [*random.permutation(num_experts), *random.integers(num_experts, size=num_more)]:
            free = np.argwhere((slots[layer] == EMPTY) & (slots[layer] != expert).all(axis=1)[:, None])
            if len(free):
                slots[(layer, *random.choice(free))] = expert
    return Placement(slots=slots, num_experts=num_experts)


def check(stage: Stage, serving: Placement, max_moves: int) -> None:
    """A stage writes slots that nobody uses, from slots that have the expert, and leaves every expert somewhere."""
    assert stage.before == serving
    assert len(stage.moves) <= max_moves
    filled = serving.slots.copy()
    for move in stage.moves:
        assert move.layer == stage.layer
        assert serving.slots[move.layer, move.to_rank, move.to_slot] == EMPTY
        assert serving.slots[move.layer, move.from_rank, move.from_slot] == move.expert
        filled[move.layer, move.to_rank, move.to_slot] = move.expert
    stage.after.validate()
    changed = stage.after.slots != filled
    assert (stage.after.slots[changed] == EMPTY).all(), "after the moves, slots are only given up"
    assert all((filled[layer] == serving.slots[layer]).all() for layer in range(len(filled)) if layer != stage.layer)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_experts=st.integers(1, 7),
    num_ranks=st.integers(1, 4),
    num_spare=st.integers(0, 2),
    max_moves=st.integers(1, 4),
)
def test_stages_lead_from_any_placement_to_any_other(
    seed: int, num_experts: int, num_ranks: int, num_spare: int, max_moves: int
) -> None:
    random = np.random.default_rng(seed)
    shape = (2, num_ranks, -(-num_experts // num_ranks) + num_spare)
    current, target = (random_placement(random, num_experts, shape) for _ in range(2))
    serving, num_moves = current, 0
    is_stuck = [
        (current.slots[layer] != target.slots[layer]).any()
        and (current.slots[layer] != EMPTY).all()
        and current.num_replicas[layer] == num_experts
        for layer in range(2)
    ]
    if any(is_stuck):
        with pytest.raises(ConfigError, match="neither an empty slot nor a redundant expert"):
            list(stages(current, target, max_moves=max_moves))
        return
    for num_stages, stage in enumerate(stages(current, target, max_moves=max_moves)):
        check(stage, serving, max_moves)
        serving = stage.after
        num_moves += len(stage.moves)
        assert num_stages < 100
    assert serving == target
    num_new = int(((target.slots != current.slots) & (target.slots != EMPTY)).sum())
    assert num_moves <= 2 * num_new + 2, "a detour costs at most one move more for each"


def test_experts_change_places_by_way_of_an_empty_slot() -> None:
    current = Placement(slots=np.array([[[0, 1], [2, EMPTY]]]), num_experts=3)
    target = Placement(slots=np.array([[[2, 1], [0, EMPTY]]]), num_experts=3)
    found = [stage.after.slots[0].tolist() for stage in stages(current, target, max_moves=4)]
    assert found == [[[EMPTY, 1], [2, 0]], [[2, 1], [EMPTY, 0]], [[2, 1], [0, EMPTY]]]


def test_experts_change_places_by_way_of_a_redundant_one() -> None:
    current = Placement(slots=np.array([[[0, 1], [2, 1]]]), num_experts=3)
    target = Placement(slots=np.array([[[2, 1], [0, 1]]]), num_experts=3)
    found = [stage.after.slots[0].tolist() for stage in stages(current, target, max_moves=4)]
    assert found[0] == [[0, EMPTY], [2, 1]]
    assert found[-1] == target.slots[0].tolist()


def test_a_window_forgets() -> None:
    window = LoadWindow(1, 2, 32)
    for step in range(100):
        window.add(np.array([[1, step]]))
    assert 32 <= window.num_steps < 34
    assert window.loads.tolist() == [[window.num_steps, sum(range(100 - window.num_steps, 100))]]
    window.add(np.array([[5, 6]]), num_steps=64)
    assert window.num_steps == 64
    assert window.loads.tolist() == [[5, 6]]


def test_a_short_window_is_exact() -> None:
    window = LoadWindow(1, 1, 3)
    for step in range(5):
        window.add(np.array([[step]]))
    assert (window.num_steps, window.loads.tolist()) == (3, [[2 + 3 + 4]])


CONFIG = BalancerConfig(window_steps=10, interval_steps=5, good_balancedness=0.9, max_stage_moves=1)
SKEWED = np.array([[9, 9, 1, 1], [5, 5, 5, 5]])


def next_stage(balancer: Balancer, placement: Placement) -> Stage | None:
    """The next one, of a new plan if there is none and it is time."""
    if (stage := balancer.next_stage(placement)) is None and (search := balancer.search(placement)) is not None:
        balancer.follow(search(), placement)
        stage = balancer.next_stage(placement)
    return stage


def make(config: BalancerConfig = CONFIG) -> tuple[Balancer, Placement]:
    placement = initial_placement(num_layers=2, num_experts=4, num_ranks=2, slot_capacity=3)
    return Balancer(config, num_layers=2, num_experts=4), placement


def test_a_plan_is_followed_stage_by_stage() -> None:
    balancer, placement = make()
    for _ in range(4):
        balancer.observe(SKEWED)
        assert next_stage(balancer, placement) is None, "it is not time"
    balancer.observe(SKEWED)
    before = balancedness(placement, balancer.window.loads)
    num_stages = 0
    while (stage := next_stage(balancer, placement)) is not None:
        assert next_stage(balancer, placement) is stage, "until it serves"
        check(stage, placement, 1)
        placement = stage.after
        num_stages += 1
    assert num_stages >= 2
    assert before < 0.9
    assert balancedness(placement, balancer.window.loads) == 1
    assert balancer.num_rebalances == 1
    balancer.observe(SKEWED, num_steps=5)
    assert next_stage(balancer, placement) is None, "it is good enough"
    assert balancer.num_rebalances == 1


def test_the_load_turns() -> None:
    balancer, placement = make()
    balancer.observe(SKEWED, num_steps=5)
    while (stage := next_stage(balancer, placement)) is not None:
        placement = stage.after
    for _ in range(20):
        balancer.observe(np.array([[9, 1, 9, 1], [5, 5, 5, 5]]))
        while (stage := next_stage(balancer, placement)) is not None:
            placement = stage.after
    assert balancedness(placement, balancer.window.loads) == 1


def test_a_plan_ends_when_it_is_abandoned_or_the_placement_is_another() -> None:
    balancer, placement = make()
    balancer.observe(SKEWED, num_steps=5)
    assert next_stage(balancer, placement) is not None
    balancer.abandon()
    assert next_stage(balancer, placement) is None
    balancer.observe(SKEWED, num_steps=5)
    assert next_stage(balancer, placement) is not None
    other = Placement(slots=np.roll(placement.slots, 1, axis=1), num_experts=4)
    assert next_stage(balancer, other) is None
    assert next_stage(balancer, placement) is None


def test_a_plan_from_a_placement_that_serves_no_more_is_dropped() -> None:
    balancer, placement = make()
    balancer.observe(SKEWED, num_steps=5)
    search = balancer.search(placement)
    assert search is not None
    assert balancer.search(placement) is None, "it is not time for another one"
    other = Placement(slots=np.roll(placement.slots, 1, axis=1), num_experts=4)
    balancer.follow(search(), other)
    assert balancer.next_stage(placement) is None
    assert balancer.num_rebalances == 0


def test_a_search_knows_the_loads_of_its_beginning() -> None:
    balancer, placement = make()
    balancer.observe(SKEWED, num_steps=5)
    search = balancer.search(placement)
    assert search is not None
    plan = search()
    balancer.observe(SKEWED[:, ::-1], num_steps=10)
    assert [stage.after for stage in search()] == [stage.after for stage in plan]


def test_redundant_replicas_come_into_free_slots() -> None:
    balancer, placement = make(BalancerConfig(window_steps=10, interval_steps=5, num_redundant=1))
    balancer.observe(np.array([[9, 1, 1, 1], [5, 5, 5, 5]]), num_steps=5)
    while (stage := next_stage(balancer, placement)) is not None:
        placement = stage.after
    assert placement.num_replicas.tolist() == [5, 4]
    assert len(placement.replicas(0, 0)) == 2


def test_an_even_load_moves_nothing() -> None:
    balancer, placement = make()
    balancer.observe(np.full((2, 4), 7), num_steps=5)
    assert next_stage(balancer, placement) is None
    balancer.observe(np.zeros((2, 4), dtype=np.int64), num_steps=50)
    assert next_stage(balancer, placement) is None
    assert balancer.num_rebalances == 0


def test_stages_without_moves_make_no_progress() -> None:
    _, placement = make()
    with pytest.raises(ConfigError, match="max_moves is 0"):
        list(stages(placement, placement, max_moves=0))
