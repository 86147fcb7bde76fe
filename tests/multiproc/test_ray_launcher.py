"""Ranks as actors of a Ray cluster of two nodes: the same texts, deaths of ranks and nodes, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from generation_requests import CACHE, GREEDY, PROMPTS, generation, text_of, texts_of
from ranks import is_alive, running, until
from ray_nodes import Nodes, ray_nodes

from nobiru import LLM
from nobiru.elastic.launcher import ray as launcher_module
from nobiru.elastic.launcher.ray import RayLauncher
from nobiru.engine.client import ZmqClient
from nobiru.errors import RequestKilledRankError

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

POISON = 77


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes(2) as nodes:
        yield nodes


@pytest.fixture
def launcher(nodes: Nodes) -> Iterator[RayLauncher]:
    launcher = RayLauncher(
        "ray_entries:run", address=nodes.address, environment={"NOBIRU_FAULT_INJECTION": "5"}, num_ranks=2
    )
    yield launcher
    launcher.close()
    assert not ray.is_initialized()


def rank_pids(client: ZmqClient) -> list[int]:
    return [rank["pid"] for rank in client.status()["ranks"] if rank["pid"] is not None]


def test_experts_spread_over_nodes_and_whatever_dies(nodes: Nodes, tmp_path: Path) -> None:
    from small_models import make

    model = make("mixtral", tmp_path)
    llm = LLM(str(model), dtype="float32", num_threads=1, **CACHE)
    expected = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    seen: list[int] = []

    def replace_a_node() -> None:
        nodes.kill(nodes.ids[0])
        nodes.add(wait=False)

    async def survives(client: ZmqClient, failure: Callable[[], None]) -> None:
        seen.extend(rank_pids(client))
        epoch = client.status()["epoch"]
        work = asyncio.create_task(texts_of(client, PROMPTS * 2))
        await asyncio.sleep(0.2)
        assert not work.done()
        failure()
        assert await asyncio.wait_for(work, 60) == expected * 2
        assert client.status()["epoch"] > epoch
        await until(lambda: len(client.serving_ranks) == 2 and not client.operations.is_busy)

    async def main() -> None:
        on_ray = {"data_parallel_backend": "ray", "ray_address": nodes.address, "enable_expert_parallel": True}
        faults = "step_delay_ms=20"
        async with running(model, data_parallel_size=2, rank_timeout_s=6, faults=faults, **on_ray, **CACHE) as client:
            await until(lambda: client.has_working_rank)
            assert await texts_of(client, PROMPTS) == expected
            first, second = rank_pids(client)
            await survives(client, lambda: os.kill(first, signal.SIGKILL))
            await survives(client, lambda: os.kill(second, signal.SIGSTOP))
            await survives(client, replace_a_node)
            assert client.queued_requests == 0
            seen.extend(rank_pids(client))

    asyncio.run(main())
    asyncio.run(until(lambda: not any(map(is_alive, seen)), 30))
    nodes.assert_nothing_is_left()


def test_a_prompt_that_kills_ranks_fails_alone(nodes: Nodes, language_model: Path) -> None:
    """Which needs to be told of each step in time, without memory that outlives the rank."""

    async def main() -> None:
        on_ray = {"data_parallel_backend": "ray", "ray_address": nodes.address}
        async with running(language_model, faults=f"kill_on_token={POISON}", **on_ray, **CACHE) as client:
            poisoned = asyncio.create_task(text_of(client.generate(generation([5, POISON, 6]))))
            assert all(len(text) == GREEDY.max_tokens for text in await texts_of(client, PROMPTS))
            with pytest.raises(RequestKilledRankError):
                await poisoned
            assert client.status()["epoch"] >= 3

    asyncio.run(main())
    nodes.assert_nothing_is_left()


def test_how_a_rank_ended_is_told(launcher: RayLauncher) -> None:
    async def main() -> None:
        assert launcher.cpus_per_rank == 1
        ends = {
            "return 3": "exited with code 3",
            "variable NOBIRU_FAULT_INJECTION": "exited with code 5",
            "raise": "failed with ValueError: the entry point failed",
            "die": "was an actor that is dead because its worker process has died",
        }
        for what, how in ends.items():
            assert (await asyncio.wait_for(launcher.launch(what.encode()).wait_dead(), 30)).startswith(how)

    asyncio.run(main())


def test_a_rank_without_a_place_and_one_that_is_killed(
    launcher: RayLauncher, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher_module, "PLACE_TIMEOUT_S", 0.5)
    launcher.cpus_per_rank = 2

    async def main() -> None:
        assert "no node of the Ray cluster with 2 free CPUs" in await launcher.launch(b"wait").wait_dead()
        launcher.cpus_per_rank = 1
        rank = launcher.launch(b"wait")
        await until(lambda: rank.pid is not None)
        assert rank.node == launcher.host
        assert not rank.join(0.1)
        assert "killed" in await rank.wait_dead()
        rank.kill()
        rank.close()
        at_once = launcher.launch(b"wait")
        at_once.kill()
        assert "was ended before" in await at_once.wait_dead()

    asyncio.run(main())
    launcher.close()
    nodes.assert_nothing_is_left()


@pytest.mark.parametrize("delay_s", [0, 0.2, 1.0])
def test_ranks_that_are_starting_end_with_their_launcher(launcher: RayLauncher, nodes: Nodes, delay_s: float) -> None:
    ranks = [launcher.launch(b"wait"), launcher.launch(b"die")]
    time.sleep(delay_s)
    launcher.close()
    assert all(rank.has_ended for rank in ranks)
    assert not ray.is_initialized()
    nodes.assert_nothing_is_left()


def test_no_rank_outlives_a_killed_server(nodes: Nodes) -> None:
    code = """
import sys, time
from nobiru.elastic.launcher.ray import RayLauncher
ranks = [
    RayLauncher("ray_entries:run", address=sys.argv[1], environment={}, num_ranks=2).launch(b"wait") for _ in range(2)
]
while not all(rank.pid for rank in ranks):
    time.sleep(0.05)
print(*(rank.pid for rank in ranks), flush=True)
time.sleep(60)
"""
    server = subprocess.Popen([sys.executable, "-c", code, nodes.address], stdout=subprocess.PIPE)
    assert server.stdout is not None
    pids = [int(pid) for pid in server.stdout.readline().split()]
    assert len(pids) == 2
    assert all(map(is_alive, pids))
    server.kill()
    server.wait()
    asyncio.run(until(lambda: not any(map(is_alive, pids)), 30))
    nodes.assert_nothing_is_left()
