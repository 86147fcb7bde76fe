"""Looking for a placement that spreads a measured load better, and that few moves lead to.

Owns the search. Knows nothing of when it is worth while (`nobiru.parallel.balancer`) and of how weights travel. Pure;
the same arguments give the same plan on the same machine. Sums of floating-point numbers may round differently
elsewhere, so one process decides and tells the others.

For each layer, the worst balanced first, two plans compete:

* *From here*: local search. Of all single changes that touch the busiest rank — move an expert away, exchange it for
  one of another rank, give it one more replica, at the expense of a redundant one of any other expert if the number of
  replicas is used up — the one that lowers the largest load most, until none does.
* *From scratch*: replicas by need, then packed largest share first onto the least loaded rank with room (Graham's LPT
  rule, R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969). The two levels, replication and packing, are
  those of DeepSeek's Expert Parallelism Load Balancer (github.com/deepseek-ai/EPLB). The result is dealt to the ranks
  that hold most of it already, and improved by the same local search.

Ranks of one machine and of several are treated alike. What a search costs is limited: for all layers together it takes
so many steps at most, and of very many replicas that could be added or given up a step tries the most promising ones.

Legend: E logical experts, R ranks, A additions, D removals.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nobiru.errors import ConfigError
from nobiru.parallel.placement import (
    EMPTY,
    Placement,
    layer_balancedness,
    max_load_bound,
    replica_counts,
)

Holds = NDArray[np.bool_]
_EQUAL = 1e-9  # loads closer than this, relatively, are the same
# Of one step, the additions and removals that are tried together.
_MAX_ADDITIONS, _MAX_REMOVALS = 64, 64


def rebalance(
    placement: Placement,
    loads: NDArray[Any],
    *,
    max_moves: int,
    num_redundant: int | None = None,
    move_price: float = _EQUAL,
    max_steps: int = 2048,
) -> Placement:
    """A placement under which the busiest rank of no layer has more of `loads` [L, E] than under the current one.

    At most `max_moves` experts lie where they did not; every expert keeps a replica, and the others stay in their
    slots. A layer keeps the number of replicas it has; with `num_redundant` it may get as many beyond one for each
    expert. A plan is worth a move more if that lowers the largest load by the share `move_price`. A layer without any
    free slot and without a redundant replica stays as it is, because nothing could be copied anywhere. The local search
    takes `max_steps` at most, so the time is bounded: seconds for 60 layers of 256 experts on 32 ranks.
    """
    placement.validate()
    loads = np.asarray(loads, dtype=np.float64)
    expected = (placement.num_layers, placement.num_experts)
    if loads.shape != expected or not np.isfinite(loads).all() or (loads < 0).any():
        raise ConfigError(f"loads must be {list(expected)} numbers of at least 0, not an array {list(loads.shape)}")
    held = placement.held() > 0
    slots = placement.slots.copy()
    steps = iter(range(max_steps))
    for layer in np.argsort(layer_balancedness(placement, loads), kind="stable").tolist():
        num_replicas = int(placement.num_replicas[layer])
        is_stuck = num_replicas == placement.num_experts == placement.num_ranks * placement.slot_capacity
        if max_moves > 0 and not is_stuck and loads[layer].any():
            wanted = num_replicas if num_redundant is None else placement.num_experts + num_redundant
            search = _Search(
                before=held[layer],
                weights=loads[layer],
                slot_capacity=placement.slot_capacity,
                max_replicas=max(num_replicas, wanted),
                max_moves=max_moves,
                steps=steps,
            )
            found = search.best(move_price)
            max_moves -= search.num_moves(found)
            slots[layer] = _settle(slots[layer], found)
    return Placement(slots=slots, num_experts=placement.num_experts)


def _settle(slots_RS: NDArray[np.int64], holds_RE: Holds) -> NDArray[np.int64]:
    """Give experts their slots: those that stay keep theirs, newcomers take free ones first, then given-up ones."""
    settled = slots_RS.copy()
    for rank, holds_E in enumerate(holds_RE):
        old = slots_RS[rank]
        given_up = (old != EMPTY) & ~holds_E[old]
        places = np.concatenate([np.flatnonzero(old == EMPTY), np.flatnonzero(given_up)])
        settled[rank, given_up] = EMPTY
        newcomers = np.setdiff1d(np.flatnonzero(holds_E), old)
        settled[rank, places[: len(newcomers)]] = newcomers
    return settled


@dataclass(frozen=True, kw_only=True)
class _Search:
    """One layer: `before` [R, E] says which rank holds which expert now, `weights` [E] are the experts' loads. `steps`
    are those that may still be taken."""

    before: Holds
    weights: NDArray[np.float64]
    slot_capacity: int
    max_replicas: int
    max_moves: int
    steps: Iterator[int]

    def best(self, price: float) -> Holds:
        """Of all plans found, the one with the smallest largest load, each move making it dearer by `price`."""
        plans = self._improved(self.before)
        if (fresh := _deal(self._packed(), self.before)) is not None and self.num_moves(fresh) <= self.max_moves:
            plans += self._improved(fresh)
        return min(plans, key=lambda holds: float(self._loads(holds).max()) * (1 + price * self.num_moves(holds)))

    def num_moves(self, holds: Holds) -> int:
        return int(np.count_nonzero(holds & ~self.before))

    def _loads(self, holds: Holds) -> NDArray[np.float64]:
        loads: NDArray[np.float64] = holds @ (self.weights / holds.sum(axis=0))
        return loads

    def _improved(self, start: Holds) -> list[Holds]:
        """`start`, and what each step of the local search makes of it."""
        bound = max_load_bound(
            self.weights,
            num_ranks=len(start),
            slot_capacity=self.slot_capacity,
            num_redundant=self.max_replicas - len(self.weights),
        )
        plans = [start]
        while self._loads(plans[-1]).max() > bound * (1 + _EQUAL) and next(self.steps, None) is not None:
            if (better := self._step(plans[-1])) is None:
                break
            plans.append(better)
        return plans

    def _step(self, holds: Holds) -> Holds | None:
        """The best single change that lowers the largest load, or, at the same largest load, the sum of squares."""
        loads = self._loads(holds)
        found = [self._exchange(holds, loads), self._replicate(holds, loads)]
        better = [candidate for candidate in found if candidate is not None]
        if not better:
            return None
        scores = [(float((at := self._loads(each)).max()), float(at @ at)) for each in better]
        best = min(range(len(better)), key=lambda number: scores[number])
        largest, squares = float(loads.max()), float(loads @ loads)
        lowers = scores[best][0] < largest * (1 - _EQUAL)
        evens = scores[best][0] <= largest and scores[best][1] < squares * (1 - _EQUAL)
        return better[best] if lowers or evens else None

    def _exchange(self, holds: Holds, loads: NDArray[np.float64]) -> Holds | None:
        """An expert of the busiest rank goes to another rank, for nothing or for one of that rank's."""
        busiest = int(np.argmax(loads))
        share = self.weights / holds.sum(axis=0)
        gone = np.flatnonzero(holds[busiest])
        # What comes back is (rank, expert), the last column standing for "nothing", possible where there is room.
        rank, back = np.nonzero(np.column_stack([holds & ~holds[busiest], holds.sum(axis=1) < self.slot_capacity]))
        back_share = np.append(share, 0.0)[back]
        delta = share[gone][:, None] - back_share[None, :]
        allowed = ~holds[rank][:, gone].T & (rank != busiest)[None, :]
        moved = np.column_stack([~self.before, np.zeros(len(holds), dtype=np.bool_)]).astype(np.int64)
        cost = moved[rank][:, gone].T - moved[busiest, gone][:, None] + moved[busiest, back] - moved[rank, back]
        allowed &= (cost <= self.max_moves - self.num_moves(holds)) & (delta > 0)
        if not allowed.any():
            return None
        others = self._largest_beside(loads, busiest)[rank]
        largest = np.maximum(np.maximum(loads[busiest] - delta, loads[rank][None, :] + delta), others[None, :])
        squares = -2 * delta * (loads[busiest] - loads[rank][None, :] - delta)
        first, second = np.unravel_index(_pick(largest, squares, cost, allowed), allowed.shape)
        changed = holds.copy()
        changed[busiest, gone[first]], changed[rank[second], gone[first]] = False, True
        if back[second] < len(share):
            changed[rank[second], back[second]], changed[busiest, back[second]] = False, True
        return changed

    def _replicate(self, holds: Holds, loads: NDArray[np.float64]) -> Holds | None:
        """An expert of the busiest rank gets a replica elsewhere, in a free slot or in place of a redundant one."""
        busiest = int(np.argmax(loads))
        counts = holds.sum(axis=0)
        add_rank, add = np.nonzero(~holds & holds[busiest])
        drop_rank, drop = np.nonzero(holds & (counts > 1))
        if not len(add):
            return None
        # Promising: what the busiest rank is relieved of most, by idle ranks; what others have to take over least.
        relief = self.weights[add] / (counts[add] + 1) / counts[add]
        promising = np.lexsort((loads[add_rank], -relief))[:_MAX_ADDITIONS]
        add_rank, add = add_rank[promising], add[promising]
        cheapest = np.argsort(self.weights[drop] / counts[drop], kind="stable")[:_MAX_REMOVALS]
        drop_rank, drop = drop_rank[cheapest], drop[cheapest]
        # The last removal is none at all, which needs one replica fewer than allowed.
        by_drop = np.zeros((len(drop) + 1, len(holds)))
        by_drop[:-1] = holds[:, drop].T * (self.weights[drop] / (counts[drop] - 1) / counts[drop])[:, None]
        by_drop[np.arange(len(drop)), drop_rank] = -(self.weights / counts)[drop]
        by_add = holds[:, add].T * -(self.weights[add] / (counts[add] + 1) / counts[add])[:, None]
        by_add[np.arange(len(add)), add_rank] = self.weights[add] / (counts[add] + 1)
        drop_rank, drop = np.append(drop_rank, -1), np.append(drop, -1)
        has_room = holds.sum(axis=1) < self.slot_capacity
        allowed = (add[:, None] != drop) & (has_room[add_rank][:, None] | (add_rank[:, None] == drop_rank))
        allowed[:, -1] &= int(counts.sum()) < self.max_replicas
        gives_back = np.append(~self.before[drop_rank[:-1], drop[:-1]], False)
        cost = (~self.before[add_rank, add]).astype(int)[:, None] - gives_back.astype(int)
        allowed &= cost <= self.max_moves - self.num_moves(holds)
        if not allowed.any():
            return None
        after = loads + by_add[:, None, :] + by_drop[None, :, :]
        first, second = np.unravel_index(_pick(after.max(-1), (after * after).sum(-1), cost, allowed), allowed.shape)
        changed = holds.copy()
        changed[add_rank[first], add[first]] = True
        if drop[second] >= 0:
            changed[drop_rank[second], drop[second]] = False
        return changed

    @staticmethod
    def _largest_beside(loads: NDArray[np.float64], busiest: int) -> NDArray[np.float64]:
        """For each rank, the largest load that neither it nor the busiest one has, [R]."""
        rest = np.delete(loads, busiest)
        if len(rest) < 2:
            return np.zeros(len(loads))
        second, first = np.sort(rest)[-2:]
        beside: NDArray[np.float64] = np.where((loads == first) & (np.count_nonzero(rest == first) == 1), second, first)
        return beside

    def _packed(self) -> Holds | None:
        """Experts and their replicas packed from scratch; None if a rank with room cannot be found for one of them."""
        num_ranks = len(self.before)
        counts = replica_counts(
            self.weights, num_redundant=self.max_replicas - len(self.weights), max_replicas=num_ranks
        )
        share = self.weights / counts
        holds = np.zeros_like(self.before)
        loads, sizes = np.zeros(num_ranks), np.zeros(num_ranks, dtype=np.int64)
        for expert in np.argsort(-share, kind="stable"):
            fits = np.flatnonzero(sizes < self.slot_capacity)
            chosen = fits[np.lexsort((sizes[fits], loads[fits]))][: counts[expert]]
            if not len(chosen):
                return None
            holds[chosen, expert] = True
            loads[chosen] += self.weights[expert] / len(chosen)
            sizes[chosen] += 1
        return holds


def _pick(largest: NDArray[np.float64], squares: NDArray[np.float64], cost: NDArray[np.int64], allowed: Holds) -> int:
    """The flat index of the allowed change with the smallest largest load; then sum of squares, cost, position."""
    largest = np.where(allowed, largest, np.inf)
    tied = np.flatnonzero(largest <= largest.min() * (1 + _EQUAL))
    tied = tied[allowed.flat[tied]]
    return int(tied[np.lexsort((cost.flat[tied], squares.flat[tied]))[0]])


def _deal(packed: Holds | None, before: Holds) -> Holds | None:
    """The same sets of experts, each given to the rank that holds most of it already, largest overlap first."""
    if packed is None:
        return None
    overlap = packed.astype(np.int64) @ before.T.astype(np.int64)
    dealt = np.zeros_like(packed)
    for _ in range(len(packed)):
        group, rank = np.unravel_index(int(np.argmax(overlap)), overlap.shape)
        dealt[rank] = packed[group]
        overlap[group, :] = -1
        overlap[:, rank] = -1
    return dealt
