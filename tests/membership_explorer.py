"""Exhaustive exploration of the membership machine in its world, within budgets of faults.

Breadth first over all events in all orders. Worlds that differ only in names of ranks and in how numbers are counted
are one state. `explore` raises `Broken`, with the way there, when something happens that must not, or when a state is
reached from which normal events alone do not lead to rest. Then, if every event that stays possible happens in the end,
the world comes to rest, whatever the order.

    python tests/membership_explorer.py      # the large configurations, minutes to hours
"""

from __future__ import annotations

import hashlib
import marshal
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from membership_broken import Broken
from membership_model import World, at_start, serving
from membership_state import Budget, Event, Message, Rank, Request
from membership_text import LENGTH

_OF_EPOCHS = ("begin", "abandon", "suspended")


@dataclass(frozen=True, slots=True)
class Explored:
    num_states: int
    num_transitions: int
    depth: int
    num_at_rest: int
    seconds: float


def explore(first: World, *, max_states: int = 10_000_000) -> Explored:
    """All that can happen from a world on."""
    began_s = time.monotonic()
    numbers = {digest(first): 0}
    parents: list[tuple[int, Event | None]] = [(0, None)]
    queue = deque([(0, 0, first)])
    at_rest: list[int] = []
    sources, targets = array("l"), array("l")  # of normal events
    num_transitions = depth = 0
    while queue:
        number, depth, world = queue.popleft()
        normal = world.normal_events()
        if world.is_at_rest():
            at_rest.append(number)
        for place, event in enumerate((*normal, *world.faults())):
            num_transitions += 1
            try:
                following = world.happen(event)
            except Exception as error:
                raise Broken(f"{error!r}\n{_story(first, parents, number, event)}") from error
            name = digest(following)
            if (known := numbers.get(name)) is None:
                known = numbers[name] = len(parents)
                parents.append((number, event))
                queue.append((known, depth + 1, following))
                if known >= max_states:
                    raise Broken(f"more than {max_states} states")
            if place < len(normal):
                sources.append(number)
                targets.append(known)
    if (stuck := _without_rest(len(parents), sources, targets, at_rest)) is not None:
        raise Broken(f"it does not come to rest\n{_story(first, parents, stuck, None)}")
    return Explored(len(parents), num_transitions, depth, len(at_rest), time.monotonic() - began_s)


def _without_rest(num_states: int, sources: array[int], targets: array[int], at_rest: list[int]) -> int | None:
    """The first state from which no normal events lead to rest."""
    before: list[list[int]] = [[] for _ in range(num_states)]
    for source, target in zip(sources, targets, strict=True):
        before[target].append(source)
    good = bytearray(num_states)
    stack = list(at_rest)
    for number in stack:
        good[number] = 1
    while stack:
        for source in before[stack.pop()]:
            if not good[source]:
                good[source] = 1
                stack.append(source)
    bad = good.find(0)
    return None if bad < 0 else bad


def _story(first: World, parents: list[tuple[int, Event | None]], number: int, last: Event | None) -> str:
    """How a state was reached."""
    events = [last] if last is not None else []
    while number:
        number, event = parents[number]
        assert event is not None
        events.append(event)
    world, lines = first, []
    for event in reversed(events):
        lines.append(f"{event[0]} {event[1] or ''}")
        try:
            world = world.happen(event)
        except Exception:
            break
    return "\n".join((*lines, str(world)))


# ---- equal worlds ----------------------------------------------------------------------------------------------------


def digest(world: World) -> bytes:
    """The same for worlds that differ in names and in counting only."""
    return hashlib.blake2b(marshal.dumps(_state(world), 0), digest_size=16).digest()


def _state(world: World) -> tuple[object, ...]:
    machine, operation, attempt = world.machine, world.machine.operation, world.machine.attempt
    names = dict.fromkeys(world.ranks)
    for members in (*world.members_of.values(), *world.joining.values()):
        names.update(dict.fromkeys(members))
    return (
        sorted(_rank_state(world, name) for name in names),
        machine.lives,
        machine.suspicion.is_unexplained,
        machine.desired_size,
        machine.epoch > 0,
        None
        if operation is None
        else (
            operation.phase,
            operation.origin,
            operation.size,
            operation.drain_timeout_s is not None,
            operation.drain_may_replay,
        ),
        None if attempt is None else (attempt.is_armed, attempt.is_committed),
        tuple(world.budget),
        len(world.requests),
        sorted(name for name, _ in world.timers),
        world.is_draining,
        world.has_lost,
        None if world.text is None else world.text.state,
        sorted(_since(attempt, machine.num_attempts) for attempt in world.leaves),
        sorted(
            (_since(epoch, machine.epoch), _since(attempt, machine.num_attempts))
            for epoch, attempt in world.attempt_of.items()
        ),
    )


def _since(number: int, now: int) -> int:
    return 0 if number == 0 else number - now - 1


def _rank_state(world: World, name: str) -> tuple[object, ...]:
    """What is known about a rank, without its name."""
    machine, operation, attempt = world.machine, world.machine.operation, world.machine.attempt
    is_ordered = bool(world.requests)  # who leaves depends on the order only when somebody asks
    return (
        _plain(
            world.ranks.get(name), machine.epoch, machine.num_attempts, 0 if world.text is None else world.text.seq_id
        ),
        world.text is not None and (name == world.text.rank_id, name in world.takers and world.takers.index(name) + 1),
        name in world.dead,
        (1 + machine.members.index(name) if is_ordered else 1) if name in machine.members else 0,
        name in machine.loaded,
        name in machine.launching,
        machine.suspicion.strikes.get(name, 0),
        0 if name not in machine.suspicion.left else 1 if machine.suspicion.left[0] == name else 2,
        operation is not None
        and name in operation.newcomers
        and (1 + operation.newcomers.index(name) if is_ordered else 1),
        operation is not None and name in operation.leaving,
        attempt is not None and (name in attempt.prepared, name in attempt.parked, name in attempt.applied),
        sorted(_since(epoch, machine.epoch) for epoch, members in world.members_of.items() if name in members),
        sorted(_since(number, machine.num_attempts) for number, members in world.joining.items() if name in members),
    )


