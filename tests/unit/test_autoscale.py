"""The autoscaler's policy: what always holds, whatever is observed, and how it does on traces of requests."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
from autoscale_simulation import Run, simulate, steady, trace
from hypothesis import given, settings
from hypothesis import strategies as st

from nobiru.config import AutoscaleConfig
from nobiru.elastic.autoscale import MAX_BACKOFF_S, MAX_GROWTH, MAX_LOAD, Decision, Observation, State, Usage, decide

QUICK = {"up_after_s": 1.0, "down_after_s": 5.0, "up_cooldown_s": 3.0, "down_cooldown_s": 6.0}


def config_of(**options: Any) -> AutoscaleConfig:
    return AutoscaleConfig(**{"min_size": 1, "max_size": 8, **options})


def seen(
    now_s: float,
    wait_s: float,
    *,
    size: int = 2,
    tokens: int = 0,
    compute_s: float = 0.0,
    occupancy: float = 0.0,
    changing: bool = False,
) -> Observation:
    ranks = Usage(size=size, is_changing=changing, num_served_tokens=tokens, compute_s=compute_s, occupancy=occupancy)
    return Observation(now_s=now_s, wait_s=wait_s, ranks=ranks)


def feed(config: AutoscaleConfig, *observations: Observation, state: State | None = None) -> tuple[State, Decision]:
    state, decision = state or State(), None
    for each in observations:
        state, decision = decide(config, state, each)
    assert decision is not None
    return state, decision


# ---- single decisions ------------------------------------------------------------------------------------------------


def settled(config: AutoscaleConfig, size: int = 2) -> State:
    """All cool-downs of the start are over at 0 s, and nothing is known of the wait."""
    return dataclasses.replace(feed(config, seen(-1e4, 0.0, size=size))[0], episode=None)


@pytest.mark.parametrize(
    ("wait_s", "size", "wanted"),
    [(2.1, 2, 3), (3.0, 2, 3), (4.0, 2, 4), (6.1, 2, 7), (100.0, 2, 8), (100.0, 1, 4), (2.1, 7, 8), (9.0, 8, 8)],
)
def test_it_grows_to_what_the_wait_asks_for(wait_s: float, size: int, wanted: int) -> None:
    config = config_of()
    state, decision = feed(config, seen(0.0, wait_s, size=size), state=settled(config, size))
    assert decision.action == "hold", "not at once"
    _, decision = decide(config, state, seen(2.0, wait_s, size=size))
    assert decision.size == wanted
    assert f"the wait, {wait_s:.2f} s, is above target_wait_s = 2 for 2.0 s" in decision.reason
    assert decision.numbers["estimated_wait_s"] == wait_s


def test_a_wait_that_falls_by_itself_asks_for_nothing() -> None:
    config = config_of()
    state, _ = feed(config, seen(0.0, 10.0), state=settled(config))
    state, decision = decide(config, state, seen(2.0, 8.0))  # at this pace above the target for six seconds more
    assert (decision.size, "falls" in decision.reason) == (2, True)
    state, decision = decide(config, state, seen(4.0, 7.9))  # it did not go on
    assert decision.size == 8


def test_a_short_blip_asks_for_nothing() -> None:
    config = config_of()
    state = settled(config)
    for second in range(100):
        state, decision = decide(config, state, seen(float(second), 50.0 if second % 2 else 0.1))
        assert decision.action == "hold"


@pytest.mark.parametrize(
    ("size", "load", "wanted"), [(8, 0.0, 4), (8, 0.3, 4), (8, 0.5, 6), (8, 0.65, 8), (3, 0.1, 2), (2, 0.35, 1)]
)
def test_it_shrinks_to_what_carries_the_load(size: int, load: float, wanted: int) -> None:
    config = config_of()
    state, _ = feed(config, seen(0.0, 0.0, size=size), state=settled(config, size))
    _, decision = decide(config, state, seen(59.0, 0.0, size=size, compute_s=59 * load * size))
    assert decision.action == "hold"
    _, decision = decide(config, state, seen(60.0, 0.0, size=size, compute_s=60 * load * size))
    assert decision.size == wanted
    assert decision.numbers["load"] == pytest.approx(load)


def test_busy_ranks_may_still_have_room() -> None:
    """A language model's ranks are always busy; what they served when they were saturated tells more."""
    config = config_of()
    state, _ = feed(
        config,
        seen(0.0, 5.0, size=8),
        seen(10.0, 5.0, size=8, tokens=80_000, compute_s=80.0),  # 1,000 tokens/s each
        seen(11.0, 0.0, size=8, tokens=80_000, compute_s=88.0),
        state=settled(config, 8),
    )
    assert state.rank_tokens_per_s == 1000
    later = seen(71.0, 0.0, size=8, tokens=80_000 + 60 * 800, compute_s=88.0 + 60 * 8)
    _, decision = decide(config, state, later)
    assert (decision.size, decision.numbers["load"]) == (4, 0.1)
    crowded = dataclasses.replace(later, ranks=dataclasses.replace(later.ranks, occupancy=0.8))
    _, decision = decide(config, state, crowded)
    assert (decision.size, decision.numbers["load"]) == (8, 0.8)


