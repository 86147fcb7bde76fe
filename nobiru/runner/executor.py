"""Runs a plan, and keeps the failure of one sequence from becoming the failure of its neighbours.

Owns retries inside a step. Knows nothing of queues or clients: it maps a plan to one outcome per sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from nobiru.errors import InferenceError, NobiruError
from nobiru.generation import SampledToken
from nobiru.request import Vectors
from nobiru.runner.inputs import Input, inputs_of
from nobiru.scheduler.plan import Plan

logger = logging.getLogger(__name__)

Outcome = Vectors | SampledToken | NobiruError | None


class Runner(Protocol):
    """What turns sequences into vectors or tokens, in order; raises when any of them fails.

    A part of a prefill that is not the last gives None. Running an input again changes nothing.
    """

    def run(self, sequences: Sequence[Any]) -> Sequence[Outcome]: ...


class Executor:
    """`execute(plan)` gives one result or one error for each of its parts.

    A batch that raises is run again in halves until the sequence at fault fails by itself. Out-of-memory is treated the
    same way, after `free_memory`: half the batch may fit. Errors that `is_fatal` recognizes (a device that cannot go
    on) are raised: the rank has to end.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        is_fatal: Callable[[Exception], bool] = lambda error: False,
        is_out_of_memory: Callable[[Exception], bool] = lambda error: isinstance(error, MemoryError),
        free_memory: Callable[[], None] = lambda: None,
    ) -> None:
        self._runner = runner
        self._is_fatal = is_fatal
        self._is_out_of_memory = is_out_of_memory
        self._free_memory = free_memory

    def execute(self, plan: Plan) -> list[Outcome]:
        return self.run(inputs_of(plan))

    def run(self, inputs: list[Input]) -> list[Outcome]:
        """As `execute`, from the inputs of a plan."""
        try:
            results = self._runner.run(inputs)
        except Exception as error:
            if self._is_fatal(error):
                raise
            return self._run_in_halves(inputs, error)
        return [_checked(result, each) for result, each in zip(results, inputs, strict=True)]

    def _run_in_halves(self, inputs: list[Input], error: Exception) -> list[Outcome]:
        num_tokens = sum(each.token_ids.size for each in inputs)
        if self._is_out_of_memory(error):
            logger.warning("out of memory with %d sequences, %d tokens", len(inputs), num_tokens)
            self._free_memory()
            if len(inputs) == 1:
                return [InferenceError(f"out of memory with {num_tokens} tokens", code="out_of_memory")]
        elif len(inputs) == 1 and isinstance(error, NobiruError):
            return [error]
        elif len(inputs) == 1:
            logger.error("inference failed for one sequence of %d tokens", num_tokens, exc_info=error)
            return [InferenceError(f"the model failed on this input of {num_tokens} tokens: {type(error).__name__}")]
        middle = len(inputs) // 2
        return self.run(inputs[:middle]) + self.run(inputs[middle:])


def _checked(result: Outcome, sequence: Input) -> Outcome:
    if not isinstance(result, np.ndarray):
        return result
    # The sum is finite unless some value is not (or values are near the end of float32's range).
    if not np.isfinite(result.sum()) and not np.isfinite(result).all():
        num_tokens = sequence.token_ids.size
        return InferenceError(f"the model gave values that are not finite for this input of {num_tokens} tokens")
    return result
