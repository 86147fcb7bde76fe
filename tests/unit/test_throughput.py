"""How fast the queue gets shorter, as steps tell."""

from __future__ import annotations

import pytest

from nobiru.engine.client import Throughput


def test_nothing_is_known_before_the_first_tokens() -> None:
    throughput = Throughput(half_life_s=5.0)
    assert throughput.tokens_per_s is None
    throughput.add(0, 1.0)
    assert throughput.tokens_per_s is None


def test_the_recent_past_weighs_most() -> None:
    throughput = Throughput(half_life_s=5.0)
    for _ in range(100):
        throughput.add(1000, 1.0)
    assert throughput.tokens_per_s == pytest.approx(1000)
    for _ in range(5):
        throughput.add(100, 1.0)
    assert throughput.tokens_per_s == pytest.approx(550, rel=0.01)
    for _ in range(100):
        throughput.add(100, 1.0)
    assert throughput.tokens_per_s == pytest.approx(100, rel=0.01)


def test_steps_in_which_a_queue_stands_still_count() -> None:
    """All places are taken by texts in progress: prompts wait, and how long they do is what is to be known."""
    throughput = Throughput(half_life_s=5.0)
    for number in range(200):
        throughput.add(100 if number % 10 == 0 else 0, 0.1)
    assert throughput.tokens_per_s == pytest.approx(100, rel=0.1)
