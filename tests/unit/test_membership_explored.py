"""The membership machine on all ways through its world: every order of events, delays, and faults within budgets.

`NOBIRU_EXPLORE=1` takes the large configurations too, as `python tests/membership_explorer.py` does.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from membership_broken import Broken
from membership_explorer import CONFIGURATIONS, LARGE, digest, explore
from membership_model import World, at_start, serving
from membership_state import Budget, Request

from nobiru.elastic.membership import Action, Forget, Membership, Prepare

CHOSEN = {**CONFIGURATIONS, **(LARGE if os.environ.get("NOBIRU_EXPLORE") else {})}


@pytest.mark.parametrize("name", CHOSEN)
def test_one_epoch_serves_in_the_end_on_all_ways(name: str) -> None:
    explored = explore(CHOSEN[name]())
    assert explored.num_at_rest > 0


def test_what_happens_to_a_copy_of_a_world_does_not_happen_to_the_world() -> None:
    """Else states would be taken for others."""
    chance = random.Random(1)
    world = serving(2, Budget(1, 1, 1, 1, 1, 1), requests=(Request(1),), writer="r1")
    for _ in range(300):
        before = digest(world)
        following = [world.happen(event) for event in (*world.normal_events(), *world.faults())]
        assert digest(world) == before
        world = chance.choice(following)


# ---- machines that are wrong are found out ---------------------------------------------------------------------------


def commits_at_the_first_that_parks(machine: Membership, rank_id: str, attempt: int) -> list[Action]:
    current = machine.attempt
    if current is not None and current.number == attempt and current.is_armed and not current.is_committed:
        current.parked |= set(machine.members)
    return PARKED(machine, rank_id, attempt)


def tells_nobody_to_forget(machine: Membership) -> list[Action]:
    FORGET(machine)
    return []


def lets_survivors_prepare_before_they_leave(machine: Membership) -> list[Action]:
    return [replace(each, leave=False) if isinstance(each, Prepare) else each for each in BEGIN_TO_PREPARE(machine)]


def takes_any_answer_for_the_attempt(
    machine: Membership, rank_id: str, attempt: int, *args: str, **more: bool
) -> list[Action]:
    return PREPARED(machine, rank_id, machine.num_attempts, *args, **more)


def sets_no_timer_for_parking(machine: Membership, name: str, number: int) -> list[Action]:
    return [] if name == "park" else TIMER(machine, name, number)


def tells_nothing_to_who_parked_in_vain(machine: Membership, rank_id: str, attempt: int) -> list[Action]:
    return [each for each in PARKED(machine, rank_id, attempt) if not isinstance(each, Forget)]


PARKED, FORGET, TIMER = Membership.rank_parked, Membership._forget_attempt, Membership.timer
PREPARED, BEGIN_TO_PREPARE = Membership.rank_prepared, Membership._prepare_if_loaded
SHRINK = (Request(1),)
WRONG: dict[str, tuple[str, Callable[..., list[Action]], World, str]] = {
    "commits at the first that parks": (
        "rank_parked",
        commits_at_the_first_that_parks,
        serving(2, requests=SHRINK),
        "has parked",
    ),
    "tells nobody to forget": (
        "_forget_attempt",
        tells_nobody_to_forget,
        serving(2, Budget(cancels=1), requests=SHRINK),
        "come to rest",
    ),
    "takes any answer": (
        "rank_prepared",
        takes_any_answer_for_the_attempt,
        serving(2, Budget(cancels=1), requests=(*SHRINK, *SHRINK)),
        "prepared",
    ),
    "has no timer for parking": (
        "timer",
        sets_no_timer_for_parking,
        serving(2, Budget(losses=1), requests=SHRINK),
        "come to rest",
    ),
    "tells nothing to who parked in vain": (
        "rank_parked",
        tells_nothing_to_who_parked_in_vain,
        serving(1, Budget(cancels=1, losses=1), requests=SHRINK),
        "come to rest",
    ),
    "lets survivors prepare before they leave": (
        "_prepare_if_loaded",
        lets_survivors_prepare_before_they_leave,
        at_start(2, Budget(early=1)),
        "has left",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_machine_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, wrong, first, what = WRONG[name]
    monkeypatch.setattr(Membership, method, wrong)
    with pytest.raises(Broken, match=what):
        explore(first)


def test_the_way_to_what_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Membership, "rank_parked", commits_at_the_first_that_parks)
    with pytest.raises(Broken, match=r"request (?s:.)*complete r"):
        explore(serving(2, requests=SHRINK))
