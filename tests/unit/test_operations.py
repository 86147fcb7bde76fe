"""Operations: what is remembered of them, how long ranks stood still, and when a group grows back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import pytest

from nobiru.config import EngineConfig
from nobiru.elastic.membership import Action, Membership
from nobiru.engine import operations
from nobiru.engine.operations import MAX_HEAL_FAILURES, MAX_REMEMBERED, Operations
from nobiru.engine.planning import Planning
from nobiru.errors import NotFoundError


class Group:
    """A machine whose ranks do at once what they are told, and a clock that is moved by hand."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch, *, self_heal: bool = True) -> None:
        self.now_s = 1000.0
        self.num_places = 8
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.machine = Membership(desired_size=size)
        config = EngineConfig(model="none", data_parallel_size=size, self_heal=self_heal)
        self.operations = Operations(
            config,
            self.machine,
            Planning(config, None, files=(), host="127.0.0.1"),
            perform=self.perform,
            later=lambda seconds, call: self.timers.append((self.now_s + seconds, call)),
            states=lambda: {},
            on_done=lambda: None,
            num_places=lambda: self.num_places,
        )
        monkeypatch.setattr(operations.time, "monotonic", lambda: self.now_s)
        self.perform(self.machine.start())
        self.finish()

    def perform(self, actions: Iterable[Action]) -> None:
        self.operations.note_phases()
        assert list(actions) is not None
        self.operations.heal_if_due()

    def load(self) -> None:
        for rank_id in sorted(self.machine.launching):
            self.perform(self.machine.rank_loaded(rank_id))

    def prepare(self) -> None:
        machine = self.machine
        if machine.attempt is None and machine.operation is not None:
            self.perform(machine.timer("reform", machine.operation.number))
        attempt = machine.attempt
        for rank_id in attempt.members if attempt is not None else ():
            self.perform(machine.rank_prepared(rank_id, machine.num_attempts))

    def park(self) -> None:
        record = self.operations.running
        assert record is not None
        record.stopped_s = self.now_s
        for rank_id in self.machine.members:
            self.perform(self.machine.rank_parked(rank_id, self.machine.num_attempts))

    def apply(self) -> None:
        for rank_id in self.machine.members:
            self.perform(self.machine.rank_applied(rank_id, self.machine.num_attempts))

    def finish(self) -> None:
        self.load()
        self.prepare()
        if self.machine.lives and self.machine.attempt is not None and not self.machine.attempt.is_committed:
            self.park()
        self.apply()
        assert self.machine.operation is None

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        due = [call for when_s, call in self.timers if when_s <= self.now_s]
        self.timers = [(when_s, call) for when_s, call in self.timers if when_s > self.now_s]
        for call in due:
            call()


def test_a_pause_is_from_the_first_that_parks_to_the_last_that_steps_again(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(2, monkeypatch)
    assert group.operations.documents()[0]["pause_seconds"] == 0.0, "nobody was there to be stopped"
    group.operations.request(size=1)
    group.pass_time(5.0)
    group.prepare()
    group.park()
    group.pass_time(0.25)
    group.apply()
    assert group.operations.documents()[-1]["pause_seconds"] == 0.25


def test_a_failure_pauses_from_its_news_to_the_last_that_steps_again(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(3, monkeypatch, self_heal=False)
    group.perform(group.machine.rank_lost("r0"))
    group.pass_time(1.0)
    group.perform(group.machine.rank_lost("r1"))
    group.pass_time(1.0)
    group.finish()
    document = group.operations.documents()[-1]
    assert (document["origin"], document["phase"], document["pause_seconds"]) == ("failure", "done", 2.0)


def test_a_failure_of_parked_members_pauses_from_when_they_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(3, monkeypatch, self_heal=False)
    group.operations.request(size=2)
    group.prepare()
    running = group.operations.running
    assert running is not None
    running.stopped_s = group.now_s
    group.perform(group.machine.rank_parked("r0", group.machine.num_attempts))
    group.pass_time(3.0)
    group.perform(group.machine.rank_lost("r1"))
    group.pass_time(1.0)
    group.finish()
    undone, failure = group.operations.documents()[-2:]
    assert (undone["phase"], undone["pause_seconds"]) == ("rolled_back", None)
    assert failure["pause_seconds"] == 4.0


def test_the_oldest_operations_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(1, monkeypatch)
    first = group.operations.documents()[0]["operation_id"]
    for number in range(MAX_REMEMBERED + 5):
        group.operations.request(size=1, idempotency_key=str(number))
        group.finish()
    documents = group.operations.documents()
    assert len(documents) == MAX_REMEMBERED + 1
    assert documents[-1]["idempotency_key"] == str(MAX_REMEMBERED + 4)
    with pytest.raises(NotFoundError):
        group.operations.document(first)
    running = group.operations.request(size=1)
    assert group.operations.document(running["operation_id"])["phase"] == "preparing"


def test_one_timer_heals_whatever_happens_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(3, monkeypatch)
    group.perform(group.machine.rank_lost("r0"))
    group.finish()
    for _ in range(10):
        group.perform([])
    assert len(group.timers) == 1
    group.pass_time(0.0)
    assert group.operations.documents()[-1]["origin"] == "heal"
    group.finish()
    assert len(group.machine.members) == 3
    assert not group.timers


def test_healing_waits_longer_each_time_and_gives_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = Group(2, monkeypatch)
    group.perform(group.machine.rank_lost("r0"))
    group.finish()
    waits = []
    with caplog.at_level(logging.ERROR):
        while group.timers:
            waits.append(group.timers[0][0] - group.now_s)
            group.pass_time(waits[-1])
            (newcomer,) = group.machine.launching
            group.perform(group.machine.rank_lost(newcomer))
    assert waits == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert len(waits) == MAX_HEAL_FAILURES
    assert caplog.text.count("not trying again") == 1
    group.operations.request(size=2)
    group.finish()
    group.perform(group.machine.rank_lost("r1"))
    group.finish()
    assert len(group.timers) == 2, "the deadline of what was asked for, and a new try"


def test_an_operation_that_a_death_undoes_is_not_healed_towards(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(2, monkeypatch)
    group.operations.request(size=4)
    group.perform(group.machine.rank_lost("r0"))
    group.finish()
    group.pass_time(0.0)
    assert group.operations.documents()[-1]["target"] == {"data_parallel_size": 2}