def test_sizes_out_of_bounds_come_back_after_the_cool_down() -> None:
    config = config_of(min_size=2, max_size=4)
    for size, wanted, cooldown_s in ((1, 2, 10.0), (7, 4, 60.0)):
        state, decision = feed(config, seen(0.0, 0.0, size=size))
        assert decision.action == "hold"
        assert decide(config, state, seen(cooldown_s - 0.1, 0.0, size=size))[1].action == "hold"
        _, decision = decide(config, state, seen(cooldown_s, 0.0, size=size))
        assert decision.size == wanted


def test_a_users_size_is_where_it_goes_on_from() -> None:
    config = config_of()
    state, _ = feed(config, seen(0.0, 50.0), seen(1.0, 50.0), state=settled(config))
    state, decision = decide(config, state, seen(1.5, 50.0, changing=True))
    assert decision.action == "hold"
    state, decision = decide(config, state, seen(5.0, 50.0, size=3))
    assert (state.size, state.num_undone, decision.action) == (3, 0, "hold")
    for now_s in (7.0, 10.0, 14.9):
        state, decision = decide(config, state, seen(now_s, 50.0, size=3))
        assert decision.action == "hold", "the user's size stands for a cool-down"
    assert decide(config, state, seen(15.0, 50.0, size=3))[1].size == 8


def test_what_was_undone_is_tried_again_later_and_later() -> None:
    run = simulate(steady(100, 6000), config_of(), start_s=1.0, is_undone=lambda number: True)
    assert set(run.sizes) == {1}
    starts = [second for second, _, _ in run.changes]
    pauses = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert pauses[:3] == pytest.approx([21, 41, 81], abs=1)
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(MAX_BACKOFF_S + 1, abs=1)
    run = simulate(steady(100, 300), config_of(), start_s=1.0, is_undone=lambda number: number <= 2)
    assert run.sizes[-1] > 4


def test_a_dry_run_only_tells() -> None:
    run = simulate(steady(100, 60), config_of(dry_run=True))
    assert run.changes == []
    told = [number * 0.5 for number, each in enumerate(run.decisions) if each.action != "hold"]
    assert len(told) > 3
    assert min(later - earlier for earlier, later in itertools.pairwise(told)) >= 10


# ---- what always holds -----------------------------------------------------------------------------------------------


@st.composite
def configs(draw: st.DrawFn, **fixed: Any) -> AutoscaleConfig:
    low = draw(st.integers(1, 5))
    seconds = st.sampled_from([0.0, 0.5, 1.0, 3.0, 10.0])
    drawn = {
        "min_size": low,
        "max_size": draw(st.integers(low, 12)),
        "target_wait_s": draw(st.sampled_from([0.1, 1.0, 2.0, 10.0])),
        "up_after_s": draw(seconds),
        "down_after_s": draw(st.sampled_from([0.0, 1.0, 10.0, 30.0])),
        "up_cooldown_s": draw(seconds),
        "down_cooldown_s": draw(seconds),
    }
    return AutoscaleConfig(**{**drawn, **fixed})


