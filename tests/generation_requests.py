"""Generation requests for tests of rank processes, and how to read their streams."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import numpy as np

from nobiru import SamplingParams
from nobiru.engine.client import ZmqClient
from nobiru.engine.generation_stream import GenerationStream
from nobiru.generation import GenerationRequest

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(100, 160, length).tolist() for length in (1, 3, 5, 9, 17, 20, 33, 40)]
NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, seed=1)
SAMPLED = SamplingParams(n=3, max_tokens=NUM_TOKENS, ignore_eos=True, seed=7)
CACHE = {"kv_cache_memory_bytes": 4_000_000}


def generation(prompt: list[int], params: SamplingParams = GREEDY) -> GenerationRequest:
    return GenerationRequest(
        request_id="test",
        prompt_token_ids=np.array(prompt, dtype=np.int32),
        params=params,
        max_tokens=params.max_tokens or 1,
    )


async def text_of(stream: GenerationStream) -> list[int]:
    """The tokens of a stream with one child; every delta follows the one before."""
    tokens: list[int] = []
    reason = None
    async for delta in stream:
        assert reason is None
        assert delta.first_index == len(tokens)
        tokens += [token.token_id for token in delta.tokens]
        reason = delta.finish_reason
    assert reason is not None
    stream.close()
    return tokens


async def texts_of(client: ZmqClient, prompts: list[list[int]]) -> list[list[int]]:
    return await asyncio.gather(*(text_of(client.generate(generation(prompt))) for prompt in prompts))


async def texts_with_aborts(
    client: ZmqClient, expected: Sequence[list[int]], params: SamplingParams, *, count: int, within_s: float
) -> None:
    """So many requests for texts of `PROMPTS` begin at random moments; two fifths of them are given up at some token,
    and the others' texts have to be those that are `expected`."""
    chance = random.Random(0)

    async def one(number: int) -> None:
        await asyncio.sleep(chance.random() * within_s)
        stream = client.generate(generation(PROMPTS[number], params))
        if chance.random() < 0.4:
            num_tokens = chance.randint(0, 10)
            async for _ in stream:
                num_tokens -= 1
                if num_tokens <= 0:
                    break
            stream.close()
        else:
            assert await text_of(stream) == expected[number]

    await asyncio.gather(*(one(chance.randrange(len(PROMPTS))) for _ in range(count)))
