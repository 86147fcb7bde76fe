"""An operation is stopped in each of its phases, and there it is cancelled, or runs out of time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from elastic_scenes import ended, play, undisturbed_texts
from generation_requests import PROMPTS, texts_of
from ranks import until

from nobiru.elastic.holds import Point
from nobiru.engine.client import ZmqClient
from nobiru.errors import ConflictError

DRAIN = {"drain_timeout_s": 30.0}


@pytest.fixture(scope="module")
def expected(moe_model: Path) -> list[list[int]]:
    return undisturbed_texts(moe_model)


def facts(status: dict[str, Any]) -> dict[str, Any]:
    """What of a status does not follow from the load."""
    return {
        **status,
        "ranks": [{**rank, "outstanding_tokens": None} for rank in status["ranks"]],
        "placement": {**status["placement"], "balancedness": None},
    }


async def stopped_at(client: ZmqClient, point: Point, **asked: Any) -> str:
    """Begin an operation and let it come to the end of a phase, where it stands; its id."""
    client.ranks.holds.hold(point)
    operation_id: str = client.operations.request(**asked)["operation_id"]
    machine = client.ranks.machine

    def is_there() -> bool:
        assert machine.operation is not None, client.operations.document(operation_id)
        members = machine.attempt.members if machine.attempt is not None else ()
        num_reports = {"prepare": len(members), "park": len(machine.members), "apply": len(members)}.get(point, 1)
        return client.ranks.holds.num_waiting(point) == num_reports

    await until(is_there)
    return operation_id


async def check_no_trace(client: ZmqClient, before: dict[str, Any], operation_id: str, error: str) -> None:
    """The operation is undone, late reports change nothing, and everything is as it was before."""
    document = await ended(client, operation_id)
    assert (document["phase"], document["to_epoch"]) == ("rolled_back", None)
    assert error in document["error"]
    client.ranks.holds.release()
    await until(lambda: len(client.status()["ranks"]) == len(before["ranks"]))
    assert facts(client.status()) == facts(before)
    await texts_of(client, PROMPTS[:2])


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
            operation_id = operations.request(size=size, deadline_s=0.3)["operation_id"]
            await check_no_trace(client, before, operation_id, "the deadline has passed")

    play(moe_model, expected, scene)


def test_a_committed_operation_cannot_be_cancelled(moe_model: Path, expected: list[list[int]]) -> None:
    async def scene(client: ZmqClient) -> None:
        operation_id = await stopped_at(client, "apply", size=1)
        with pytest.raises(ConflictError, match="is settling; it cannot be cancelled any more"):
            client.operations.cancel(operation_id)
        client.ranks.holds.release()
        assert (await ended(client, operation_id))["phase"] == "done"

    play(moe_model, expected, scene)
