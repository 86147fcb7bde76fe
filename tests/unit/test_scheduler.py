"""The scheduler's rules, by example and by thousands of random schedules."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nobiru.config import SchedulerConfig
from nobiru.scheduler import Plan, Scheduler, Sequence


def sequence(
    seq_id: int, num_tokens: int, *, priority: int = 0, arrival_s: float = 0.0, alone: bool = False
) -> Sequence:
    return Sequence(
        seq_id=seq_id, num_tokens=num_tokens, arrival=seq_id, arrival_s=arrival_s, priority=priority, alone=alone
    )


def ids(plan: Plan | None) -> list[int]:
    return [] if plan is None else [item.seq_id for item in plan.sequences]


def scheduler(**limits: object) -> Scheduler:
    return Scheduler(SchedulerConfig(**{"max_num_batched_tokens": 100, "max_num_seqs": 8, **limits}))  # type: ignore[arg-type]


def step(s: Scheduler, now_s: float = 0.0) -> list[int]:
    plan = s.schedule(now_s)
    if plan is not None:
        s.update(plan)
    return ids(plan)


def test_fills_the_budget_in_order_of_arrival() -> None:
    s = scheduler()
    for number in range(5):
        s.add(sequence(number, 40))
    assert [step(s) for _ in range(3)] == [[0, 1], [2, 3], [4]]
    assert s.schedule(0.0) is None
    assert not s.has_work


def test_looks_past_what_does_not_fit_and_serves_it_next() -> None:
    s = scheduler()
    for number, num_tokens in enumerate([60, 90, 30, 10]):
        s.add(sequence(number, num_tokens))
    assert step(s) == [0, 2, 3]
    assert step(s) == [1]


def test_lookahead_is_bounded() -> None:
    s = scheduler(lookahead=2)
    for number, num_tokens in enumerate([60, 90, 90, 40]):
        s.add(sequence(number, num_tokens))
    assert step(s) == [0]


def test_urgent_work_is_not_padded_with_bulk_beyond_the_smallest_step() -> None:
    s = scheduler(min_step_tokens=20)
    s.add(sequence(0, 30, priority=10))
    s.add(sequence(1, 8, priority=10))
    s.add(sequence(2, 10, priority=0))
    assert step(s) == [2, 1]
    assert step(s) == [0]


def test_steps_are_short_for_a_while_after_an_urgent_sequence() -> None:
    s = scheduler(max_num_seqs=50, hurried_step_tokens=30, hurry_s=5.0, min_step_tokens=10)
    for number in range(40):
        s.add(sequence(number, 10, priority=10))
    assert step(s, now_s=0.0) == list(range(10)), "nobody is in a hurry"
    s.add(sequence(100, 10, priority=0))
    assert step(s, now_s=1.0) == [100]
    assert step(s, now_s=2.0) == [10, 11, 12]
    s.add(sequence(101, 60, priority=0))
    assert step(s, now_s=4.0) == [101], "a sequence that is longer than a short step has one to itself"
    assert step(s, now_s=8.9) == [13, 14, 15]
    assert step(s, now_s=9.0) == list(range(16, 26))


def test_equal_priorities_are_no_hurry() -> None:
    s = scheduler(hurried_step_tokens=30)
    for number in range(4):
        s.add(sequence(number, 25))
    assert step(s) == [0, 1, 2, 3]


def test_a_lower_value_is_served_first_whatever_the_arrival() -> None:
    s = scheduler(max_num_seqs=1)
    for number, priority in enumerate([5, -3, 0]):
        s.add(sequence(number, 10, priority=priority))
    assert [step(s) for _ in range(3)] == [[1], [2], [0]]


def test_fcfs_ignores_priority() -> None:
    s = scheduler(policy="fcfs", max_num_seqs=1)
    for number, priority in enumerate([5, -3, 0]):
        s.add(sequence(number, 10, priority=priority))
    assert [step(s) for _ in range(3)] == [[0], [1], [2]]


def test_an_aged_sequence_is_served_beside_a_constant_stream_of_urgent_ones() -> None:
    s = scheduler(age_limit_s=5.0)
    s.add(sequence(0, 90, priority=10))
    served = []
    for number in range(1, 20):
        s.add(sequence(number, 50, arrival_s=float(number)))
        served.append(step(s, now_s=float(number)))
    assert [0] in served
    assert served.index([0]) == 4  # at 5 s
    assert sorted(seq_id for step_ids in served for seq_id in step_ids) == list(range(20))


def test_a_suspect_runs_alone() -> None:
    s = scheduler()
    s.add(sequence(0, 10))
    s.add(sequence(1, 10, alone=True))
    s.add(sequence(2, 10))
    assert step(s) == [0, 2]
    s.add(sequence(3, 10))
    assert step(s) == [1]
    assert step(s) == [3]


def test_abort_waiting_and_running() -> None:
    s = scheduler(max_num_seqs=1)
    s.add(sequence(0, 10))
    s.add(sequence(1, 10))
    plan = s.schedule(0.0)
    assert plan is not None
    s.abort([0, 1, 77])
    assert s.update(plan) == [False]
    assert not s.has_work


def test_abandon_gives_everything_its_turn_back() -> None:
    s = scheduler()
    for number in range(4):
        s.add(sequence(number, 50))
    plan = s.schedule(0.0)
    assert plan is not None
    s.abort([1])
    s.abandon(plan)
    assert [step(s), step(s)] == [[0, 2], [3]]


@pytest.mark.parametrize("num_tokens", [0, 101])
def test_refuses_what_never_fits(num_tokens: int) -> None:
    with pytest.raises(ValueError, match="1 to 100"):
        scheduler().add(sequence(0, num_tokens))


def test_refuses_an_id_in_use() -> None:
    s = scheduler()
    s.add(sequence(0, 10))
    with pytest.raises(ValueError, match="in use"):
        s.add(sequence(0, 10))


CONFIGS = st.builds(
    SchedulerConfig,
    max_num_batched_tokens=st.integers(8, 64),
    hurried_step_tokens=st.none() | st.integers(1, 64),
    max_num_seqs=st.integers(1, 6),
    policy=st.sampled_from(["priority", "fcfs"]),
    lookahead=st.integers(1, 5),
    age_limit_s=st.sampled_from([0.0, 3.0, 1e9]),
    min_step_tokens=st.integers(0, 32),
)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 8), st.integers(-1, 2), st.booleans()),
        st.tuples(st.just("step"), st.sampled_from(["update", "abandon"])),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("tick"), st.sampled_from([0.5, 4.0])),
    ),
    max_size=60,
)


class Journal:
    """Runs random events against a scheduler and checks every step it plans."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.now_s = 0.0
        self.sequences: dict[int, Sequence] = {}
        self.aborted: set[int] = set()
        self.outcomes: Counter[int] = Counter()

    def add(self, num_tokens: int, priority: int, alone: bool) -> None:
        item = sequence(len(self.sequences), num_tokens, priority=priority, arrival_s=self.now_s, alone=alone)
        self.sequences[item.seq_id] = item
        self.scheduler.add(item)

    def abort(self, seq_id: int) -> None:
        if seq_id in self.sequences and not self.outcomes[seq_id]:
            self.scheduler.abort([seq_id])
            self.aborted.add(seq_id)
            self.outcomes[seq_id] += 1

    def step(self, ending: str) -> None:
        waiting = {s for s in self.sequences if s not in self.aborted and not self.outcomes[s]}
        plan = self.scheduler.schedule(self.now_s)
        if plan is None:
            assert not waiting
            return
        self.check(plan, waiting)
        if ending == "abandon":
            self.scheduler.abandon(plan)
            return
        for item, wanted in zip(plan.sequences, self.scheduler.update(plan), strict=True):
            assert wanted
            self.outcomes[item.seq_id] += 1

    def check(self, plan: Plan, waiting: set[int]) -> None:
        assert plan.sequences
        assert set(ids(plan)) <= waiting
        assert plan.num_tokens == sum(item.num_tokens for item in plan.sequences) <= self.config.max_num_batched_tokens
        assert len(plan.sequences) <= self.config.max_num_seqs
        assert len(plan.sequences) == 1 or not any(item.alone for item in plan.sequences)
        in_order = [item for item in plan.sequences if not self.is_aged(item)]
        keys = [self.key(item) for item in in_order]
        assert keys == sorted(keys)
        if not any(self.is_aged(item) for item in plan.sequences):
            first = min((self.sequences[seq_id] for seq_id in waiting), key=self.key)
            assert plan.sequences[0] is first  # the one whose turn it is always runs

    def key(self, item: Sequence) -> tuple[int, int]:
        return (item.priority if self.config.policy == "priority" else 0, item.arrival)

    def is_aged(self, item: Sequence) -> bool:
        return self.config.policy == "priority" and self.now_s - item.arrival_s >= self.config.age_limit_s

    def drain(self) -> None:
        for _ in range(2 * len(self.sequences) + 2):
            self.step("update")
        assert all(self.outcomes[seq_id] == 1 for seq_id in self.sequences), "every sequence has exactly one outcome"
        assert not self.scheduler.has_work
        assert self.scheduler.waiting.num_tokens == 0


