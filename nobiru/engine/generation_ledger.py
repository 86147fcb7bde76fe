"""Generation requests accepted and not yet answered: which tokens came, what was sent where, what must run again.

Owns the promise that every token of a text is delivered once and in order, and that every request has one outcome,
whichever ranks die on the way. Pure: no sockets, no clock, no event loop.

Each of a request's children is one sequence on a rank. Each sending has a fresh `seq_id`, so that results of an
earlier attempt are known by their id and dropped; of the present attempt only tokens that follow what was received
count. A child that runs again takes the tokens received along, and goes on behind them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from nobiru.engine.ledger import DEATHS_UNTIL_ALONE, DEATHS_UNTIL_FAILED
from nobiru.engine.messages import Failure, Generate, Generated
from nobiru.errors import InferenceError, InvalidRequestError, NobiruError, RequestKilledRankError
from nobiru.generation import GenerationDelta, GenerationRequest


@dataclass(slots=True, eq=False, kw_only=True)
class Child:
    """One text of a request; `seq_id` names its present attempt."""

    number: int
    entry: GenerationEntry
    seq_id: int
    rank_id: str | None = None
    received: list[int] = field(default_factory=list)
    num_deaths: int = 0
    has_begun: bool = False
    has_ended: bool = False
    num_outstanding: int = 0  # tokens that its rank may still compute for it

    def message(self, now_s: float) -> Generate:
        request = self.entry.request
        return Generate(
            seq_id=self.seq_id,
            arrival=self.entry.arrival + self.number,
            age_s=now_s - self.entry.arrived_s,
            priority=request.params.priority,
            alone=self.num_deaths >= DEATHS_UNTIL_ALONE,
            child=self.number,
            params=request.params,
            max_tokens=request.max_tokens,
            stop_token_ids=list(request.stop_token_ids),
            prompt=request.prompt_token_ids.astype("<i4", copy=False).tobytes(),
            outputs=np.array(self.received, dtype="<i4").tobytes(),
        )


@dataclass(slots=True, eq=False, kw_only=True)
class GenerationEntry:
    """One request. `error` ends all of its children."""

    request: GenerationRequest
    arrived_s: float
    arrival: int
    children: list[Child] = field(default_factory=list)
    error: NobiruError | None = None

    @property
    def has_ended(self) -> bool:
        return self.error is not None or all(child.has_ended for child in self.children)


class GenerationLedger:
    """All open generation requests of one API server; `ids` are never used twice on a rank.

    `open`, `stop` and `cancel` follow the clients; `unsent`, `sent`, `apply`, `fail` and `rank_lost` follow the ranks.
    """

    def __init__(self, ids: Iterator[int]) -> None:
        self.entries: set[GenerationEntry] = set()
        self.num_tokens = 0  # of prompts that have not brought a token yet
        self.tokens_on: Counter[str] = Counter()  # that may still be computed, by rank
        self._ids = ids
        self._children: dict[int, Child] = {}
        self._unsent: list[tuple[int, int, Child]] = []

    def open(self, request: GenerationRequest, now_s: float) -> GenerationEntry:
        """Take a request. Its first child is `unsent`; the others follow its first token, and share its prefill."""
        count = request.params.n
        turns = [next(self._ids) for _ in range(count)]
        entry = GenerationEntry(request=request, arrived_s=now_s, arrival=turns[0])
        for number in range(count):
            child = Child(number=number, entry=entry, seq_id=next(self._ids))
            entry.children.append(child)
            self._children[child.seq_id] = child
        self.entries.add(entry)
        self.num_tokens += count * request.prompt_token_ids.size
        self._queue(entry.children[0])
        return entry

    def unsent(self) -> Iterator[Child]:
        """Children that wait for a rank, oldest first; each is handed out once."""
        while self._unsent:
            _, seq_id, child = heapq.heappop(self._unsent)
            if child.seq_id == seq_id and seq_id in self._children:
                yield child

    def sent(self, child: Child, rank_id: str) -> None:
        request = child.entry.request
        child.rank_id = rank_id
        self._owe(child, request.prompt_token_ids.size + request.max_tokens)

    def apply(self, results: Iterable[Generated]) -> list[tuple[GenerationEntry, GenerationDelta]]:
        """Enter a step's tokens; what is new of them, by entry."""
        deltas = []
        for result in results:
            child = self._children.get(result.seq_id)
            if child is None or result.first_index != len(child.received):
                continue
            self._begin(child)
            child.received += [token.token_id for token in result.tokens]
            self._owe(child, child.entry.request.max_tokens - len(child.received))
            if result.finish_reason is not None:
                self._end(child)
            delta = GenerationDelta(
                child=child.number,
                first_index=result.first_index,
                tokens=result.tokens,
                finish_reason=result.finish_reason,
                stop_token_id=result.tokens[-1].token_id if result.finish_reason == "stop" else None,
                num_cached_tokens=result.num_cached_tokens,
            )
            deltas.append((child.entry, delta))
        return deltas

    def fail(self, seq_id: int, failure: Failure) -> GenerationEntry | None:
        """A sequence failed on its rank: the entry that ends with it, which is to be cancelled."""
        child = self._children.get(seq_id)
        if child is None or child.entry.error is not None:
            return None
        kind = InvalidRequestError if failure.is_invalid else InferenceError
        child.entry.error = kind(failure.message, code=failure.code)
        self._end(child)
        return child.entry

    def stop(self, entry: GenerationEntry, number: int) -> dict[str, list[int]]:
        """Nobody wants more of this child: what to abort, by rank."""
        child = entry.children[number]
        if child.has_ended:
            return {}
        self._end(child)
        return {} if child.rank_id is None else {child.rank_id: [child.seq_id]}

    def cancel(self, entry: GenerationEntry) -> dict[str, list[int]]:
        """Nobody waits for this request any more: what to abort, by rank."""
        aborts: dict[str, list[int]] = {}
        for child in entry.children:
            if not child.has_ended:
                if child.rank_id is not None:
                    aborts.setdefault(child.rank_id, []).append(child.seq_id)
                self._end(child)
        self.entries.discard(entry)
        return aborts

    def rank_lost(self, rank_id: str, executing: Iterable[int]) -> list[GenerationEntry]:
        """Queue what a dead rank held to run again; the entries that end here because they keep killing ranks.

        `executing` are the ids in the step during which it died: the suspects.
        """
        suspects = set(executing)
        ended = []
        for child in [each for each in self._children.values() if each.rank_id == rank_id]:
            child.num_deaths += child.seq_id in suspects
            if child.num_deaths >= DEATHS_UNTIL_FAILED and child.entry.error is None:
                child.entry.error = RequestKilledRankError(
                    f"a rank died {child.num_deaths} times while it ran this request, the last time with it alone"
                )
                ended.append(child.entry)
        for entry in ended:
            self.cancel(entry)
        for child in [each for each in self._children.values() if each.rank_id == rank_id]:
            self._run_again(child)
        self.tokens_on.pop(rank_id, None)
        return ended

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _queue(self, child: Child) -> None:
        heapq.heappush(self._unsent, (child.entry.arrival + child.number, child.seq_id, child))

    def _begin(self, child: Child) -> None:
        """Its first token is here, or will never be: its prompt does not wait any more, the other children can go."""
        if child.has_begun:
            return
        child.has_begun = True
        self.num_tokens -= child.entry.request.prompt_token_ids.size
        if child.number == 0:
            for other in child.entry.children[1:]:
                self._queue(other)

    def _owe(self, child: Child, num_tokens: int) -> None:
        if child.rank_id is not None:
            self.tokens_on[child.rank_id] += num_tokens - child.num_outstanding
        child.num_outstanding = num_tokens

    def _run_again(self, child: Child) -> None:
        self._owe(child, 0)
        del self._children[child.seq_id]
        child.seq_id, child.rank_id = next(self._ids), None
        self._children[child.seq_id] = child
        self._queue(child)

    def _end(self, child: Child) -> None:
        if child.has_ended:
            return
        child.has_ended = True
        del self._children[child.seq_id]
        self._begin(child)
        self._owe(child, 0)
        if child.entry.has_ended:
            self.entries.discard(child.entry)
