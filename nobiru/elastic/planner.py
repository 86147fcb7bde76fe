"""Which experts the members of the next epoch hold, and what has to be read for it.

Pure. Owns the way from one membership to another with few experts moved: those who stay keep what they hold, experts
that nobody would hold go to the emptiest ranks, and the fullest ranks hand over experts until all hold as many as any
other, give or take one. While the old epoch serves, only slots that are empty in it may be filled.

Legend: L MoE layers, S slots of a layer and rank, E logical experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nobiru.errors import ConfigError
from nobiru.parallel.placement import EMPTY, Placement

Slots = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fill:
    """Put an expert of a layer into an empty slot of a rank."""

    layer: int
    expert: int
    slot: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MembershipPlan:
    """`placement` has its ranks in the order of the new members; `fills` are what each of those that stay has to read.

    Newcomers begin with all that the placement gives them.
    """

    placement: Placement
    fills: Mapping[str, tuple[Fill, ...]]

    @property
    def num_fills(self) -> int:
        return sum(map(len, self.fills.values()))


def plan_membership(
    held: Mapping[str, Slots],
    members: Sequence[str],
    *,
    num_layers: int,
    num_experts: int,
    slot_capacity: int,
    num_redundant: int = 0,
) -> MembershipPlan:
    """For `members` of the next epoch, of whom those in `held` have these experts in their slots [L, S] now.

    `ConfigError` when the members' slots do not suffice for all experts.
    """
    num_redundant = min(num_redundant, num_experts * (len(members) - 1))
    if slot_capacity * len(members) < num_experts + num_redundant:
        raise ConfigError(
            f"{len(members)} ranks of {slot_capacity} slots a layer cannot hold {num_experts} experts and "
            f"{num_redundant} redundant ones"
        )
    old = {rank: held.get(rank, np.full((num_layers, slot_capacity), EMPTY)) for rank in members}
    slots = np.stack([old[rank] for rank in members], axis=1).astype(np.int64)
    for layer in range(num_layers):
        _Layer(slots[layer], num_experts, num_redundant).settle()
    placement = Placement(slots=slots, num_experts=num_experts)
    fills = {
        rank: tuple(
            Fill(layer=layer, expert=int(slots[layer, position, slot]), slot=slot)
            for layer, slot in np.argwhere(slots[:, position] != old[rank]).tolist()
            if slots[layer, position, slot] != EMPTY
        )
        for position, rank in enumerate(members)
        if rank in held
    }
    return MembershipPlan(placement=placement, fills=fills)


class _Layer:
    """One layer's slots [R, S], changed in place. Slots that were in use at first are only emptied, never refilled."""

    def __init__(self, slots_RS: Slots, num_experts: int, num_redundant: int) -> None:
        self._slots_RS = slots_RS
        self._free_RS = slots_RS == EMPTY
        self._num_experts = num_experts
        self._num_redundant = num_redundant

    def settle(self) -> None:
        for expert in range(self._num_experts):
            if not (self._slots_RS == expert).any():
                self._give(expert)
        self._match_redundancy()
        while self._hand_over():
            continue

    def _counts(self) -> NDArray[np.int64]:
        """Experts of each rank."""
        counts: NDArray[np.int64] = (self._slots_RS != EMPTY).sum(1)
        return counts

    def _takers(self, expert: int) -> list[int]:
        """Ranks that could get a replica, emptiest first."""
        has_room = (self._free_RS & (self._slots_RS == EMPTY)).any(1) & ~(self._slots_RS == expert).any(1)
        counts = self._counts()
        return sorted(np.flatnonzero(has_room).tolist(), key=lambda rank: (counts[rank], rank))

    def _give(self, expert: int) -> bool:
        takers = self._takers(expert)
        if takers:
            self._put(takers[0], expert)
        return bool(takers)

    def _put(self, rank: int, expert: int) -> None:
        slot = int(np.flatnonzero(self._free_RS[rank] & (self._slots_RS[rank] == EMPTY))[0])
        self._slots_RS[rank, slot] = expert

    def _replicas(self) -> NDArray[np.int64]:
        """Replicas of each expert."""
        return np.bincount(self._slots_RS[self._slots_RS != EMPTY], minlength=self._num_experts)

    def _match_redundancy(self) -> None:
        """As many replicas beyond one of each as there should be; those that go are of the fullest ranks."""
        while (replicas := self._replicas()).sum() > self._num_experts + self._num_redundant:
            counts = self._counts()
            spare = [(rank, slot) for rank, slot in np.argwhere(replicas[self._slots_RS] > 1).tolist()]
            spare = [(rank, slot) for rank, slot in spare if self._slots_RS[rank, slot] != EMPTY]
            rank, slot = max(spare, key=lambda place: (counts[place[0]], place))
            self._slots_RS[rank, slot] = EMPTY
        for expert in np.argsort(replicas, kind="stable").tolist() * len(self._slots_RS):
            if self._replicas().sum() >= self._num_experts + self._num_redundant:
                return
            self._give(expert)

    def _hand_over(self) -> bool:
        """Move one expert from the fullest to the emptiest rank that can take it, if that evens them out."""
        counts = self._counts()
        for giver in sorted(range(len(counts)), key=lambda rank: (-counts[rank], rank)):
            for slot in np.flatnonzero(self._slots_RS[giver] != EMPTY)[::-1].tolist():
                expert = int(self._slots_RS[giver, slot])
                takers = self._takers(expert)
                if takers and counts[giver] - counts[takers[0]] > 1:
                    self._slots_RS[giver, slot] = EMPTY
                    self._put(takers[0], expert)
                    return True
        return False
