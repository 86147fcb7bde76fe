"""The ledger: slices, fairness, losses of ranks at any moment, and exactly one outcome for every request."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nobiru.engine.ledger import Entry, Ledger, Slice
from nobiru.engine.messages import Failure, StepDone
from nobiru.errors import InferenceError, RequestKilledRankError
from nobiru.request import EncodedPrompts, PoolingRequest

DIM = 3


def request(lengths: list[int], *, first_token: int = 1, dimensions: int | None = None) -> PoolingRequest:
    """Sequence i holds the token `first_token + i` only, so every vector tells where it comes from."""
    token_ids = np.repeat(np.arange(first_token, first_token + len(lengths), dtype=np.int32), lengths)
    prompts = EncodedPrompts(
        token_ids=token_ids,
        lengths=np.array(lengths, dtype=np.int32),
        truncated=np.zeros(len(lengths), dtype=np.bool_),
    )
    return PoolingRequest(request_id="q", prompts=prompts, dimensions=dimensions)


def ledger(**limits: int) -> Ledger:
    return Ledger(embedding_dim=DIM, **{"max_slice_tokens": 10, "max_slice_sequences": 4, **limits})


def sequences(piece: Slice) -> list[tuple[int, int, int]]:
    """(id, token, dimension) of a slice's sequences, read from its message as a rank reads it."""
    message = piece.message(now_s=0.0)
    lengths = np.frombuffer(message.lengths, dtype="<i4")
    tokens = np.frombuffer(message.token_ids, dtype="<i4")
    firsts = tokens[np.cumsum(lengths) - lengths].tolist()
    return [(message.first_seq_id + i, token, message.dimensions or DIM) for i, token in enumerate(firsts)]


def done(results: list[tuple[int, int, int]], failing: tuple[int, ...] = ()) -> StepDone:
    failures = [
        Failure(index=number, message="no", code="inference_failed")
        for number, (_, token, _) in enumerate(results)
        if token in failing
    ]
    vectors = [np.full(0 if token in failing else size, token, dtype=np.float32) for _, token, size in results]
    return StepDone(
        seq_ids=np.array([seq_id for seq_id, _, _ in results], dtype="<i8").tobytes(),
        vector_sizes=np.array([vector.size for vector in vectors], dtype="<i4").tobytes(),
        vectors=np.concatenate([*vectors, np.empty(0, np.float32)]).tobytes(),
        failures=failures,
        generated=[],
        state=None,
        queue_s=[],
        num_sequences=len(results),
        num_tokens=0,
        compute_s=0.0,
    )


def send_all(book: Ledger, rank_id: str = "r0") -> list[Slice]:
    pieces = list(book.unsent())
    for piece in pieces:
        book.sent(piece, rank_id)
    return pieces


def assert_right(entry: Entry, first_token: int = 1) -> None:
    expected = np.arange(first_token, first_token + len(entry.vectors), dtype=np.float32)
    np.testing.assert_array_equal(entry.vectors, np.repeat(expected[:, None], entry.vectors.shape[1], axis=1))


def test_a_small_request_is_one_slice() -> None:
    book = ledger()
    entry = book.open(request([3, 1, 2]), 0.0)
    [piece] = send_all(book)
    assert [token for _, token, _ in sequences(piece)] == [2, 3, 1]  # by length
    assert book.apply(done(sequences(piece))) == [entry]
    assert_right(entry)
    assert book.num_tokens == 0
    assert not book.entries


def test_dimensions_size_the_answer() -> None:
    book = ledger()
    entry = book.open(request([1, 1], dimensions=2), 0.0)
    [piece] = send_all(book)
    book.apply(done(sequences(piece)))
    assert entry.vectors.shape == (2, 2)
    assert_right(entry)


def test_a_large_request_shares_the_engine_slice_by_slice() -> None:
    book = ledger(window=2)
    large = book.open(request([5] * 10), 0.0)
    first = send_all(book)
    assert [len(piece.left) for piece in first] == [2, 2]
    book.open(request([5], first_token=100), 0.0)
    [small] = send_all(book)
    assert book.apply(done(sequences(first[0]))) == []
    [third] = send_all(book)
    assert third.entry is large
    assert small.arrival < third.arrival
    assert book.num_tokens == 45


def test_a_failed_sequence_ends_its_request_only_and_names_its_input() -> None:
    book = ledger()
    bad, good = book.open(request([1, 1]), 0.0), book.open(request([1], first_token=50), 0.0)
    pieces = send_all(book)
    results = [item for piece in pieces for item in sequences(piece)]
    assert book.apply(done(results, failing=(2,))) == [bad, good]
    assert isinstance(bad.error, InferenceError)
    assert "input[1]" in bad.error.message
    assert good.error is None
    assert_right(good, 50)
    assert book.cancel(bad) == {"r0": [pieces[0].slice_id]}
    assert book.num_tokens == 0


def test_cancel_names_what_to_abort_and_late_results_are_dropped() -> None:
    book = ledger()
    entry = book.open(request([1, 1]), 0.0)
    [piece] = send_all(book)
    results = sequences(piece)
    assert book.cancel(entry) == {"r0": [piece.slice_id]}
    assert book.cancel(entry) == {}
    assert book.apply(done(results)) == []
    assert book.num_tokens == 0


