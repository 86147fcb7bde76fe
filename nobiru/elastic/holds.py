"""Holds an operation up in any of its phases, for tests of what happens there. Does nothing unless it is asked to.

Each phase ends with a report to the controller: a rank has loaded, has prepared, has parked. Holding a
phase up means that such a report comes late, as it may with a slow machine or network; nothing else is different.

    holds.hold("park")           # from now on these reports wait
    await until(lambda: holds.num_waiting("park") == 2)
    …                            # both ranks stand still: kill one, cancel the operation, look
    holds.release("park")

Across processes `NOBIRU_FAULT_INJECTION=hold_park_ms=300` has each report come 300 ms late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, get_args

# What is held: the report that ends the launch of a rank, its preparation, the drain of those that leave, the way of
# the members to the step boundary (all stand still then), and the first step of the new epoch.
Point = Literal["load", "prepare", "drain", "park", "apply"]
POINTS: tuple[Point, ...] = get_args(Point)

Report = Callable[[], None]


class Holds:
    """`pass_on` calls a report at once, unless its point is held; `later(seconds, call)` is for `delays_s`, in seconds
    by point."""

    def __init__(self, later: Callable[[float, Report], None], delays_s: Mapping[Point, float] | None = None) -> None:
        self._later = later
        self._delays_s = dict(delays_s or {})
        self._waiting: dict[Point, list[Report]] = {}

    def hold(self, *points: Point) -> None:
        """Reports of these points wait from now on."""
        for point in points:
            self._waiting.setdefault(point, [])

    def num_waiting(self, point: Point) -> int:
        return len(self._waiting.get(point, ()))

    def release(self, *points: Point) -> None:
        """Let those that wait through, in their order, and hold up no others; without `points`, everywhere."""
        for point in points or tuple(self._waiting):
            for report in self._waiting.pop(point, []):
                report()

    def pass_on(self, point: Point, report: Report) -> None:
        if point in self._waiting:
            self._waiting[point].append(report)
        elif point in self._delays_s:
            self._later(self._delays_s[point], report)
        else:
            report()


def delays_from(faults: Mapping[str, int]) -> dict[Point, float]:
    """`hold_load_ms` and so on of `nobiru.runner.faults`, in seconds."""
    return {point: faults[f"hold_{point}_ms"] / 1000 for point in POINTS if f"hold_{point}_ms" in faults}
