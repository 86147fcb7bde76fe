"""The plan of a step while it is being filled: what it holds, what still fits.

Owns the limits of one step. Knows nothing of queues and of the KV cache.
"""

from __future__ import annotations

from nobiru.config import SchedulerConfig
from nobiru.scheduler.plan import Part, Plan, Sequence


class Step:
    """`max_num_tokens` at most, or one sequence; a sequence that is `alone` has it to itself.

    Under the policy `priority`, the first sequence admitted sets the step's urgency: less urgent ones join only while
    the step stays within `min_step_tokens`.
    """

    def __init__(self, config: SchedulerConfig, max_num_tokens: int) -> None:
        self._config = config
        self._max_num_tokens = max_num_tokens
        self._parts: dict[int, Part] = {}
        self.num_tokens = 0
        self._urgency: int | None = None
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def room(self) -> int:
        """How many more tokens it takes."""
        if self._is_closed:
            return 0
        return max(0, self._max_num_tokens - self.num_tokens) if self._parts else self._config.max_num_batched_tokens

    def room_for(self, candidate: Sequence) -> int:
        """How many tokens a waiting sequence may bring."""
        if candidate.alone and self._parts:
            return 0
        if self._config.policy == "fcfs" or self._urgency is None or candidate.priority <= self._urgency:
            return self.room
        return min(self.room, self._config.min_step_tokens - self.num_tokens)

    def add(self, part: Part) -> None:
        self._parts[part.sequence.seq_id] = part
        self.num_tokens += part.num_tokens
        self._is_closed = self._is_closed or part.sequence.alone

    def set_urgency(self, priority: int) -> None:
        """Of the first sequence that was admitted by its turn."""
        if self._urgency is None:
            self._urgency = priority

    def remove(self, seq_id: int) -> None:
        """Take a sequence out again, if it is in."""
        if (part := self._parts.pop(seq_id, None)) is not None:
            self.num_tokens -= part.num_tokens

    def plan(self) -> Plan | None:
        return Plan(parts=tuple(self._parts.values()), num_tokens=self.num_tokens) if self._parts else None
