"""Which expert lies in which slot of which rank: the value, how well it spreads a load, what changes between two.

Owns the vocabulary of placements and the proven limits of what a placement can reach. Pure: arrays of numbers in,
arrays of numbers out; no tensors, no processes, no clock. `nobiru.parallel.rebalance` looks for better placements.

A *slot* is a place for one expert's weights, at a fixed address on a rank. Rank r's slot s is the *physical slot*
r * S + s. A slot may be empty (-1). An expert may have several *replicas*, on different ranks; each gets an equal share
of the expert's tokens.

Legend: L MoE layers, E logical experts, R ranks, S slots of a layer and rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nobiru.errors import ConfigError

EMPTY = -1


@dataclass(frozen=True, eq=False, kw_only=True)
class Placement:
    """`slots` [L, R, S]: the logical expert in each slot, or -1. Read-only; every layer has `num_experts` experts."""

    slots: NDArray[np.int64]
    num_experts: int

    def __post_init__(self) -> None:
        slots = np.array(self.slots, dtype=np.int64)
        if slots.ndim != 3 or slots.size == 0:
            raise ConfigError(f"slots of a placement are [layers, ranks, slots], not {list(slots.shape)}")
        if slots.min() < EMPTY or slots.max() >= self.num_experts:
            raise ConfigError(
                f"slots of a placement hold -1 to {self.num_experts - 1}, not {slots.min()} to {slots.max()}"
            )
        slots.setflags(write=False)
        object.__setattr__(self, "slots", slots)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Placement):
            return NotImplemented
        return self.num_experts == other.num_experts and np.array_equal(self.slots, other.slots)

    def __hash__(self) -> int:
        return hash((self.num_experts, self.slots.shape, self.slots.tobytes()))

    @property
    def num_layers(self) -> int:
        return int(self.slots.shape[0])

    @property
    def num_ranks(self) -> int:
        return int(self.slots.shape[1])

    @property
    def slot_capacity(self) -> int:
        return int(self.slots.shape[2])

    @property
    def num_replicas(self) -> NDArray[np.int64]:
        """How many slots of each layer hold an expert, [L]."""
        counts: NDArray[np.int64] = np.count_nonzero(self.slots != EMPTY, axis=(1, 2))
        return counts

    def replicas(self, layer: int, expert: int) -> list[tuple[int, int]]:
        """Where the expert is: (rank, slot), in order."""
        return [(int(rank), int(slot)) for rank, slot in np.argwhere(self.slots[layer] == expert)]

    def held(self) -> NDArray[np.int64]:
        """How often each rank holds each expert, [L, R, E]."""
        counts = np.zeros((self.num_layers, self.num_ranks, self.num_experts), dtype=np.int64)
        layer, rank, slot = np.nonzero(self.slots != EMPTY)
        np.add.at(counts, (layer, rank, self.slots[layer, rank, slot]), 1)
        return counts

    def validate(self) -> None:
        """`ConfigError` unless every expert has a replica, and no rank holds an expert twice in a layer."""
        held = self.held()
        if (missing := np.argwhere(held.sum(axis=1) == 0)).size:
            layer, expert = missing[0]
            raise ConfigError(f"expert {expert} of MoE layer {layer} is in no slot of any rank")
        if (doubled := np.argwhere(held > 1)).size:
            layer, rank, expert = doubled[0]
            raise ConfigError(f"rank {rank} holds expert {expert} of MoE layer {layer} more than once")


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One expert's weights, copied from a slot that has them to one that will; the numbers of ranks are positions."""

    layer: int
    expert: int
    from_rank: int
    from_slot: int
    to_rank: int
    to_slot: int


