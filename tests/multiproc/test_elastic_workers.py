"""Ranks of two workers come and go as wholes, like others: under load, with the texts of an undisturbed process."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from elastic_scenes import ended, members, play, undisturbed, whole
from ranks import is_alive, until

from nobiru.engine.client import ZmqClient
from nobiru.errors import ConflictError

pytestmark = pytest.mark.timeout(400)

PAIRS: dict[str, Any] = {"tensor_parallel_size": 2, "step_timeout_s": 20.0}
SPREAD: dict[str, Any] = {**PAIRS, "enable_expert_parallel": True}


@pytest.fixture(scope="module")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from small_models import make

    return make("qwen3-moe", tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def expected(moe_model: Path) -> list[list[int]]:
    return undisturbed(moe_model)


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
    await until(lambda: not any(map(is_alive, gone)), timeout_s=10)


def test_replicas_grow_and_shrink(language_model: Path) -> None:
    play(language_model, undisturbed(language_model), grow_and_shrink, **PAIRS)


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

    play(language_model, undisturbed(language_model), scene, data_parallel_size=2, **PAIRS)


def test_experts_follow_ranks_that_come_and_go(moe_model: Path, expected: list[list[int]]) -> None:
    async def scene(client: ZmqClient) -> None:
        all_experts_once(client)
        await grow_and_shrink(client)
        all_experts_once(client)
        await scaled(client, replace=["r0"])
        assert members(client) == ["r2"]
        all_experts_once(client)

    play(moe_model, expected, scene, **SPREAD)


def test_a_cancelled_growth_leaves_no_trace(moe_model: Path, expected: list[list[int]]) -> None:
    async def scene(client: ZmqClient) -> None:
        before = client.status()
        for seconds in (0.2, 6.0):  # while it loads, and while it prepares or later
            document = client.operations.request(size=2)
            await asyncio.sleep(seconds)
            if client.operations.document(document["operation_id"])["phase"] == "done":
                break  # it was quicker
            try:
                client.operations.cancel(document["operation_id"])
            except ConflictError:  # it is committed
                break
            assert (await ended(client, document["operation_id"]))["phase"] == "rolled_back"
            after = client.status()
            assert after["epoch"] == before["epoch"]
            assert after["placement"]["slots"] == before["placement"]["slots"]
            assert after["ranks"][0]["worker_pids"] == before["ranks"][0]["worker_pids"]

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

    play(moe_model, expected, scene, data_parallel_size=2, **SPREAD)
