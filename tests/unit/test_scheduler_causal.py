"""Days in the life of a causal model's scheduler: a pretended model whose next token depends on every token before it,
read back through the block table, as an attention kernel would. Whatever happens beside a sequence, its text is the
undisturbed one, it has one outcome, and at the end every block is free.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nobiru.config import SchedulerConfig
from nobiru.kv.blocks import BlockPool
from nobiru.scheduler import CausalState, Plan, Scheduler, Sequence

VOCABULARY = 7
STOP_TOKEN = 0


def next_token(tokens: list[int]) -> int:
    return zlib.crc32(bytes(tokens)) % VOCABULARY


@dataclass(frozen=True)
class Wish:
    """A request of the test: what it asks for, and what befalls it."""

    prompt: tuple[int, ...]
    max_new: int
    min_new: int = 0
    priority: int = 0
    arrives_at: int = 0
    aborts_at: int | None = None
    alone: bool = False
    salt: str = ""
    fails_at: int | None = None  # the number of tokens with which it fails

    def undisturbed(self) -> list[int]:
        tokens = list(self.prompt)
        for number in range(1, self.max_new + 1):
            tokens.append(next_token(tokens))
            if tokens[-1] == STOP_TOKEN and number >= self.min_new:
                break
        return tokens


@dataclass
class Day:
    """Runs wishes through a scheduler over a cache of `num_blocks` blocks."""

    wishes: list[Wish]
    num_blocks: int
    block_size: int
    limits: SchedulerConfig
    lost_steps: set[int] = field(default_factory=set)
    ahead: bool = False

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, self.block_size)
        self.scheduler = Scheduler(self.limits, self.pool)
        self.slots: dict[tuple[int, int], tuple[str, int]] = {}
        self.sequences = [self._sequence(number, wish) for number, wish in enumerate(self.wishes)]
        self.outcomes: dict[int, str] = {}
        self.planned: deque[Plan] = deque()
        self.num_steps = 0

    def _sequence(self, number: int, wish: Wish) -> Sequence:
        state = CausalState(
            token_ids=list(wish.prompt),
            num_prompt_tokens=len(wish.prompt),
            max_num_tokens=len(wish.prompt) + wish.max_new,
            min_num_tokens=len(wish.prompt) + wish.min_new,
            stop_token_ids=frozenset([STOP_TOKEN]),
            cache_salt=wish.salt,
        )
        return Sequence(
            seq_id=number,
            num_tokens=len(wish.prompt),
            arrival=number,
            arrival_s=float(wish.arrives_at),
            priority=wish.priority,
            alone=wish.alone,
            causal=state,
        )

    def run(self) -> None:
        while self.num_steps < 50 or self.scheduler.has_work:
            assert self.num_steps < 3000, "it comes to an end"
            self._clients(self.num_steps)
            self._step()
            self.num_steps += 1
        assert set(self.outcomes) == set(range(len(self.wishes)))
        assert self.pool.num_free == self.num_blocks, "every block is free"
        assert not self.scheduler.running

    def _clients(self, now: int) -> None:
        for number, wish in enumerate(self.wishes):
            if wish.arrives_at == now:
                self.scheduler.add(self.sequences[number])
            if wish.aborts_at is not None and max(wish.aborts_at, wish.arrives_at) == now:
                self.scheduler.abort([number])
                self.outcomes.setdefault(number, "aborted")

    def _step(self) -> None:
        """With `ahead`, one plan is always in flight while the next is made, as the pipelined step loop does it."""
        if self.ahead and self.planned:
            plan = self.planned.popleft()
            following = self.scheduler.schedule(self.num_steps)
            self._check(following)
            if self.num_steps in self.lost_steps:
                for lost in (following, plan):  # newest first
                    if lost is not None:
                        self.scheduler.abandon(lost)
                return
            self._finish(plan)
            confirmed = None if following is None else self.scheduler.confirm(following)
            if confirmed is not None:
                self.planned.append(confirmed)
            return
        plan = self.scheduler.schedule(self.num_steps)
        self._check(plan)
        if plan is None:
            return
        if self.ahead:
            self.planned.append(plan)
        elif self.num_steps in self.lost_steps:
            self._execute(plan)  # written or half written, it counts for nothing
            self.scheduler.abandon(plan)
        else:
            self._finish(plan)

    def _check(self, plan: Plan | None) -> None:
        if plan is None:
            assert self.planned or self.ahead or not self.scheduler.has_work, "there is work, so something runs"
            return
        assert 1 <= plan.num_tokens == sum(part.num_tokens for part in plan.parts) <= self.limits.max_num_batched_tokens
        assert len({part.sequence.seq_id for part in plan.parts}) == len(plan.parts)
        assert len(self.scheduler.running) <= self.limits.max_num_seqs
        assert len(plan.parts) == 1 or not any(part.sequence.alone for part in plan.parts)
        for part in plan.parts:
            state = part.sequence.causal
            assert state is not None and len(state.block_ids) * self.block_size >= part.start + part.num_tokens

    def _execute(self, plan: Plan) -> dict[int, int]:
        tokens: dict[int, int] = {}
        for part in plan.parts:
            state, wish = part.sequence.causal, self.wishes[part.sequence.seq_id]
            assert state is not None
            end = part.start + part.num_tokens
            places = [(state.block_ids[p // self.block_size], p % self.block_size) for p in range(end)]
            for position in range(part.start, end):
                self.slots[places[position]] = (wish.salt, state.token_ids[position])
            context = [self.slots[place] for place in places]
            assert [token for _, token in context] == state.token_ids[:end], "the cache holds what it should"
            assert {salt for salt, _ in context} == {wish.salt}, "nothing of another salt"
            assert part.is_last == (end == len(state.token_ids))
            if part.is_last and state.generates:
                tokens[part.sequence.seq_id] = next_token([token for _, token in context])
        return tokens

    def _finish(self, plan: Plan) -> None:
        tokens = self._execute(plan)
        failed = {
            part.sequence.seq_id
            for part in plan.parts
            if self.wishes[part.sequence.seq_id].fails_at == part.start + part.num_tokens
        }
        wanted = self.scheduler.update(plan, tokens, failed)
        for part, is_wanted in zip(plan.parts, wanted, strict=True):
            number, state = part.sequence.seq_id, part.sequence.causal
            assert state is not None
            if not is_wanted:
                assert self.outcomes[number] == "aborted"
                continue
            assert number not in self.outcomes, "one outcome"
            if number in failed:
                self.outcomes[number] = "failed"
            elif state.finish_reason is not None:
                self.outcomes[number] = state.finish_reason
                assert state.token_ids == self.wishes[number].undisturbed()
            assert (number in self.outcomes) == (number not in self.scheduler.running)


wishes = st.builds(
    Wish,
    prompt=st.one_of(
        st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20),
        st.integers(1, 20).map(lambda length: [1, 2, 3, 4, 5, 6, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 1, 2][:length]),
    ).map(tuple),
    max_new=st.integers(0, 12),
    min_new=st.integers(0, 6),
    priority=st.integers(-1, 1),
    arrives_at=st.integers(0, 30),
    aborts_at=st.one_of(st.none(), st.none(), st.integers(0, 40)),
    alone=st.integers(0, 9).map(lambda number: number == 0),
    salt=st.sampled_from(["", "", "x"]),
    fails_at=st.one_of(st.none(), st.none(), st.none(), st.integers(1, 24)),
)


@settings(max_examples=400, deadline=None)
@given(
    wishes=st.lists(wishes, min_size=1, max_size=10),
    block_size=st.integers(1, 5),
    spare_blocks=st.integers(0, 12),
    budget=st.integers(1, 24),
    max_num_seqs=st.integers(1, 6),
    policy=st.sampled_from(["priority", "fcfs"]),
    lost_steps=st.sets(st.integers(0, 60), max_size=5),
    ahead=st.booleans(),
)
def test_a_day_in_the_life(
    wishes: list[Wish],
    block_size: int,
    spare_blocks: int,
    budget: int,
    max_num_seqs: int,
    policy: str,
    lost_steps: set[int],
    ahead: bool,
) -> None:
    longest = max(len(wish.prompt) + wish.max_new for wish in wishes)
    limits = SchedulerConfig(
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        policy=policy,  # type: ignore[arg-type]
        min_step_tokens=4,
        age_limit_s=5.0,
    )
    num_blocks = -(-longest // block_size) + spare_blocks
    Day(wishes, num_blocks, block_size, limits, lost_steps=lost_steps, ahead=ahead).run()


def day(*wishes: Wish, num_blocks: int = 100, block_size: int = 4, ahead: bool = False, **limits: object) -> Day:
    config = SchedulerConfig(**{"max_num_batched_tokens": 100, "max_num_seqs": 8, **limits})  # type: ignore[arg-type]
    return Day(list(wishes), num_blocks, block_size, config, ahead=ahead)


def state_of(day: Day, number: int) -> CausalState:
    state = day.sequences[number].causal
    assert state is not None
    return state


def test_a_long_prompt_is_prefilled_in_chunks_and_does_not_stop_those_that_generate() -> None:
    one = day(Wish((1, 2), 10, min_new=10), Wish((3,) * 40, 2, arrives_at=1), max_num_batched_tokens=10)
    for now in range(4):
        one._clients(now)
        plan = one.scheduler.schedule(now)
        assert plan is not None
        if now:
            assert [(part.sequence.seq_id, part.num_tokens) for part in plan.parts] == [(0, 1), (1, 9)]
        one._finish(plan)


@pytest.mark.parametrize("ahead", [False, True])
def test_the_least_urgent_and_newest_loses_its_blocks(ahead: bool) -> None:
    wishes = [Wish((1,) * 8, 8, min_new=8, priority=p, salt=str(n)) for n, p in enumerate([0, 1, 1])]
    one = day(*wishes, num_blocks=9, ahead=ahead)
    one.run()
    assert [state_of(one, number).num_preemptions > 0 for number in range(3)] == [False, False, True]
    assert one.scheduler.num_preemptions >= 1


def test_a_prompt_seen_before_is_not_computed_again() -> None:
    prompt = tuple(range(1, 7)) * 3
    one = day(Wish(prompt, 1), Wish(prompt, 1, arrives_at=5), Wish(prompt, 1, arrives_at=5, salt="other"))
    one.run()
    assert [state_of(one, number).num_cached_tokens for number in range(3)] == [0, 16, 0]


def test_a_sequence_that_can_never_fit_is_refused() -> None:
    one = day(Wish((1,) * 30, 11), num_blocks=10)
    with pytest.raises(ValueError, match="more than the KV cache"):
        one.scheduler.add(one.sequences[0])
    with pytest.raises(ValueError, match="needs a KV cache"):
        Scheduler(one.limits).add(one.sequences[0])


def test_planning_ahead_brings_the_same_texts_in_as_many_steps_and_one() -> None:
    wishes = [Wish((number + 1,) * 9, 20, min_new=20) for number in range(4)]
    plain, ahead = day(*wishes), day(*wishes, ahead=True)
    for each in (plain, ahead):
        each.run()
    assert [s.causal.token_ids for s in plain.sequences] == [s.causal.token_ids for s in ahead.sequences]  # type: ignore[union-attr]
