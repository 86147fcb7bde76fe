"""Ranks of two workers come and go as wholes, like others: under load, with the texts of an undisturbed process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from elastic_scenes import LIMIT_S, ended, members, play, undisturbed_texts, whole
from generation_requests import PROMPTS, texts_of
from ranks import is_alive, until

from nobiru.elastic.holds import Point
from nobiru.engine.client import ZmqClient

pytestmark = pytest.mark.timeout(400)

SPREAD: dict[str, Any] = {"tensor_parallel_size": 2, "data_parallel_size": 1}
REPLICAS: dict[str, Any] = {**SPREAD, "enable_expert_parallel": False}


@pytest.fixture(scope="module")
def expected(moe_model: Path) -> list[list[int]]:
    return undisturbed_texts(moe_model)


def workers_of(client: ZmqClient, rank_id: str) -> list[int]:
    return next(rank["worker_pids"] for rank in client.status()["ranks"] if rank["rank_id"] == rank_id)


async def scaled(client: ZmqClient, **asked: Any) -> None:
    document = client.operations.request(**asked)
    document = await ended(client, document["operation_id"])
    assert document["phase"] == "done", document["error"]


def all_experts_once(client: ZmqClient) -> None:
    """Every expert of each layer is on one worker."""
    placement = client.status()["placement"]
    assert set(placement["slots"]) == set(members(client))
    for layer in zip(*placement["slots"].values(), strict=True):
        held = [expert for slots in layer for expert in slots if expert >= 0]
        assert sorted(held) == list(range(placement["num_experts"]))


async def grow_and_shrink(client: ZmqClient) -> None:
    first = workers_of(client, "r0")
    assert len(first) == 2
    assert first[0] == client.status()["ranks"][0]["pid"]
    await scaled(client, size=2)
    assert members(client) == ["r0", "r1"]
    gone = workers_of(client, "r1")
    assert len(set(first + gone)) == 4
    await scaled(client, size=1, drain_timeout_s=30.0)
    assert members(client) == ["r0"]
    assert workers_of(client, "r0") == first, "who stays keeps its processes"
    await until(lambda: not any(map(is_alive, gone)), timeout_s=30)


def test_replicas_grow_and_shrink(language_model: Path) -> None:
    play(language_model, undisturbed_texts(language_model), grow_and_shrink, **REPLICAS)


def test_a_replica_is_replaced_and_one_with_a_dead_worker_healed(language_model: Path) -> None:
    async def scene(client: ZmqClient) -> None:
        await scaled(client, replace=["r0"])
        assert members(client) == ["r1", "r2"]
        before = workers_of(client, "r1")
        os.kill(before[1], signal.SIGKILL)
        await until(lambda: "r1" not in members(client))
        await whole(client, 2)
        assert members(client) == ["r2", "r3"]
        assert not any(map(is_alive, before))

    play(language_model, undisturbed_texts(language_model), scene, **{**REPLICAS, "data_parallel_size": 2})


def test_experts_follow_ranks_that_come_and_go(moe_model: Path, expected: list[list[int]]) -> None:
    async def scene(client: ZmqClient) -> None:
        all_experts_once(client)
        await grow_and_shrink(client)
        all_experts_once(client)
        await scaled(client, replace=["r0"])
        assert members(client) == ["r2"]
        all_experts_once(client)

    play(moe_model, expected, scene, **SPREAD)


async def growth_stopped_at(client: ZmqClient, point: Point, num_reports: int) -> str:
    client.ranks.holds.hold(point)
    operation_id: str = client.operations.request(size=2)["operation_id"]
    await until(lambda: client.ranks.holds.num_waiting(point) == num_reports, LIMIT_S)
    return operation_id


def test_a_cancelled_growth_leaves_no_trace(moe_model: Path, expected: list[list[int]]) -> None:
    async def scene(client: ZmqClient) -> None:
        before = client.status()
        points: tuple[Point, ...] = ("prepare", "park")
        for point, num_reports in zip(points, (2, 1), strict=True):  # of old and new members, and of old ones
            operation_id = await growth_stopped_at(client, point, num_reports)
            client.operations.cancel(operation_id)
            client.ranks.holds.release()
            assert (await ended(client, operation_id))["phase"] == "rolled_back"
            await until(lambda: len(client.status()["ranks"]) == 1)
            after = client.status()
            assert after["epoch"] == before["epoch"]
            assert after["placement"]["slots"] == before["placement"]["slots"]
            assert after["ranks"][0]["worker_pids"] == before["ranks"][0]["worker_pids"]
            await texts_of(client, PROMPTS[:2])
        await scaled(client, size=2)
        all_experts_once(client)

    play(moe_model, expected, scene, **SPREAD)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_dead_worker_is_a_dead_rank(moe_model: Path, expected: list[list[int]], victim: int) -> None:
    """The survivors take over its experts, and its place is filled."""

    async def scene(client: ZmqClient) -> None:
        before = workers_of(client, "r0")
        os.kill(before[victim], signal.SIGKILL)
        await until(lambda: members(client) == ["r1"] or "r2" in members(client))
        await whole(client, 2)
        assert members(client) == ["r1", "r2"]
        all_experts_once(client)
        assert not any(map(is_alive, before))

    play(moe_model, expected, scene, **{**SPREAD, "data_parallel_size": 2})
