"""Who keeps the others of a group from stepping, without dying.

Pure. Owns what is held against whom, and how long to wait before the next try. An epoch that broke without a death is
held against the members that are still in its step when the next try begins, or else against the one that left it
first: its connection was the one that failed. An attempt that could not be prepared is held against whoever could not,
or did not come. A death is a better reason for all that failed before it, and a calm epoch clears everybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

# A death is noticed within milliseconds of the failed collectives it causes, so a new attempt waits for the news.
REFORM_S = 0.5
MAX_REFORM_S = 8.0
# Three epochs that broke, or six attempts that could not be prepared.
BROKEN_STRIKES = 2
PREPARE_STRIKES = 1
MAX_STRIKES = 6


@dataclass(slots=True)
class Suspicion:
    """`strikes` by rank. `left` are those that have left the epoch that broke, in order."""

    strikes: dict[str, int] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    num_tries: int = 0
    is_unexplained: bool = False

    def copy(self) -> Suspicion:
        return Suspicion(dict(self.strikes), list(self.left), self.num_tries, self.is_unexplained)

    def has_left(self, rank_id: str) -> None:
        if rank_id not in self.left:
            self.left.append(rank_id)

    def epoch_broke(self, *, by_death: bool) -> None:
        self.is_unexplained = not by_death
        if by_death:
            self.strikes = {}

    def epoch_begins(self) -> None:
        self.left, self.is_unexplained = [], False

    def is_calm(self) -> None:
        """An epoch has stepped for a while."""
        self.strikes, self.num_tries = {}, 0

    def could_not_prepare(self, rank_ids: Iterable[str]) -> None:
        self._strike(rank_ids, PREPARE_STRIKES)

    def drop(self, rank_ids: Sequence[str]) -> None:
        """They are gone."""
        self.strikes = {rank: strikes for rank, strikes in self.strikes.items() if rank not in rank_ids}

    def next_wait_s(self) -> float:
        """Until another try, after one that failed."""
        self.num_tries += 1
        return min(MAX_REFORM_S, REFORM_S * 2.0 ** (self.num_tries - 1))

    def who_has_to_go(self, members: Sequence[str]) -> list[str]:
        """When another try is about to begin."""
        if self.is_unexplained:
            self.is_unexplained = False
            stuck = [rank for rank in members if rank not in self.left]
            self._strike(stuck or self.left[:1], BROKEN_STRIKES)
        return [rank for rank, strikes in self.strikes.items() if strikes >= MAX_STRIKES]

    def _strike(self, rank_ids: Iterable[str], weight: int) -> None:
        for rank in rank_ids:
            self.strikes[rank] = self.strikes.get(rank, 0) + weight
