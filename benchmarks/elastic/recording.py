"""What one run measured, as JSON: tokens over time, and the events that clients may have noticed.

Owns the file's shape. Seconds count from the begin of the run.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.elastic.intervals import spread

Kind = Literal["planned", "kill", "stop", "restart"]
BIN_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Event:
    """One change. `pause_s` is the server's own word, `recovery_s` and the gaps are what clients saw.

    `usual_gap_s` is the longest interval without a token in the two seconds before.
    """

    kind: Kind
    size: int
    to_size: int
    began_s: float
    ended_s: float
    longest_gap_s: float
    usual_gap_s: float
    pause_s: float | None = None
    recovery_s: float | None = None
    phase_s: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.size} → {self.to_size}" if self.kind == "planned" else self.kind


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One run. `tokens` counts those that came in each bin of `bin_s`."""

    model: str
    kind: Kind
    num_clients: int
    rank_timeout_s: float
    num_requests: int
    tokens: list[int]
    events: list[Event]
    problems: list[str]
    bin_s: float = BIN_S

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Recording:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**fields, "events": [Event(**each) for each in fields["events"]]})


def report(recordings: Sequence[Recording]) -> dict[str, Any]:
    """Spreads over all events of a kind; how much longer restarts interrupt than planned changes to the same size."""
    events = [event for recording in recordings for event in recording.events]
    result: dict[str, Any] = {
        "tool": "elastic_pauses",
        "models": sorted({Path(each.model).name for each in recordings}),
        "requests": sum(each.num_requests for each in recordings),
        "problems": [problem for each in recordings for problem in each.problems][:10],
    }
    for kind in ("planned", "kill", "stop", "restart"):
        if chosen := [event for event in events if event.kind == kind]:
            result[kind] = _spreads(chosen)
    planned = [event for event in events if event.kind == "planned"]
    for name in sorted({event.name for event in planned}):
        result["planned"][name] = _spreads([event for event in planned if event.name == name])
    result["restart_longer_by"] = {
        str(size): round(gaps["restart"] / gaps["planned"], 1)
        for size in sorted({event.to_size for event in events})
        if len(gaps := _median_gaps([event for event in events if event.to_size == size])) == 2
    }
    return result


def _spreads(events: Sequence[Event]) -> dict[str, Any]:
    values: dict[str, Callable[[Event], float | None]] = {
        "pause_s": lambda event: event.pause_s,
        "recovery_s": lambda event: event.recovery_s,
        "longest_gap_s": lambda event: event.longest_gap_s,
        "usual_gap_s": lambda event: event.usual_gap_s,
        "seconds": lambda event: event.ended_s - event.began_s,
    }
    found = {name: [value for event in events if (value := get(event)) is not None] for name, get in values.items()}
    return {name: spread(numbers) for name, numbers in found.items() if numbers}


def _median_gaps(events: Sequence[Event]) -> dict[str, float]:
    gaps = {kind: [e.longest_gap_s for e in events if e.kind == kind] for kind in ("planned", "restart")}
    return {kind: spread(numbers)["p50"] for kind, numbers in gaps.items() if numbers}
