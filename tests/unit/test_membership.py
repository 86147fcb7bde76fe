"""The membership machine against pretended ranks: late messages, deaths at every moment, users who change their mind.

The ranks are those of the protocol: they step together or not at all, park only when every member is armed, begin an
epoch only when they are told to, and prepare beside stepping.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nobiru.elastic.membership import (
    BEFORE_COMMIT,
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


@dataclass
class Rank:
    """One rank, as the controller's messages and its neighbours make it."""

    rank_id: str
    is_loaded: bool = False
    epoch: int = 0
    members: tuple[str, ...] = ()
    steps: bool = False
    is_parked: bool = False
    standby: Prepare | None = None
    armed: int = 0
    inbox: deque[Action] = field(default_factory=deque)


class World:
    """The controller's machine, its ranks, and what is on its way between them."""

    def __init__(self, size: int, chance: random.Random, *, fail_prepare: float = 0.0, impatience: float = 0.0) -> None:
        self.machine = Membership(desired_size=size)
        self.chance = chance
        self.fail_prepare = fail_prepare
        self.impatience = impatience  # how often a timer is early
        self.ranks: dict[str, Rank] = {}
        self.dead: set[str] = set()
        self.pending: list[tuple[str, tuple[object, ...]]] = []
        self.committed: list[Begin] = []
        self.num_stopped = 0
        self.do(self.machine.start())

    # ---- the controller ----------------------------------------------------------------------------------------------

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Launch(rank_id):
                    assert rank_id not in self.ranks and rank_id not in self.dead, "ids are never used again"
                    self.ranks[rank_id] = Rank(rank_id)
                    self.pending.append(("loads", (rank_id,)))
                case Prepare():
                    self.send(action.members, action)
                case Arm() | Forget() | Abandon():
                    self.send(action.ranks, action)
                case Begin():
                    assert action.epoch == len(self.committed) + 1, "epochs follow one another"
                    self.committed.append(action)
                    self.send(action.members, action)
                case Stop(rank_id):
                    self.num_stopped += 1
                    self.ranks.pop(rank_id, None)
                    self.dead.add(rank_id)
                case Drain():
                    self.pending.append(("drained", ()))
                case SetTimer():
                    self.pending.append(("timer", (action.name, action.number)))
                case Undrain():
                    pass

    def send(self, rank_ids: tuple[str, ...], action: Action) -> None:
        for rank_id in rank_ids:
            if rank_id in self.ranks:
                self.ranks[rank_id].inbox.append(action)

    # ---- ranks -------------------------------------------------------------------------------------------------------

    def receive(self, rank: Rank) -> None:
        message = rank.inbox.popleft()
        match message:
            case Prepare():
                rank.standby, rank.armed = message, 0
                failed = self.chance.random() < self.fail_prepare
                self.pending.append(("prepared", (rank.rank_id, message.attempt, "no" if failed else None)))
            case Arm():
                rank.armed = message.attempt
            case Forget():
                if rank.standby is not None and rank.standby.attempt <= message.attempt:
                    rank.standby = None
                if rank.armed <= message.attempt:
                    rank.armed, rank.is_parked = 0, False
            case Abandon():
                if rank.epoch <= message.epoch:
                    rank.steps = rank.is_parked = False
            case Begin():
                assert rank.standby is not None and rank.standby.attempt == message.attempt, "it is prepared"
                assert rank.is_parked or not rank.steps, "nobody switches in the middle of a step"
                rank.epoch, rank.members, rank.steps = message.epoch, message.members, True
                rank.is_parked, rank.standby, rank.armed = False, None, 0
                self.pending.append(("applied", (rank.rank_id, message.attempt)))

    def gather(self, rank: Rank) -> None:
        """The beginning of a step: all members of the epoch, or nobody."""
        others = [self.ranks.get(each) for each in rank.members]
        if any(each is None or not each.steps or each.epoch != rank.epoch for each in others):
            gone = any(each is None or each.epoch != rank.epoch or not each.steps for each in others)
            if gone and any(each is None for each in others):
                rank.steps = False
                self.pending.append(("suspended", (rank.rank_id, rank.epoch)))
            return
        members = [each for each in others if each is not None]
        if any(each.is_parked for each in members):
            return
        armed = {each.armed for each in members}
        if len(armed) == 1 and armed != {0}:
            for each in members:
                each.is_parked = True
                self.pending.append(("parked", (each.rank_id, each.armed)))

    # ---- what happens ------------------------------------------------------------------------------------------------

    def kill(self, rank_id: str) -> None:
        del self.ranks[rank_id]
        self.dead.add(rank_id)
        self.pending.append(("lost", (rank_id,)))

    def happen(self, index: int) -> None:
        name, values = self.pending.pop(index)
        machine = self.machine
        about = values[0] if values else None
        if name in ("loads", "prepared", "applied", "parked", "suspended") and about in self.dead and name == "loads":
            return
        match name, values:
            case "loads", (str(rank_id),):
                self.ranks[rank_id].is_loaded = True
                self.do(machine.rank_loaded(rank_id))
            case "prepared", (str(rank_id), int(attempt), error):
                self.do(machine.rank_prepared(rank_id, attempt, error))  # type: ignore[arg-type]
            case "applied", (str(rank_id), int(attempt)):
                self.do(machine.rank_applied(rank_id, attempt))
            case "parked", (str(rank_id), int(attempt)):
                self.do(machine.rank_parked(rank_id, attempt))
            case "suspended", (str(rank_id), int(epoch)):
                self.do(machine.rank_suspended(rank_id, epoch))
            case "lost", (str(rank_id),):
                self.do(machine.rank_lost(rank_id))
            case "drained", ():
                self.do(machine.drained())
            case "timer", (str(timer), int(number)):
                self.do(machine.timer(timer, number))

    def step(self) -> None:
        """Something that can happen happens."""
        busy = [rank for rank in self.ranks.values() if rank.inbox]
        stepping = [rank for rank in self.ranks.values() if rank.steps]
        kind = self.chance.random()
        if kind < 0.4 and busy:
            self.receive(self.chance.choice(busy))
        elif kind < 0.6 and stepping:
            self.gather(self.chance.choice(stepping))
        elif self.pending:
            early = [number for number, (name, _) in enumerate(self.pending) if name != "timer"]
            if self.chance.random() < self.impatience or not (early or busy):
                self.happen(self.chance.randrange(len(self.pending)))
            elif early:
                self.happen(self.chance.choice(early))

    def settle(self) -> None:
        """Nobody dies any more: everything comes to an end, and the group steps."""
        for _ in range(20000):
            if self.is_settled():
                return
            self.step()
        raise AssertionError(f"it does not settle: {self.machine}")

    def is_settled(self) -> bool:
        machine = self.machine
        if machine.operation is not None or not machine.lives or machine.attempt is not None:
            return False
        members = [self.ranks.get(rank_id) for rank_id in machine.members]
        return all(rank is not None and rank.steps and rank.epoch == machine.epoch for rank in members) and not any(
            rank.inbox for rank in self.ranks.values()
        )

    def check_settled(self) -> None:
        machine = self.machine
        assert set(self.ranks) == set(machine.members), "no rank is left that belongs to nothing"
        assert not any(rank.is_parked for rank in self.ranks.values())
        assert all(operation.has_ended for operation in machine.operations)
        assert all(operation.phase != "failed" for operation in machine.operations)
        assert machine.epoch == len(self.committed)


