"""The membership machine on chosen ways through its world, and on long random ones. `test_membership_explored.py` takes
all ways, within smaller bounds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from membership_model import World, at_start, serving
from membership_state import Budget, Event, Request

from nobiru.elastic.membership import (
    APPLY_TIMEOUT_S,
    Forget,
    Launch,
    Membership,
    SetTimer,
    Stop,
)
from nobiru.elastic.suspicion import MAX_REFORM_S, REFORM_S


def settled(world: World, seed: int = 0, max_events: int = 20000) -> World:
    """Nothing goes wrong any more: whatever the order, it comes to rest."""
    chance = random.Random(seed)
    for _ in range(max_events):
        if world.is_at_rest():
            return world
        world = world.happen(chance.choice(world.normal_events()))
    raise AssertionError(f"it does not come to rest: {world}")


def asked(world: World, *requests: Request) -> World:
    for request in requests:
        world = settled(replace(world, requests=(request,)).happen(("request", None)))
    return world


def killed(world: World, *rank_ids: str) -> World:
    world = replace(world, budget=Budget(deaths=len(rank_ids)))
    for rank_id in rank_ids:
        world = world.happen(("kill", rank_id))
    return world


def test_growth_keeps_the_members_and_adds_new_ones() -> None:
    world = asked(serving(2), Request(4))
    assert world.machine.members == ("r0", "r1", "r2", "r3")
    assert world.machine.epoch == 2


def test_shrink_takes_the_newest_and_removal_the_named() -> None:
    world = asked(serving(4), Request(2))
    assert world.machine.members == ("r0", "r1")
    world = asked(world, Request(1, ("r0",)))
    assert world.machine.members == ("r1",)
    world = asked(world, Request(1, ("r1",), drains=True))
    assert world.machine.members == ("r4",), "a replacement"


def test_the_survivors_of_a_death_go_on_alone_and_may_grow_again() -> None:
    world = settled(killed(serving(3), "r1"))
    assert world.machine.members == ("r0", "r2")
    assert world.machine.desired_size == 3
    world.do(world.machine.request(size=world.machine.desired_size, origin="heal"))
    assert settled(world).machine.members == ("r0", "r2", "r3")


def test_when_nobody_survives_the_group_is_launched_anew() -> None:
    assert settled(killed(serving(2), "r0", "r1")).machine.members == ("r2", "r3")


def test_fewer_survivors_than_can_hold_the_model_are_joined_by_new_ranks() -> None:
    world = settled(killed(serving(3, min_size=2), "r0", "r2"))
    assert world.machine.members == ("r1", "r3")
    assert world.machine.latest is not None
    assert (world.machine.latest.origin, world.machine.latest.phase) == ("failure", "done")


def test_several_deaths_in_a_row_are_one_failure() -> None:
    world = killed(serving(3), "r0", "r1").happen(("news", "r0"))
    first = world.machine.latest
    assert first is not None
    world = settled(world.happen(("timer", ("reform", first.number))).happen(("news", "r1")))
    assert world.machine.members == ("r2",)
    assert world.machine.latest is not None
    assert (world.machine.latest.number, world.machine.latest.phase) == (first.number, "done")


def test_a_second_change_is_refused_while_one_runs() -> None:
    machine = serving(2).machine
    machine.request(size=3)
    with pytest.raises(ValueError, match="another"):
        machine.request(size=1)


def test_cancelling_before_the_commit_changes_nothing() -> None:
    world = serving(2)
    world.do(world.machine.request(size=3))
    world.do(world.machine.cancel())
    world = settled(world)
    assert (world.machine.epoch, world.machine.members) == (1, ("r0", "r1"))
    assert world.machine.latest is not None
    assert world.machine.latest.phase == "rolled_back"
    assert world.machine.cancel() == []


def test_a_prepare_that_fails_rolls_back() -> None:
    machine = serving(2).machine
    machine.request(size=1)
    assert Forget(2, ("r0", "r1")) in machine.rank_prepared("r0", 2, "the file is gone")
    assert machine.members == ("r0", "r1")
    assert machine.latest is not None
    assert machine.latest.error == "r0 could not prepare: the file is gone"


@pytest.mark.parametrize("how", ["cancel", "member dies", "new rank dies"])
def test_an_operation_that_is_undone_leaves_the_desired_size_as_it_was(how: str) -> None:
    world = serving(3)
    world = settled(killed(world, "r2"))  # two of three serve
    world.do(world.machine.request(size=4))
    if how == "cancel":
        world.do(world.machine.cancel())
    else:
        world = killed(world, "r1" if how == "member dies" else "r4")
    world = settled(world)
    assert world.machine.desired_size == 3
    world = asked(world, Request(1))
    assert world.machine.desired_size == 1


# ---- what fails without a death --------------------------------------------------------------------------------------


def broken(machine: Membership, *left: str) -> list[float]:
    """An epoch of three breaks, and `left` say so; the waits until the next one serves."""
    waits = []
    actions = [action for rank_id in left for action in machine.rank_suspended(rank_id, machine.epoch)]
    assert machine.operation is not None
    while not machine.lives:
        waits += [each.seconds for each in actions if isinstance(each, SetTimer) and each.name == "reform"]
        actions = machine.timer("reform", machine.operation.number)
        assert machine.attempt is not None
        for rank_id in machine.attempt.members:
            machine.rank_prepared(rank_id, machine.attempt.number)
    for rank_id in machine.members:
        machine.rank_applied(rank_id, machine.num_attempts)
    assert machine.operation is None
    return waits


def test_who_is_stuck_in_three_epochs_that_break_has_to_go() -> None:
    machine = serving(3).machine
    assert broken(machine, "r0", "r1") == [REFORM_S]
    assert broken(machine, "r1", "r0") == [2 * REFORM_S]
    assert machine.members == ("r0", "r1", "r2")
    broken(machine, "r1", "r0")
    assert machine.members == ("r0", "r1")
    assert "r2" not in machine.loaded


def test_whose_connection_fails_first_three_times_has_to_go() -> None:
    machine = serving(3).machine
    for first, *others in (("r1", "r0", "r2"), ("r1", "r2", "r0"), ("r1", "r2", "r0")):
        broken(machine, first, *others)
    assert machine.members == ("r0", "r2")


def test_a_calm_epoch_clears_everybody() -> None:
    machine = serving(3).machine
    for _ in range(5):
        assert broken(machine, "r0", "r1") == [REFORM_S]
        assert machine.timer("calm", machine.epoch) == []
    assert machine.members == ("r0", "r1", "r2")


def test_a_member_that_cannot_prepare_has_to_go_and_the_operation_says_so() -> None:
    """Its checkpoint cannot be read any more, say."""
    machine = serving(3).machine
    actions = machine.rank_lost("r0")
    failure = machine.latest
    assert failure is not None
    waits = []
    for _ in range(6):
        actions = machine.timer("reform", failure.number)
        assert machine.attempt is not None
        actions = machine.rank_prepared("r1", machine.attempt.number, "no such file")
        waits += [each.seconds for each in actions if isinstance(each, SetTimer)]
    assert waits == [0.5, 1.0, 2.0, 4.0, MAX_REFORM_S, MAX_REFORM_S]
    actions = machine.timer("reform", failure.number)
    assert Stop("r1") in actions
    assert (failure.phase, failure.error) == ("failed", "r1 kept failing without dying, and had to go")
    assert machine.latest is not failure
    assert machine.attempt is not None
    machine.rank_prepared("r2", machine.attempt.number)
    assert (machine.lives, machine.members) == (True, ("r2",))


def test_who_misses_others_is_not_to_blame() -> None:
    machine = serving(2).machine
    machine.rank_suspended("r0", 1)
    machine.rank_suspended("r1", 1)
    assert machine.operation is not None
    machine.timer("reform", machine.operation.number)
    before = machine.suspicion.strikes.get("r1", 0)
    machine.rank_prepared("r0", machine.num_attempts, "nobody came", missed_others=True)
    assert machine.suspicion.strikes["r1"] == before + 1


def test_when_only_one_is_left_and_fails_too_the_group_is_launched_anew() -> None:
    machine = serving(2).machine
    machine.rank_lost("r0")
    assert machine.operation is not None
    number = machine.operation.number
    for _ in range(6):
        machine.timer("reform", number)
        machine.rank_prepared("r1", machine.num_attempts, "no such file")
    assert machine.timer("reform", number) == [Stop("r1"), Launch("r2"), Launch("r3")]


def test_answers_that_got_lost_do_not_keep_an_operation_open() -> None:
    machine = serving(2).machine
    machine.request(size=1)
    for rank_id in ("r0",):
        machine.rank_prepared(rank_id, 2)
    actions = [action for rank_id in ("r0", "r1") for action in machine.rank_parked(rank_id, 2)]
    assert SetTimer("apply", 2, APPLY_TIMEOUT_S) in actions
    machine.timer("apply", 2)
    assert machine.latest is not None
    assert machine.latest.origin == "failure", "nobody has begun the epoch"


def test_who_has_parked_for_an_attempt_that_is_over_is_told() -> None:
    machine = serving(1).machine
    machine.request(size=2)
    machine.cancel()
    assert machine.rank_parked("r0", 2) == [Forget(2, ("r0",))]


def test_a_start_that_is_given_up_has_failed() -> None:
    machine = at_start(2).machine
    machine.give_up("no such model")
    assert machine.latest is not None
    assert (machine.latest.phase, machine.latest.error) == ("failed", "no such model")


# ---- long random ways ------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 4),
    min_size=st.integers(1, 2),
    num_events=st.integers(0, 200),
    fault_rate=st.sampled_from([0.0, 0.02, 0.1]),
)
def test_whatever_happens_one_epoch_serves_in_the_end(
    seed: int, size: int, min_size: int, num_events: int, fault_rate: float
) -> None:
    chance = random.Random(seed)
    world = at_start(size, Budget(*[1000] * 6), min_size=min(size, min_size))
    for _ in range(num_events):
        machine = world.machine
        if machine.lives and machine.operation is None and chance.random() < 0.1:
            some = tuple(rank for rank in machine.members if chance.random() < 0.3)
            request = Request(chance.randint(machine.min_size, 4), some, chance.random() < 0.3, chance.random() < 0.5)
            world = replace(world, requests=(request,)).happen(("request", None))
        elif (faults := world.faults()) and chance.random() < fault_rate:
            world = world.happen(one_of_a_kind(faults, chance))
        else:
            world = world.happen(chance.choice(world.normal_events() or faults))
    settled(world, seed)


def one_of_a_kind(events: list[Event], chance: random.Random) -> Event:
    kind = chance.choice(sorted({what for what, _ in events}))
    return chance.choice([event for event in events if event[0] == kind])