def test_a_lost_rank_costs_nothing_but_time() -> None:
    book = ledger()
    entry = book.open(request([1, 1, 1]), 0.0)
    later = book.open(request([1], first_token=50), 0.0)
    [piece, _] = send_all(book)
    old = sequences(piece)
    book.apply(done(old[:1]))
    assert book.rank_lost("r0", executing=[old[1][0]]) == []
    replayed, other = send_all(book, "r1")
    assert replayed.entry is entry
    assert other.entry is later
    assert book.apply(done(old[1:])) == []  # a late result of the dead rank
    assert book.apply(done(sequences(replayed))) == [entry]
    assert_right(entry)


def test_a_sequence_that_kills_ranks_runs_alone_and_then_fails_alone() -> None:
    book = ledger()
    bad = book.open(request([1, 1, 1]), 0.0)
    good = book.open(request([1, 1], first_token=50), 0.0)
    for number in range(2):
        pieces = send_all(book, f"r{number}")
        assert not any(piece.alone for piece in pieces)
        executing = [seq_id for piece in pieces for seq_id, _, _ in sequences(piece)]
        assert book.rank_lost(f"r{number}", executing) == []
    pieces = send_all(book, "r2")
    assert all(piece.alone and len(piece.left) == 1 for piece in pieces)
    assert len(pieces) == 5
    culprit = next(piece for piece in pieces if sequences(piece)[0][1] == 2)
    assert book.rank_lost("r2", [sequences(culprit)[0][0]]) == [bad]
    assert isinstance(bad.error, RequestKilledRankError)
    assert bad.error.code == "request_killed_rank"
    assert "input[1]" in bad.error.message
    pieces = send_all(book, "r3")
    assert {piece.entry for piece in pieces} == {good}
    assert book.apply(done([item for piece in pieces for item in sequences(piece)])) == [good]
    assert_right(good, 50)
    assert book.num_tokens == 0


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.lists(st.integers(1, 10), min_size=1, max_size=20)),
        st.tuples(st.just("send"), st.none()),
        st.tuples(st.just("step"), st.tuples(st.integers(0, 5), st.integers(1, 6), st.booleans())),
        st.tuples(st.just("lose"), st.integers(0, 4)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("late"), st.none()),
    ),
    max_size=40,
)


class Life:
    """One server's life with a rank that steps, fails, dies and is replaced, at random."""

    def __init__(self) -> None:
        self.book = ledger(window=2)
        self.rank = 0
        self.held: list[tuple[int, int, int]] = []  # what the living rank has
        self.stale: list[tuple[int, int, int]] = []
        self.entries: list[tuple[Entry, int]] = []
        self.outcomes: Counter[int] = Counter()

    def open(self, lengths: list[int]) -> None:
        first_token = 1 + 100 * len(self.entries)
        self.entries.append((self.book.open(request(lengths, first_token=first_token), 0.0), first_token))

    def send(self, _: None = None) -> None:
        for piece in send_all(self.book, f"r{self.rank}"):
            self.held.extend(sequences(piece))

    def step(self, choice: tuple[int, int, bool]) -> None:
        begin, count, failing = choice
        batch = self.held[begin : begin + count]
        del self.held[begin : begin + count]
        self.ended(self.book.apply(done(batch, failing=(batch[0][1],) if batch and failing else ())))

    def lose(self, num_executing: int) -> None:
        executing = [seq_id for seq_id, _, _ in self.held[:num_executing]]
        self.stale.extend(self.held)
        self.held = []
        self.ended(self.book.rank_lost(f"r{self.rank}", executing))
        self.rank += 1

    def late(self, _: None) -> None:
        assert self.book.apply(done(self.stale)) == []

    def cancel(self, number: int) -> None:
        if number < len(self.entries) and not self.outcomes[number]:
            self.outcomes[number] += 1
            self.forget(self.entries[number][0])

    def ended(self, entries: list[Entry]) -> None:
        for entry in entries:
            number = next(i for i, (each, _) in enumerate(self.entries) if each is entry)
            self.outcomes[number] += 1
            if entry.error is None:
                assert_right(entry, self.entries[number][1])
            self.forget(entry)

    def forget(self, entry: Entry) -> None:
        aborted = {slice_id for ids in self.book.cancel(entry).values() for slice_id in ids}
        assert all(isinstance(slice_id, int) for slice_id in aborted)

    def finish(self) -> None:
        for _ in range(200):
            self.send()
            if not self.held:
                break
            self.step((0, 6, False))
        assert all(self.outcomes[number] == 1 for number in range(len(self.entries)))
        assert self.book.num_tokens == 0
        assert not self.book.entries
        assert not self.book._slice_of


@settings(max_examples=300, deadline=None)
@given(EVENTS)
def test_every_request_has_one_outcome_whatever_happens(events: list[tuple[str, object]]) -> None:
    life = Life()
    for name, argument in events:
        getattr(life, name)(argument)
    life.finish()


@pytest.mark.parametrize("num_texts", [5000])
def test_thousands_of_texts(num_texts: int) -> None:
    rng = np.random.default_rng(0)
    book = ledger(max_slice_tokens=512, max_slice_sequences=64)
    entry = book.open(request(rng.integers(1, 200, num_texts).tolist()), 0.0)
    while pieces := send_all(book):
        for piece in pieces:
            assert piece.num_tokens <= 512
            book.apply(done(sequences(piece)))
    assert_right(entry)
