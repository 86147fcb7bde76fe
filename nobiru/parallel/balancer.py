"""When experts are moved, and in which stages, so that ranks get equal shares of the load.

Owns the window of measured loads, the decision that a better placement is worth its moves, and the stages that lead
there. Pure: told of steps, asked for the next stage; no clock, no tensors. Does not know how weights travel or when
ranks switch their tables. A search takes seconds for large models, so it is handed out as a function that may be called
anywhere.

A *stage* changes one layer. Its moves fill slots that are empty in the placement that serves; when they are done, and
their checksums right, all ranks switch to the stage's placement, in which the new replicas serve and slots that are
not needed any more are empty. So a slot is written only after every rank serves with a placement that does not use it.

Legend: L MoE layers, E logical experts, R ranks, S slots of a layer and rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nobiru.errors import ConfigError
from nobiru.parallel.placement import EMPTY, Move, Placement, balancedness, moves
from nobiru.parallel.rebalance import rebalance


@dataclass(frozen=True, kw_only=True)
class BalancerConfig:
    """Every `interval_steps` steps, if the balancedness over the last `window_steps` is below `good_balancedness`,
    at most `max_moves` experts are given new places, at most `max_stage_moves` in one stage (what is in transfer at a
    time is that many times an expert's bytes). A move has to lower a layer's largest load by the share `move_price`.
    Each layer may have `num_redundant` replicas beyond one for each expert; None: as many as it has.
    """

    window_steps: int
    interval_steps: int
    good_balancedness: float = 0.95
    max_moves: int = 256
    max_stage_moves: int = 4
    move_price: float = 0.002
    num_redundant: int | None = None


@dataclass(frozen=True, kw_only=True)
class Stage:
    """From `before` to `after`, placements that differ in `layer` only: `moves` first, which may be none."""

    layer: int
    before: Placement
    moves: tuple[Move, ...]
    after: Placement


class LoadWindow:
    """The load of each expert over the last steps, [L, E]; the window's edge is exact to a sixteenth of its length."""

    NUM_PIECES = 16

    def __init__(self, num_layers: int, num_experts: int, num_steps: int) -> None:
        self.loads = np.zeros((num_layers, num_experts), dtype=np.int64)
        self.num_steps = 0
        self._max_steps = num_steps
        self._piece_steps = -(-num_steps // self.NUM_PIECES)
        self._pieces: deque[tuple[int, NDArray[np.int64]]] = deque()

    def add(self, loads: NDArray[Any], num_steps: int = 1) -> None:
        """Tokens routed to each expert in the next `num_steps` steps, [L, E], of all ranks together."""
        if self._pieces and self._pieces[-1][0] + num_steps <= self._piece_steps:
            steps, piece = self._pieces.pop()
            self._pieces.append((steps + num_steps, piece + loads))
        else:
            self._pieces.append((num_steps, np.array(loads, dtype=np.int64)))
        self.loads += loads
        self.num_steps += num_steps
        while self.num_steps - self._pieces[0][0] >= self._max_steps:
            steps, piece = self._pieces.popleft()
            self.num_steps -= steps
            self.loads -= piece


Search = Callable[[], Sequence[Stage]]


class Balancer:
    """Told of every step by `observe`; `next_stage` says what to do now, again and again until its `after` serves. When
    there is nothing to do, `search` may have something to compute, whose result is `follow`ed.
    """

    def __init__(self, config: BalancerConfig, *, num_layers: int, num_experts: int) -> None:
        self.window = LoadWindow(num_layers, num_experts, config.window_steps)
        self.num_rebalances = 0
        self._config = config
        self._num_steps = 0
        self._stages: deque[Stage] = deque()

    def observe(self, loads: NDArray[Any], num_steps: int = 1) -> None:
        """Tokens routed to each expert in the last `num_steps` steps, [L, E], of all ranks together."""
        self.window.add(loads, num_steps)
        self._num_steps += num_steps

    def next_stage(self, placement: Placement) -> Stage | None:
        """The stage that leads on from `placement`, which serves now; None without a plan.

        A plan begun is followed to its end, unless somebody else changed the placement.
        """
        if self._stages and placement == self._stages[0].after:
            self._stages.popleft()
        if self._stages and placement != self._stages[0].before:
            self._stages.clear()
        return self._stages[0] if self._stages else None

    def search(self, placement: Placement) -> Search | None:
        """What finds a plan that leads on from `placement`; None if it is good enough, or it is not time.

        The function is pure, and has all it needs: it may be called in a thread.
        """
        if self._num_steps < self._config.interval_steps:
            return None
        self._num_steps = 0
        loads = self.window.loads.copy()
        if balancedness(placement, loads) >= self._config.good_balancedness:
            return None
        return partial(_plan, placement, loads, self._config)

    def follow(self, plan: Sequence[Stage], placement: Placement) -> None:
        """Begin what a search has found, which may be nothing, or begin elsewhere than at `placement`, which serves."""
        if plan and plan[0].before == placement:
            self._stages = deque(plan)
            self.num_rebalances += 1

    def abandon(self) -> None:
        """Forget the plan: a transfer failed, or the membership is about to change."""
        self._stages.clear()


def _plan(placement: Placement, loads: NDArray[Any], config: BalancerConfig) -> Sequence[Stage]:
    target = rebalance(
        placement,
        loads,
        max_moves=config.max_moves,
        num_redundant=config.num_redundant,
        move_price=config.move_price,
    )
    return list(stages(placement, target, max_moves=config.max_stage_moves))


def stages(current: Placement, target: Placement, *, max_moves: int) -> Iterator[Stage]:
    """From one placement to another, layer by layer, with at most `max_moves` moves in a stage.

    Where experts have to change places and nothing is free, one waits in a slot that stays empty otherwise, or in that
    of a redundant replica, which is copied back at the end. `ConfigError` when a layer has neither.
    """
    if max_moves < 1:
        raise ConfigError(f"max_moves is {max_moves}; a stage needs at least 1")
    target.validate()
    for layer in np.flatnonzero((current.slots != target.slots).any(axis=(1, 2))).tolist():
        while not np.array_equal(current.slots[layer], target.slots[layer]):
            for copies, after_RS in _advance(current.slots[layer], target.slots[layer], max_moves, layer):
                todo = moves(current, _with_layer(current, layer, _filled(current.slots[layer], copies)))
                after = _with_layer(current, layer, after_RS)
                yield Stage(layer=layer, before=current, moves=tuple(todo), after=after)
                current = after


Copies = list[tuple[int, int, int]]  # (rank, slot, expert)


def _advance(
    current_RS: NDArray[np.int64], target_RS: NDArray[np.int64], max_moves: int, layer: int
) -> list[tuple[Copies, NDArray[np.int64]]]:
    """The next stages of a layer: what to copy into empty slots, and what the slots hold afterwards."""
    waiting = np.argwhere((current_RS == EMPTY) & (target_RS != EMPTY)).tolist()
    copies = [(rank, slot, int(target_RS[rank, slot])) for rank, slot in waiting[:max_moves]]
    after_RS = _without_unneeded(current_RS, target_RS, copies)
    if copies or not np.array_equal(after_RS, current_RS):
        return [(copies, after_RS)]
    # What is missing has to go where experts sit that are nowhere else. The first of them gives way: to an empty slot,
    # of its own rank if there is one, or to that of a redundant replica.
    rank, slot = np.argwhere((current_RS != target_RS) & (target_RS != EMPTY))[0].tolist()
    expert = int(current_RS[rank, slot])
    if (empty := np.argwhere(current_RS == EMPTY)).size:
        place = min(empty.tolist(), key=lambda place: (place[0] != rank, place))
        copies = [(place[0], place[1], expert)]
        return [(copies, _without_unneeded(current_RS, target_RS, copies))]
    redundant = np.argwhere(np.bincount(current_RS.ravel())[current_RS] > 1)
    if not redundant.size:
        raise ConfigError(f"MoE layer {layer} has neither an empty slot nor a redundant expert; no expert can move")
    place = redundant[0].tolist()
    vacated_RS = _filled(current_RS, [(place[0], place[1], EMPTY)])
    copies = [(place[0], place[1], expert)]
    return [([], vacated_RS), (copies, _without_unneeded(vacated_RS, target_RS, copies))]


def _without_unneeded(slots_RS: NDArray[np.int64], target_RS: NDArray[np.int64], copies: Copies) -> NDArray[np.int64]:
    """After `copies`: slots that hold what the target has not there are emptied, if the expert is elsewhere too.

    Slots that others wait for come first.
    """
    after_RS = _filled(slots_RS, copies)
    counts = np.bincount(after_RS[after_RS != EMPTY])
    wrong = np.argwhere((slots_RS != EMPTY) & (slots_RS != target_RS)).tolist()
    for rank, slot in sorted(wrong, key=lambda place: (target_RS[place[0], place[1]] == EMPTY, place)):
        expert = after_RS[rank, slot]
        if counts[expert] > 1:
            counts[expert] -= 1
            after_RS[rank, slot] = EMPTY
    return after_RS


def _filled(slots_RS: NDArray[np.int64], copies: Copies) -> NDArray[np.int64]:
    filled_RS = slots_RS.copy()
    for rank, slot, expert in copies:
        filled_RS[rank, slot] = expert
    return filled_RS


def _with_layer(placement: Placement, layer: int, slots_RS: NDArray[np.int64]) -> Placement:
    slots = placement.slots.copy()
    slots[layer] = slots_RS
    return Placement(slots=slots, num_experts=placement.num_experts)
