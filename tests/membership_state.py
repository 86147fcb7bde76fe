"""What is: the membership machine, pretended ranks, links and timers. What happens to them is in `membership_model`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, NamedTuple, TypeVar

from membership_text import Text

from nobiru.elastic.membership import Membership

# What, and of which attempt; of which epoch: begin, abandon, suspended; of which tries and token: add, output.
Message = tuple[str, int]
Event = tuple[str, object]
_T = TypeVar("_T")
_State = TypeVar("_State", bound="State")


class Budget(NamedTuple):
    """How many faults may still happen."""

    deaths: int = 0
    losses: int = 0  # of messages
    early: int = 0  # timers
    cancels: int = 0
    errors: int = 0  # of a member that cannot prepare, or whose exchange fails without a death
    naps: int = 0  # gathers after which all sleep, because there is no work

    def without(self, kind: str) -> Budget:
        return self._replace(**{kind: getattr(self, kind) - 1})


NO_FAULTS = Budget()


class Request(NamedTuple):
    """An operation that is asked for as soon as the machine takes it, at any moment after that."""

    size: int
    remove: tuple[str, ...] = ()
    drains: bool = False
    may_replay: bool = True


class Rank(NamedTuple):
    """`place`: loading, out (of any epoch), between (steps), gather, step, parked."""

    place: str = "loading"
    epoch: int = 0
    result: str = ""  # of the gather, once all have come: step, sleep, park
    has_gathered: bool = False  # in this epoch
    left: int = 0  # the epoch that it has left because of an error
    asleep: bool = False
    is_broken: bool = False  # the connections of its epoch are shut
    armed: int = 0
    preparing: int = 0
    can_form: bool = False  # all members of the attempt have come to form its groups
    standby: int = 0
    tasks: tuple[int, ...] = ()  # texts that it writes, and their next token (`membership_text`)
    inbox: tuple[Message, ...] = ()
    control: tuple[Message, ...] = ()
    outbox: tuple[Message, ...] = ()

    @property
    def stands_still(self) -> bool:
        """And says so again from time to time."""
        return self.left > 0 or self.place == "parked"

    @property
    def polls(self) -> bool:
        return self.place in ("out", "between", "parked")


@dataclass(slots=True)
class State:
    """The controller's machine, its ranks, and what is on its way between them: what is, and can be seen from it."""

    machine: Membership
    budget: Budget = NO_FAULTS
    requests: tuple[Request, ...] = ()
    ranks: dict[str, Rank] = field(default_factory=dict)
    dead: frozenset[str] = frozenset()  # whose death is not known yet
    members_of: dict[int, tuple[str, ...]] = field(default_factory=dict)  # by epoch
    joining: dict[int, tuple[str, ...]] = field(default_factory=dict)  # by attempt
    leaves: frozenset[int] = frozenset()  # attempts whose members leave the epoch before they prepare
    attempt_of: dict[int, int] = field(default_factory=dict)  # by epoch
    timers: frozenset[tuple[str, int]] = frozenset()
    is_draining: bool = False
    has_lost: bool = False  # a message
    text: Text | None = None
    takers: tuple[str, ...] = ()  # ranks that take requests

    def only_steps(self, rank: Rank) -> bool:
        peers = [each for each in self.peers_of(rank) if each is not None and each.epoch == rank.epoch]
        armed = {each.armed for each in peers}
        if any(each.inbox or each.preparing for each in peers) or not rank.has_gathered or self.is_torn(rank):
            return False
        return len(armed) > 1 or armed == {0}

    def comes(self, rank_id: str, attempt: int) -> bool:
        """Whether it takes part in forming the attempt, or still may."""
        rank = self.ranks.get(rank_id)
        if rank is None or rank_id in self.dead:
            return False
        return attempt in (rank.preparing, rank.standby) or ("prepare", attempt) in rank.inbox

    def peers_of(self, rank: Rank) -> list[Rank | None]:
        return [
            None if rank_id in self.dead else self.ranks.get(rank_id) for rank_id in self.members_of.get(rank.epoch, ())
        ]

    def is_torn(self, rank: Rank) -> bool:
        """Whether an exchange in its epoch fails: connections are closed, or a member has left."""
        return rank.is_broken or any(
            each is None or (each.is_broken if each.epoch == rank.epoch else not self.will_begin(each, rank.epoch))
            for each in self.peers_of(rank)
        )

    def will_begin(self, peer: Rank, epoch: int) -> bool:
        return self.attempt_of[epoch] == peer.standby  # its own groups of the epoch stand and are open

    def waits(self, rank: Rank) -> bool:
        return rank.place == "gather" and not rank.result

    def waits_in_vain(self, rank: Rank) -> bool:
        coming = (each for each in self.peers_of(rank) if each is not None and each.epoch == rank.epoch)
        return self.waits(rank) and not any(each.place == "between" for each in coming)

    def comes_last(self, rank_id: str, rank: Rank) -> bool:
        if rank.place != "between" or rank.asleep or rank.is_broken or self.is_torn(rank):
            return False
        return all(
            self.ranks[each].epoch == rank.epoch and self.waits(self.ranks[each])
            for each in self.members_of[rank.epoch]
            if each != rank_id
        )

    def is_woken(self, rank: Rank) -> bool:
        """Another member waits in a gather, and the controller passes that on."""
        machine = self.machine
        return (
            rank.place == "between"
            and machine.lives
            and machine.epoch == rank.epoch
            and any(each is not None and self.waits(each) for each in self.peers_of(rank))
        )

    def change(self, rank_id: str, **values: object) -> None:
        self.ranks[rank_id] = self.ranks[rank_id]._replace(**values)  # type: ignore[arg-type]

    def say(self, rank_id: str, message: Message) -> None:
        self.change(rank_id, outbox=(*self.ranks[rank_id].outbox, message))

    def leave(self, rank_id: str) -> None:
        self.change(
            rank_id, place="out", epoch=0, result="", has_gathered=False, asleep=False, is_broken=False, armed=0
        )

    # ---- what is -----------------------------------------------------------------------------------------------------

    def is_at_rest(self) -> bool:
        """The committed epoch serves, and nobody is anything but its member.

        Who has not heard that an attempt is over may keep what was prepared for it until the next one.
        """
        machine = self.machine
        if machine.operation is not None or not machine.lives or machine.attempt is not None or self.dead:
            return False
        if set(self.ranks) != set(machine.members) or machine.launching or machine.loaded != set(machine.members):
            return False
        if self.text is not None and not self.text.has_ended:
            return False
        return not self.is_draining and all(
            rank.epoch == machine.epoch
            and rank.place in ("between", "gather", "step")
            and not (rank.is_broken or rank.inbox or rank.control or rank.outbox)
            and (self.has_lost or not (rank.armed or rank.preparing or rank.standby))
            for rank in self.ranks.values()
        )

    def copy(self: _State) -> _State:
        world = _shallow(self)
        machine = world.machine = _shallow(self.machine)
        machine.loaded, machine.launching = set(machine.loaded), set(machine.launching)
        machine.suspicion = machine.suspicion.copy()
        if machine.latest is not None:
            machine.latest = _shallow(machine.latest)
            machine.latest.newcomers = list(machine.latest.newcomers)
        if machine.attempt is not None:
            attempt = machine.attempt = _shallow(machine.attempt)
            attempt.prepared, attempt.parked, attempt.applied = (
                set(attempt.prepared),
                set(attempt.parked),
                set(attempt.applied),
            )
        world.ranks, world.members_of = dict(self.ranks), dict(self.members_of)
        world.text = None if self.text is None else self.text.copy()
        world.joining, world.attempt_of = dict(self.joining), dict(self.attempt_of)
        return world

    def forget_numbers(self) -> None:
        """Of epochs and attempts that nobody refers to any more."""
        machine = self.machine
        if self.members_of.keys() <= {machine.epoch} and self.joining.keys() <= {machine.num_attempts}:
            return
        epochs = {machine.epoch} | {rank.epoch for rank in self.ranks.values()}
        attempts = {machine.num_attempts}
        for rank in self.ranks.values():
            attempts |= {rank.preparing, rank.standby}
            for what, number in (*rank.inbox, *rank.control, *rank.outbox):
                if what not in ("add", "output"):
                    (epochs if what in ("begin", "abandon", "suspended") else attempts).add(number)
        self.members_of = {epoch: members for epoch, members in self.members_of.items() if epoch in epochs}
        self.attempt_of = {epoch: attempt for epoch, attempt in self.attempt_of.items() if epoch in epochs}
        self.joining = {attempt: members for attempt, members in self.joining.items() if attempt in attempts}
        self.leaves = frozenset(attempt for attempt in self.leaves if attempt in self.joining)


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))


def _shallow(value: _T) -> _T:
    copied: _T = object.__new__(type(value))
    for name in _names(type(value)):
        setattr(copied, name, getattr(value, name))
    return copied