def settled(size: int) -> World:
    world = World(size, random.Random(0))
    world.settle()
    return world


def test_growth_keeps_the_members_and_adds_new_ones() -> None:
    world = settled(2)
    world.do(world.machine.request(size=4))
    world.settle()
    assert world.machine.members == ("r0", "r1", "r2", "r3")
    assert [begin.epoch for begin in world.committed] == [1, 2]


def test_shrink_takes_the_newest_and_removal_the_named() -> None:
    world = settled(4)
    world.do(world.machine.request(size=2))
    world.settle()
    assert world.machine.members == ("r0", "r1")
    world.do(world.machine.request(size=1, remove=["r0"]))
    world.settle()
    assert world.machine.members == ("r1",)
    world.do(world.machine.request(size=1, remove=["r1"]))
    world.settle()
    assert world.machine.members == ("r4",), "a replacement"


def test_the_survivors_of_a_death_go_on_alone_and_may_grow_again() -> None:
    world = settled(3)
    world.kill("r1")
    world.settle()
    assert world.machine.members == ("r0", "r2")
    assert world.machine.desired_size == 3
    world.do(world.machine.request(size=world.machine.desired_size, origin="heal"))
    world.settle()
    assert world.machine.members == ("r0", "r2", "r3")


def test_when_nobody_survives_the_group_is_launched_anew() -> None:
    world = settled(2)
    world.kill("r0")
    world.kill("r1")
    world.settle()
    assert world.machine.members == ("r2", "r3")


def test_a_second_change_is_refused_while_one_runs() -> None:
    world = settled(2)
    world.do(world.machine.request(size=3))
    with pytest.raises(ValueError, match="another"):
        world.machine.request(size=1)


def test_cancelling_before_the_commit_changes_nothing() -> None:
    world = settled(2)
    world.do(world.machine.request(size=3))
    before = world.machine.epoch
    world.do(world.machine.cancel())
    world.settle()
    world.check_settled()
    assert world.machine.epoch == before
    assert world.machine.operations[-1].phase == "rolled_back"
    assert world.machine.cancel() == []


def test_a_prepare_that_fails_rolls_back() -> None:
    world = settled(2)
    world.fail_prepare = 1.0
    world.do(world.machine.request(size=3))
    world.settle()
    assert world.machine.members == ("r0", "r1")
    assert "could not prepare" in (world.machine.operations[-1].error or "")


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 3),
    num_events=st.integers(0, 150),
    deaths=st.sampled_from([0.0, 0.02, 0.1]),
    fail_prepare=st.sampled_from([0.0, 0.1]),
    impatience=st.sampled_from([0.0, 0.05]),
)
def test_whatever_happens_one_epoch_serves_in_the_end(
    seed: int, size: int, num_events: int, deaths: float, fail_prepare: float, impatience: float
) -> None:
    chance = random.Random(seed)
    world = World(size, chance, fail_prepare=fail_prepare, impatience=impatience)
    for _ in range(num_events):
        happens = chance.random()
        machine = world.machine
        if happens < deaths and world.ranks:
            world.kill(chance.choice(list(world.ranks)))
        elif happens < deaths + 0.05 and machine.lives and machine.operation is None:
            some = [rank for rank in machine.members if chance.random() < 0.3]
            timeout = chance.choice([None, 1.0])
            may_replay = chance.random() < 0.5
            size = chance.randint(1, 4)
            world.do(machine.request(size=size, remove=some, drain_timeout_s=timeout, drain_may_replay=may_replay))
        elif happens < deaths + 0.08:
            operation = machine.operation
            can = operation is not None and operation.phase in BEFORE_COMMIT
            actions = machine.cancel()
            assert can or not actions
            world.do(actions)
        else:
            world.step()
    world.fail_prepare = world.impatience = 0.0
    world.settle()
    world.check_settled()
