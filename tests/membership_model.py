"""The membership machine with pretended ranks, links and timers around it: what can happen next, and what then is.

A `World` is a value: `happen` gives the next one. Its ranks are those of the protocol. The loop of each receives
messages only between steps; a second thread prepares attempts, a third obeys `Abandon`. A gather ends when every member
has come, but not for all at the same moment, and after a death it may end for some and fail for others. Links keep
their order. What a rank said last before its death may be heard or not.

Events are normal or faults. Faults have budgets: deaths, lost messages, timers that are early, and so on. A world in
which only normal events happen from now on must come to rest (`is_at_rest`); timers are normal there once nothing else
is on its way, and steps in which nothing changes do not count as rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from nobiru.elastic.membership import (
    PLANNED,
    Abandon,
    Action,
    Arm,
    Begin,
    Drain,
    Forget,
    Launch,
    Membership,
    Prepare,
    SetTimer,
    Stop,
    Undrain,
)

Message = tuple[str, int]  # what, and of which attempt; abandon and suspended: of which epoch
Event = tuple[str, object]
_T = TypeVar("_T")


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
    asleep: bool = False
    is_broken: bool = False  # the connections of its epoch are shut
    armed: int = 0
    preparing: int = 0
    can_form: bool = False  # all members of the attempt have come to form its groups
    standby: int = 0
    inbox: tuple[Message, ...] = ()
    control: tuple[Message, ...] = ()
    outbox: tuple[Message, ...] = ()

    @property
    def polls(self) -> bool:
        return self.place in ("out", "between", "parked")


class Broken(AssertionError):
    """Something that must never be."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Broken(what)


