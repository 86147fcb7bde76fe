"""Experts spread over the workers of several ranks: the texts of one process, through deaths and moves of experts."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elastic_scenes import LIMIT_S, whole
from generation_requests import CACHE, PROMPTS, generation, text_of, texts_with_aborts
from ranks import Steps, children, is_alive, running, until
from real_models import stories260k

from nobiru import LLM, SamplingParams
from nobiru.engine.client import ZmqClient

pytestmark = pytest.mark.timeout(400)

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, seed=1, logprobs=0)
Text = tuple[list[int], list[float]]
SPREAD: dict[str, Any] = {**CACHE, "enable_expert_parallel": True, "tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def moe_model() -> Path:
    return stories260k().parent / "stories260K-moe8x-noisy"


@pytest.fixture(scope="module")
def with_logprobs(moe_model: Path) -> list[Text]:
    llm = LLM(str(moe_model), dtype="float32", num_threads=1, **CACHE)
    outputs = [each.outputs[0] for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    return [(each.token_ids, [token.logprob or 0.0 for token in each.logprobs or []]) for each in outputs]


@pytest.fixture(scope="module")
def expected(with_logprobs: list[Text]) -> list[list[int]]:
    return [tokens for tokens, _ in with_logprobs]


async def texts_with_logprobs(client: ZmqClient) -> list[Text]:
    async def text(prompt: list[int]) -> Text:
        stream = client.generate(generation(prompt, GREEDY))
        tokens = [token async for delta in stream for token in delta.tokens]
        stream.close()
        return [token.token_id for token in tokens], [token.logprob or 0.0 for token in tokens]

    return await asyncio.gather(*map(text, PROMPTS))


async def texts_of(client: ZmqClient, prompts: list[list[int]]) -> list[list[int]]:
    return await asyncio.gather(*(text_of(client.generate(generation(prompt, GREEDY))) for prompt in prompts))


def all_pids(client: ZmqClient) -> list[int]:
    return [pid for rank in client.status()["ranks"] for pid in (rank["pid"], *children(rank["pid"]))]


async def all_dead(pids: list[int]) -> None:
    await until(lambda: not any(map(is_alive, pids)), timeout_s=30)


@pytest.mark.parametrize(("size", "redundant"), [(1, 0), pytest.param(2, 0, marks=pytest.mark.slow), (2, 3)])
def test_the_texts_are_those_of_one_process(
    moe_model: Path, expected: list[list[int]], with_logprobs: list[Text], size: int, redundant: int
) -> None:
    async def main() -> None:
        options = {"data_parallel_size": size, "num_redundant_experts": redundant}
        async with running(moe_model, **options, **SPREAD) as client:
            await until(lambda: client.has_working_rank, LIMIT_S)
            assert await texts_of(client, PROMPTS) == expected
            assert await text_of(client.generate(generation(PROMPTS[2], GREEDY))) == expected[2]
            assert await client.probe(timeout_s=20)
            for found, (tokens, logprobs) in zip(await texts_with_logprobs(client), with_logprobs, strict=True):
                assert found[0] == tokens
                np.testing.assert_allclose(found[1], logprobs, atol=1e-4)
            placement = client.status()["placement"]
            slots = np.concatenate([np.array(each) for each in placement["slots"].values()], axis=1)
            assert slots.shape[1] == size * 2 * placement["slot_capacity"]
            for slots_S in slots:
                assert (slots_S >= 0).sum() == 8 + redundant
                assert set(slots_S.tolist()) - {-1} == set(range(8))
            pids = all_pids(client)
            assert len(pids) == size * 2
        await all_dead(pids)

    asyncio.run(main())


@pytest.mark.parametrize("victim", [*(pytest.param(each, marks=pytest.mark.slow) for each in (0, 1)), 3])
def test_a_death_costs_no_token_and_the_group_forms_anew(
    moe_model: Path, expected: list[list[int]], victim: int
) -> None:
    steps = Steps()

    async def main() -> None:
        options = {"data_parallel_size": 2, "faults": "step_delay_ms=20", "steps": steps}
        async with running(moe_model, **options, **SPREAD) as client:
            await until(lambda: client.has_working_rank, LIMIT_S)
            before = all_pids(client)
            stays = before[2:] if victim < 2 else before[:2]
            work = asyncio.create_task(texts_of(client, PROMPTS))
            await asyncio.sleep(0.4)
            os.kill(before[victim], signal.SIGKILL)
            assert await asyncio.wait_for(work, LIMIT_S) == expected
            await until(lambda: steps.num_restarts == 1)
            await whole(client, 2)
            assert client.status()["epoch"] == 3, "the survivor alone, then with the new rank"
            after = all_pids(client)
            assert len(after) == 4
            assert set(after) & set(before) == set(stays)
        await all_dead(before + after)

    asyncio.run(main())


def test_experts_move_while_texts_are_written(moe_model: Path, expected: list[list[int]]) -> None:
    options = {"data_parallel_size": 2, "enable_eplb": True, "eplb_window_size": 32, "eplb_step_interval": 20}

    async def main() -> None:
        async with running(moe_model, **options, **SPREAD) as client:
            await until(lambda: client.has_working_rank, LIMIT_S)
            for _ in range(20):
                assert await asyncio.wait_for(texts_of(client, PROMPTS), 60) == expected
                status = client.status()["placement"]
                if status["version"] >= 2:
                    break
            assert status["version"] >= 2, "a stage of a rebalance serves"
            assert status["bytes_moved"] > 0
            assert client.status()["epoch"] == 1

    asyncio.run(main())


@pytest.mark.slow
def test_a_worker_that_stands_still_is_replaced_with_its_rank(moe_model: Path, expected: list[list[int]]) -> None:
    steps = Steps()

    async def main() -> None:
        options = {"data_parallel_size": 2, "step_timeout_s": 2.0, "steps": steps}
        async with running(moe_model, **options, **SPREAD) as client:
            await until(lambda: client.has_working_rank, LIMIT_S)
            before = all_pids(client)
            os.kill(before[3], signal.SIGSTOP)
            assert await asyncio.wait_for(texts_of(client, PROMPTS), 90) == expected
            assert steps.num_restarts == 1
            await all_dead(before[2:])

    asyncio.run(main())


@pytest.mark.slow
def test_many_requests_with_random_aborts_leave_nothing_behind(moe_model: Path, expected: list[list[int]]) -> None:
    steps = Steps()

    async def main() -> None:
        async with running(moe_model, data_parallel_size=2, steps=steps, **SPREAD) as client:
            await until(lambda: client.has_working_rank, LIMIT_S)
            async with asyncio.timeout(120):
                await texts_with_aborts(client, expected, GREEDY, count=60, within_s=4)
            await until(lambda: steps.state is not None and steps.state.kv_usage == 0.0)
            assert client.queued_requests == client.queued_tokens == 0
            assert client.status()["epoch"] == 1
            pids = all_pids(client)
        await all_dead(pids)

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_on_a_ray_cluster(moe_model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    tests = Path(__file__).parents[1]
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")]))
    small = {"include_dashboard": False, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})

    async def main() -> None:
        options = {"data_parallel_size": 2, "data_parallel_backend": "ray", "ray_address": cluster.address}
        async with running(moe_model, **options, **SPREAD) as client:
            await until(lambda: client.has_working_rank, timeout_s=120)
            assert await texts_of(client, PROMPTS) == expected
            pids = all_pids(client)
            assert len(pids) == 4
        await all_dead(pids)

    try:
        for _ in range(2):
            cluster.add_node(num_cpus=2, **small)
        asyncio.run(main())
    finally:
        cluster.shutdown()
