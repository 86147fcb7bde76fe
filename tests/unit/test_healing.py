"""A group that has lost ranks grows back: as far as there is room, and further when there is more of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from nobiru.config import EngineConfig
from nobiru.elastic.membership import Action, Launch, Membership, Prepare, SetTimer
from nobiru.engine.operations import MAX_HEAL_FAILURES, Operations
from nobiru.engine.planning import Planning
from nobiru.errors import InvalidRequestError


class Group:
    """Ranks that do at once what is asked of them, and a clock that stands still: `pass_time` calls what is due."""

    def __init__(self, size: int, *, num_places: int, **options: int) -> None:
        self.num_places = num_places
        self.can_start = True
        self.due: list[Callable[[], None]] = []
        self.machine = Membership(desired_size=size)
        config = EngineConfig(model="-", data_parallel_size=size, **options)  # type: ignore[arg-type]
        self.operations = Operations(
            config,
            self.machine,
            Planning(config, None, files=(), host="127.0.0.1"),
            perform=self.perform,
            later=lambda seconds, call: self.due.append(call),
            states=dict,
            on_done=lambda: None,
            num_places=lambda: self.num_places,
        )
        self.perform(self.machine.start())

    def perform(self, actions: Iterable[Action]) -> None:
        self.operations.note_phases()
        for action in actions:
            match action:
                case Launch(rank_id) if self.can_start:
                    self.perform(self.machine.rank_loaded(rank_id))
                case Launch(rank_id):
                    self.lose(rank_id)
                case Prepare():
                    for rank_id in action.members:
                        self.perform(self.machine.rank_prepared(rank_id, action.attempt))
                    for rank_id in self.machine.members:
                        self.perform(self.machine.rank_parked(rank_id, action.attempt))
                    for rank_id in action.members:
                        self.perform(self.machine.rank_applied(rank_id, action.attempt))
                case SetTimer("reform", number, _):
                    self.perform(self.machine.timer("reform", number))
        self.operations.note_phases()
        self.operations.heal_if_due()

    def lose(self, rank_id: str) -> None:
        self.machine.num_places = self.num_places
        self.perform(self.machine.rank_lost(rank_id))

    def pass_time(self) -> None:
        due, self.due = self.due, []
        for call in due:
            call()

    @property
    def size(self) -> int:
        assert not self.operations.is_busy
        return len(self.machine.members)


def test_it_grows_back_to_what_was_asked_for() -> None:
    group = Group(3, num_places=3)
    group.lose("r1")
    assert group.size == 2
    group.pass_time()
    assert group.size == 3
    assert group.machine.members == ("r0", "r2", "r3")


def test_a_lost_node_leaves_less_room_until_there_is_another() -> None:
    group = Group(4, num_places=4)
    for rank_id in ("r0", "r1", "r3"):
        group.num_places = 3
        group.lose(rank_id)
    group.pass_time()
    assert group.size == 3, "as many as there is room for"
    for _ in range(5):
        group.pass_time()
        assert len(group.due) == 1, "somebody looks whether there is room, and one is enough"
    assert group.size == 3
    group.num_places = 8
    group.pass_time()
    group.pass_time()
    assert group.size == 4


def test_room_that_is_gone_when_it_is_to_be_used() -> None:
    group = Group(2, num_places=2)
    group.lose("r0")
    group.num_places = 1
    group.pass_time()
    assert group.size == 1
    group.num_places = 2
    group.pass_time()
    group.pass_time()
    assert group.size == 2


def test_it_stops_after_failures_and_begins_anew_after_a_success() -> None:
    group = Group(2, num_places=8)
    group.can_start = False
    group.lose("r1")
    for _ in range(20):
        group.pass_time()
    origins = [each["origin"] for each in group.operations.documents()]
    assert origins.count("heal") == MAX_HEAL_FAILURES
    assert not group.due
    group.can_start = True
    group.operations.request(size=3)
    assert group.size == 3
    group.lose("r0")
    group.pass_time()
    assert group.size == 3


def test_nobody_left_and_less_room() -> None:
    group = Group(3, num_places=3)
    group.num_places = 1
    group.machine.num_places = 1
    for rank_id in ("r0", "r1"):
        group.lose(rank_id)
    assert group.size == 1
    group.lose("r2")
    assert group.size == 1
    assert group.machine.members == ("r3",)


def test_a_new_rank_that_finds_no_room_does_not_keep_the_others_waiting() -> None:
    """The last rank has died, two were launched, and a node goes: the one that is there serves."""
    machine = Membership(desired_size=2, num_places=2, members=("r0",), loaded={"r0"}, lives=True, epoch=1, num_ranks=2)
    launched = [each.rank_id for each in machine.rank_lost("r0") if isinstance(each, Launch)]
    assert launched == ["r2", "r3"]
    assert machine.rank_loaded("r2") == []
    machine.num_places = 1
    assert [each.members for each in machine.rank_lost("r3") if isinstance(each, Prepare)] == [("r2",)]


def test_as_many_as_there_is_room_for_may_be_asked_for() -> None:
    group = Group(2, num_places=2)
    with pytest.raises(InvalidRequestError, match="data_parallel_size is 3; it must be from 1 to 2"):
        group.operations.request(size=3)
    group.num_places = 3
    group.operations.request(size=3)
    assert group.size == 3
    told = Group(2, num_places=2, max_data_parallel_size=4)
    told.operations.request(size=4)
    assert told.size == 4
