"""Forming epochs: whatever order things happen in, all members begin the same epoch, and it never hangs."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from nobiru.elastic.formation import Action, Formation, SendAbandon, SendBegin, SendForm, SetTimer


def test_an_epoch_begins_when_all_have_formed() -> None:
    group = Formation(size=2)
    assert group.rank_loaded(1, "r1") == []
    assert group.store_is_ready() == []
    form, timer = group.rank_loaded(0, "r0")
    assert form == SendForm(attempt=1, epoch=1, members=("r0", "r1"))
    assert isinstance(timer, SetTimer)
    assert group.rank_formed("r1", 1) == []
    assert group.rank_formed("r0", 1) == [SendBegin(attempt=1, epoch=1, members=("r0", "r1"))]
    assert group.phase == "serving"


def test_a_death_ends_the_epoch_and_the_successor_brings_the_next() -> None:
    group = serving_pair()
    assert group.rank_lost("r0") == [SendAbandon(attempt=1, members=("r1",))]
    assert group.rank_suspended("r1", 1) == [], "the cause is known"
    form, _ = group.rank_loaded(0, "r2")
    assert form == SendForm(attempt=2, epoch=2, members=("r2", "r1"))


def test_without_a_culprit_the_same_members_try_again() -> None:
    group = serving_pair()
    abandon, timer = group.rank_suspended("r0", 1)
    assert abandon == SendAbandon(attempt=1, members=("r0", "r1"))
    assert isinstance(timer, SetTimer)
    assert group.rank_suspended("r1", 1) == []
    form, _ = group.timer(timer.attempt)
    assert isinstance(form, SendForm)
    assert form.epoch == 2


def test_who_does_not_answer_in_time_is_asked_again() -> None:
    group = Formation(size=1, has_store=True)
    form, timer = group.rank_loaded(0, "r0")
    assert isinstance(form, SendForm) and isinstance(timer, SetTimer)
    _, again = group.timer(timer.attempt)
    assert isinstance(again, SetTimer)
    assert group.rank_formed("r0", form.attempt) == [], "too late"
    second, _ = group.timer(again.attempt)
    assert isinstance(second, SendForm)
    assert second.attempt > form.attempt


def serving_pair() -> Formation:
    group = Formation(size=2, has_store=True)
    group.rank_loaded(0, "r0")
    group.rank_loaded(1, "r1")
    for rank_id in ("r0", "r1"):
        group.rank_formed(rank_id, 1)
    return group


class World:
    """A formation, ranks that die and come back, and what is on its way."""

    def __init__(self, size: int, chance: random.Random) -> None:
        self.group = Formation(size=size)
        self.size, self.chance = size, chance
        self.ids = itertools.count()
        self.alive: dict[int, str] = {}
        self.pending: list[tuple[str, object]] = [("store", None)]
        self.attempts, self.epochs = [0], [0]
        for position in range(size):
            self.launch(position)

    def launch(self, position: int) -> None:
        self.alive[position] = f"r{next(self.ids)}"
        self.pending.append(("loaded", (position, self.alive[position])))

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendForm():
                    assert action.attempt > self.attempts[-1]
                    self.attempts.append(action.attempt)
                    for rank_id in action.members:
                        answer = "formed" if self.chance.random() < 0.8 else "failed"
                        self.pending.append((answer, (rank_id, action.attempt)))
                case SendBegin():
                    assert action.epoch == self.epochs[-1] + 1
                    assert len(action.members) == self.size
                    self.epochs.append(action.epoch)
                case SetTimer():
                    self.pending.append(("timer", action.attempt))
                case SendAbandon():
                    pass

    def event(self, name: str, value: object) -> None:
        group = self.group
        match name, value:
            case "store", _:
                self.perform(group.store_is_ready())
            case "loaded", (int(position), str(rank_id)) if self.alive.get(position) == rank_id:
                self.perform(group.rank_loaded(position, rank_id))
            case "formed", (str(rank_id), int(attempt)) if rank_id in self.alive.values():
                self.perform(group.rank_formed(rank_id, attempt))
            case "failed", (str(rank_id), int(attempt)) if rank_id in self.alive.values():
                self.perform(group.form_failed(rank_id, attempt))
            case "timer", int(attempt):
                self.perform(group.timer(attempt))

    def happens(self) -> None:
        kind = self.chance.random()
        if kind < 0.1:
            position = self.chance.choice(list(self.alive))
            self.perform(self.group.rank_lost(self.alive[position]))
            self.launch(position)
        elif kind < 0.15 and self.group.phase == "serving":
            self.perform(self.group.rank_suspended(self.chance.choice(self.group.members), self.group.epoch))
        elif self.pending:
            self.event(*self.pending.pop(self.chance.randrange(len(self.pending))))


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_it_never_hangs_and_numbers_only_grow(chance: random.Random, size: int) -> None:
    """Ranks die and come back, messages and timers are late; when nobody dies any more, the group serves."""
    world = World(size, chance)
    for _ in range(60):
        world.happens()
    for _ in range(2000):
        if world.group.phase == "serving":
            break
        assert world.pending, "somebody is always asked, or a timer runs"
        name, value = world.pending.pop(0)
        world.event("formed" if name == "failed" else name, value)
    assert world.group.phase == "serving"
