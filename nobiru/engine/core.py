"""The step loop: schedule, execute, update.

Owns the order of these three and nothing else. The offline `LLM` and a rank process of the server drive the same core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nobiru.runner.executor import Executor, Outcome
from nobiru.scheduler import Plan, Scheduler, Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """What one step brought.

    `sequences` and `outcomes` belong together; sequences aborted meanwhile are left out. `num_tokens` counts the whole
    batch, `compute_s` is the time of its execution, `queue_s` how long each sequence had waited for it.
    """

    sequences: list[Sequence]
    outcomes: list[Outcome]
    queue_s: list[float]
    num_sequences: int
    num_tokens: int
    compute_s: float


class EngineCore:
    """`add` and `abort` at any time between steps; `step` until `has_work` is false.

    `on_plan` sees each plan just before it is executed: the rank process leaves a note of it that survives its death.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_plan: Callable[[Plan], None] = lambda plan: None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._clock = clock
        self._on_plan = on_plan

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self.scheduler.add(sequence)

    def abort(self, seq_ids: Iterable[int]) -> None:
        self.scheduler.abort(seq_ids)

    def step(self) -> StepOutput | None:
        """Run one batch; None when nothing waits."""
        started_s = self._clock()
        plan = self.scheduler.schedule(started_s)
        if plan is None:
            return None
        self._on_plan(plan)
        try:
            outcomes = self.executor.execute(plan)
        except BaseException:  # an interrupt, or a device that cannot go on: the step did not happen
            self.scheduler.abandon(plan)
            raise
        wanted = self.scheduler.update(plan)
        return self._output(plan, outcomes, wanted, started_s)

    def _output(self, plan: Plan, outcomes: list[Outcome], wanted: list[bool], started_s: float) -> StepOutput:
        kept = [index for index, is_wanted in enumerate(wanted) if is_wanted]
        return StepOutput(
            sequences=[plan.sequences[index] for index in kept],
            outcomes=[outcomes[index] for index in kept],
            queue_s=[max(0.0, started_s - plan.sequences[index].arrival_s) for index in kept],
            num_sequences=len(plan.sequences),
            num_tokens=plan.num_tokens,
            compute_s=self._clock() - started_s,
        )
