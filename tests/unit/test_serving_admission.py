"""Admission: whole requests, by what already waits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nobiru.errors import OverloadedError, UnavailableError
from nobiru.serving.admission import MAX_RETRY_AFTER_S, UNMEASURED_RETRY_AFTER_S, Admission, estimate_tokens


@dataclass
class Queue:
    queued_tokens: int = 0
    tokens_per_s: float | None = 100.0


def test_a_request_larger_than_the_limit_is_taken_when_little_waits() -> None:
    admission = Admission(Queue(queued_tokens=1000), max_queued_tokens=1000)
    admission.admit(10**9)
    assert admission.num_accepted == 1


def test_refused_once_more_than_the_limit_waits() -> None:
    admission = Admission(Queue(queued_tokens=1001), max_queued_tokens=1000)
    with pytest.raises(OverloadedError, match=r"1001 tokens.*max_queued_tokens = 1000") as refused:
        admission.admit(1)
    assert refused.value.retry_after_s == 1
    assert admission.num_accepted == 0


def test_tokens_still_being_tokenized_count_until_the_engine_counts_them() -> None:
    queue = Queue()
    admission = Admission(queue, max_queued_tokens=1000)
    ticket = admission.admit(1500)
    with pytest.raises(OverloadedError):
        admission.admit(1)
    ticket.release_reservation()
    queue.queued_tokens += 900  # the real number is lower than the guess
    admission.admit(1)


@pytest.mark.parametrize(
    ("num_queued", "tokens_per_s", "expected_s"),
    [
        (1001, 100.0, 1),
        (2000, 100.0, 10),
        (1990, 100.0, 10),
        (10**9, 100.0, MAX_RETRY_AFTER_S),
        (2000, None, UNMEASURED_RETRY_AFTER_S),
    ],
)
def test_retry_after_is_when_the_queue_has_shrunk(
    num_queued: int, tokens_per_s: float | None, expected_s: float
) -> None:
    admission = Admission(Queue(num_queued, tokens_per_s), max_queued_tokens=1000)
    with pytest.raises(OverloadedError) as refused:
        admission.admit(1)
    assert refused.value.retry_after_s == expected_s


def test_draining_takes_nothing_new() -> None:
    admission = Admission(Queue(), max_queued_tokens=1000)
    ticket = admission.admit(5)
    admission.draining = True
    with pytest.raises(UnavailableError) as refused:
        admission.admit(1)
    assert refused.value.retry_after_s is not None
    assert admission.num_accepted == 1
    ticket.close()
    assert admission.num_accepted == 0


@given(st.lists(st.tuples(st.integers(0, 10**6), st.booleans()), max_size=50))
def test_nothing_stays_reserved_when_all_tickets_are_closed(requests: list[tuple[int, bool]]) -> None:
    admission = Admission(Queue(), max_queued_tokens=10**9)
    tickets = [(admission.admit(tokens), released) for tokens, released in requests]
    assert admission.num_reserved_tokens == sum(tokens for tokens, _ in requests)
    for ticket, released in tickets:
        if released:
            ticket.release_reservation()
        ticket.close()
    assert (admission.num_reserved_tokens, admission.num_accepted) == (0, 0)


def test_estimated_wait_counts_reserved_tokens_too() -> None:
    admission = Admission(Queue(queued_tokens=300), max_queued_tokens=1000)
    admission.admit(200)
    assert admission.estimated_wait_s() == 5
    assert Admission(Queue(300, None), max_queued_tokens=1000).estimated_wait_s() == 0


def test_estimate_grows_with_texts_and_characters() -> None:
    assert estimate_tokens(1, 0) > 0
    assert estimate_tokens(2, 4000) > estimate_tokens(1, 4000) > 999
