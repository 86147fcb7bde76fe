"""The step loop: schedule, execute, update.

Owns the order of these three and nothing else. The offline `LLM` and a rank process of the server drive the same core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from nobiru.errors import NobiruError
from nobiru.generation import SampledToken
from nobiru.runner.executor import Executor, Outcome
from nobiru.runner.inputs import inputs_of
from nobiru.scheduler import Plan, Scheduler, Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """What one step brought.

    `sequences` and `outcomes` belong together: a vector, a token or an error for each. Parts of a prefill that are not
    the last, and sequences aborted meanwhile, are left out. `num_tokens` counts the whole batch, `compute_s` is the
    time of its execution; `queue_s` how long the `newcomers`, sequences that ran for the first time, had waited for it.
    """

    sequences: list[Sequence]
    outcomes: list[Outcome]
    newcomers: list[Sequence]
    queue_s: list[float]
    num_sequences: int
    num_tokens: int
    compute_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _InFlight:
    """A plan in execution."""

    plan: Plan
    started_s: float
    outcomes: Future[list[Outcome]]


class EngineCore:
    """`add` and `abort` at any time between steps; `step` until `has_work` is false.

    `on_plan` sees each plan just before it is executed: the rank process leaves a note of it that survives its death.
    With `worker`, a thread, `step` is `step_with_batch_queue`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_plan: Callable[[Plan], None] = lambda plan: None,
        worker: ThreadPoolExecutor | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._clock = clock
        self._on_plan = on_plan
        self._worker = worker
        self._in_flight: _InFlight | None = None

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def is_executing(self) -> bool:
        """Whether a batch is in execution between steps."""
        return self._in_flight is not None

    def add(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self.scheduler.add(sequence)

    def abort(self, seq_ids: Iterable[int]) -> None:
        self.scheduler.abort(seq_ids)

    def step(self) -> StepOutput | None:
        """Run one batch; None when nothing waits."""
        if self._worker is not None:
            return self.step_with_batch_queue(self._worker)
        plan = self.plan()
        return None if plan is None else self.run(plan)

    def plan(self) -> Plan | None:
        """The next step; to be followed by `run`, or by `scheduler.abandon`."""
        return self.scheduler.schedule(self._clock())

    def run(self, plan: Plan) -> StepOutput:
        """Execute a plan and enter its results; if it raises, the step did not happen."""
        started_s = self._clock()
        self._on_plan(plan)
        try:
            outcomes = self.executor.execute(plan)
        except BaseException:  # an interrupt, or a device that cannot go on
            self.scheduler.abandon(plan)
            raise
        return self._update(plan, outcomes, started_s)

    def step_with_batch_queue(self, worker: ThreadPoolExecutor) -> StepOutput | None:
        """As `step`, but one batch is in execution while the next is planned, and while this one's results are sent."""
        if self._in_flight is None and not self._submit(self.scheduler.schedule(self._clock()), worker):
            return None
        current, self._in_flight = self._in_flight, None
        assert current is not None
        following = self.scheduler.schedule(self._clock())
        try:
            outcomes = current.outcomes.result()
        except BaseException:
            for plan in (following, current.plan):  # newest first
                if plan is not None:
                    self.scheduler.abandon(plan)
            raise
        output = self._update(current.plan, outcomes, current.started_s)
        if following is not None:
            self._submit(self.scheduler.confirm(following), worker)
        return output

    def _submit(self, plan: Plan | None, worker: ThreadPoolExecutor) -> bool:
        if plan is None:
            return False
        self._on_plan(plan)
        outcomes = worker.submit(self.executor.run, inputs_of(plan))
        self._in_flight = _InFlight(plan=plan, started_s=self._clock(), outcomes=outcomes)
        return True

    def _update(self, plan: Plan, outcomes: list[Outcome], started_s: float) -> StepOutput:
        ids = [part.sequence.seq_id for part in plan.parts]
        results = list(zip(ids, outcomes, strict=True))
        tokens = {seq_id: each.token_id for seq_id, each in results if isinstance(each, SampledToken)}
        failed = {seq_id for seq_id, each in results if isinstance(each, NobiruError)}
        wanted = self.scheduler.update(plan, tokens, failed)
        kept = [index for index, is_wanted in enumerate(wanted) if is_wanted and outcomes[index] is not None]
        newcomers = [sequence for sequence in plan.sequences if not sequence.has_run]
        for sequence in newcomers:
            sequence.has_run = True
        return StepOutput(
            sequences=[plan.parts[index].sequence for index in kept],
            outcomes=[outcomes[index] for index in kept],
            newcomers=newcomers,
            queue_s=[max(0.0, started_s - sequence.arrival_s) for sequence in newcomers],
            num_sequences=len(plan.parts),
            num_tokens=plan.num_tokens,
            compute_s=self._clock() - started_s,
        )