@dataclass(slots=True)
class World:
    """The controller's machine, its ranks, and what is on its way between them."""

    machine: Membership
    budget: Budget = Budget()
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

    # ---- what can happen ---------------------------------------------------------------------------------------------

    def normal_events(self) -> list[Event]:
        """In a world without faults each of these happens sooner or later, if it stays possible."""
        events: list[Event] = [("news", rank_id) for rank_id in self.dead]
        for rank_id, rank in self.ranks.items():
            if rank_id not in self.dead:
                events += [(what, rank_id) for what in self._rank_events(rank_id, rank)]
            if rank.outbox:
                events.append(("deliver", rank_id))
        if self.is_draining:
            events.append(("drained", None))
        events += [("timer", timer) for timer in self.timers if timer[0] == "reform"]
        if self._is_slow(events):
            events += [("timer", timer) for timer in self.timers if timer[0] != "reform"]
            events += [("time out", rank_id) for rank_id, rank in self.ranks.items() if self._waits_in_vain(rank)]
            events += [("launch late", rank_id) for rank_id in self.machine.launching]
        return events

    def _rank_events(self, rank_id: str, rank: Rank) -> Iterator[str]:
        if rank.control:
            yield "obey"
        if rank.place == "loading":
            yield "load"
        if rank.polls and rank.inbox:
            yield "receive"
        if rank.polls and rank.preparing:
            if rank.can_form:
                yield "form"
            if any(not self._comes(each, rank.preparing) for each in self.joining[rank.preparing]):
                yield "cannot form"
        if rank.place == "between" and not rank.asleep:
            yield "enter"
        if rank.asleep and self._is_woken(rank):
            yield "wake"
        if rank.result:
            yield "complete"
        if rank.place == "step":
            yield "end"
        if rank.place in ("gather", "step") and self._is_torn(rank):
            yield "fail"

    def faults(self) -> list[Event]:
        events: list[Event] = []
        budget, machine = self.budget, self.machine
        living = {rank_id: rank for rank_id, rank in self.ranks.items() if rank_id not in self.dead}
        operation = machine.operation
        if self.requests and operation is None and machine.lives and set(self.requests[0].remove) <= set(machine.members):
            events.append(("request", None))
        if budget.cancels and operation is not None and operation.origin in PLANNED:
            events.append(("cancel", None))
        if budget.deaths:
            events += [("kill", rank_id) for rank_id in living]
        if budget.losses:
            events += [("lose inbox", rank_id) for rank_id, rank in living.items() if rank.inbox]
            events += [("lose control", rank_id) for rank_id, rank in living.items() if rank.control]
            events += [("lose outbox", rank_id) for rank_id, rank in living.items() if rank.outbox]
        if budget.early:
            events += [("early", timer) for timer in self.timers if timer[0] != "reform"]
        if budget.errors:
            events += [("error", rank_id) for rank_id, rank in living.items() if rank.polls and rank.preparing]
            events += [("tear", rank_id) for rank_id, rank in living.items() if rank.place in ("gather", "step")]
        if budget.naps:
            events += [("doze", rank_id) for rank_id, rank in living.items() if self._comes_last(rank_id, rank)]
        events += [("work", rank_id) for rank_id, rank in living.items() if rank.asleep and rank.place == "between"]
        return events

    def _is_slow(self, events: list[Event]) -> bool:
        """Nothing but time passes: at most members go on stepping, which changes nothing."""
        return all(what == "enter" and self._only_steps(self.ranks[str(rank_id)]) for what, rank_id in events)

    def _only_steps(self, rank: Rank) -> bool:
        peers = [each for each in self._peers(rank) if each is not None and each.epoch == rank.epoch]
        armed = {each.armed for each in peers}
        if any(each.inbox for each in peers) or not rank.has_gathered or self._is_torn(rank):
            return False
        return len(armed) > 1 or armed == {0}

    def _comes(self, rank_id: str, attempt: int) -> bool:
        """Whether it takes part in forming the attempt, or still may."""
        rank = self.ranks.get(rank_id)
        if rank is None or rank_id in self.dead:
            return False
        return attempt in (rank.preparing, rank.standby) or ("prepare", attempt) in rank.inbox

    def _peers(self, rank: Rank) -> list[Rank | None]:
        return [
            None if rank_id in self.dead else self.ranks.get(rank_id) for rank_id in self.members_of.get(rank.epoch, ())
        ]

    def _is_torn(self, rank: Rank) -> bool:
        """Whether an exchange in its epoch fails: connections are closed, or a member has left."""
        return rank.is_broken or any(
            each is None
            or (each.is_broken if each.epoch == rank.epoch else not self._will_begin(each, rank.epoch))
            for each in self._peers(rank)
        )

    def _will_begin(self, peer: Rank, epoch: int) -> bool:
        return self.attempt_of[epoch] == peer.standby  # its own groups of the epoch stand and are open

    def _waits(self, rank: Rank) -> bool:
        return rank.place == "gather" and not rank.result

    def _waits_in_vain(self, rank: Rank) -> bool:
        coming = (each for each in self._peers(rank) if each is not None and each.epoch == rank.epoch)
        return self._waits(rank) and not any(each.place == "between" for each in coming)

    def _comes_last(self, rank_id: str, rank: Rank) -> bool:
        if rank.place != "between" or rank.asleep or rank.is_broken or self._is_torn(rank):
            return False
        return all(
            self.ranks[each].epoch == rank.epoch and self._waits(self.ranks[each])
            for each in self.members_of[rank.epoch]
            if each != rank_id
        )

    def _is_woken(self, rank: Rank) -> bool:
        """Another member waits in a gather, and the controller passes that on."""
        machine = self.machine
        return (
            rank.place == "between"
            and machine.lives
            and machine.epoch == rank.epoch
            and any(each is not None and self._waits(each) for each in self._peers(rank))
        )

    # ---- what happens ------------------------------------------------------------------------------------------------

    def happen(self, event: Event) -> World:
        """The world after an event. Raises `Broken` if it must not be."""
        what, about = event
        world = self.copy()
        if isinstance(about, str):
            _RANK_EVENTS[what](world, about)
        elif what == "drained":
            world.is_draining = False
            world.do(world.machine.drained())
        elif what == "cancel":
            world._spend("cancels")
            world.do(world.machine.cancel("cancelled"))
        elif what == "request":
            world._request()
        else:
            assert what in ("timer", "early") and isinstance(about, tuple)
            if what == "early":
                world._spend("early")
            world.timers -= {about}
            world.do(world.machine.timer(*about))
        world._forget_the_past()
        return world

    def _spend(self, kind: str) -> None:
        self.budget = self.budget.without(kind)

    def _request(self) -> None:
        request, self.requests = self.requests[0], self.requests[1:]
        self.do(
            self.machine.request(
                size=request.size,
                remove=request.remove,
                drain_timeout_s=1.0 if request.drains else None,
                drain_may_replay=request.may_replay,
            )
        )

    def do(self, actions: list[Action]) -> None:
        """As the controller performs them."""
        for action in actions:
            match action:
                case Launch(rank_id):
                    require(rank_id not in self.ranks, "ids are never used again")
                    self.ranks[rank_id] = Rank()
                case Prepare():
                    self.joining[action.attempt] = action.members
                    if action.leave:
                        self.leaves |= {action.attempt}
                    self._send(action.members, ("prepare", action.attempt))
                case Arm():
                    self._send(action.ranks, ("arm", action.attempt))
                case Forget():
                    self._send(action.ranks, ("forget", action.attempt))
                case Abandon():
                    for rank_id in set(action.ranks) - self.dead:
                        self._change(rank_id, control=(*self.ranks[rank_id].control, ("abandon", action.epoch)))
                case Begin():
                    self._commit(action)
                case Stop(rank_id):
                    del self.ranks[rank_id]
                    self.dead -= {rank_id}
                case Drain():
                    self.is_draining = True
                case Undrain():
                    self.is_draining = False
                case SetTimer():
                    self.timers |= {(action.name, action.number)}

    def _send(self, rank_ids: tuple[str, ...], message: Message) -> None:
        for rank_id in rank_ids:
            require(rank_id in self.ranks, f"{rank_id} is told {message[0]}, but is no more")
            if rank_id not in self.dead:
                self._change(rank_id, inbox=(*self.ranks[rank_id].inbox, message))

    def _commit(self, begin: Begin) -> None:
        require(begin.epoch == self.machine.epoch, "one epoch at a time, one after the other")
        require(begin.members == self.joining[begin.attempt], "an epoch begins with those who have prepared it")
        require(len(begin.members) >= self.machine.min_size, "an epoch can hold the model")
        require(len(set(begin.members)) == len(begin.members), "members are different")
        for rank_id in begin.members:
            if rank_id not in self.dead:
                require(self.ranks[rank_id].standby == begin.attempt, "who is to begin has prepared")
        self.members_of[begin.epoch] = begin.members
        self.attempt_of[begin.epoch] = begin.attempt
        self._send(begin.members, ("begin", begin.epoch))

    def _change(self, rank_id: str, **values: object) -> None:
        self.ranks[rank_id] = self.ranks[rank_id]._replace(**values)  # type: ignore[arg-type]

    def _say(self, rank_id: str, message: Message) -> None:
        self._change(rank_id, outbox=(*self.ranks[rank_id].outbox, message))

    def _leave(self, rank_id: str) -> None:
        self._change(
            rank_id, place="out", epoch=0, result="", has_gathered=False, asleep=False, is_broken=False, armed=0
        )

    # ---- of one rank -------------------------------------------------------------------------------------------------

    def _load(self, rank_id: str) -> None:
        self._change(rank_id, place="out")
        self._say(rank_id, ("loaded", 0))

    def _receive(self, rank_id: str) -> None:
        (what, number), rest = self.ranks[rank_id].inbox[0], self.ranks[rank_id].inbox[1:]
        self._change(rank_id, inbox=rest)
        rank = self.ranks[rank_id]
        match what:
            case "prepare":
                self._drop_attempts(rank_id, number - 1)
                if number in self.leaves and rank.epoch:
                    self._leave(rank_id)
                self._change(rank_id, preparing=number)
                if all(self._is_here(each, number) for each in self.joining[number]):
                    for each in self.joining[number]:
                        self._change(each, can_form=True)
            case "arm":
                self._change(rank_id, armed=number, asleep=False)
            case "forget":
                self._drop_attempts(rank_id, number)
            case "begin":
                self._begin(rank_id, number)

    def _is_here(self, rank_id: str, attempt: int) -> bool:
        rank = self.ranks.get(rank_id)
        return rank is not None and rank.preparing == attempt

    def _drop_attempts(self, rank_id: str, last: int) -> None:
        rank = self.ranks[rank_id]
        if rank.standby <= last:
            self._change(rank_id, standby=0)
        if rank.preparing <= last:
            self._change(rank_id, preparing=0, can_form=False)
        if rank.armed <= last:
            self._change(rank_id, armed=0, place="between" if rank.place == "parked" else rank.place)

    def _begin(self, rank_id: str, epoch: int) -> None:
        rank = self.ranks[rank_id]
        require(rank.standby == self.attempt_of[epoch], "who begins has prepared")
        for other, each in self.ranks.items():
            require(other in self.dead or each.place != "step", f"{other} is in a step while {rank_id} applies a commit")
        self._leave(rank_id)
        self._change(rank_id, place="between", epoch=epoch, standby=0)

    def _obey(self, rank_id: str) -> None:
        rank = self.ranks[rank_id]
        (_, epoch), rest = rank.control[0], rank.control[1:]
        self._change(rank_id, control=rest, is_broken=rank.is_broken or 0 < rank.epoch <= epoch)

    def _form(self, rank_id: str) -> None:
        attempt = self.ranks[rank_id].preparing
        self._change(rank_id, preparing=0, can_form=False, standby=attempt)
        self._say(rank_id, ("formed", attempt))

    def _cannot_form(self, rank_id: str, what: str = "not formed") -> None:
        attempt = self.ranks[rank_id].preparing
        self._change(rank_id, preparing=0, can_form=False)
        self._say(rank_id, (what, attempt))

    def _enter(self, rank_id: str, ends: str = "step") -> None:
        rank = self.ranks[rank_id]
        is_last = self._comes_last(rank_id, rank)
        self._change(rank_id, place="gather")
        if not is_last:
            return
        members = self.members_of[rank.epoch]
        armed = {self.ranks[each].armed for each in members}
        require(self.machine.epoch == rank.epoch, "only the committed epoch steps")
        for each in members:
            self._change(each, result="park" if len(armed) == 1 and armed != {0} else ends)

    def _doze(self, rank_id: str) -> None:
        self._spend("naps")
        self._enter(rank_id, "sleep")

    def _wake(self, rank_id: str) -> None:
        self._change(rank_id, asleep=False)

    def _complete(self, rank_id: str) -> None:
        rank = self.ranks[rank_id]
        place = {"step": "step", "sleep": "between", "park": "parked"}[rank.result]
        self._change(rank_id, result="", place=place, asleep=rank.result == "sleep", has_gathered=True)
        if not rank.has_gathered:
            self._say(rank_id, ("applied", self.attempt_of[rank.epoch]))
        if place == "parked":
            self._say(rank_id, ("parked", rank.armed))

    def _end(self, rank_id: str) -> None:
        self._change(rank_id, place="between")

    def _fail(self, rank_id: str) -> None:
        epoch = self.ranks[rank_id].epoch
        self._leave(rank_id)
        self._say(rank_id, ("suspended", epoch))

    def _deliver(self, rank_id: str) -> None:
        (what, number), rest = self.ranks[rank_id].outbox[0], self.ranks[rank_id].outbox[1:]
        self._change(rank_id, outbox=rest)
        self._hear(rank_id, (what, number))

    def _hear(self, rank_id: str, message: Message, *, expect_nothing: bool = False) -> None:
        what, number = message
        machine = self.machine
        match what:
            case "loaded":
                actions = machine.rank_loaded(rank_id)
            case "formed":
                actions = machine.rank_prepared(rank_id, number)
            case "not formed":
                actions = machine.rank_prepared(rank_id, number, "no", missed_others=True)
            case "not filled":
                actions = machine.rank_prepared(rank_id, number, "no")
            case "parked":
                actions = machine.rank_parked(rank_id, number)
            case "applied":
                actions = machine.rank_applied(rank_id, number)
            case _:
                actions = machine.rank_suspended(rank_id, number)
        require(not (expect_nothing and actions), f"{message} is late and does nothing")
        self.do(actions)

    def _news(self, rank_id: str) -> None:
        self.dead -= {rank_id}
        del self.ranks[rank_id]
        self.do(self.machine.rank_lost(rank_id))

    def _kill(self, rank_id: str) -> None:
        self._spend("deaths")
        self._die(rank_id)

    def _die(self, rank_id: str) -> None:
        """What it said before may still arrive, until its death is noticed."""
        self.dead |= {rank_id}
        self.ranks[rank_id] = Rank(place="dead", outbox=self.ranks[rank_id].outbox)

    def _lose(self, rank_id: str, link: str) -> None:
        self._spend("losses")
        self.has_lost = True
        self._change(rank_id, **{link: getattr(self.ranks[rank_id], link)[1:]})

    def _error(self, rank_id: str) -> None:
        self._spend("errors")
        self._cannot_form(rank_id, "not filled")

    def _tear(self, rank_id: str) -> None:
        self._spend("errors")
        self._fail(rank_id)

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
        return not self.is_draining and all(
            rank.epoch == machine.epoch
            and rank.place in ("between", "gather", "step")
            and not (rank.is_broken or rank.inbox or rank.control or rank.outbox)
            and (self.has_lost or not (rank.armed or rank.preparing or rank.standby))
            for rank in self.ranks.values()
        )

    def copy(self) -> World:
        world = _shallow(self)
        machine = world.machine = _shallow(self.machine)
        machine.loaded, machine.launching = set(machine.loaded), set(machine.launching)
        machine.strikes, machine.left = dict(machine.strikes), list(machine.left)
        if machine.latest is not None:
            machine.latest = _shallow(machine.latest)
            machine.latest.newcomers = list(machine.latest.newcomers)
        if machine.attempt is not None:
            attempt = machine.attempt = _shallow(machine.attempt)
            attempt.prepared, attempt.parked, attempt.applied = set(attempt.prepared), set(attempt.parked), set(attempt.applied)
        world.ranks, world.members_of = dict(self.ranks), dict(self.members_of)
        world.joining, world.attempt_of = dict(self.joining), dict(self.attempt_of)
        return world

    def _forget_the_past(self) -> None:
        """Drop what is late: it must do nothing, and does not have to be told from what is not there."""
        machine = self.machine
        for timer in self.timers:
            if self._is_stale(*timer):
                require(self.copy().machine.timer(*timer) == [], f"the timer {timer} is late and does nothing")
                self.timers -= {timer}
        for rank_id, rank in self.ranks.items():
            if rank.control and any(not 0 < rank.epoch <= epoch for _, epoch in rank.control):
                self._change(rank_id, control=tuple(each for each in rank.control if 0 < rank.epoch <= each[1]))
            if rank.outbox and any(map(self._is_late, rank.outbox)):
                for message in filter(self._is_late, rank.outbox):
                    self.copy()._hear(rank_id, message, expect_nothing=True)
                self._change(rank_id, outbox=tuple(each for each in rank.outbox if not self._is_late(each)))
        if self.members_of.keys() <= {machine.epoch} and self.joining.keys() <= {machine.num_attempts}:
            return
        epochs = {machine.epoch} | {rank.epoch for rank in self.ranks.values()}
        attempts = {machine.num_attempts}
        for rank in self.ranks.values():
            attempts |= {rank.preparing, rank.standby}
            for what, number in (*rank.inbox, *rank.control, *rank.outbox):
                (epochs if what in ("begin", "abandon", "suspended") else attempts).add(number)
        self.members_of = {epoch: members for epoch, members in self.members_of.items() if epoch in epochs}
        self.attempt_of = {epoch: attempt for epoch, attempt in self.attempt_of.items() if epoch in epochs}
        self.joining = {attempt: members for attempt, members in self.joining.items() if attempt in attempts}
        self.leaves &= self.joining.keys()

    def _is_late(self, message: Message) -> bool:
        """Of a rank's message: it is about what is over, whatever happens from now on."""
        what, number = message
        machine = self.machine
        if what == "suspended":
            return number < machine.epoch
        return what != "loaded" and (number < machine.num_attempts or machine.attempt is None)

    def _is_stale(self, name: str, number: int) -> bool:
        machine = self.machine
        if name == "calm":
            return number != machine.epoch or not machine.lives
        if name in ("reform", "drain"):
            operation = machine.operation
            return operation is None or operation.number != number or (name == "drain" and operation.phase != "draining")
        attempt = machine.attempt
        return attempt is None or attempt.number != number or (attempt.is_committed != (name == "apply"))


