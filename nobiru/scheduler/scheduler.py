"""Which sequences run in the next step, and with how many tokens.

Owns the waiting queue, the set of running sequences and who holds KV blocks. Pure Python over integers: no torch, no
I/O, no clock but the `now_s` it is given, so thousands of random schedules a second can be tested.

Running sequences are served first: those that generate (a token each), then those still in their prefill. What is left
of the token budget goes to waiting ones. An encoder's sequence runs whole, in one step, and ends with it. A causal
model's runs over KV blocks: its prefill may be cut to what the budget leaves (chunked prefill), and begins behind the
longest prefix that is in the cache. When blocks run out, the least urgent and newest sequence loses its own and waits
again, to be computed anew (preemption by recompute); the step then admits nobody.

Three rules of admission go beyond filling up:

* Look-ahead. A sequence that does not fit into what is left of the budget is passed over, up to `lookahead` of them. It
  keeps its place, so it opens the next step of its priority: being passed over costs one step at most.
* One urgency a step. Under `priority`, less urgent sequences join a step only while it stays within `min_step_tokens`
  tokens (below that a step costs the same anyway). An interactive query then waits for the step in progress and for its
  own small step, never for a step filled up with bulk work.
* Ageing. When the sequence that has waited longest has done so for `age_limit_s` and more urgent ones would pass it
  again, it goes first. Every other step may serve one such sequence, so neither it starves nor those it passes.

A plan may be made while the one before is in flight: tokens in flight count as computed, and a token that is being
sampled as known. Only `update` advances anything for good; `abandon` undoes plans, newest first.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from nobiru.config import SchedulerConfig
from nobiru.kv.blocks import BlockPool
from nobiru.scheduler.block_tables import BlockTables
from nobiru.scheduler.plan import CausalState, Part, Plan, Sequence
from nobiru.scheduler.queue import WaitingQueue
from nobiru.scheduler.step import Step

NO_TOKENS: Mapping[int, int] = MappingProxyType({})


class Scheduler:
    """Two queues, `waiting` and `running`, and the rules above. `pool` is the KV cache's, None for encoders.

    `schedule` makes a plan; `confirm` takes out of a plan made ahead what has ended since; `update` enters a plan's
    results; `abandon` undoes a plan that was not executed.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool | None = None) -> None:
        self.config = config
        self.waiting = WaitingQueue(by_priority=config.policy == "priority")
        self.running: dict[int, Sequence] = {}
        self.num_preemptions = 0
        self._tables = None if pool is None else BlockTables(pool, prefix_caching=config.prefix_caching)
        self._num_plans: dict[int, int] = {}  # in how many plans in flight a sequence is
        self._aborted: set[int] = set()  # aborted while in flight: their result is dropped by `update`
        self._last_step_served_aged = False
        self._last_step_was_alone = False
        self._passed_s = -math.inf  # when an urgent sequence last passed others

    @property
    def has_work(self) -> bool:
        return len(self.waiting) > 0 or len(self.running) > 0

    @property
    def has_cache(self) -> bool:
        """Whether its sequences run over a KV cache."""
        return self._tables is not None

    @property
    def kv_usage(self) -> float:
        """The share of KV blocks that sequences hold."""
        return 0.0 if self._tables is None else 1 - self._tables.pool.num_free / self._tables.pool.num_blocks

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; `ValueError` when it could never be scheduled or its id is in use."""
        if sequence.causal is None and not 1 <= sequence.num_tokens <= self.config.max_num_batched_tokens:
            raise ValueError(
                f"sequence {sequence.seq_id} has {sequence.num_tokens} tokens; "
                f"a step takes 1 to {self.config.max_num_batched_tokens}"
            )
        if sequence.causal is not None:
            _check_causal(sequence, self._tables)
        if sequence.seq_id in self.waiting or sequence.seq_id in self.running:
            raise ValueError(f"sequence id {sequence.seq_id} is in use")
        self.waiting.push(sequence)

    def abort(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences at any moment; ids that are not here are ignored."""
        for seq_id in seq_ids:
            if self.waiting.remove(seq_id) is not None or seq_id not in self.running:
                continue
            if self._num_plans.get(seq_id):
                self._aborted.add(seq_id)
            else:
                self._end(self.running[seq_id])

    def schedule(self, now_s: float) -> Plan | None:
        """The next step, or None when nothing can run (with nothing in flight: when there is no work)."""
        step = Step(self.config, self._max_num_tokens(now_s))
        num_preemptions = -1
        while not len(step) and num_preemptions != self.num_preemptions:  # all of them may have lost their blocks
            num_preemptions = self.num_preemptions
            self._fill(step, now_s)
        plan = step.plan()
        if plan is not None:
            self._last_step_was_alone = plan.parts[0].sequence.alone
            for part in plan.parts:
                self._num_plans[part.sequence.seq_id] = self._num_plans.get(part.sequence.seq_id, 0) + 1
                if (state := part.sequence.causal) is not None:
                    state.num_in_flight_tokens += part.num_tokens
        return plan

    def _max_num_tokens(self, now_s: float) -> int:
        """Of a step. While urgent sequences come, an encoder's next step is never far."""
        most, hurried = self.config.max_num_batched_tokens, self.config.hurried_step_tokens
        if hurried is None or self._tables is not None or now_s >= self._passed_s + self.config.hurry_s:
            return most
        return min(most, hurried)

    def confirm(self, plan: Plan) -> Plan | None:
        """The plan without sequences that ended or were aborted since it was made, while the one before ran."""
        kept = []
        for part in plan.parts:
            if part.sequence.seq_id in self.running and part.sequence.seq_id not in self._aborted:
                kept.append(part)
            else:
                self._leave_plan(part)
                self._drop_if_aborted(part.sequence)
        return Plan(parts=tuple(kept), num_tokens=sum(part.num_tokens for part in kept)) if kept else None

    def update(
        self, plan: Plan, tokens: Mapping[int, int] = NO_TOKENS, failed: Collection[int] = frozenset()
    ) -> list[bool]:
        """Enter the results of an executed plan; for each part, whether somebody still wants its result.

        `tokens` are the sampled token ids by `seq_id`; sequences in `failed` end without a result. A sequence that has
        ended is not in `running` any more; `causal.finish_reason` says why it did.
        """
        return [self._update(part, tokens.get(part.sequence.seq_id), failed) for part in plan.parts]

    def abandon(self, plan: Plan) -> None:
        """Undo a plan whose step did not complete: encoder sequences wait again, with the turn they had."""
        for part in plan.parts:
            self._leave_plan(part)
            if self._drop_if_aborted(part.sequence) or part.sequence.causal is not None:
                continue
            del self.running[part.sequence.seq_id]
            self.waiting.push(part.sequence)

    def _fill(self, step: Step, now_s: float) -> None:
        if not self._last_step_was_alone and self._serve_alone(step):  # every other step may be one of those
            return
        if self._continue_running(step):
            self._admit(step, now_s)
        if not len(step):
            self._serve_alone(step)

    # ---- running sequences -------------------------------------------------------------------------------------------

    def _continue_running(self, step: Step) -> bool:
        """Plan the next tokens of running sequences; whether waiting ones may join."""
        causal = [each for each in self.running.values() if each.causal is not None]
        may_admit = True
        for sequence in sorted(causal, key=self._service_order):
            if sequence.alone or sequence.seq_id not in self.running:
                continue  # has steps of its own; was preempted a moment ago
            if step.room == 0:
                break
            may_admit = self._continue(step, sequence) and may_admit
        return may_admit

    def _serve_alone(self, step: Step) -> bool:
        """Give the step to a sequence that must be alone, if there is one."""
        running = next((each for each in self.running.values() if each.alone and each.causal is not None), None)
        if running is not None:
            self._continue(step, running)
        elif (first := self.waiting.first()) is not None and first.alone and not self._is_full(step, first):
            self._take(step, first)
        return len(step) > 0

    def _continue(self, step: Step, sequence: Sequence) -> bool:
        """Plan a sequence's next tokens; false if blocks had to be taken from somebody for it, or would have to be."""
        state = sequence.causal
        assert state is not None and self._tables is not None
        part = _next_part(sequence, state, step.room)
        if part is None or sequence.seq_id in self._aborted:
            return True
        end = part.start + part.num_tokens
        took_none = True
        while not self._tables.grow(state, end):
            took_none = False
            victim = max(self.running.values(), key=self._turn)
            if self._num_plans.get(victim.seq_id):
                return False  # its blocks are being written
            step.remove(victim.seq_id)
            self._preempt(victim)
            if victim is sequence:
                return False
        step.add(part)
        return took_none

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.causal is not None and self._tables is not None
        self._tables.close(sequence.causal)
        sequence.causal.num_preemptions += 1
        self.num_preemptions += 1
        del self.running[sequence.seq_id]
        self.waiting.push(sequence)

    def _turn(self, sequence: Sequence) -> tuple[int, int]:
        return (sequence.priority if self.config.policy == "priority" else 0, sequence.arrival)

    def _service_order(self, sequence: Sequence) -> tuple[bool, tuple[int, int]]:
        """Generating sequences first: a long prefill must not stop them."""
        state = sequence.causal
        assert state is not None
        is_prefill = state.num_computed_tokens + state.num_in_flight_tokens < len(state.token_ids) - 1
        return is_prefill, self._turn(sequence)

    # ---- admission ---------------------------------------------------------------------------------------------------

    def _admit(self, step: Step, now_s: float) -> None:
        first = self.waiting.first()
        if first is None:
            return
        aged = None if self._last_step_served_aged else self._passed_and_aged(first, now_s)
        self._last_step_served_aged = aged is not None
        if aged is not None and not self._is_full(step, aged):
            self._take(step, aged)
        for candidate in self.waiting.candidates(self.config.lookahead):
            if step.room == 0 or self._is_full(step, candidate):
                break
            if self._take(step, candidate):
                step.set_urgency(candidate.priority)
            elif step.room_for(candidate) > 0 and candidate.causal is not None:
                break  # no blocks; others that need fewer must not pass, or it would never get them

    def _passed_and_aged(self, first: Sequence, now_s: float) -> Sequence | None:
        oldest = self.waiting.oldest()
        if oldest is None or oldest.priority <= first.priority:
            return None
        self._passed_s = now_s
        return oldest if now_s - oldest.arrival_s >= self.config.age_limit_s else None

    def _is_full(self, step: Step, candidate: Sequence) -> bool:
        num_sequences = len(step) if candidate.causal is None else len(self.running)
        return num_sequences >= self.config.max_num_seqs

    def _take(self, step: Step, sequence: Sequence) -> bool:
        """From waiting to running; false if it does not fit, or if there are no blocks for it."""
        room, state = step.room_for(sequence), sequence.causal
        if state is None:
            if room < sequence.num_tokens:
                return False
            part = Part(sequence=sequence, start=0, num_tokens=sequence.num_tokens, is_last=True)
        else:
            assert self._tables is not None
            if room < 1 or not self._tables.open(state):
                return False
            chunk = _next_part(sequence, state, room)
            assert chunk is not None, "a sequence that begins has tokens to compute"
            has_grown = self._tables.grow(state, chunk.start + chunk.num_tokens)
            assert has_grown, "open has made sure of it"
            part = chunk
        self.waiting.remove(sequence.seq_id)
        self.running[sequence.seq_id] = sequence
        step.add(part)
        return True

    # ---- results -----------------------------------------------------------------------------------------------------

    def _update(self, part: Part, token: int | None, failed: Collection[int]) -> bool:
        sequence, state = part.sequence, part.sequence.causal
        self._leave_plan(part)
        if self._drop_if_aborted(sequence):
            return False
        if sequence.seq_id not in self.running:
            return False
        if state is None or sequence.seq_id in failed:
            self._end(sequence)
            return True
        assert self._tables is not None
        state.num_computed_tokens += part.num_tokens
        self._tables.publish(state)
        if part.is_last:
            _advance(state, token)
        if state.finish_reason is not None:
            self._end(sequence)
        return True

    def _leave_plan(self, part: Part) -> None:
        seq_id = part.sequence.seq_id
        self._num_plans[seq_id] -= 1
        if not self._num_plans[seq_id]:
            del self._num_plans[seq_id]
        if part.sequence.causal is not None:
            part.sequence.causal.num_in_flight_tokens -= part.num_tokens

    def _drop_if_aborted(self, sequence: Sequence) -> bool:
        """Whether it was aborted; it goes once it is in no plan any more."""
        if sequence.seq_id not in self._aborted:
            return False
        if sequence.seq_id not in self._num_plans:
            self._aborted.discard(sequence.seq_id)
            self._end(sequence)
        return True

    def _end(self, sequence: Sequence) -> None:
        del self.running[sequence.seq_id]
        if sequence.causal is not None:
            assert self._tables is not None
            self._tables.close(sequence.causal)