@dataclass(frozen=True)
class Look:
    """What a moment brings: how much the wait, the tokens and the time grow, and what becomes of an operation."""

    after_s: float
    wait_s: float
    tokens: int
    busy: float
    occupancy: float
    takes: int  # looks until an operation ends
    is_undone: bool
    other: int | None  # somebody else changes to this size


LOOKS = st.lists(
    st.builds(
        Look,
        after_s=st.sampled_from([0.5, 0.5, 1.0, 5.0, 40.0]),
        wait_s=st.one_of(st.just(0.0), st.floats(0, 40, allow_nan=False)),
        tokens=st.integers(0, 10_000),
        busy=st.floats(0, 1),
        occupancy=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
        takes=st.integers(0, 3),
        is_undone=st.booleans(),
        other=st.one_of(st.none(), st.none(), st.none(), st.integers(1, 14)),
    ),
    max_size=60,
)


@dataclass
class Played:
    now_s: float
    state: State
    observation: Observation
    decision: Decision
    changing: bool


def play(config: AutoscaleConfig, looks: list[Look]) -> list[Played]:
    """The policy in a world that answers as it likes."""
    state, size, wanted, left = State(), config.min_size, config.min_size, 0
    now_s, tokens, compute_s, is_undone = 0.0, 0, 0.0, False
    played = []
    for look in looks:
        now_s += look.after_s
        tokens += look.tokens
        compute_s += look.busy * size * look.after_s
        if wanted != size:
            left -= 1
            if left < 0:
                size = size if is_undone else wanted
                wanted = size
        elif look.other is not None:
            size = wanted = look.other
        now = seen(
            now_s,
            look.wait_s,
            size=size,
            tokens=tokens,
            compute_s=compute_s,
            occupancy=look.occupancy,
            changing=wanted != size,
        )
        before = state
        state, decision = decide(config, state, now)
        played.append(Played(now_s, before, now, decision, wanted != size))
        if decision.action != "hold":
            wanted, left, is_undone = decision.size, look.takes, look.is_undone
    return played


@settings(max_examples=300, deadline=None)
@given(configs(), LOOKS)
def test_bounds_hold_and_nothing_is_decided_while_ranks_change(config: AutoscaleConfig, looks: list[Look]) -> None:
    for each in play(config, looks):
        decision = each.decision
        assert decision.from_size == each.observation.ranks.size
        if each.changing:
            assert decision.action == "hold"
        if decision.action != "hold":
            assert config.min_size <= decision.size <= config.max_size
            if config.min_size <= decision.from_size <= config.max_size:
                assert math.ceil(decision.from_size / 2) <= decision.size <= decision.from_size * MAX_GROWTH
        assert decision.reason


@settings(max_examples=300, deadline=None)
@given(configs(), LOOKS)
def test_no_two_decisions_within_a_cool_down(config: AutoscaleConfig, looks: list[Look]) -> None:
    quiet_s = -math.inf  # since when nothing changes
    size = None
    for each in play(config, looks):
        if each.changing or each.observation.ranks.size != size:
            quiet_s = each.now_s
        size = each.observation.ranks.size
        if each.decision.action != "hold":
            cooldown_s = config.up_cooldown_s if each.decision.action == "grow" else config.down_cooldown_s
            assert each.now_s - quiet_s >= cooldown_s
            quiet_s = each.now_s


@settings(max_examples=300, deadline=None)
@given(configs(), LOOKS, st.floats(0, 60), st.floats(0, 1))
def test_a_longer_wait_or_a_higher_load_never_asks_for_fewer(
    config: AutoscaleConfig, looks: list[Look], more_s: float, more_load: float
) -> None:
    for each in play(config, looks):
        worse = [
            dataclasses.replace(each.observation, wait_s=each.observation.wait_s + more_s),
            dataclasses.replace(
                each.observation,
                ranks=dataclasses.replace(
                    each.observation.ranks, occupancy=each.observation.ranks.occupancy + more_load
                ),
            ),
        ]
        for observation in worse:
            assert decide(config, each.state, observation)[1].size >= each.decision.size


