"""Generation on rank processes for real: texts survive the death of ranks, and what nobody wants is freed at once."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from generation_requests import CACHE, GREEDY, NUM_TOKENS, PROMPTS, SAMPLED, generation, text_of, texts_of
from ranks import Steps, request, running, until

from nobiru import LLM
from nobiru.engine.generation_stream import GenerationStream
from nobiru.errors import NobiruError, RequestKilledRankError, UnavailableError

POISON = 77


@pytest.fixture(scope="module")
def llm(language_model: Path) -> LLM:
    return LLM(str(language_model), dtype="float32", num_threads=1, **CACHE)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    return [each.outputs[0].token_ids for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_texts_equal_the_offline_ones(language_model: Path, llm: LLM, expected: list[list[int]]) -> None:
    async def main() -> None:
        async with running(language_model, **CACHE) as client:
            assert await texts_of(client, PROMPTS) == expected
            children: dict[int, list[int]] = {}
            async for delta in client.generate(generation(PROMPTS[3], SAMPLED)):
                children.setdefault(delta.child, []).extend(token.token_id for token in delta.tokens)
            (offline,) = llm.generate([PROMPTS[3]], SAMPLED, use_tqdm=False)
            assert [children[child] for child in range(3)] == [each.token_ids for each in offline.outputs]
            assert client.queued_tokens == client.queued_requests == 0
            assert await client.probe(timeout_s=10)

    asyncio.run(main())


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}], ids=["plain", "ahead"])
def test_killed_ranks_cost_no_token(language_model: Path, expected: list[list[int]], options: dict[str, bool]) -> None:
    async def main() -> None:
        async with running(language_model, faults="step_delay_ms=20", **CACHE, **options) as client:
            await until(lambda: client.has_working_rank)
            work = asyncio.create_task(texts_of(client, PROMPTS * 2))
            for _ in range(2):
                await asyncio.sleep(0.25)
                pid = client.status()["ranks"][0]["pid"]
                os.kill(pid, signal.SIGKILL)
                await until(lambda pid=pid: client.has_working_rank and client.status()["ranks"][0]["pid"] != pid)
            assert await work == expected * 2
            assert client.status()["epoch"] == 3

    asyncio.run(main())


def test_a_prompt_that_kills_ranks_fails_alone(language_model: Path, expected: list[list[int]]) -> None:
    async def main() -> None:
        async with running(language_model, faults=f"kill_on_token={POISON}", **CACHE) as client:
            poisoned = asyncio.create_task(text_of(client.generate(generation([5, POISON, 6]))))
            assert await texts_of(client, PROMPTS) == expected
            with pytest.raises(RequestKilledRankError):
                await poisoned
            assert client.status()["epoch"] == 4
            assert client.queued_requests == 0

    asyncio.run(main())


def test_a_sequence_that_fails_harms_no_other(language_model: Path, expected: list[list[int]]) -> None:
    async def main() -> None:
        async with running(language_model, faults=f"raise_on_token={POISON}", **CACHE) as client:
            poisoned = asyncio.create_task(text_of(client.generate(generation([5, POISON, 6]))))
            assert await texts_of(client, PROMPTS) == expected
            with pytest.raises(NobiruError, match="the model failed on this input"):
                await poisoned

    asyncio.run(main())


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}], ids=["plain", "ahead"])
def test_what_nobody_waits_for_is_freed_within_a_step(language_model: Path, options: dict[str, bool]) -> None:
    async def main() -> None:
        steps = Steps()
        async with running(language_model, faults="step_delay_ms=30", steps=steps, **CACHE, **options) as client:
            streams = [client.generate(generation(prompt)) for prompt in PROMPTS]
            for stream in streams:
                await anext(stream)
            for stream in streams[1:]:
                stream.close()
                stream.close()
            num_steps = len(steps.batches)
            await until(lambda: len(steps.batches) >= num_steps + 3)
            assert steps.state is not None
            assert steps.state.num_running == 1
            assert len(await text_of_rest(streams[0])) == NUM_TOKENS - 1
            assert steps.state.kv_usage == 0.0
            assert client.queued_requests == 0

    asyncio.run(main())


async def text_of_rest(stream: GenerationStream) -> list[int]:
    return [token.token_id async for delta in stream for token in delta.tokens]


def test_a_child_that_is_stopped_ends_and_the_others_go_on(language_model: Path) -> None:
    async def main() -> None:
        async with running(language_model, faults="step_delay_ms=5", **CACHE) as client:
            stream = client.generate(generation(PROMPTS[2], SAMPLED))
            tokens: dict[int, int] = {}
            async for delta in stream:
                tokens[delta.child] = tokens.get(delta.child, 0) + len(delta.tokens)
                if delta.child == 1 and tokens[1] == 3:
                    stream.stop(1)
            assert tokens == {0: NUM_TOKENS, 1: 3, 2: NUM_TOKENS}

    asyncio.run(main())


def test_a_shutdown_ends_open_streams(language_model: Path) -> None:
    async def main() -> None:
        async with running(language_model, faults="step_delay_ms=30", **CACHE) as client:
            stream = client.generate(generation(PROMPTS[0]))
            await anext(stream)
        with pytest.raises(UnavailableError):
            await text_of_rest(stream)

    asyncio.run(main())


def test_a_cache_too_small_for_the_longest_text_is_refused_at_start(language_model: Path) -> None:
    async def main() -> None:
        async with running(language_model, kv_cache_memory_bytes=10_000) as client:
            message = await asyncio.wait_for(client.failed, 60)
            assert "kv_cache_memory_bytes is 10000" in message
            assert "max_model_len" in message

    asyncio.run(main())


def test_a_causal_embedding_model_gives_the_offline_vectors(tmp_path: Path) -> None:
    from small_models import make

    folder = make("qwen3-embedding", tmp_path)
    offline = LLM(str(folder), dtype="float32", num_threads=1, max_num_batched_tokens=7, **CACHE)
    vectors = [each.outputs.embedding for each in offline.embed(PROMPTS, use_tqdm=False)]

    async def main() -> None:
        async with running(folder, **CACHE) as client:
            np.testing.assert_allclose(await client.embed(request(*PROMPTS)), vectors, atol=1e-5)
            assert await client.probe(timeout_s=10)

    asyncio.run(main())
