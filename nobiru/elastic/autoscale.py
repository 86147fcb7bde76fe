"""When to change the number of ranks, by how long requests wait: a pure policy.

State and observation in, state and decision out; no clock and no I/O. `docs/operations.md` tells how to choose the
numbers, `nobiru.serving.autoscaler` looks at regular intervals and does what is decided.

The wait is about inversely proportional to the number of ranks, so from a wait above the target follows a size. A short
wait says nothing of how few ranks would do. For that the *load* is measured, over the whole time that the wait was
short: the share of what the ranks can do that is in use. It is the smaller one of two upper bounds, how busy they are
(small batches keep a rank as busy as large ones) and what they served against what as many ranks served when they were
last saturated; but at least the share of places for sequences and of KV blocks that is taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from nobiru.config import AutoscaleConfig

Level = Literal["low", "near", "high"]

# The wait that counts as low. One operation at most halves the number of ranks, which may double the wait.
LOW_SHARE = 0.5
# What the ranks that stay may be loaded with: requests do not come evenly.
MAX_LOAD = 0.7
MIN_BACKOFF_S = 5.0
MAX_BACKOFF_S = 600.0
# In one operation the ranks become at most so many times as many.
MAX_GROWTH = 4.0
# Growing again within so many times `down_after_s` shows that shrinking was wrong: `patience` doubles. Else it halves.
REGRET = 2
MAX_PATIENCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What the ranks are and what they have done.

    `num_served_tokens`, those that were queued and are computed, and `compute_s`, the seconds of all ranks' steps,
    count from the start of the server. `occupancy` is the share of places for sequences, or of KV blocks, that is
    taken; 0 for models that keep neither. `is_changing`: an operation runs, or is about to.
    """

    size: int
    is_changing: bool
    num_served_tokens: int
    compute_s: float
    occupancy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """`wait_s` is how long a request that comes now will wait, by estimate."""

    now_s: float
    wait_s: float
    ranks: Usage


@dataclass(frozen=True, slots=True)
class Episode:
    """A time during which the wait was at one level, with one number of ranks. It began with `first`."""

    level: Level
    first: Observation
    max_occupancy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What is remembered between two looks.

    `size` is that of the last look; `wanted` what was decided and has not been seen yet. No growth before `grow_at_s`,
    no shrinking before `shrink_at_s`. `rank_tokens_per_s` is what each rank served when they were last saturated.
    `num_undone` decisions in a row came to nothing. `patience` multiplies `down_after_s`; `shrunk_s` is when it shrank
    last, None if it has grown since.
    """

    size: int = 0
    wanted: int | None = None
    is_changing: bool = True
    episode: Episode | None = None
    grow_at_s: float = -math.inf
    shrink_at_s: float = -math.inf
    rank_tokens_per_s: float | None = None
    num_undone: int = 0
    patience: int = 1
    shrunk_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """To change to `size` ranks, or, if that is `from_size`, to leave them as they are; and why."""

    from_size: int
    size: int
    reason: str
    numbers: Mapping[str, float | None]

    @property
    def action(self) -> Literal["grow", "shrink", "hold"]:
        if self.size == self.from_size:
            return "hold"
        return "grow" if self.size > self.from_size else "shrink"


@dataclass(frozen=True, slots=True)
class _Verdict:
    """`is_judged`: the episode has been looked at as a whole; a new one begins, which what comes next is judged by."""

    size: int
    reason: str
    is_judged: bool = False


def decide(config: AutoscaleConfig, state: State, seen: Observation) -> tuple[State, Decision]:
    """What to do at this moment. Observations are given in their order, about one a second."""
    size = seen.ranks.size
    if seen.ranks.is_changing:
        state = replace(state, is_changing=True, episode=None)
        return state, Decision(
            from_size=size, size=size, reason="the ranks are changing", numbers=_numbers(state, seen)
        )
    if state.is_changing or state.wanted is not None or size != state.size:
        state = _settled(config, state, seen)
    state = _measured(config, _entered(config, state, seen), seen)
    verdict = _judge(config, state, seen)
    decision = Decision(from_size=size, size=verdict.size, reason=verdict.reason, numbers=_numbers(state, seen))
    if verdict.is_judged:
        state = _entered(config, replace(state, episode=None), seen)
    return _decided(config, state, seen, verdict.size), decision


def level_of(config: AutoscaleConfig, wait_s: float) -> Level:
    """On which side of the target a wait is."""
    if wait_s > config.target_wait_s:
        return "high"
    return "low" if wait_s <= LOW_SHARE * config.target_wait_s else "near"


# ---- what is remembered ----------------------------------------------------------------------------------------------


def _settled(config: AutoscaleConfig, state: State, seen: Observation) -> State:
    """An operation has ended, whoever's: cool down; and back off, if it was decided here and was undone."""
    size, now_s = seen.ranks.size, seen.now_s
    num_undone, backoff_s = (0 if size != state.size else state.num_undone), 0.0
    if state.wanted is not None and size != state.wanted:
        num_undone = state.num_undone + 1
        backoff_s = min(MAX_BACKOFF_S, max(config.up_cooldown_s, MIN_BACKOFF_S) * 2.0 ** min(num_undone, 16))
    return replace(
        state,
        size=size,
        wanted=None,
        is_changing=False,
        episode=None,
        grow_at_s=now_s + max(config.up_cooldown_s, backoff_s),
        shrink_at_s=now_s + max(config.down_cooldown_s, backoff_s),
        num_undone=num_undone,
    )


