"""Who belongs to the group, now and next: one pure machine for growth, shrink, removal, replacement and failure.

Events in, actions out; no sockets, no processes, no clock. The controller performs the actions and reports what
happens. Protocol and words: `docs/elastic.md`.

There is one committed *epoch*: its number and its members, in order. Every way to the next one is an *attempt*: its
members build the groups of the next epoch and fill their slots (`Prepare`), beside serving if the present epoch lives.
When all are prepared the controller arms them; an armed member of a living epoch parks at the next step boundary at
which every other one is armed too. With everybody parked the attempt is committed, the only point of no return:
members begin the new epoch, and those that are not in it end. Until then everything can be undone, and the present
epoch has not noticed.

A member that dies ends its epoch. What was being prepared is undone, and the survivors prepare an epoch of their own.
They leave the old one before they prepare, so they count as parked. If nobody survives, the group is launched anew.

Every wait has a timer. Who keeps the others from stepping without dying is removed in the end (`Suspicion`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from nobiru.elastic.suspicion import Suspicion

Phase = Literal["planning", "preparing", "draining", "committing", "settling", "done", "rolled_back", "failed"]
Origin = Literal["user", "autoscaler", "heal", "failure", "start"]
# Those that somebody chose a size with, and those that can be undone; the others have no epoch to go back to.
CHOSEN: tuple[Origin, ...] = ("user", "autoscaler")
PLANNED: tuple[Origin, ...] = (*CHOSEN, "heal")
ENDED: tuple[Phase, ...] = ("done", "rolled_back", "failed")
BEFORE_COMMIT: tuple[Phase, ...] = ("planning", "preparing", "draining", "committing")

PREPARE_TIMEOUT_S = 120.0
PARK_TIMEOUT_S = 30.0
APPLY_TIMEOUT_S = 60.0
CALM_S = 60.0  # an epoch that steps for so long clears everybody of suspicion


# ---- actions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    """Start a rank with this id, which will hold what `Prepare` asks of it."""

    rank_id: str


@dataclass(frozen=True, slots=True)
class Prepare:
    """To each of `members`, in their order: build the groups of an attempt at `epoch`, fill slots.

    With `leave` the epoch before is over: who is still in it leaves it first, so nobody is in a step of it afterwards.
    """

    attempt: int
    epoch: int
    members: tuple[str, ...]
    leave: bool


@dataclass(frozen=True, slots=True)
class Arm:
    """To each of `ranks`: announce from now on that you are ready to leave the present epoch for this attempt."""

    attempt: int
    ranks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Begin:
    """Committed. To each of `members`: switch to the attempt's epoch and go on."""

    attempt: int
    epoch: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Forget:
    """To each of `ranks`: drop what was prepared for this attempt, and go on as before.

    Whoever has parked for it runs the step before which it parked: all of them parked before the same one.
    """

    attempt: int
    ranks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Abandon:
    """To each of `ranks`: a member of this epoch is gone; leave its step."""

    epoch: int
    ranks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """Send these ranks no new requests, and say so when they have none left."""

    ranks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Undrain:
    """They take requests again."""

    ranks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """End this rank; what it still has runs elsewhere."""

    rank_id: str


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Report `timer(name, number)` after so many seconds."""

    name: str
    number: int
    seconds: float


Action = Launch | Prepare | Arm | Begin | Forget | Abandon | Drain | Undrain | Stop | SetTimer


# ---- state -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Operation:
    """One change of membership. `newcomers` are its own ranks, `leaving` those that go with its commit.

    It ends `done`, or `rolled_back` if it was planned. Others have nothing to go back to, and end `failed` if given up.
    """

    number: int
    origin: Origin
    size: int
    phase: Phase = "planning"
    newcomers: list[str] = field(default_factory=list)
    leaving: tuple[str, ...] = ()
    drain_timeout_s: float | None = None
    drain_may_replay: bool = True
    error: str | None = None

    @property
    def has_ended(self) -> bool:
        return self.phase in ENDED


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """Who has to be loaded, prepared, parked and applied for the commit."""

    number: int
    members: tuple[str, ...]
    prepared: set[str] = field(default_factory=set)
    parked: set[str] = field(default_factory=set)
    applied: set[str] = field(default_factory=set)
    is_armed: bool = False
    is_committed: bool = False


@dataclass(slots=True, kw_only=True)
class Membership:
    """Every method enters an event and gives what is to be done about it.

    `lives` says whether the members of `epoch` step together; if not, the next attempt is on its way. `loaded` are the
    ranks whose model is loaded. `latest` is the newest operation, which may have ended. `desired_size` is that of the
    last committed change of a size that somebody chose. An epoch has `min_size` members at least. `num_places` is how
    many ranks there is room for, as far as is known (None: for any number).
    """

    desired_size: int
    min_size: int = 1
    num_places: int | None = None
    epoch: int = 0
    members: tuple[str, ...] = ()
    lives: bool = False
    loaded: set[str] = field(default_factory=set)
    launching: set[str] = field(default_factory=set)
    latest: Operation | None = None
    attempt: _Attempt | None = None
    suspicion: Suspicion = field(default_factory=Suspicion)
    num_operations: int = 0
    num_attempts: int = 0
    num_ranks: int = 0

    @property
    def operation(self) -> Operation | None:
        """The one that is running."""
        return None if self.latest is None or self.latest.has_ended else self.latest

    # ---- what users and the controller ask -------------------------------------------------------------------------

    def start(self) -> list[Action]:
        """Launch the first ranks."""
        operation = Operation(number=self.num_operations, origin="start", size=self.desired_size)
        return [*self._open(operation), *self._prepare_if_loaded()]

    def request(
        self,
        *,
        size: int,
        remove: Sequence[str] = (),
        origin: Origin = "user",
        drain_timeout_s: float | None = None,
        drain_may_replay: bool = True,
    ) -> list[Action]:
        """Change to `size` members, without those of `remove`; others leave newest first. No operation may run.

        Without an epoch that lives there is nothing to change from: `ValueError`, as for ranks that are no members.
        """
        if self.operation is not None or not self.lives:
            raise ValueError("another change of membership is running")
        if size < 1 or not set(remove) <= set(self.members):
            raise ValueError(f"cannot change to {size} members without {', '.join(remove)}")
        stay = [rank for rank in self.members if rank not in remove]
        leaving = (*remove, *stay[size:])
        operation = Operation(
            number=self.num_operations,
            origin=origin,
            size=size,
            leaving=leaving,
            drain_timeout_s=drain_timeout_s,
            drain_may_replay=drain_may_replay,
        )
        return [*self._open(operation), *self._prepare_if_loaded()]

    def cancel(self, error: str | None = None) -> list[Action]:
        """Undo the running operation, if it is a planned one that is not committed yet; else nothing."""
        operation = self.operation
        if operation is None or operation.origin not in PLANNED or operation.phase not in BEFORE_COMMIT:
            return []
        return self._roll_back(operation, error)

    def give_up(self, error: str) -> None:
        """No epoch can be brought up: the operation that was to do it has failed, and nothing follows."""
        if (operation := self.operation) is not None:
            operation.phase, operation.error = "failed", error

    # ---- what ranks do ---------------------------------------------------------------------------------------------

    def rank_loaded(self, rank_id: str) -> list[Action]:
        if rank_id not in self.launching:
            return []
        self.launching.discard(rank_id)
        self.loaded.add(rank_id)
        return self._prepare_if_loaded()

    def rank_prepared(
        self, rank_id: str, attempt: int, error: str | None = None, *, missed_others: bool = False
    ) -> list[Action]:
        """It has prepared, or could not: by a fault of its own, or because others did not come to form a group."""
        current = self.attempt
        if current is None or current.number != attempt or current.is_committed or rank_id not in current.members:
            return []
        if error is not None:
            others = [rank for rank in current.members if rank != rank_id and rank not in current.prepared]
            return self._attempt_failed(
                f"{rank_id} could not prepare: {error}", others if missed_others else (rank_id,)
            )
        current.prepared.add(rank_id)
        if len(current.prepared) < len(current.members):
            return []
        operation = self.operation
        assert operation is not None
        if not self.lives:
            return self._commit(current, operation)
        if operation.leaving and operation.drain_timeout_s is not None:
            operation.phase = "draining"
            return [Drain(operation.leaving), SetTimer("drain", operation.number, operation.drain_timeout_s)]
        return self._arm(current, operation)

    def drained(self) -> list[Action]:
        """The leaving ranks have no requests left."""
        operation = self.operation
        if operation is None or operation.phase != "draining" or self.attempt is None:
            return []
        return self._arm(self.attempt, operation)

    def rank_parked(self, rank_id: str, attempt: int) -> list[Action]:
        current = self.attempt
        if self.lives and rank_id in self.members and (current is None or attempt < current.number):
            return [Forget(attempt, (rank_id,))]  # it has not heard that this attempt is over
        if current is None or current.number != attempt or not current.is_armed or current.is_committed:
            return []
        current.parked.add(rank_id)
        operation = self.operation
        assert operation is not None
        return self._commit(current, operation) if set(self.members) <= current.parked else []

    def rank_applied(self, rank_id: str, attempt: int) -> list[Action]:
        """It steps in the new epoch."""
        current, operation = self.attempt, self.operation
        if current is None or current.number != attempt or not current.is_committed or operation is None:
            return []
        current.applied.add(rank_id)
        return self._settle(operation) if set(self.members) <= current.applied else []

    def rank_suspended(self, rank_id: str, epoch: int) -> list[Action]:
        """A collective failed there. Without a death, the same members form anew a little later."""
        if epoch != self.epoch or rank_id not in self.members:
            return []
        self.suspicion.has_left(rank_id)
        return self._epoch_broke("exchanges failed") if self.lives else []

    def rank_lost(self, rank_id: str, cause: str | None = None) -> list[Action]:
        """A rank died, or was declared dead; `cause` is for people."""
        known = rank_id in self.loaded or rank_id in self.launching
        self._drop([rank_id])
        operation = self.operation
        if not known:
            return []
        if rank_id in self.members:
            self.members = tuple(each for each in self.members if each != rank_id)
            return self._epoch_broke()
        if operation is None or rank_id not in operation.newcomers:
            return []
        operation.newcomers.remove(rank_id)
        if operation.origin in PLANNED:
            return self._roll_back(operation, f"the new rank {rank_id} died{f': {cause}' if cause else ''}")
        if operation.origin == "failure":
            operation.size = min(operation.size, max(len(self.members), self._size_with_room()))
        return [*self._forget_attempt(), *self._launch_missing(operation), *self._prepare_if_loaded()]

    def timer(self, name: str, number: int) -> list[Action]:
        operation, current = self.operation, self.attempt
        match name:
            case "reform" if operation is not None and operation.number == number and current is None:
                return self._remove_suspects(operation) or self._prepare_if_loaded()
            case "drain" if operation is not None and operation.number == number and operation.phase == "draining":
                if operation.drain_may_replay:
                    return self.drained()
                return self._roll_back(operation, "the ranks did not finish their requests in time")
            case "prepare" if current is not None and current.number == number:
                missing = [rank for rank in current.members if rank not in current.prepared]
                return self._attempt_failed("the ranks did not all prepare in time", missing) if missing else []
            case "park" if current is not None and current.number == number and not current.is_committed:
                return self._attempt_failed("the ranks did not all park in time", ())
            case "apply" if current is not None and current.number == number:
                assert operation is not None
                if current.applied:  # its first gather took all members, so the others' answers are what got lost
                    return self._settle(operation)
                return self._epoch_broke("the ranks did not begin their epoch in time")
            case "calm" if number == self.epoch and self.lives:
                self.suspicion.is_calm()
        return []

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _open(self, operation: Operation) -> list[Action]:
        self.latest = operation
        self.num_operations += 1
        operation.phase = "preparing"
        return self._launch_missing(operation)

    def _launch_missing(self, operation: Operation) -> list[Action]:
        stay = [rank for rank in self.members if rank not in operation.leaving]
        num_missing = operation.size - len(stay) - len(operation.newcomers)
        new = [f"r{self.num_ranks + number}" for number in range(num_missing)]
        self.num_ranks += len(new)
        operation.newcomers += new
        self.launching |= set(new)
        return [Launch(rank_id) for rank_id in new]

    def _prepare_if_loaded(self) -> list[Action]:
        operation = self.operation
        if operation is None or self.attempt is not None or operation.phase != "preparing":
            return []
        if not set(operation.newcomers) <= self.loaded:
            return []
        stay = [rank for rank in self.members if rank not in operation.leaving]
        self.num_attempts += 1
        self.attempt = _Attempt(number=self.num_attempts, members=(*stay, *operation.newcomers))
        return [
            Prepare(self.num_attempts, self.epoch + 1, self.attempt.members, leave=not self.lives),
            SetTimer("prepare", self.num_attempts, PREPARE_TIMEOUT_S),
        ]

    def _arm(self, attempt: _Attempt, operation: Operation) -> list[Action]:
        operation.phase = "committing"
        attempt.is_armed = True
        return [Arm(attempt.number, self.members), SetTimer("park", attempt.number, PARK_TIMEOUT_S)]

    def _commit(self, attempt: _Attempt, operation: Operation) -> list[Action]:
        attempt.is_committed = True
        operation.phase = "settling"
        gone = [rank for rank in self.members if rank not in attempt.members]
        self.epoch += 1
        self.members, self.lives = attempt.members, True
        self.suspicion.epoch_begins()
        self._drop(gone)
        if operation.origin in CHOSEN:
            self.desired_size = operation.size
        return [
            Begin(attempt.number, self.epoch, self.members),
            *(Stop(rank_id) for rank_id in gone),
            SetTimer("apply", attempt.number, APPLY_TIMEOUT_S),
            SetTimer("calm", self.epoch, CALM_S),
        ]

    def _settle(self, operation: Operation) -> list[Action]:
        self.attempt = None
        operation.phase = "done"
        return []

    def _attempt_failed(self, error: str, suspects: Sequence[str]) -> list[Action]:
        """Nobody has died, but the attempt does not come to an end."""
        operation = self.operation
        assert operation is not None
        if operation.origin in PLANNED:
            return self._roll_back(operation, error)
        self.suspicion.could_not_prepare(suspects)
        return [*self._forget_attempt(), SetTimer("reform", operation.number, self.suspicion.next_wait_s())]

    def _forget_attempt(self) -> list[Action]:
        """What was being prepared is not going to be committed."""
        attempt, self.attempt = self.attempt, None
        if attempt is None or attempt.is_committed:
            return []
        concerned = dict.fromkeys((*self.members, *attempt.members))
        return [Forget(attempt.number, tuple(rank for rank in concerned if rank in self.loaded))]

    def _roll_back(self, operation: Operation, error: str | None) -> list[Action]:
        """Before the commit: newcomers go, everybody else forgets; the present epoch goes on, if it lives."""
        operation.phase, operation.error = "rolled_back", error
        stopped = self._stop_all(operation.newcomers)
        actions = self._forget_attempt()
        if operation.drain_timeout_s is not None and operation.leaving:
            actions.append(Undrain(tuple(rank for rank in operation.leaving if rank in self.members)))
        return [*actions, *stopped]

    def _stop_all(self, rank_ids: Sequence[str]) -> list[Action]:
        stopped = [rank for rank in rank_ids if rank in self.loaded or rank in self.launching]
        self._drop(stopped)
        return [Stop(rank) for rank in stopped]

    def _drop(self, rank_ids: Sequence[str]) -> None:
        self.loaded -= set(rank_ids)
        self.launching -= set(rank_ids)
        self.suspicion.drop(rank_ids)

    def _epoch_broke(self, error: str | None = None) -> list[Action]:
        """Its members cannot step together any more: the survivors form the next epoch. Without an `error` one died.

        Whatever is being prepared is undone. A failure that is being dealt with goes on, with those who are left.
        """
        operation = self.operation
        actions: list[Action] = []
        if self.lives:
            actions.append(Abandon(self.epoch, self.members))
        self.lives = False
        self.suspicion.epoch_broke(by_death=error is None)
        if operation is not None and operation.phase == "settling":
            self.attempt = None  # it was committed; what comes now is a failure of the new epoch
            operation.phase = "done"
        elif operation is not None and operation.origin in PLANNED:
            actions += self._roll_back(operation, error or "a member died")
        actions += self._forget_attempt()
        failure = self.operation
        if failure is None:
            failure = Operation(number=self.num_operations, origin="failure", size=self._least_size)
            actions += self._open(failure)
        else:
            failure.size = self._least_size
            actions += self._launch_missing(failure)
        # Give news of more deaths the time to arrive: an attempt with a dead member would only cost its time limit.
        wait_s = self.suspicion.next_wait_s() if error else 0.0
        return [*actions, SetTimer("reform", failure.number, wait_s)]

    @property
    def _least_size(self) -> int:
        """Of the epoch that follows a failure."""
        return max(len(self.members), self.min_size) if self.members else self._size_with_room()

    def _remove_suspects(self, operation: Operation) -> list[Action]:
        """Before another try: if somebody has kept the others from stepping too often, go on without it."""
        suspects = self.suspicion.who_has_to_go(self.members)
        if not suspects:
            return []
        operation.phase = "failed"
        operation.error = f"{', '.join(suspects)} kept failing without dying, and had to go"
        self.members = tuple(rank for rank in self.members if rank not in suspects)
        stopped = self._stop_all(suspects)
        successor = Operation(number=self.num_operations, origin="failure", size=self._least_size)
        successor.newcomers = [rank for rank in operation.newcomers if rank not in suspects]
        return [*stopped, *self._open(successor), *self._prepare_if_loaded()]

    def _size_with_room(self) -> int:
        """Of a group that is launched anew: as desired, or what there is room for."""
        room = self.desired_size if self.num_places is None else self.num_places
        return max(self.min_size, min(self.desired_size, room))