def _check_causal(sequence: Sequence, tables: BlockTables | None) -> None:
    state = sequence.causal
    assert state is not None
    if tables is None:
        raise ValueError(f"sequence {sequence.seq_id} needs a KV cache, and there is none")
    most = state.max_num_tokens - state.generates
    if not 1 <= len(state.token_ids) <= most:
        raise ValueError(f"sequence {sequence.seq_id} has {len(state.token_ids)} tokens; 1 to {most} can be computed")
    if not tables.can_ever_hold(state):
        raise ValueError(f"sequence {sequence.seq_id} may have {state.max_num_tokens} tokens, more than the KV cache")


def _next_part(sequence: Sequence, state: CausalState, room: int) -> Part | None:
    """Its next tokens, at most `room`; None if none is known, or if the one in flight is its last."""
    start = state.num_computed_tokens + state.num_in_flight_tokens
    num_known = len(state.token_ids)
    if state.num_in_flight_tokens and start == num_known:
        num_known += 1  # being sampled
        if not state.generates or num_known >= state.max_num_tokens:
            return None
    num_tokens = min(num_known - start, room)
    if num_tokens < 1:
        return None
    return Part(sequence=sequence, start=start, num_tokens=num_tokens, is_last=start + num_tokens == num_known)


def _advance(state: CausalState, token: int | None) -> None:
    """All known tokens are computed: take the new one, and see whether that is the end."""
    if not state.generates:
        state.finish_reason = "pooled"
        return
    assert token is not None, "a part that ends at the last token gives one"
    state.token_ids.append(token)
    if token in state.stop_token_ids and len(state.token_ids) >= state.min_num_tokens:
        state.finish_reason = "stop"
    elif len(state.token_ids) >= state.max_num_tokens:
        state.finish_reason = "length"