def _entered(config: AutoscaleConfig, state: State, seen: Observation) -> State:
    level, episode, occupancy = level_of(config, seen.wait_s), state.episode, seen.ranks.occupancy
    if episode is None or episode.level != level:
        return replace(state, episode=Episode(level, seen, occupancy))
    return replace(state, episode=replace(episode, max_occupancy=max(episode.max_occupancy, occupancy)))


def _measured(config: AutoscaleConfig, state: State, seen: Observation) -> State:
    """While requests wait too long, ranks do what they can."""
    assert state.episode is not None
    lasted_s = seen.now_s - state.episode.first.now_s
    num_tokens = seen.ranks.num_served_tokens - state.episode.first.ranks.num_served_tokens
    if state.episode.level != "high" or lasted_s <= 0 or lasted_s < config.up_after_s or num_tokens <= 0:
        return state
    return replace(state, rank_tokens_per_s=num_tokens / lasted_s / seen.ranks.size)


def _decided(config: AutoscaleConfig, state: State, seen: Observation, size: int) -> State:
    if size == seen.ranks.size:
        return state
    now_s = seen.now_s
    if config.dry_run:  # as if it had been done, and in no time
        grow_at_s, shrink_at_s = now_s + config.up_cooldown_s, now_s + config.down_cooldown_s
        return replace(state, episode=None, grow_at_s=grow_at_s, shrink_at_s=shrink_at_s)
    if size < seen.ranks.size:
        return replace(state, episode=None, wanted=size, shrunk_s=now_s)
    patience = state.patience
    if state.shrunk_s is not None:
        was_wrong = now_s - state.shrunk_s < REGRET * config.down_after_s
        patience = min(MAX_PATIENCE, 2 * patience) if was_wrong else max(1, patience // 2)
    return replace(state, episode=None, wanted=size, patience=patience, shrunk_s=None)


# ---- judging ---------------------------------------------------------------------------------------------------------


def _judge(config: AutoscaleConfig, state: State, seen: Observation) -> _Verdict:
    size, now_s = seen.ranks.size, seen.now_s
    assert state.episode is not None
    if size < config.min_size:
        if now_s < state.grow_at_s:
            return _Verdict(size, f"fewer than min = {config.min_size}, but it is too soon to grow")
        return _Verdict(config.min_size, f"fewer than min = {config.min_size}")
    if size > config.max_size:
        if now_s < state.shrink_at_s:
            return _Verdict(size, f"more than max = {config.max_size}, but it is too soon to shrink")
        return _Verdict(config.max_size, f"more than max = {config.max_size}")
    if state.episode.level == "near":
        return _Verdict(size, f"the wait, {seen.wait_s:.2f} s, is near target_wait_s = {config.target_wait_s:g}")
    return (_judge_high if state.episode.level == "high" else _judge_low)(config, state, seen, state.episode)


def _judge_high(config: AutoscaleConfig, state: State, seen: Observation, episode: Episode) -> _Verdict:
    size, now_s, wait_s, target_s = seen.ranks.size, seen.now_s, seen.wait_s, config.target_wait_s
    first = episode.first
    lasted_s = now_s - first.now_s
    why = f"the wait, {wait_s:.2f} s, is above target_wait_s = {target_s:g} for {lasted_s:.1f} s"
    if size >= config.max_size:
        return _Verdict(size, f"{why}, but max = {config.max_size} ranks serve")
    if lasted_s < config.up_after_s:
        return _Verdict(size, f"{why}, not yet for up_after_s = {config.up_after_s:g}")
    if now_s < state.grow_at_s:
        return _Verdict(size, f"{why}, but it is too soon to grow")
    if lasted_s > 0 and wait_s - (first.wait_s - wait_s) / lasted_s * config.up_cooldown_s <= target_s:
        return _Verdict(size, f"{why}, but falls, and at this pace will not for long", is_judged=True)
    wanted = max(size + 1, math.ceil(size * min(wait_s / target_s, MAX_GROWTH)))
    return _Verdict(min(wanted, config.max_size), why)


def _judge_low(config: AutoscaleConfig, state: State, seen: Observation, episode: Episode) -> _Verdict:
    size, now_s = seen.ranks.size, seen.now_s
    lasted_s, needed_s = now_s - episode.first.now_s, config.down_after_s * state.patience
    why = f"the wait, {seen.wait_s:.2f} s, is low for {lasted_s:.1f} s"
    if size <= config.min_size:
        return _Verdict(size, f"{why}, but no more than min = {config.min_size} ranks serve")
    if lasted_s < needed_s:
        return _Verdict(size, f"{why}, not yet for {needed_s:g} s")
    if now_s < state.shrink_at_s:
        return _Verdict(size, f"{why}, but it is too soon to shrink")
    load = _load(state, seen, episode)
    if load is None:
        return _Verdict(size, f"{why}, and the load is not known yet")
    enough = math.ceil(load * size / MAX_LOAD - 1e-9)
    wanted = max(config.min_size, math.ceil(size / 2), enough)
    if wanted >= size:
        return _Verdict(size, f"{why}, but the load, {load:.2f}, is too high for fewer ranks", is_judged=True)
    return _Verdict(wanted, f"{why}, and the load is {load:.2f}")


def _load(state: State, seen: Observation, episode: Episode) -> float | None:
    """The mean share of what the ranks can do that was in use during the episode; None when that begins now."""
    first = episode.first
    lasted_s = seen.now_s - first.now_s
    if lasted_s <= 0:
        return None
    load = (seen.ranks.compute_s - first.ranks.compute_s) / lasted_s / seen.ranks.size
    if state.rank_tokens_per_s is not None:
        num_tokens = seen.ranks.num_served_tokens - first.ranks.num_served_tokens
        load = min(load, num_tokens / lasted_s / seen.ranks.size / state.rank_tokens_per_s)
    return max(load, episode.max_occupancy)


def _numbers(state: State, seen: Observation) -> dict[str, float | None]:
    numbers: dict[str, float | None] = {"ranks": seen.ranks.size, "estimated_wait_s": round(seen.wait_s, 3)}
    load = None if state.episode is None else _load(state, seen, state.episode)
    numbers["load"] = None if load is None else round(load, 3)
    rate = state.rank_tokens_per_s
    numbers["rank_tokens_per_s"] = None if rate is None else round(rate, 1)
    return numbers