_RANK_EVENTS: Mapping[str, Callable[[World, str], None]] = {
    "load": World._load,
    "receive": World._receive,
    "obey": World._obey,
    "form": World._form,
    "cannot form": World._cannot_form,
    "enter": World._enter,
    "wake": World._wake,
    "work": World._wake,
    "doze": World._doze,
    "complete": World._complete,
    "end": World._end,
    "fail": World._fail,
    "time out": World._fail,
    "deliver": World._deliver,
    "news": World._news,
    "kill": World._kill,
    "launch late": World._die,
    "lose inbox": lambda world, rank_id: world._lose(rank_id, "inbox"),
    "lose control": lambda world, rank_id: world._lose(rank_id, "control"),
    "lose outbox": lambda world, rank_id: world._lose(rank_id, "outbox"),
    "error": World._error,
    "tear": World._tear,
}


def _shallow(value: _T) -> _T:
    copied: _T = object.__new__(type(value))
    for name in value.__slots__:  # type: ignore[attr-defined]
        setattr(copied, name, getattr(value, name))
    return copied


def at_start(size: int, budget: Budget = Budget(), *, min_size: int = 1) -> World:
    """The first ranks are being launched."""
    world = World(machine=Membership(desired_size=size, min_size=min_size), budget=budget)
    world.do(world.machine.start())
    return world


def serving(
    size: int, budget: Budget = Budget(), *, min_size: int = 1, requests: tuple[Request, ...] = ()
) -> World:
    """An epoch of `size` ranks steps, and `requests` follow."""
    world = at_start(size, min_size=min_size)
    while not world.is_at_rest():
        events = [event for event in world.normal_events() if event[0] not in ("timer", "time out")]
        world = world.happen(min(events, key=lambda event: event[0] in ("enter", "complete", "end")))
    world.timers = frozenset()
    return replace(world, budget=budget, requests=requests)
