"""Which sequences run in the next step.

Owns the waiting queue and the set of running sequences. Pure Python over integers: no torch, no I/O, no clock but the
`now_s` it is given, so thousands of random schedules a second can be tested.

A pooling request's sequence is one prefill, so a plan is simply filled until the token budget or the sequence limit is
reached. Three rules go beyond that:

* Look-ahead. A sequence that does not fit into what is left of the budget is passed over, up to `lookahead` of them. It
  keeps its place, so it opens the next step of its priority: being passed over costs one step at most.
* One urgency a step. Under `priority`, less urgent sequences join a step only while it stays within `min_step_tokens`
  tokens (below that a step costs the same anyway). An interactive query then waits for the step in progress and for its
  own small step, never for a step filled up with bulk work.
* Ageing. When the sequence that has waited longest has done so for `age_limit_s` and more urgent ones would pass it
  again, it goes first. Every other step may serve one such sequence, so neither it starves nor those it passes.
"""

from __future__ import annotations

from collections.abc import Iterable

from nobiru.config import SchedulerConfig
from nobiru.scheduler.plan import Plan, Sequence
from nobiru.scheduler.queue import WaitingQueue


class Scheduler:
    """Two queues, `waiting` and `running`, and the rules above.

    `schedule` moves sequences from waiting to running; `update` ends the running ones of a plan; `abandon` puts them
    back where they stood, for a step that did not happen.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.waiting = WaitingQueue(by_priority=config.policy == "priority")
        self.running: dict[int, Sequence] = {}
        self._aborted: set[int] = set()  # aborted while running: their result is dropped by `update`
        self._last_step_served_aged = False

    @property
    def has_work(self) -> bool:
        return len(self.waiting) > 0 or len(self.running) > 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; `ValueError` when it could never be scheduled or its id is in use."""
        if not 1 <= sequence.num_tokens <= self.config.max_num_batched_tokens:
            raise ValueError(
                f"sequence {sequence.seq_id} has {sequence.num_tokens} tokens; "
                f"a step takes 1 to {self.config.max_num_batched_tokens}"
            )
        if sequence.seq_id in self.waiting or sequence.seq_id in self.running:
            raise ValueError(f"sequence id {sequence.seq_id} is in use")
        self.waiting.push(sequence)

    def abort(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences at any moment; ids that are not here are ignored."""
        for seq_id in seq_ids:
            if self.waiting.remove(seq_id) is None and seq_id in self.running:
                self._aborted.add(seq_id)

    def schedule(self, now_s: float) -> Plan | None:
        """The next step's sequences, or None when nothing waits."""
        first = self.waiting.first()
        if first is None:
            return None
        step = _Step(self.config)
        aged = None if self._last_step_served_aged else self._passed_and_aged(first, now_s)
        self._last_step_served_aged = aged is not None
        if aged is not None:
            self._take(step, aged, counts_for_urgency=False)
        for candidate in self.waiting.candidates(self.config.lookahead):
            if step.is_full:
                break
            if step.fits(candidate):
                self._take(step, candidate)
        return Plan(sequences=tuple(step.sequences), num_tokens=step.num_tokens)

    def update(self, plan: Plan) -> list[bool]:
        """End the plan's sequences; for each, whether somebody still wants its result."""
        wanted = []
        for sequence in plan.sequences:
            del self.running[sequence.seq_id]
            wanted.append(sequence.seq_id not in self._aborted)
            self._aborted.discard(sequence.seq_id)
        return wanted

    def abandon(self, plan: Plan) -> None:
        """Undo a plan whose step did not complete: its sequences wait again, with the turn they had."""
        for sequence, wanted in zip(plan.sequences, self.update(plan), strict=True):
            if wanted:
                self.waiting.push(sequence)

    def _passed_and_aged(self, first: Sequence, now_s: float) -> Sequence | None:
        oldest = self.waiting.oldest()
        if oldest is None or oldest.priority <= first.priority:
            return None
        return oldest if now_s - oldest.arrival_s >= self.config.age_limit_s else None

    def _take(self, step: _Step, sequence: Sequence, *, counts_for_urgency: bool = True) -> None:
        self.waiting.remove(sequence.seq_id)
        self.running[sequence.seq_id] = sequence
        step.add(sequence, counts_for_urgency=counts_for_urgency)


class _Step:
    """The plan being filled."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.sequences: list[Sequence] = []
        self.num_tokens = 0
        self.urgency: int | None = None
        self.is_full = False

    def fits(self, candidate: Sequence) -> bool:
        num_tokens = self.num_tokens + candidate.num_tokens
        if candidate.alone:
            return not self.sequences
        if num_tokens > self.config.max_num_batched_tokens:
            return False
        return (
            self.config.policy == "fcfs"
            or self.urgency is None
            or candidate.priority <= self.urgency
            or num_tokens <= self.config.min_step_tokens
        )

    def add(self, sequence: Sequence, *, counts_for_urgency: bool) -> None:
        self.sequences.append(sequence)
        self.num_tokens += sequence.num_tokens
        if counts_for_urgency and self.urgency is None:
            self.urgency = sequence.priority
        self.is_full = (
            sequence.alone
            or len(self.sequences) >= self.config.max_num_seqs
            or self.num_tokens >= self.config.max_num_batched_tokens
        )