@settings(max_examples=500, deadline=None)
@given(config=CONFIGS, events=EVENTS)
def test_random_schedules(config: SchedulerConfig, events: list[tuple[object, ...]]) -> None:
    journal = Journal(config)
    for name, *arguments in events:
        if name == "tick":
            journal.now_s += arguments[0]  # type: ignore[operator]
        else:
            getattr(journal, str(name))(*arguments)
    journal.drain()


@settings(max_examples=200, deadline=None)
@given(
    config=CONFIGS,
    urgent=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    bulk=st.integers(1, 8),
)
def test_nothing_starves_beside_an_endless_urgent_stream(config: SchedulerConfig, urgent: list[int], bulk: int) -> None:
    s = Scheduler(config)
    s.add(sequence(0, bulk, priority=100))
    now_s, next_id = 0.0, 1
    for _ in range(200):
        now_s += 1.0
        for num_tokens in urgent[: config.max_num_seqs]:
            s.add(sequence(next_id, num_tokens, arrival_s=now_s))
            next_id += 1
        if 0 in step(s, now_s):
            break
        for _ in range(3):  # enough service for the urgent ones, so that only order decides
            if 0 in step(s, now_s):
                return
        if config.age_limit_s > 1e6:
            return  # ageing is off: strict priority may starve
    assert 0 not in s.waiting


@settings(max_examples=200, deadline=None)
@given(config=CONFIGS, sizes=st.lists(st.integers(1, 8), min_size=2, max_size=30))
def test_equal_priority_is_overtaken_only_while_it_does_not_fit(config: SchedulerConfig, sizes: list[int]) -> None:
    s = Scheduler(config)
    for number, num_tokens in enumerate(sizes):
        s.add(sequence(number, num_tokens))
    while (plan := s.schedule(0.0)) is not None:
        served = ids(plan)
        left = set(s.waiting._members)
        for seq_id in left:
            before = sum(sizes[other] for other in served if other < seq_id)
            overtaken = any(other > seq_id for other in served)
            assert not overtaken or before + sizes[seq_id] > config.max_num_batched_tokens
        s.update(plan)
