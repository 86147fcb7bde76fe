"""Requests accepted and not yet answered: what was sent where, what came back, what must run again.

Owns the promise that every accepted request gets exactly one outcome. Pure: no sockets, no clock, no event loop, so
every loss of a rank at every moment can be tested.

A request is cut into *slices* of at most one step's size, its sequences sorted by length. Only `window` slices of a
request are on their way at a time, and a new one goes behind whatever has arrived meanwhile: requests of equal
priority share the engine slice by slice, so one with 5,000 texts does not starve the others. Each sending of a
sequence has a fresh id; results with another id are late ones of a lost rank, and are dropped.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nobiru.engine.messages import Add, Failure, StepDone
from nobiru.errors import InferenceError, NobiruError, RequestKilledRankError
from nobiru.request import PoolingRequest, Vectors

# A sequence seen in execution at so many deaths runs alone next; one more death and it is to blame.
DEATHS_UNTIL_ALONE = 2
DEATHS_UNTIL_FAILED = 3


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """One request: `vectors` [N, D] fills up; `num_left` sequences have no vector yet; `error` ends it early."""

    request: PoolingRequest
    arrived_s: float
    offsets: NDArray[np.int64]
    order: NDArray[np.int64]
    vectors: Vectors
    num_left: int
    num_cut: int = 0
    slices: set[Slice] = field(default_factory=set)
    deaths: dict[int, int] = field(default_factory=dict)
    error: NobiruError | None = None

    @property
    def is_ended(self) -> bool:
        return self.num_left == 0 or self.error is not None


@dataclass(slots=True, eq=False, kw_only=True)
class Slice:
    """Sequences of one request that travel together; `left` maps ids to positions in the request."""

    slice_id: int
    arrival: int
    entry: Entry
    indices: NDArray[np.int64]
    left: dict[int, int]
    alone: bool = False
    rank_id: str | None = None

    @property
    def num_tokens(self) -> int:
        """Of the sequences without a result."""
        return int(self.entry.request.prompts.lengths[list(self.left.values())].sum())

    def message(self, now_s: float) -> Add:
        request, offsets = self.entry.request, self.entry.offsets
        lengths = request.prompts.lengths[self.indices]
        token_ids = [request.prompts.token_ids[offsets[i] : offsets[i + 1]] for i in self.indices]
        return Add(
            slice_id=self.slice_id,
            first_seq_id=next(iter(self.left)),
            arrival=self.arrival,
            age_s=now_s - self.entry.arrived_s,
            priority=request.priority,
            alone=self.alone,
            dimensions=request.dimensions,
            normalize=request.normalize,
            num_skipped_tokens=request.prompts.num_skipped_tokens,
            lengths=lengths.astype("<i4", copy=False).tobytes(),
            token_ids=np.concatenate(token_ids).astype("<i4", copy=False).tobytes(),
        )


class Ledger:
    """All open requests of one API server.

    `open` and `cancel` follow the clients; `unsent`, `sent`, `apply` and `rank_lost` follow the ranks. Whatever ends
    an entry returns it, once.
    """

    def __init__(
        self,
        *,
        embedding_dim: int,
        max_slice_tokens: int,
        max_slice_sequences: int,
        window: int = 2,
        ids: Iterator[int] | None = None,
    ) -> None:
        self.embedding_dim = embedding_dim
        self.max_slice_tokens = max_slice_tokens
        self.max_slice_sequences = max_slice_sequences
        self.window = window
        self.num_tokens = 0
        self.tokens_on: Counter[str] = Counter()  # not yet computed, by rank
        self.entries: set[Entry] = set()
        self._slice_of: dict[int, Slice] = {}
        self._unsent: list[tuple[int, int, Slice]] = []
        self._next_ids = itertools.count() if ids is None else ids

    def open(self, request: PoolingRequest, now_s: float) -> Entry:
        """Take a request; its first slices are now `unsent`."""
        lengths = request.prompts.lengths
        offsets = np.zeros(lengths.size + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        entry = Entry(
            request=request,
            arrived_s=now_s,
            offsets=offsets,
            order=np.argsort(lengths, kind="stable"),
            vectors=np.empty((lengths.size, request.dimensions or self.embedding_dim), dtype=np.float32),
            num_left=lengths.size,
        )
        self.entries.add(entry)
        self.num_tokens += int(offsets[-1])
        self._cut_slices(entry)
        return entry

    def unsent(self) -> Iterator[Slice]:
        """Slices that wait for a rank, oldest first; each is handed out once."""
        while self._unsent:
            piece = heapq.heappop(self._unsent)[2]
            if piece.left:
                yield piece

    def sent(self, piece: Slice, rank_id: str) -> None:
        piece.rank_id = rank_id
        self.tokens_on[rank_id] += piece.num_tokens

    def put_back(self, piece: Slice) -> None:
        """A slice that could not be sent waits again, with the turn it had."""
        piece.rank_id = None
        heapq.heappush(self._unsent, (piece.arrival, piece.slice_id, piece))

    def apply(self, done: StepDone) -> list[Entry]:
        """Enter a step's results; the entries that ended with it, by their last vector or by an error.

        Results for ids that are not known any more (their client left) are passed over. An entry that ended with an
        error stays until it is cancelled, which tells what to abort.
        """
        failures = {failure.index: failure for failure in done.failures}
        values = np.frombuffer(done.vectors, dtype="<f4")
        sizes = np.frombuffer(done.vector_sizes, dtype="<i4").tolist()
        ended: dict[Entry, None] = {}
        begin = 0
        for number, seq_id in enumerate(np.frombuffer(done.seq_ids, dtype="<i8").tolist()):
            end = begin + sizes[number]
            piece = self._slice_of.get(seq_id)
            if piece is not None:
                failure = failures.get(number)
                if failure is None:
                    self._arrived(piece, seq_id, values[begin:end])
                elif piece.entry.error is None:
                    piece.entry.error = self._error(piece, seq_id, failure)
                if piece.entry.is_ended:
                    ended[piece.entry] = None
            begin = end
        return list(ended)

    def cancel(self, entry: Entry) -> dict[str, list[int]]:
        """Nobody waits for this request any more: what to abort, by rank."""
        aborts: dict[str, list[int]] = {}
        for piece in entry.slices:
            if piece.rank_id is not None:
                aborts.setdefault(piece.rank_id, []).append(piece.slice_id)
        self._forget(entry)
        return aborts

    def rank_lost(self, rank_id: str, executing: Iterable[int]) -> list[Entry]:
        """Queue what a dead rank held to run again; the entries that end here because they keep killing ranks.

        `executing` are the ids in the step during which it died: the suspects.
        """
        ended = []
        for seq_id in executing:
            piece = self._slice_of.get(seq_id)
            if piece is not None and piece.rank_id == rank_id:
                index = piece.left[seq_id]
                deaths = piece.entry.deaths[index] = piece.entry.deaths.get(index, 0) + 1
                if deaths >= DEATHS_UNTIL_FAILED and not piece.entry.is_ended:
                    ended.append(piece.entry)
                    piece.entry.error = RequestKilledRankError(
                        f"a rank died {deaths} times while it ran input[{index}], the last time with this input alone",
                        param="input",
                    )
        for entry in ended:
            self._forget(entry)
        lost = [piece for entry in self.entries for piece in entry.slices if piece.rank_id == rank_id]
        for piece in lost:
            self._run_again(piece)
        self.tokens_on.pop(rank_id, None)
        return ended

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _ids(self, count: int) -> list[int]:
        return list(itertools.islice(self._next_ids, count))

    def _cut_slices(self, entry: Entry) -> None:
        """Send the request's next slices on their way, until its window is full."""
        lengths = entry.request.prompts.lengths
        while len(entry.slices) < self.window and entry.num_cut < entry.order.size:
            end = min(entry.order.size, entry.num_cut + self.max_slice_sequences)
            indices = entry.order[entry.num_cut : end]
            num_fitting = int(np.searchsorted(np.cumsum(lengths[indices]), self.max_slice_tokens, side="right"))
            indices = indices[: max(1, num_fitting)]
            entry.num_cut += indices.size
            self._queue(entry, indices, arrival=self._ids(1)[0], alone=False)

    def _queue(self, entry: Entry, indices: NDArray[np.int64], *, arrival: int, alone: bool) -> None:
        left = dict(zip(self._ids(indices.size), indices.tolist(), strict=True))
        piece = Slice(slice_id=next(iter(left)), arrival=arrival, entry=entry, indices=indices, left=left, alone=alone)
        entry.slices.add(piece)
        self._slice_of.update(dict.fromkeys(left, piece))
        heapq.heappush(self._unsent, (piece.arrival, piece.slice_id, piece))

    def _run_again(self, piece: Slice) -> None:
        """Replace a lost slice by fresh ones with the same turn; each suspect gets one of its own."""
        entry, indices = piece.entry, list(piece.left.values())
        self._drop(piece)
        suspects = [index for index in indices if entry.deaths.get(index, 0) >= DEATHS_UNTIL_ALONE]
        others = [index for index in indices if entry.deaths.get(index, 0) < DEATHS_UNTIL_ALONE]
        if others:
            self._queue(entry, np.array(others), arrival=piece.arrival, alone=False)
        for index in suspects:
            self._queue(entry, np.array([index]), arrival=piece.arrival, alone=True)

    def _arrived(self, piece: Slice, seq_id: int, vector: Vectors) -> None:
        entry = piece.entry
        index = piece.left.pop(seq_id)
        del self._slice_of[seq_id]
        entry.vectors[index] = vector
        entry.num_left -= 1
        num_tokens = int(entry.request.prompts.lengths[index])
        self.num_tokens -= num_tokens
        if piece.rank_id is not None:
            self.tokens_on[piece.rank_id] -= num_tokens
        if not piece.left:
            entry.slices.discard(piece)
            self._cut_slices(entry)
        if entry.num_left == 0:
            self._forget(entry)

    def _error(self, piece: Slice, seq_id: int, failure: Failure) -> InferenceError:
        where = f"input[{piece.left[seq_id]}]: " if piece.entry.order.size > 1 else ""
        return InferenceError(where + failure.message, param="input", code=failure.code)

    def _drop(self, piece: Slice) -> None:
        if piece.rank_id is not None and piece.left:
            self.tokens_on[piece.rank_id] -= int(piece.entry.request.prompts.lengths[list(piece.left.values())].sum())
        for seq_id in piece.left:
            del self._slice_of[seq_id]
        piece.left = {}
        piece.entry.slices.discard(piece)

    def _forget(self, entry: Entry) -> None:
        if entry not in self.entries:
            return
        self.entries.discard(entry)
        lengths = entry.request.prompts.lengths
        left = [index for piece in entry.slices for index in piece.left.values()]
        self.num_tokens -= int(lengths[left].sum()) + int(lengths[entry.order[entry.num_cut :]].sum())
        for piece in list(entry.slices):
            self._drop(piece)
