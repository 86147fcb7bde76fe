"""One text that ranks write, with the real ledger of such requests at the other end."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
from membership_broken import require

from nobiru.engine.generation_ledger import GenerationEntry, GenerationLedger
from nobiru.engine.messages import Generated
from nobiru.generation import GenerationRequest, SampledToken, SamplingParams

LENGTH = 2  # tokens; the token at index i is i. Ranks count seq_id * LENGTH + index.
_REQUEST = GenerationRequest(
    request_id="text", prompt_token_ids=np.zeros(1, np.int32), params=SamplingParams(seed=1), max_tokens=LENGTH
)


class Text:
    """The ledger of one request."""

    __slots__ = ("_entry", "_ledger")

    def __init__(self) -> None:
        self._ledger = GenerationLedger(itertools.count())
        self._entry = self._ledger.open(_REQUEST, 0.0)

    def copy(self) -> Text:
        copied: Text = object.__new__(Text)
        child = self._entry.children[0]
        ledger = copied._ledger = GenerationLedger(itertools.count(child.seq_id + 1))
        entry = copied._entry = GenerationEntry(request=_REQUEST, arrived_s=0.0, arrival=self._entry.arrival)
        entry.children.append(replace(child, entry=entry, received=list(child.received)))
        ledger._children = dict.fromkeys(self._ledger._children, entry.children[0])
        ledger._unsent = [(turn, seq_id, entry.children[0]) for turn, seq_id, _ in self._ledger._unsent]
        ledger.tokens_on = self._ledger.tokens_on.copy()
        ledger.entries = {entry} if self._ledger.entries else set()
        return copied

    @property
    def rank_id(self) -> str | None:
        """Who writes it."""
        child = self._entry.children[0]
        return None if child.has_ended else child.rank_id

    @property
    def has_ended(self) -> bool:
        return self._entry.has_ended

    @property
    def state(self) -> tuple[bool, int]:
        return self.has_ended, len(self._entry.children[0].received)

    @property
    def seq_id(self) -> int:
        """Of the present try; it only grows."""
        return self._entry.children[0].seq_id

    def sent(self, rank_id: str) -> int | None:
        """Hand it to a rank, if it waits for one: what the rank is told."""
        for child in self._ledger.unsent():
            self._ledger.sent(child, rank_id)
            return child.seq_id * LENGTH + len(child.received)
        return None

    def hear(self, number: int) -> bool:
        """A token of a rank; whether it counts."""
        seq_id, index = divmod(number, LENGTH)
        reason = "length" if index == LENGTH - 1 else None
        generated = Generated(
            seq_id=seq_id, first_index=index, tokens=[SampledToken(token_id=index)], finish_reason=reason
        )
        deltas = self._ledger.apply([generated])
        received = self._entry.children[0].received
        require(received == list(range(len(received))), f"no token twice, none missing: {received}")
        return bool(deltas)

    def rank_lost(self, rank_id: str) -> None:
        self._ledger.rank_lost(rank_id, ())

    def is_late(self, number: int) -> bool:
        """Whether a rank's token is of a try that is over."""
        return self.has_ended or number // LENGTH < self.seq_id
