"""The executor: a failing sequence fails alone, whatever its neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nobiru.errors import ConfigError, InferenceError
from nobiru.request import SequenceInput, Vectors
from nobiru.runner.executor import Executor
from nobiru.runner.faults import FaultyRunner, parse_faults
from nobiru.scheduler import Part, Plan
from nobiru.scheduler import Sequence as Scheduled


class TokenRunner:
    """A vector says its sequence's first token; counts calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def run(self, sequences: Sequence[SequenceInput]) -> list[Vectors]:
        self.num_calls += 1
        return [np.full(2, each.token_ids[0], dtype=np.float32) for each in sequences]


def plan(tokens: list[int]) -> Plan:
    sequences = tuple(
        Scheduled(
            seq_id=number,
            num_tokens=1,
            arrival=number,
            arrival_s=0.0,
            payload=SequenceInput(token_ids=np.array([token], dtype=np.int32)),
        )
        for number, token in enumerate(tokens)
    )
    parts = tuple(Part(sequence=each, start=0, num_tokens=1, is_last=True) for each in sequences)
    return Plan(parts=parts, num_tokens=len(tokens))


def test_one_call_when_nothing_fails() -> None:
    runner = TokenRunner()
    vectors = Executor(runner).execute(plan([3, 1, 2]))
    assert [float(vector[0]) for vector in vectors] == [3, 1, 2]  # type: ignore[index]
    assert runner.num_calls == 1


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.sampled_from(["raise_on_token", "nan_on_token"]))
def test_only_the_culprits_fail(tokens: list[int], fault: str) -> None:
    outcomes = Executor(FaultyRunner(TokenRunner(), {fault: 0})).execute(plan(tokens))
    for token, outcome in zip(tokens, outcomes, strict=True):
        if token == 0:
            assert isinstance(outcome, InferenceError)
        else:
            assert not isinstance(outcome, Exception)
            assert outcome[0] == token


@given(st.integers(1, 40), st.integers(1, 40))
def test_out_of_memory_halves_the_batch(num_sequences: int, memory_tokens: int) -> None:
    freed: list[None] = []
    runner = FaultyRunner(TokenRunner(), {"memory_tokens": memory_tokens})
    outcomes = Executor(runner, free_memory=lambda: freed.append(None)).execute(plan([7] * num_sequences))
    assert all(not isinstance(outcome, Exception) for outcome in outcomes)
    assert bool(freed) == (num_sequences > memory_tokens)


def test_out_of_memory_with_one_sequence_is_its_error() -> None:
    [outcome] = Executor(FaultyRunner(TokenRunner(), {"memory_tokens": 0})).execute(plan([7]))
    assert isinstance(outcome, InferenceError)
    assert outcome.code == "out_of_memory"


def test_a_fatal_error_is_raised() -> None:
    runner = FaultyRunner(TokenRunner(), {"raise_on_token": 1})
    with pytest.raises(RuntimeError, match="fault injection"):
        Executor(runner, is_fatal=lambda error: True).execute(plan([1, 2]))


def test_unknown_faults_are_named() -> None:
    assert parse_faults("kill_on_token=5,step_delay_ms=2") == {"kill_on_token": 5, "step_delay_ms": 2}
    with pytest.raises(ConfigError, match="explode"):
        parse_faults("explode=1")
