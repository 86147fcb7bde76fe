"""The values the scheduler takes and gives: sequences waiting for their step, and the plan of one step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One sequence in the scheduler's hands; it looks at these numbers and never at `payload`.

    `seq_id` is unique. `arrival` orders sequences of equal priority and is unique too; a sequence that runs again
    after a failure keeps its own. `arrival_s` is the clock's time at arrival (seconds). `alone` asks for a step without
    company, because the sequence is suspected of killing ranks.
    """

    seq_id: int
    num_tokens: int
    arrival: int
    arrival_s: float
    priority: int = 0
    alone: bool = False
    payload: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The sequences of one step, in order of service."""

    sequences: tuple[Sequence, ...]
    num_tokens: int
