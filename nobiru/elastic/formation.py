"""How loaded ranks come to step together: one try after another to form an epoch, until all of them stand in it.

A pure state machine: events in, actions out; no sockets, no clock. The controller performs the actions.

An *attempt* is one try to build the groups of an epoch, an *epoch* a membership that has begun. Both numbers only grow.
An attempt goes out when every place in the group has a loaded rank; when all have formed it, the epoch begins. A member
that dies ends the attempt or the epoch: the others are told to abandon their step, and the next attempt waits for the
dead one's successor. When members say that a collective failed, and nobody has died, the same members try again a
little later: an exception in a collective does not name a culprit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

# A death is noticed within milliseconds of the failed collectives it causes, so a new attempt waits for the news.
RETRY_S = 0.5
FORM_TIMEOUT_S = 30.0

Phase = Literal["waiting", "forming", "serving"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SendForm:
    """To each of `members`, in order of their positions."""

    attempt: int
    epoch: int
    members: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SendBegin:
    attempt: int
    epoch: int
    members: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SendAbandon:
    """Leave whatever belongs to this attempt or an earlier one."""

    attempt: int
    members: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SetTimer:
    """Call `timer(attempt)` after so many seconds."""

    attempt: int
    seconds: float


Action = SendForm | SendBegin | SendAbandon | SetTimer


@dataclass(slots=True, kw_only=True)
class Formation:
    """`size` places. Every method enters an event and gives what is to be done about it."""

    size: int
    phase: Phase = "waiting"
    epoch: int = 0
    attempt: int = 0
    has_store: bool = False
    loaded: dict[int, str] = field(default_factory=dict)
    formed: set[str] = field(default_factory=set)
    settled: bool = True

    @property
    def members(self) -> tuple[str, ...]:
        """The loaded ranks, by position."""
        return tuple(self.loaded[position] for position in sorted(self.loaded))

    def store_is_ready(self) -> list[Action]:
        self.has_store = True
        return self._try_to_form()

    def rank_loaded(self, position: int, rank_id: str) -> list[Action]:
        self.loaded[position] = rank_id
        return self._try_to_form()

    def rank_lost(self, rank_id: str) -> list[Action]:
        position = next((place for place, each in self.loaded.items() if each == rank_id), None)
        if position is None:
            return []
        del self.loaded[position]
        was_together = self.phase != "waiting"
        self.phase, self.settled = "waiting", True
        return [SendAbandon(attempt=self.attempt, members=self.members)] if was_together else []

    def rank_formed(self, rank_id: str, attempt: int) -> list[Action]:
        if self.phase != "forming" or attempt != self.attempt or rank_id not in self.members:
            return []
        self.formed.add(rank_id)
        if len(self.formed) < self.size:
            return []
        self.epoch += 1
        self.phase = "serving"
        return [SendBegin(attempt=attempt, epoch=self.epoch, members=self.members)]

    def form_failed(self, rank_id: str, attempt: int) -> list[Action]:
        if self.phase != "forming" or attempt != self.attempt or rank_id not in self.members:
            return []
        return self._try_again_later()

    def rank_suspended(self, rank_id: str, epoch: int) -> list[Action]:
        if self.phase != "serving" or epoch != self.epoch or rank_id not in self.members:
            return []
        return self._try_again_later()

    def timer(self, attempt: int) -> list[Action]:
        if attempt != self.attempt:
            return []
        if self.phase == "forming":  # somebody has not answered in time
            return self._try_again_later()
        self.settled = True
        return self._try_to_form()

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _try_to_form(self) -> list[Action]:
        if self.phase != "waiting" or not self.settled or not self.has_store or len(self.loaded) < self.size:
            return []
        self.attempt += 1
        self.phase = "forming"
        self.formed = set()
        return [
            SendForm(attempt=self.attempt, epoch=self.epoch + 1, members=self.members),
            SetTimer(attempt=self.attempt, seconds=FORM_TIMEOUT_S),
        ]

    def _try_again_later(self) -> list[Action]:
        self.phase, self.settled = "waiting", False
        self.attempt += 1  # answers to the one before are late from now on
        return [
            SendAbandon(attempt=self.attempt - 1, members=self.members),
            SetTimer(attempt=self.attempt, seconds=RETRY_S),
        ]
