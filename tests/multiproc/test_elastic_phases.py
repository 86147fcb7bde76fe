"""An operation is stopped in each of its phases, and there it is cancelled, runs out of time, or loses a rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from elastic_scenes import ended, members, play, stopped_at, undisturbed_texts, whole
from generation_requests import PROMPTS, texts_of
from ranks import is_alive, until

from nobiru.engine.client import ZmqClient
from nobiru.errors import ConflictError

DRAIN = {"drain_timeout_s": 30.0}


@pytest.fixture(scope="module")
def expected(moe_model: Path) -> list[list[int]]:
    return undisturbed_texts(moe_model)


def pids(client: ZmqClient) -> dict[str, int]:
    return {rank["rank_id"]: rank["pid"] for rank in client.status()["ranks"]}


def facts(status: dict[str, Any]) -> dict[str, Any]:
    """What of a status does not follow from the load."""
    return {
        **status,
        "ranks": [{**rank, "outstanding_tokens": None} for rank in status["ranks"]],
        "placement": {**status["placement"], "balancedness": None},
    }


async def check_no_trace(client: ZmqClient, before: dict[str, Any], operation_id: str, error: str) -> None:
    """The operation is undone, late reports change nothing, and everything is as it was before."""
    document = await ended(client, operation_id)
    assert (document["phase"], document["to_epoch"]) == ("rolled_back", None)
    assert error in document["error"]
    client.ranks.holds.release()
    await until(lambda: len(client.status()["ranks"]) == len(before["ranks"]))
    assert facts(client.status()) == facts(before)
    await texts_of(client, PROMPTS[:2])


async def too_late_to_cancel(client: ZmqClient) -> None:
    operation_id = await stopped_at(client, "apply", size=1)
    with pytest.raises(ConflictError, match="is settling; it cannot be cancelled any more"):
        client.operations.cancel(operation_id)
    client.ranks.holds.release()
    assert (await ended(client, operation_id))["phase"] == "done"


@pytest.mark.parametrize("kind", ["growth", "shrink"])
def test_what_is_undone_before_the_commit_leaves_no_trace(
    moe_model: Path, expected: list[list[int]], kind: str
) -> None:
    size, points = (3, ("load", "prepare", "park")) if kind == "growth" else (1, ("prepare", "drain", "park"))

    async def scene(client: ZmqClient) -> None:
        operations = client.operations
        for point in points:
            await texts_of(client, PROMPTS[:2])
            before = client.status()
            operation_id = await stopped_at(client, point, size=size, **(DRAIN if kind == "shrink" else {}))
            operations.cancel(operation_id)
            await check_no_trace(client, before, operation_id, "cancelled")
        for point in points if kind == "shrink" else ():
            before = client.status()
            operation_id = await stopped_at(client, point, size=size, deadline_s=2.0, **DRAIN)
            await check_no_trace(client, before, operation_id, "the deadline has passed")
        if kind == "growth":
            before = client.status()
            client.ranks.holds.hold("load")
            operation_id = operations.request(size=size, deadline_s=0.3)["operation_id"]
            await check_no_trace(client, before, operation_id, "the deadline has passed")
        else:
            await too_late_to_cancel(client)

    play(moe_model, expected, scene)


@pytest.mark.parametrize("victim", ["member", "newcomer"])
def test_a_death_in_any_phase_costs_no_token(moe_model: Path, expected: list[list[int]], victim: str) -> None:
    async def scene(client: ZmqClient) -> None:
        for point in ("load", "prepare", "drain", "park", "apply"):
            if len(members(client)) < 2:
                await ended(client, client.operations.request(size=2)["operation_id"])
            before, epoch = pids(client), client.status()["epoch"]
            stays, leaves = before
            asked: dict[str, Any] = {"replace": [leaves], **DRAIN} if point == "drain" else {"size": 3}
            operation_id = await stopped_at(client, point, **asked)
            (newcomer,) = set(pids(client)) - set(before)
            dead = stays if victim == "member" else newcomer
            os.kill(pids(client)[dead], signal.SIGKILL)
            await until(lambda: dead not in pids(client))  # noqa: B023
            client.ranks.holds.release()
            document = await ended(client, operation_id)
            if point == "apply":
                assert document["phase"] == "done", "it was committed"
                await whole(client, 2)
                assert set(members(client)) == {stays, leaves, newcomer} - {dead}
                continue
            assert document["phase"] == "rolled_back"
            assert document["error"]
            await whole(client, 2 if victim == "newcomer" else 1)
            assert {rank: pid for rank, pid in before.items() if rank != dead} == pids(client)
            assert (client.status()["epoch"] == epoch) == (victim == "newcomer")
            assert not is_alive(before.get(dead, 0))

    play(moe_model, expected, scene, self_heal=False)
