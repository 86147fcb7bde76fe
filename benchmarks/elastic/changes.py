"""Random changes of the ranks of a server: what users ask for, take back, and what dies in between.

Owns what is drawn and what each change may end as. The same seed and the same members draw the same changes.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.elastic.server import POLL_S, ElasticServer, ServerError

WEIGHTS = {
    "grow": 20,
    "shrink": 14,
    "drained shrink": 10,
    "remove": 10,
    "replace": 10,
    "cancel": 14,
    "kill": 12,
    "kill during": 12,
    "stop": 2,
}
DRAIN_S = 10
# A growth takes seconds, of which most are the launch; a cancel or a death may come at any moment of it.
LONGEST_DELAY_S = 4.0


@dataclass(frozen=True, kw_only=True)
class Change:
    """`body` is what is asked for, `None` if nothing is. After `delay_s` it is cancelled, or `victim` gets `signal`.

    `victim` counts the ranks there are then, newcomers included, modulo their number.
    """

    kind: str
    body: Mapping[str, Any] | None = None
    cancels: bool = False
    signal: signal.Signals | None = None
    victim: int = 0
    delay_s: float = 0.0

    def __str__(self) -> str:
        asked = "" if self.body is None else ", ".join(f"{name} {value}" for name, value in self.body.items())
        after = f"after {self.delay_s:.2f} s" if self.delay_s else ""
        return " ".join(part for part in (self.kind, asked, after) if part)

    @property
    def may_end_as(self) -> tuple[str, ...]:
        return ("done", "rolled_back") if self.cancels or self.signal is not None else ("done",)


def draw(rng: random.Random, members: list[str], max_size: int) -> Change:
    """A change that these members can go through."""
    possible = {kind: weight for kind, weight in WEIGHTS.items() if _is_possible(kind, len(members), max_size)}
    kind = rng.choices(list(possible), list(possible.values()))[0]
    delay_s = round(rng.uniform(0.0, LONGEST_DELAY_S), 2)
    match kind:
        case "kill" | "stop":
            number = signal.SIGKILL if kind == "kill" else signal.SIGSTOP
            return Change(kind=kind, signal=number, victim=rng.randrange(len(members)))
        case "cancel":
            return Change(kind=kind, body=_draw_body(rng, members, max_size), cancels=True, delay_s=delay_s)
        case "kill during":
            body, victim = _draw_body(rng, members, max_size), rng.randrange(2 * max_size)
            return Change(kind=kind, body=body, signal=signal.SIGKILL, victim=victim, delay_s=delay_s)
        case _:
            return Change(kind=kind, body=_body(kind, rng, members, max_size))


def _is_possible(kind: str, num_members: int, max_size: int) -> bool:
    if kind == "grow":
        return num_members < max_size
    if kind in ("shrink", "drained shrink", "remove"):
        return num_members > 1
    return True


def _draw_body(rng: random.Random, members: list[str], max_size: int) -> dict[str, Any]:
    kinds = ("grow", "shrink", "drained shrink", "remove", "replace")
    return _body(
        rng.choice([each for each in kinds if _is_possible(each, len(members), max_size)]), rng, members, max_size
    )


def _body(kind: str, rng: random.Random, members: list[str], max_size: int) -> dict[str, Any]:
    match kind:
        case "grow":
            return {"data_parallel_size": rng.randint(len(members) + 1, max_size)}
        case "shrink":
            return {"data_parallel_size": rng.randint(1, len(members) - 1)}
        case "drained shrink":
            size = rng.randint(1, len(members) - 1)
            return {"data_parallel_size": size, "drain": True, "drain_timeout_s": DRAIN_S}
        case "remove":
            return {"remove_ranks": rng.sample(members, rng.randint(1, len(members) - 1))}
        case "replace":
            return {"replace_ranks": rng.sample(members, rng.randint(1, len(members)))}
    raise AssertionError(kind)


@dataclass(kw_only=True)
class Outcome:
    """What became of a change; `operations` are all that it led to, failures and healing included."""

    phase: str = ""
    notes: list[str] = field(default_factory=list)
    operations: list[dict[str, Any]] = field(default_factory=list)


async def perform(server: ElasticServer, change: Change) -> Outcome:
    """Do it, and wait until the group is whole again. `ServerError` when it ends in another way than it may."""
    outcome = Outcome()
    known = {each["operation_id"] for each in await server.operations()}
    asked = None if change.body is None else (await server.request(change.body))["operation_id"]
    await asyncio.sleep(change.delay_s)
    if change.cancels:
        code, _ = await server.call("DELETE", f"/elastic/operations/{asked}")
        outcome.notes.append("cancelled" if code == 200 else f"too late to cancel ({code})")
    gone = None
    if change.signal is not None:
        gone, note = await _signal(server, change)
        outcome.notes.append(note)
    if asked is not None:
        document = await server.ended(asked)
        outcome.phase = document["phase"]
        if outcome.phase not in change.may_end_as:
            raise ServerError(f"{change}: {outcome.phase}, {document['error']}")
    if gone is not None:
        await _until_noticed(server, gone)
    await server.wait_whole()
    outcome.operations = [each for each in await server.operations() if each["operation_id"] not in known]
    if wrong := [each for each in outcome.operations if each["phase"] == "failed"]:
        raise ServerError(f"{change}: {wrong[0]['operation_id']} failed, {wrong[0]['error']}")
    return outcome


async def _signal(server: ElasticServer, change: Change) -> tuple[str, str]:
    """Which rank got it, and a note of that."""
    assert change.signal is not None
    ranks = [rank for rank in (await server.status())["ranks"] if rank["pid"] is not None]
    rank = ranks[change.victim % len(ranks)]
    try:
        os.kill(rank["pid"], change.signal)
    except ProcessLookupError:
        return rank["rank_id"], f"{rank['rank_id']} had ended"
    return rank["rank_id"], f"{change.signal.name} to {rank['rank_id']} ({rank['state']})"


async def _until_noticed(server: ElasticServer, rank_id: str, timeout_s: float = 60.0) -> None:
    """Until the server knows that the rank is dead."""
    async with asyncio.timeout(timeout_s):
        while any(rank["rank_id"] == rank_id for rank in (await server.status())["ranks"]):
            await asyncio.sleep(POLL_S)