def slot_capacity_for(*, num_experts: int, num_redundant: int, min_ranks: int) -> int:
    """The slots a layer needs on each rank while there are at least `min_ranks` of them."""
    return -(-(num_experts + num_redundant) // min_ranks)


def initial_placement(
    *, num_layers: int, num_experts: int, num_ranks: int, slot_capacity: int, num_redundant: int = 0
) -> Placement:
    """Experts in order, as many on each rank as on any other, give or take one; then replicas of the first ones.

    Which ranks hold one more changes from layer to layer, so memory is even. An expert has at most one replica on a
    rank: `num_redundant` beyond that stay away, and slots that are not needed stay empty. `ConfigError` when
    `slot_capacity` does not suffice.
    """
    num_redundant = min(num_redundant, num_experts * (num_ranks - 1))
    needed = slot_capacity_for(num_experts=num_experts, num_redundant=num_redundant, min_ranks=num_ranks)
    if slot_capacity < needed:
        raise ConfigError(
            f"slot_capacity is {slot_capacity}; {num_experts} experts and {num_redundant} redundant ones"
            f" on {num_ranks} ranks need at least {needed}"
        )
    slots = np.full((num_layers, num_ranks, slot_capacity), EMPTY, dtype=np.int64)
    for layer in range(num_layers):
        sizes = np.full(num_ranks, num_experts // num_ranks)
        sizes[: num_experts % num_ranks] += 1
        sizes = np.roll(sizes, layer)
        rank_of = np.repeat(np.arange(num_ranks), sizes)
        slots[layer, rank_of, np.arange(num_experts) - (np.cumsum(sizes) - sizes)[rank_of]] = np.arange(num_experts)
        for _ in range(num_redundant):
            _add_replica(slots[layer], sizes, num_experts)
    return Placement(slots=slots, num_experts=num_experts)


def _add_replica(slots_RS: NDArray[np.int64], sizes: NDArray[np.int64], num_experts: int) -> None:
    """Of the first of the experts with the fewest replicas that some rank has room for and lacks, on the emptiest such.

    `sizes` [R] counts the slots in use, which come first.
    """
    counts = np.bincount(slots_RS[slots_RS != EMPTY], minlength=num_experts)
    for expert in np.argsort(counts, kind="stable").tolist():
        fits = (slots_RS != expert).all(axis=1) & (sizes < slots_RS.shape[1])
        if fits.any():
            rank = int(np.argmin(np.where(fits, sizes, slots_RS.shape[1])))
            slots_RS[rank, sizes[rank]] = expert
            sizes[rank] += 1
            return


def moves(old: Placement, new: Placement) -> list[Move]:
    """What has to be copied before `new` can serve, layer by layer; an expert that stays in its slot is not moved.

    The source is a replica in `old`: on the same rank if there is one, else on the rank that has the fewest to send
    so far, the nearest of those.
    """
    num_sends = np.zeros(old.num_ranks, dtype=np.int64)
    found: list[Move] = []
    for layer, rank, slot in np.argwhere((new.slots != EMPTY) & (new.slots != old.slots)).tolist():
        expert = int(new.slots[layer, rank, slot])
        from_rank, from_slot = min(
            old.replicas(layer, expert),
            key=lambda source: (source[0] != rank, int(num_sends[source[0]]), abs(source[0] - rank), source),
        )
        num_sends[from_rank] += from_rank != rank
        found.append(
            Move(layer=layer, expert=expert, from_rank=from_rank, from_slot=from_slot, to_rank=rank, to_slot=slot)
        )
    return found


def rank_loads(placement: Placement, loads: NDArray[Any]) -> NDArray[np.float64]:
    """The load of each rank, [L, R], when each expert's load (`loads` [L, E]) is shared equally by its replicas."""
    layers, nowhere = np.arange(placement.num_layers), placement.num_experts
    # Behind the experts stands what is in empty slots: nothing.
    expert_LRS = np.where(placement.slots == EMPTY, nowhere, placement.slots)
    numbered = expert_LRS + layers[:, None, None] * (nowhere + 1)
    counts = np.bincount(numbered.ravel(), minlength=len(layers) * (nowhere + 1)).reshape(len(layers), -1)
    share = np.zeros(counts.shape)
    share[:, :nowhere] = np.asarray(loads, dtype=np.float64) / np.maximum(counts[:, :nowhere], 1)
    by_rank: NDArray[np.float64] = share[layers[:, None, None], expert_LRS].sum(axis=2)
    return by_rank


def layer_balancedness(placement: Placement, loads: NDArray[Any]) -> NDArray[np.float64]:
    """Mean load of the ranks over that of the busiest one, for each layer [L]; 1 is perfect, and what no load gives."""
    by_rank = rank_loads(placement, loads)
    busiest = by_rank.max(axis=1)
    spread: NDArray[np.float64] = np.divide(by_rank.mean(axis=1), busiest, out=np.ones_like(busiest), where=busiest > 0)
    return spread


def balancedness(placement: Placement, loads: NDArray[Any]) -> float:
    """The mean of `layer_balancedness`."""
    return float(layer_balancedness(placement, loads).mean())


def balancedness_bound(placement: Placement, loads: NDArray[Any]) -> NDArray[np.float64]:
    """What no placement with as many ranks, slots and replicas exceeds, for each layer [L] (see `max_load_bound`)."""
    bounds = np.ones(placement.num_layers)
    for layer, (weights, num_replicas) in enumerate(zip(loads, placement.num_replicas, strict=True)):
        if (total := float(np.sum(weights))) > 0:
            bound = max_load_bound(
                weights,
                num_ranks=placement.num_ranks,
                slot_capacity=placement.slot_capacity,
                num_redundant=int(num_replicas) - placement.num_experts,
            )
            bounds[layer] = total / placement.num_ranks / bound
    return bounds


def max_load_bound(weights: NDArray[Any], *, num_ranks: int, slot_capacity: int, num_redundant: int) -> float:
    """A load that the busiest rank has at least, whatever the placement; `weights` [E] are the experts' loads.

    The largest of four: the average; the hottest share, if replicas are given to experts where they lower it most
    (always to the expert with the largest share, which is optimal); by the pigeonhole principle the k + 1 lightest of
    the k * R + 1 heaviest experts that are certain to have one replica only, for every k; and where slots are so few
    that a rank must hold k experts, the heaviest beside the k - 1 lightest (without redundancy).
    """
    heaviest_first = np.sort(np.asarray(weights, dtype=np.float64))[::-1]
    num_redundant = max(num_redundant, 0)
    shares = heaviest_first / replica_counts(heaviest_first, num_redundant=num_redundant, max_replicas=num_ranks)
    bound = max(float(heaviest_first.sum()) / num_ranks, float(shares.max()))
    single = heaviest_first[num_redundant:]
    for count in range(1, (len(single) - 1) // num_ranks + 1):
        last = count * num_ranks
        bound = max(bound, float(single[last - count : last + 1].sum()))
    least = len(heaviest_first) - (num_ranks - 1) * slot_capacity
    if num_redundant == 0 and least > 1:
        bound = max(bound, float(heaviest_first[0] + heaviest_first[1 - least :].sum()))
    return bound


def replica_counts(weights: NDArray[np.float64], *, num_redundant: int, max_replicas: int) -> NDArray[np.int64]:
    """How many replicas each expert gets, [E], so that the largest share is as small as possible.

    One redundant replica after the other goes to the expert with the largest share; none gets more than `max_replicas`.
    (The replication step of DeepSeek's EPLB.)
    """
    counts = np.ones(len(weights), dtype=np.int64)
    for _ in range(min(num_redundant, len(weights) * (max_replicas - 1))):
        share = np.where(counts < max_replicas, weights / counts, -1.0)
        counts[int(np.argmax(share))] += 1
    return counts
