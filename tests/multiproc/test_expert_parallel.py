"""Experts spread over several ranks: the same texts as on one, whatever the number of ranks, deaths and departures."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from generation_requests import PROMPTS, generation, text_of, texts_with_aborts
from ranks import Steps, is_alive, running, until

from nobiru import LLM, SamplingParams
from nobiru.engine.client import ZmqClient

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, seed=1, logprobs=0)
CACHE = {"kv_cache_memory_bytes": 4_000_000}
SPREAD = {**CACHE, "enable_expert_parallel": True}

Text = tuple[list[int], list[float]]


@pytest.fixture(scope="module")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from small_models import make

    return make("qwen3-moe", tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def expected(moe_model: Path) -> list[list[int]]:
    llm = LLM(str(moe_model), dtype="float32", num_threads=1, **CACHE)
    return [each.outputs[0].token_ids for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


async def texts_of(client: ZmqClient, prompts: list[list[int]]) -> list[list[int]]:
    return await asyncio.gather(*(text_of(client.generate(generation(prompt, GREEDY))) for prompt in prompts))


def pids(client: ZmqClient) -> list[int]:
    return [rank["pid"] for rank in client.status()["ranks"]]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("redundant", [0, 2])
def test_the_texts_are_those_of_one_rank(moe_model: Path, expected: list[list[int]], size: int, redundant: int) -> None:
    async def main() -> list[int]:
        async with running(moe_model, data_parallel_size=size, num_redundant_experts=redundant, **SPREAD) as client:
            await until(lambda: client.has_working_rank)
            assert await texts_of(client, PROMPTS) == expected
            assert [await text_of(client.generate(generation(prompt, GREEDY))) for prompt in PROMPTS] == expected
            status = client.status()
            held = [np.array(slots) for slots in status["placement"]["slots"].values()]
            assert len(held) == size
            num_held = np.stack(held, 1)
            for layer in num_held:
                experts = layer[layer >= 0]
                assert set(experts.tolist()) == set(range(status["placement"]["num_experts"]))
            assert await client.probe(timeout_s=20)
            return pids(client)

    for pid in asyncio.run(main()):
        assert not is_alive(pid)


def test_a_death_costs_no_token_and_the_group_forms_anew(moe_model: Path, expected: list[list[int]]) -> None:
    async def main() -> None:
        async with running(moe_model, data_parallel_size=2, faults="step_delay_ms=20", **SPREAD) as client:
            await until(lambda: not client.operations.is_busy)
            for victim in (0, 1):
                work = asyncio.create_task(texts_of(client, PROMPTS * 2))
                await asyncio.sleep(0.25)
                os.kill(pids(client)[victim], signal.SIGKILL)
                assert await asyncio.wait_for(work, 60) == expected * 2
                await until(lambda: len(client.serving_ranks) == 2 and not client.operations.is_busy)
            assert client.status()["epoch"] == 5, "of the survivors, then with a new rank, twice"
            assert client.queued_requests == 0

    asyncio.run(main())


def test_a_rank_that_stands_still_is_replaced(moe_model: Path, expected: list[list[int]]) -> None:
    async def main() -> None:
        async with running(
            moe_model, data_parallel_size=2, faults="step_delay_ms=20", rank_timeout_s=2.0, **SPREAD
        ) as client:
            await until(lambda: client.has_working_rank)
            work = asyncio.create_task(texts_of(client, PROMPTS))
            await asyncio.sleep(0.15)
            os.kill(pids(client)[0], signal.SIGSTOP)
            assert await asyncio.wait_for(work, 60) == expected
            assert client.status()["epoch"] >= 2

    asyncio.run(main())


def test_ranks_without_work_use_no_processor_and_wake_up_at_once(moe_model: Path, expected: list[list[int]]) -> None:
    def cpu_ticks(pid: int) -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    async def main() -> None:
        async with running(moe_model, data_parallel_size=2, **SPREAD) as client:
            await until(lambda: client.has_working_rank)
            await texts_of(client, PROMPTS)
            await asyncio.sleep(0.5)
            before = [cpu_ticks(pid) for pid in pids(client)]
            await asyncio.sleep(2.0)
            used = [after - start for after, start in zip(map(cpu_ticks, pids(client)), before, strict=True)]
            assert max(used) <= 0.1 * 2.0 * os.sysconf("SC_CLK_TCK")
            started_s = time.monotonic()
            assert await text_of(client.generate(generation(PROMPTS[3], GREEDY))) == expected[3]
            assert time.monotonic() - started_s < 10

    asyncio.run(main())


def test_many_requests_with_random_aborts_leave_nothing_behind(moe_model: Path, expected: list[list[int]]) -> None:

    async def main() -> list[int]:
        steps = Steps()
        async with running(moe_model, data_parallel_size=2, steps=steps, **SPREAD) as client:
            await until(lambda: client.has_working_rank)
            async with asyncio.timeout(90):
                await texts_with_aborts(client, expected, GREEDY, count=80, within_s=2)
            await until(lambda: steps.state is not None and steps.state.kv_usage == 0.0)
            assert client.queued_requests == client.queued_tokens == 0
            assert client.status()["epoch"] == 1
            return pids(client)

    for pid in asyncio.run(main()):
        assert not is_alive(pid)


def test_a_model_without_experts_is_refused(language_model: Path) -> None:
    async def main() -> None:
        async with running(language_model, data_parallel_size=2, **SPREAD) as client:
            assert "cannot be spread over ranks" in await asyncio.wait_for(client.failed, 60)

    asyncio.run(main())


def test_experts_move_while_texts_are_written(moe_model: Path, expected: list[list[int]]) -> None:
    async def main() -> None:
        steps = Steps()
        options = {"enable_eplb": True, "eplb_step_interval": 4, "eplb_window_size": 32, "num_redundant_experts": 1}
        async with running(moe_model, data_parallel_size=2, steps=steps, **SPREAD, **options) as client:
            await until(lambda: client.has_working_rank)
            # One prompt over and over: a few experts get all of the load.
            for _ in range(12):
                assert await texts_of(client, PROMPTS[2:4]) == expected[2:4]
            await until(lambda: steps.num_rebalances > 0)
            assert await texts_of(client, PROMPTS) == expected
            placement = client.status()["placement"]
            assert placement["version"] > 1  # that of the first epoch
            assert placement["bytes_moved"] == steps.num_bytes_moved > 0
            assert max(steps.balances[-5:]) > min(steps.balances[:5])
            os.kill(pids(client)[1], signal.SIGKILL)
            assert await asyncio.wait_for(texts_of(client, PROMPTS), 60) == expected
            assert client.status()["epoch"] >= 2

    asyncio.run(main())