@lru_cache(maxsize=1 << 20)
def _plain(rank: Rank | None, epoch: int, attempts: int, seq_id: int) -> tuple[object, ...]:
    if rank is None:
        return ()
    return (
        rank.place,
        _since(rank.epoch, epoch),
        rank.result,
        rank.has_gathered,
        _since(rank.left, epoch),
        rank.asleep,
        rank.is_broken,
        _since(rank.armed, attempts),
        _since(rank.preparing, attempts),
        rank.can_form,
        _since(rank.standby, attempts),
        _messages(rank.inbox, epoch, attempts, seq_id),
        _messages(rank.control, epoch, attempts, seq_id),
        _messages(rank.outbox, epoch, attempts, seq_id),
        tuple(each - seq_id * LENGTH for each in rank.tasks),
    )


def _messages(messages: tuple[Message, ...], epoch: int, attempts: int, seq_id: int) -> tuple[Message, ...]:
    return tuple(
        (
            what,
            number - seq_id * LENGTH
            if what in ("add", "output")
            else _since(number, epoch if what in _OF_EPOCHS else attempts),
        )
        for what, number in messages
    )


# ---- what is explored ------------------------------------------------------------------------------------------------

Configuration = Callable[[], World]
SHRINK, GROW, REPLACE = (Request(1),), (Request(2),), (Request(2, ("r0",)),)
CONFIGURATIONS: dict[str, Configuration] = {
    "two start, a death": lambda: at_start(2, Budget(deaths=1)),
    "three, two deaths": lambda: serving(3, Budget(deaths=2)),
    "three of at least two, two deaths": lambda: serving(3, Budget(deaths=2), min_size=2),
    "two, two errors": lambda: serving(2, Budget(errors=2)),
    "2 → 1, a death": lambda: serving(2, Budget(deaths=1), requests=SHRINK),
    "2 → 1, a lost message": lambda: serving(2, Budget(losses=1), requests=SHRINK),
    "2 → 1, an error": lambda: serving(2, Budget(errors=1), requests=SHRINK),
    "2 → 1, a cancel, an early timer": lambda: serving(2, Budget(early=1, cancels=1), requests=SHRINK),
    "2 → 1, a cancel, a nap": lambda: serving(2, Budget(cancels=1, naps=1), requests=SHRINK),
    "1 → 2, a death": lambda: serving(1, Budget(deaths=1), requests=GROW),
    "1 → 2, a lost message": lambda: serving(1, Budget(losses=1), requests=GROW),
    "2 → 2 with another, a cancel": lambda: serving(2, Budget(cancels=1), requests=REPLACE),
    "2 → 3, a cancel": lambda: serving(2, Budget(cancels=1), requests=(Request(3),)),
    "3 → 2": lambda: serving(3, requests=(Request(2),)),
    "2 → 1, a death, a text on who leaves": lambda: serving(2, Budget(deaths=1), requests=SHRINK, writer="r1"),
    "2 → 1 after a drain, a text on who leaves": lambda: serving(2, requests=(Request(1, drains=True),), writer="r1"),
    "1 → 2, a death, a text": lambda: serving(1, Budget(deaths=1), requests=GROW, writer="r0"),
    "two, two deaths, a text": lambda: serving(2, Budget(deaths=2), writer="r0"),
}
LARGE: dict[str, Configuration] = {
    "two start, two deaths, a lost message": lambda: at_start(2, Budget(deaths=2, losses=1)),
    "three, a death, a lost message": lambda: serving(3, Budget(deaths=1, losses=1)),
    "three, an error, a lost message": lambda: serving(3, Budget(errors=1, losses=1)),
    "two, a death, an error, a lost message": lambda: serving(2, Budget(deaths=1, errors=1, losses=1)),
    "2 → 1, a death, a cancel, a lost message, an early timer": lambda: serving(
        2, Budget(deaths=1, losses=1, early=1, cancels=1), requests=SHRINK
    ),
    "2 → 3, a death, a cancel": lambda: serving(2, Budget(deaths=1, cancels=1), requests=(Request(3),)),
    "2 → 3, a lost message, an early timer": lambda: serving(2, Budget(losses=1, early=1), requests=(Request(3),)),
    "2 → 2 with another, a death, a cancel": lambda: serving(2, Budget(deaths=1, cancels=1), requests=REPLACE),
    "3 → 2, a death": lambda: serving(3, Budget(deaths=1), requests=(Request(2),)),
    "three, a death, a text": lambda: serving(3, Budget(deaths=1), writer="r1"),
    "2 → 2 with another, a death, a cancel, a text on it": lambda: serving(
        2, Budget(deaths=1, cancels=1), requests=REPLACE, writer="r0"
    ),
    "3 → 2 after a drain, a cancel": lambda: serving(3, Budget(cancels=1), requests=(Request(2, drains=True),)),
}


def main() -> None:
    for name, first in {**CONFIGURATIONS, **LARGE}.items():
        explored = explore(first())
        print(
            f"{name}: {explored.num_states:,} states, {explored.num_transitions:,} transitions, "
            f"at most {explored.depth} events deep, {explored.seconds:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
