"""Ranks die one after another, while the others already form an epoch without the first."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from elastic_scenes import members, play, undisturbed_texts
from ranks import until

from nobiru.engine.client import ZmqClient
from nobiru.engine.expert_worker import FORM_TIMEOUT_S


@pytest.fixture(scope="module")
def expected(moe_model: Path) -> list[list[int]]:
    return undisturbed_texts(moe_model)


def pids(client: ZmqClient) -> list[int]:
    return [rank["pid"] for rank in client.status()["ranks"]]


def test_a_death_while_others_form_does_not_cost_their_time_limit(moe_model: Path, expected: list[list[int]]) -> None:
    async def scene(client: ZmqClient) -> None:
        _, stands_still, dies = pids(client)
        machine = client.ranks.machine
        os.kill(stands_still, signal.SIGSTOP)
        os.kill(dies, signal.SIGKILL)
        await until(lambda: machine.attempt is not None and machine.attempt.members == ("r0", "r1"))
        await asyncio.sleep(0.5)
        assert members(client) == ["r0", "r1"], "r0 waits for r1"
        os.kill(stands_still, signal.SIGKILL)
        began_s = time.monotonic()
        await until(lambda: members(client) == ["r0"] and not client.operations.is_busy)
        assert time.monotonic() - began_s < FORM_TIMEOUT_S / 2
        (failure,) = [each for each in client.operations.documents() if each["origin"] == "failure"]
        assert failure["phase"] == "done", "both deaths are one failure"
        assert failure["pause_seconds"] > 0.5

    play(moe_model, expected, scene, data_parallel_size=3, self_heal=False)


def test_fewer_survivors_than_can_hold_the_model_are_joined_by_new_ranks(
    moe_model: Path, expected: list[list[int]]
) -> None:
    async def scene(client: ZmqClient) -> None:
        for pid in pids(client)[::2]:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: members(client) == ["r1", "r3"] and not client.operations.is_busy)
        failure = client.operations.documents()[-1]
        assert (failure["origin"], failure["phase"]) == ("failure", "done")
        slots = client.status()["placement"]["slots"]
        assert {expert for rank in slots.values() for expert in rank[0] if expert >= 0} == set(
            range(client.status()["placement"]["num_experts"])
        )

    play(moe_model, expected, scene, data_parallel_size=3, min_survivable_size=2, self_heal=False)
