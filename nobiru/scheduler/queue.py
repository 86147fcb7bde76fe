"""The waiting queue: order of service, look-ahead past what does not fit, and who has waited longest.

Owns nothing but order. Knows nothing of budgets; the scheduler asks for candidates and says which it took.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from nobiru.scheduler.plan import Sequence

Key = tuple[float, int]


class WaitingQueue:
    """Sequences in order of (priority, arrival), or of arrival alone under `fcfs`.

    Removal is lazy: an entry whose sequence left by another way is dropped when it comes to the front.
    """

    def __init__(self, *, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._members: dict[int, Sequence] = {}
        self._in_order: list[tuple[Key, int]] = []
        self._by_age: list[tuple[Key, int]] = []
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._members

    def push(self, sequence: Sequence) -> None:
        self._members[sequence.seq_id] = sequence
        self.num_tokens += sequence.num_tokens
        heapq.heappush(self._in_order, (self._key(sequence), sequence.seq_id))
        if self._by_priority:  # under fcfs the oldest is served first anyway
            heapq.heappush(self._by_age, ((sequence.arrival_s, sequence.arrival), sequence.seq_id))

    def remove(self, seq_id: int) -> Sequence | None:
        """Take a sequence out, wherever it stands; None when it is not waiting."""
        sequence = self._members.pop(seq_id, None)
        if sequence is not None:
            self.num_tokens -= sequence.num_tokens
        return sequence

    def first(self) -> Sequence | None:
        """The sequence whose turn it is; it stays in the queue."""
        return self._front(self._in_order)

    def oldest(self) -> Sequence | None:
        """The sequence that has waited longest (None under `fcfs`, where `first` is it); it stays in the queue."""
        return self._front(self._by_age)

    def candidates(self, lookahead: int) -> Iterator[Sequence]:
        """Sequences in order of service. Those the caller does not `remove` stay; after `lookahead` of them it ends."""
        seen: list[tuple[Key, int]] = []
        num_passed = 0
        try:
            while num_passed < lookahead and (sequence := self._front(self._in_order)) is not None:
                seen.append(heapq.heappop(self._in_order))
                yield sequence
                num_passed += sequence.seq_id in self._members
        finally:
            for entry in seen:
                if entry[1] in self._members:
                    heapq.heappush(self._in_order, entry)

    def _key(self, sequence: Sequence) -> Key:
        return (sequence.priority if self._by_priority else 0, sequence.arrival)

    def _front(self, heap: list[tuple[Key, int]]) -> Sequence | None:
        while heap:
            (_, arrival), seq_id = heap[0]
            sequence = self._members.get(seq_id)
            if sequence is not None and sequence.arrival == arrival:
                return sequence
            heapq.heappop(heap)
        return None
