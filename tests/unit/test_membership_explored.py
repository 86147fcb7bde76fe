"""The membership machine on all ways through its world: every order of events, delays, and faults within budgets.

`NOBIRU_EXPLORE=1` takes the large configurations too, as `python tests/membership_explorer.py` does.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from membership_broken import Broken
from membership_explorer import CONFIGURATIONS, LARGE, explore
from membership_model import World, serving
from membership_state import Budget, Request

from nobiru.elastic.membership import Abandon, Action, Membership

CHOSEN = {**CONFIGURATIONS, **(LARGE if os.environ.get("NOBIRU_EXPLORE") else {})}


@pytest.mark.parametrize("name", CHOSEN)
def test_one_epoch_serves_in_the_end_on_all_ways(name: str) -> None:
    explored = explore(CHOSEN[name]())
    assert explored.num_at_rest > 0


# ---- machines that are wrong are found out ---------------------------------------------------------------------------


def commits_at_the_first_that_parks(machine: Membership, rank_id: str, attempt: int) -> list[Action]:
    current = machine.attempt
    if current is not None and current.number == attempt and current.is_armed and not current.is_committed:
        current.parked |= set(machine.members)
    return PARKED(machine, rank_id, attempt)


def tells_nobody_to_forget(machine: Membership) -> list[Action]:
    FORGET(machine)
    return []


def tells_nobody_to_abandon(machine: Membership, error: str | None = None) -> list[Action]:
    return [action for action in BROKE(machine, error) if not isinstance(action, Abandon)]


def takes_any_answer_for_the_attempt(
    machine: Membership, rank_id: str, attempt: int, *args: str, **more: bool
) -> list[Action]:
    return PREPARED(machine, rank_id, machine.num_attempts, *args, **more)


def sets_no_timer_for_parking(machine: Membership, name: str, number: int) -> list[Action]:
    return [] if name == "park" else TIMER(machine, name, number)


PARKED, FORGET, BROKE = Membership.rank_parked, Membership._forget_attempt, Membership._epoch_broke
PREPARED, TIMER = Membership.rank_prepared, Membership.timer
SHRINK = (Request(1),)
WRONG: list[tuple[str, Callable[..., list[Action]], World, str]] = [
    ("rank_parked", commits_at_the_first_that_parks, serving(2, requests=SHRINK), "in a step|only the committed"),
    ("_forget_attempt", tells_nobody_to_forget, serving(2, Budget(cancels=1), requests=SHRINK), "come to rest"),
    (
        "rank_prepared",
        takes_any_answer_for_the_attempt,
        serving(2, Budget(deaths=1, cancels=1), requests=(*SHRINK, *SHRINK)),
        "prepared",
    ),
    ("timer", sets_no_timer_for_parking, serving(2, Budget(losses=1), requests=SHRINK), "come to rest"),
]


@pytest.mark.parametrize(("method", "wrong", "first", "what"), WRONG)
def test_a_wrong_machine_is_found_out(
    method: str, wrong: Callable[..., list[Action]], first: World, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Membership, method, wrong)
    with pytest.raises(Broken, match=what):
        explore(first)


def test_the_way_to_what_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Membership, "rank_parked", commits_at_the_first_that_parks)
    with pytest.raises(Broken, match=r"request (?s:.)*complete r"):
        explore(serving(2, requests=SHRINK))
