"""What is remembered of an operation, for those who watch it.

Owns the shape of an operation in the API. Pure: times are given.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nobiru.elastic.membership import ENDED, Operation


@dataclass(slots=True, kw_only=True)
class OperationRecord:
    """One operation from the outside; `plan` is that of a planned one. Times are seconds since the epoch of Unix, but
    for `stopped_s`: on the monotonic clock, when the first rank stood still for it. `pause_s` is from then to the last
    one's first step afterwards, 0 if none did, None of what is not done."""

    operation: Operation
    operation_id: str
    from_epoch: int
    target: dict[str, Any]
    plan: dict[str, Any] | None = None
    idempotency_key: str | None = None
    to_epoch: int | None = None
    bytes_moved: int = 0
    stopped_s: float | None = None
    pause_s: float | None = None
    ranks: dict[str, str] = field(default_factory=dict)
    began: list[tuple[str, float]] = field(default_factory=list)

    def note_phase(self, now_s: float) -> None:
        """Remember when the present phase began, if it is new."""
        if not self.began or self.began[-1][0] != self.operation.phase:
            self.began.append((self.operation.phase, now_s))

    @property
    def is_ended(self) -> bool:
        """Whether its end has been noted."""
        return bool(self.began) and self.began[-1][0] in ENDED

    def document(self, now_s: float) -> dict[str, Any]:
        """As the API shows it."""
        operation = self.operation
        ends = [began for _, began in self.began[1:]]
        if not operation.has_ended:
            ends.append(now_s)
        return {
            "operation_id": self.operation_id,
            "origin": operation.origin,
            "phase": operation.phase,
            "target": self.target,
            "from_epoch": self.from_epoch,
            "to_epoch": self.to_epoch,
            "timestamps": dict(self.began),
            "seconds": {name: round(end - began, 6) for (name, began), end in zip(self.began, ends, strict=False)},
            "pause_seconds": self.pause_s,
            "plan": self.plan,
            "bytes_moved": self.bytes_moved,
            "ranks": dict(self.ranks),
            "idempotency_key": self.idempotency_key,
            "error": operation.error,
        }
