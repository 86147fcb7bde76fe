"""Reports that tests hold up come later, in their order, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from nobiru.elastic.holds import POINTS, Holds, delays_from
from nobiru.runner.faults import FAULTS, parse_faults


class Clock:
    """Calls for later, which the test makes."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, Callable[[], None]]] = []

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        self.calls.append((seconds, call))


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_held_reports_wait_in_their_order_and_others_pass(clock: Clock) -> None:
    told: list[str] = []
    holds = Holds(clock.later)
    holds.hold("park", "apply")
    for name, point in (("a", "park"), ("b", "prepare"), ("c", "park"), ("d", "apply")):
        holds.pass_on(point, partial(told.append, name))  # type: ignore[arg-type]
    assert told == ["b"]
    assert [holds.num_waiting(point) for point in POINTS] == [0, 0, 0, 2, 1]
    holds.release("park")
    assert told == ["b", "a", "c"]
    holds.pass_on("park", partial(told.append, "e"))
    assert told[-1] == "e", "nothing is held any more"
    holds.release()
    assert told[-1] == "d"
    assert clock.calls == []


def test_a_release_may_lead_to_more_reports_of_the_same_point(clock: Clock) -> None:
    told: list[int] = []
    holds = Holds(clock.later)

    def report(number: int) -> None:
        told.append(number)
        if number < 3:
            holds.pass_on("load", partial(report, number + 1))

    holds.hold("load")
    holds.pass_on("load", partial(report, 1))
    holds.release("load")
    assert told == [1, 2, 3]


def test_delays_come_from_fault_injection(clock: Clock) -> None:
    delays_s = delays_from(parse_faults("hold_prepare_ms=250,step_delay_ms=5"))
    assert delays_s == {"prepare": 0.25}
    told: list[str] = []
    holds = Holds(clock.later, delays_s)
    holds.pass_on("prepare", partial(told.append, "late"))
    holds.pass_on("park", partial(told.append, "at once"))
    assert told == ["at once"]
    ((seconds, call),) = clock.calls
    call()
    assert (seconds, told[-1]) == (0.25, "late")


def test_every_point_has_a_fault() -> None:
    assert {f"hold_{point}_ms" for point in POINTS} <= set(FAULTS)
