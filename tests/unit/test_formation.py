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


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_it_never_hangs_and_numbers_only_grow(chance: random.Random, size: int) -> None:
    """Ranks die and come back, messages and timers are late; when nobody dies any more, the group serves."""
    group = Formation(size=size)
    ids = itertools.count()
    alive: dict[int, str] = {}
    pending: list[tuple[str, object]] = [("store", None)]
    attempts, epochs = [0], [0]
    forming: dict[str, int] = {}

    def perform(actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendForm():
                    assert action.attempt > attempts[-1]
                    assert list(action.members) == [alive[place] for place in sorted(alive)] or len(alive) < size
                    attempts.append(action.attempt)
                    for rank_id in action.members:
                        pending.append(("formed" if chance.random() < 0.8 else "failed", (rank_id, action.attempt)))
                case SendBegin():
                    assert action.epoch == epochs[-1] + 1
                    assert len(action.members) == size
                    epochs.append(action.epoch)
                    forming.clear()
                case SetTimer():
                    pending.append(("timer", action.attempt))
                case SendAbandon():
                    pass

    def event(name: str, value: object) -> None:
        match name, value:
            case "store", _:
                perform(group.store_is_ready())
            case "loaded", (int(position), str(rank_id)):
                if alive.get(position) == rank_id:
                    perform(group.rank_loaded(position, rank_id))
            case "formed", (str(rank_id), int(attempt)):
                if rank_id in alive.values():
                    perform(group.rank_formed(rank_id, attempt))
            case "failed", (str(rank_id), int(attempt)):
                if rank_id in alive.values():
                    perform(group.form_failed(rank_id, attempt))
            case "timer", int(attempt):
                perform(group.timer(attempt))

    def launch(position: int) -> None:
        alive[position] = f"r{next(ids)}"
        pending.append(("loaded", (position, alive[position])))

    for position in range(size):
        launch(position)
    for _ in range(60):
        happens = chance.random()
        if happens < 0.1:
            position = chance.choice(list(alive))
            perform(group.rank_lost(alive[position]))
            launch(position)
        elif happens < 0.15 and group.phase == "serving":
            perform(group.rank_suspended(chance.choice(group.members), group.epoch))
        elif pending:
            event(*pending.pop(chance.randrange(len(pending))))
    for _ in range(2000):
        if group.phase == "serving":
            break
        assert pending, "somebody is always asked, or a timer runs"
        name, value = pending.pop(0)
        event("formed" if name == "failed" else name, value)
    assert group.phase == "serving"