@settings(max_examples=100, deadline=None)
@given(
    configs(up_cooldown_s=5.0, down_cooldown_s=10.0, down_after_s=10.0, up_after_s=2.0),
    st.floats(0.0, 300.0),
    st.sampled_from([500.0, 2000.0, 8000.0]),
    st.sampled_from([0.5, 3.0, 20.0]),
    st.integers(1, 12),
)
def test_a_constant_load_finds_its_size_and_stays(
    config: AutoscaleConfig, requests_per_s: float, rank_tokens_per_s: float, start_s: float, size: int
) -> None:
    """No flapping: at most one turn from growing to shrinking, or back, and then nothing any more."""
    options: dict[str, Any] = {"rank_tokens_per_s": rank_tokens_per_s, "start_s": start_s, "size": size}
    run = simulate(steady(requests_per_s, 600), config, **options)
    assert run.num_turns <= 1
    needed = requests_per_s * 100 / rank_tokens_per_s
    final = run.sizes[-1]
    assert config.min_size <= final <= config.max_size
    if needed >= config.max_size:  # they never have any rest
        assert final == config.max_size
    elif needed < 0.95 * config.max_size:
        assert final >= needed
        assert run.waits[-1] <= config.target_wait_s, "enough under any load that can be carried"
        assert len({*run.sizes[-400:]}) == 1
        enough = max(config.min_size, math.ceil(needed / MAX_LOAD))
        assert final <= max(enough, needed / MAX_LOAD + 1), "and not many more"


@settings(max_examples=50, deadline=None)
@given(configs(down_after_s=10.0, down_cooldown_s=10.0), st.integers(1, 12))
def test_idle_ranks_go_down_to_the_least(config: AutoscaleConfig, size: int) -> None:
    run = simulate(steady(0, 200), config, size=size)
    assert run.sizes[-1] == max(config.min_size, 1)


# ---- traces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "start_s", "max_over", "max_changes", "max_turns", "max_ranks"),
    [  # so much of the time above the target, so many operations, so many ranks in the mean
        ("news_bursts", 3.0, 0.03, 16, 5, 3.0),
        ("news_bursts", 8.0, 0.05, 16, 5, 3.0),
        ("news_bursts", 25.0, 0.13, 20, 7, 3.5),
        ("daily_curve", 3.0, 0.01, 8, 1, 2.5),
        ("daily_curve", 8.0, 0.02, 8, 1, 2.5),
        ("daily_curve", 25.0, 0.04, 10, 1, 3.0),
        ("single_spike", 3.0, 0.03, 6, 1, 2.0),
        ("single_spike", 8.0, 0.03, 6, 1, 1.5),
        ("single_spike", 25.0, 0.05, 6, 1, 1.5),
        ("on_off", 3.0, 0.03, 14, 10, 4.0),
        ("on_off", 8.0, 0.05, 16, 10, 3.5),
        ("on_off", 25.0, 0.10, 16, 10, 4.5),
    ],
)
def test_traces(name: str, start_s: float, max_over: float, max_changes: int, max_turns: int, max_ranks: float) -> None:
    """Less rank time than the most that may serve; and, where starting does not take as long as a burst, fewer waits
    above the target than a fixed number of ranks has in as much rank time."""
    arrivals = trace(name)
    run = simulate(arrivals, config_of(), start_s=start_s)
    assert run.share_over_target <= max_over
    assert len(run.changes) <= max_changes
    assert run.num_turns <= max_turns
    assert run.rank_s <= max_ranks * len(arrivals)
    largest, as_much = fixed(name, 8), fixed(name, max(1, math.floor(run.rank_s / len(arrivals))))
    assert run.rank_s < 0.6 * largest.rank_s
    if start_s < 20 and name != "on_off":
        assert run.share_over_target < as_much.share_over_target
    assert run.num_served_tokens == pytest.approx(100 * sum(arrivals), rel=0.01), "all are served in the end"


def fixed(name: str, size: int) -> Run:
    return simulate(trace(name), None, size=size)


def test_a_slow_day_is_followed_better_than_by_any_fixed_number() -> None:
    run = simulate(trace("daily_curve"), config_of())
    fewest = next(size for size in range(1, 9) if fixed("daily_curve", size).share_over_target <= run.share_over_target)
    assert run.rank_s < 0.65 * fixed("daily_curve", fewest).rank_s
