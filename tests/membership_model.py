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
from dataclasses import replace

from membership_broken import require
from membership_state import NO_FAULTS, Budget, Event, Message, Rank, Request, State
from membership_text import LENGTH, Text

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


class World(State):
    """A state, and what can happen next."""

    __slots__ = ()

    # ---- what can happen ---------------------------------------------------------------------------------------------

    def normal_events(self) -> list[Event]:
        """In a world without faults each of these happens sooner or later, if it stays possible."""
        events: list[Event] = [("news", rank_id) for rank_id in self.dead]
        for rank_id, rank in self.ranks.items():
            if rank_id not in self.dead:
                events += [(what, rank_id) for what in self._rank_events(rank_id, rank)]
            if rank.outbox:
                events.append(("deliver", rank_id))
        if self.is_draining and not any(map(self._is_writing, self._leaving)):
            events.append(("drained", None))
        events += [("timer", timer) for timer in self.timers if timer[0] == "reform"]
        if self._is_slow(events):
            events += [("timer", timer) for timer in self.timers if timer[0] != "reform"]
            events += [("time out", rank_id) for rank_id, rank in self.ranks.items() if self.waits_in_vain(rank)]
            events += [("launch late", rank_id) for rank_id in self.machine.launching]
            events += [("repeat", rank_id) for rank_id, rank in self.ranks.items() if rank.stands_still]
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
            if any(not self.comes(each, rank.preparing) for each in self.joining[rank.preparing]):
                yield "cannot form"
        if rank.place == "between" and not rank.asleep:
            yield "enter"
        if rank.asleep and self.is_woken(rank):
            yield "wake"
        if rank.result:
            yield "complete"
        if rank.place == "step":
            yield "end"
        if rank.place in ("gather", "step") and self.is_torn(rank):
            yield "fail"

    def faults(self) -> list[Event]:
        events: list[Event] = []
        budget, machine = self.budget, self.machine
        living = {rank_id: rank for rank_id, rank in self.ranks.items() if rank_id not in self.dead}
        operation = machine.operation
        if (
            self.requests
            and operation is None
            and machine.lives
            and set(self.requests[0].remove) <= set(machine.members)
        ):
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
            events += [("doze", rank_id) for rank_id, rank in living.items() if self.comes_last(rank_id, rank)]
        events += [("work", rank_id) for rank_id, rank in living.items() if rank.asleep and rank.place == "between"]
        return events

    def _is_slow(self, events: list[Event]) -> bool:
        """Nothing but time passes: at most members go on stepping, which changes nothing."""
        return all(what == "enter" and self.only_steps(self.ranks[str(rank_id)]) for what, rank_id in events)

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
                        self.change(rank_id, control=(*self.ranks[rank_id].control, ("abandon", action.epoch)))
                case Begin():
                    self._commit(action)
                case Stop(rank_id):
                    del self.ranks[rank_id]
                    self.dead -= {rank_id}
                    self._lose_text(rank_id)
                case Drain():
                    self.is_draining = True
                    self._take_requests(tuple(each for each in self.machine.members if each not in action.ranks))
                case Undrain():
                    self.is_draining = False
                    self._take_requests(self.machine.members)
                case SetTimer():
                    self.timers |= {(action.name, action.number)}

    def _send(self, rank_ids: tuple[str, ...], message: Message) -> None:
        for rank_id in rank_ids:
            require(rank_id in self.ranks, f"{rank_id} is told {message[0]}, but is no more")
            if rank_id not in self.dead:
                self.change(rank_id, inbox=(*self.ranks[rank_id].inbox, message))

    def _commit(self, begin: Begin) -> None:
        require(begin.epoch == self.machine.epoch, "one epoch at a time, one after the other")
        require(begin.members == self.joining[begin.attempt], "an epoch begins with those who have prepared it")
        require(len(begin.members) >= self.machine.min_size, "an epoch can hold the model")
        require(len(set(begin.members)) == len(begin.members), "members are different")
        for rank_id, rank in self.ranks.items():
            if rank_id not in self.dead:
                require(rank.epoch == 0 or rank.place == "parked", f"{rank_id} has parked, or has left, at a commit")
                require(
                    rank_id not in begin.members or rank.standby == begin.attempt, f"{rank_id} has prepared to begin"
                )
        self.members_of[begin.epoch] = begin.members
        self.attempt_of[begin.epoch] = begin.attempt
        self.is_draining = False
        self._send(begin.members, ("begin", begin.epoch))
        self._take_requests(begin.members)

    @property
    def _leaving(self) -> tuple[str, ...]:
        return () if self.machine.operation is None else self.machine.operation.leaving

    def _is_writing(self, rank_id: str) -> bool:
        return self.text is not None and self.text.rank_id == rank_id

    def _take_requests(self, rank_ids: tuple[str, ...]) -> None:
        self.takers = tuple(each for each in rank_ids if each in self.ranks)
        self._send_text()

    def _send_text(self) -> None:
        if self.text is not None and self.takers and (number := self.text.sent(self.takers[0])) is not None:
            self._send(self.takers[:1], ("add", number))

    def _lose_text(self, rank_id: str) -> None:
        self.takers = tuple(each for each in self.takers if each != rank_id)
        if self.text is not None:
            self.text.rank_lost(rank_id)
            self._send_text()

    # ---- of one rank -------------------------------------------------------------------------------------------------

    def _load(self, rank_id: str) -> None:
        self.change(rank_id, place="out")
        self.say(rank_id, ("loaded", 0))

    def _receive(self, rank_id: str) -> None:
        (what, number), rest = self.ranks[rank_id].inbox[0], self.ranks[rank_id].inbox[1:]
        self.change(rank_id, inbox=rest)
        rank = self.ranks[rank_id]
        match what:
            case "prepare":
                self._drop_attempts(rank_id, number - 1)
                if number in self.leaves and rank.epoch:
                    self.leave(rank_id)
                self.change(rank_id, preparing=number)
                if all(self._is_here(each, number) for each in self.joining[number]):
                    for each in self.joining[number]:
                        self.change(each, can_form=True)
            case "arm":
                self.change(rank_id, armed=number, asleep=False)
            case "forget":
                self._drop_attempts(rank_id, number)
            case "begin":
                self._begin(rank_id, number)
            case "add":
                self.change(rank_id, tasks=(*rank.tasks, number))

    def _is_here(self, rank_id: str, attempt: int) -> bool:
        rank = self.ranks.get(rank_id)
        return rank is not None and rank.preparing == attempt

    def _drop_attempts(self, rank_id: str, last: int) -> None:
        rank = self.ranks[rank_id]
        if rank.standby <= last:
            self.change(rank_id, standby=0)
        if rank.preparing <= last:
            self.change(rank_id, preparing=0, can_form=False)
        if rank.armed <= last:
            self.change(rank_id, armed=0, place="between" if rank.place == "parked" else rank.place)

    def _begin(self, rank_id: str, epoch: int) -> None:
        rank = self.ranks[rank_id]
        require(rank.standby == self.attempt_of[epoch], "who begins has prepared")
        for other, each in self.ranks.items():
            require(
                other in self.dead or each.place != "step", f"{other} is in a step while {rank_id} applies a commit"
            )
        self.leave(rank_id)
        self.change(rank_id, place="between", epoch=epoch, standby=0, left=0)

    def _obey(self, rank_id: str) -> None:
        rank = self.ranks[rank_id]
        (_, epoch), rest = rank.control[0], rank.control[1:]
        self.change(rank_id, control=rest, is_broken=rank.is_broken or 0 < rank.epoch <= epoch)

    def _form(self, rank_id: str) -> None:
        attempt = self.ranks[rank_id].preparing
        self.change(rank_id, preparing=0, can_form=False, standby=attempt)
        self.say(rank_id, ("formed", attempt))

    def _cannot_form(self, rank_id: str, what: str = "not formed") -> None:
        attempt = self.ranks[rank_id].preparing
        self.change(rank_id, preparing=0, can_form=False)
        self.say(rank_id, (what, attempt))

    def _enter(self, rank_id: str, ends: str = "step") -> None:
        rank = self.ranks[rank_id]
        is_last = self.comes_last(rank_id, rank)
        self.change(rank_id, place="gather")
        if not is_last:
            return
        members = self.members_of[rank.epoch]
        armed = {self.ranks[each].armed for each in members}
        require(self.machine.epoch == rank.epoch, "only the committed epoch steps")
        for each in members:
            self.change(each, result="park" if len(armed) == 1 and armed != {0} else ends)

    def _doze(self, rank_id: str) -> None:
        self._spend("naps")
        self._enter(rank_id, "sleep")

    def _wake(self, rank_id: str) -> None:
        self.change(rank_id, asleep=False)

    def _complete(self, rank_id: str) -> None:
        rank = self.ranks[rank_id]
        place = {"step": "step", "sleep": "between", "park": "parked"}[rank.result]
        self.change(rank_id, result="", place=place, asleep=rank.result == "sleep", has_gathered=True)
        if not rank.has_gathered:
            self.say(rank_id, ("applied", self.attempt_of[rank.epoch]))
        if place == "parked":
            self.say(rank_id, ("parked", rank.armed))

    def _end(self, rank_id: str) -> None:
        tasks = self.ranks[rank_id].tasks
        self.change(rank_id, place="between", tasks=tuple(each + 1 for each in tasks if (each + 1) % LENGTH))
        for task in tasks:
            self.say(rank_id, ("output", task))

    def _fail(self, rank_id: str) -> None:
        epoch = self.ranks[rank_id].epoch
        self.leave(rank_id)
        self.change(rank_id, left=epoch)
        self.say(rank_id, ("suspended", epoch))

    def _repeat(self, rank_id: str) -> None:
        rank = self.ranks[rank_id]
        self.say(rank_id, ("parked", rank.armed) if rank.place == "parked" else ("suspended", rank.left))

    def _deliver(self, rank_id: str) -> None:
        (what, number), rest = self.ranks[rank_id].outbox[0], self.ranks[rank_id].outbox[1:]
        self.change(rank_id, outbox=rest)
        self._hear(rank_id, (what, number))

    def _hear(self, rank_id: str, message: Message, *, expect_nothing: bool = False) -> None:
        what, number = message
        machine = self.machine
        match what:
            case "output":
                assert self.text is not None
                is_new = self.text.hear(number)
                require(not (expect_nothing and is_new), f"{message} is late and does not count")
                return
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
        actions = self.machine.rank_lost(rank_id)
        self._lose_text(rank_id)
        self.do(actions)

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
        self.change(rank_id, **{link: getattr(self.ranks[rank_id], link)[1:]})

    def _error(self, rank_id: str) -> None:
        self._spend("errors")
        self._cannot_form(rank_id, "not filled")

    def _tear(self, rank_id: str) -> None:
        self._spend("errors")
        self._fail(rank_id)

    def _forget_the_past(self) -> None:
        """Drop what is late: it must do nothing, and does not have to be told from what is not there."""
        for timer in self.timers:
            if self._is_stale(*timer):
                require(self.copy().machine.timer(*timer) == [], f"the timer {timer} is late and does nothing")
                self.timers -= {timer}
        for rank_id, rank in self.ranks.items():
            if rank.control and any(not 0 < rank.epoch <= epoch for _, epoch in rank.control):
                self.change(rank_id, control=tuple(each for each in rank.control if 0 < rank.epoch <= each[1]))
            if 0 < rank.left < self.machine.epoch:
                self.change(rank_id, left=0)
            if rank.outbox and any(map(self._is_late, rank.outbox)):
                for message in filter(self._is_late, rank.outbox):
                    self.copy()._hear(rank_id, message, expect_nothing=True)
                self.change(rank_id, outbox=tuple(each for each in rank.outbox if not self._is_late(each)))
        self.forget_numbers()

    def _is_late(self, message: Message) -> bool:
        """Of a rank's message: it is about what is over, whatever happens from now on."""
        what, number = message
        machine = self.machine
        if what == "suspended":
            return number < machine.epoch
        if what == "output":
            return self.text is None or self.text.is_late(number)
        return what not in ("loaded", "parked") and (number < machine.num_attempts or machine.attempt is None)

    def _is_stale(self, name: str, number: int) -> bool:
        machine = self.machine
        if name == "calm":
            return number != machine.epoch or not machine.lives
        if name in ("reform", "drain"):
            operation = machine.operation
            return (
                operation is None or operation.number != number or (name == "drain" and operation.phase != "draining")
            )
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
    "repeat": World._repeat,
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


def at_start(size: int, budget: Budget = NO_FAULTS, *, min_size: int = 1) -> World:
    """The first ranks are being launched."""
    world = World(machine=Membership(desired_size=size, min_size=min_size), budget=budget)
    world.do(world.machine.start())
    return world


def serving(
    size: int,
    budget: Budget = NO_FAULTS,
    *,
    min_size: int = 1,
    requests: tuple[Request, ...] = (),
    writer: str | None = None,
) -> World:
    """An epoch of `size` ranks steps, and `requests` follow. `writer` has got a text to write."""
    world = at_start(size, min_size=min_size)
    while not world.is_at_rest():
        events = [event for event in world.normal_events() if event[0] not in ("timer", "time out")]
        world = world.happen(min(events, key=lambda event: event[0] in ("enter", "complete", "end")))
    world = replace(world, budget=budget, requests=requests, timers=frozenset())
    if writer is not None:
        world.text = Text()
        world.takers = (writer, *(each for each in world.takers if each != writer))
        world._send_text()
    return world
