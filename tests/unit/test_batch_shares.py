"""Cutting a batch into shares for threads: every sequence once, evenly, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nobiru.runner.shares import ShareThreads, plan_shares

HIDDEN = 384


@given(st.lists(st.integers(1, 512), min_size=1, max_size=120), st.integers(1, 8))
def test_shares_are_a_partition_and_even(lengths: list[int], num_shares: int) -> None:
    shares = plan_shares(lengths, num_shares, HIDDEN)
    if shares is None:
        return
    assert len(shares) == num_shares > 1
    assert sorted(number for share in shares for number in share) == list(range(len(lengths)))
    work = [sum(lengths[number] * (6 * HIDDEN + lengths[number]) for number in share) for share in shares]
    assert max(work) <= 1.5 * sum(work) / num_shares


@given(st.lists(st.integers(5, 60), min_size=20, max_size=120))
def test_usual_batches_are_cut(lengths: list[int]) -> None:
    assert plan_shares(lengths, 2, HIDDEN) is not None


@pytest.mark.parametrize(
    ("lengths", "num_shares"),
    [
        ([100], 2),  # one sequence
        ([200, 9], 2),  # nothing to balance the long one with
        ([50, 50], 1),  # one thread
        ([5, 5], 2),  # too small
        ([20] * 32, 16),  # too small for so many
    ],
)
def test_other_batches_stay_whole(lengths: list[int], num_shares: int) -> None:
    assert plan_shares(lengths, num_shares, HIDDEN) is None


def test_shares_too_small_to_pay_for_reading_the_weights() -> None:
    assert plan_shares([1] * 100, 2, HIDDEN, min_share_tokens=51) is None
    assert plan_shares([1] * 102, 2, HIDDEN, min_share_tokens=51) is not None


def test_longer_sequences_cost_more_than_their_tokens() -> None:
    lengths = [512, *([16] * 32), *([16] * 4)]
    shares = plan_shares(lengths, 2, HIDDEN)
    assert shares is not None
    (with_long,) = (share for share in shares if 0 in share)
    assert len(with_long) == 1  # 512 tokens here are more work than the 576 of short sequences there


@pytest.fixture
def threads() -> Iterator[ShareThreads]:
    before = torch.get_num_threads()
    made = ShareThreads(2)
    yield made
    torch.set_num_threads(before)


def test_each_share_has_a_thread_with_one_core(threads: ShareThreads) -> None:
    together = threading.Barrier(2)

    def look(share: int) -> tuple[int, int]:
        together.wait(timeout=30)  # both run at once
        return share, torch.get_num_threads()

    assert threads.map(look, [5, 6]) == [(5, 1), (6, 1)]
    assert torch.get_num_threads() == 2
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [2]


def test_an_error_comes_after_all_have_ended(threads: ShareThreads) -> None:
    started, ended = threading.Event(), threading.Event()

    def work(share: int) -> int:
        if share == 0:
            assert started.wait(timeout=30)
            raise ValueError("share 0")
        started.set()
        ended.wait(timeout=0.2)
        ended.set()
        return share

    with pytest.raises(ValueError, match="share 0"):
        threads.map(work, [0, 1])
    assert ended.is_set()
