"""Several ranks with the whole model each: work is spread, and what a dead one held runs on the others."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

import numpy as np
from generation_requests import CACHE, GREEDY, PROMPTS, texts_of
from ranks import request, running, until

from nobiru import LLM


def test_embeddings_are_spread_and_survive_a_death(model: Path) -> None:
    texts = [[2, *np.random.default_rng(number).integers(100, 160, 30).tolist(), 3] for number in range(40)]
    outputs = LLM(str(model), dtype="float32", num_threads=1).embed(texts, use_tqdm=False)
    expected = [output.outputs.embedding for output in outputs]

    async def main() -> None:
        async with running(model, faults="step_delay_ms=30", data_parallel_size=2) as client:
            await until(lambda: len(client.serving_ranks) == 2)
            work = [asyncio.create_task(client.embed(request(text))) for text in texts]
            await asyncio.sleep(0)
            shares = Counter({each["rank_id"]: each["outstanding_tokens"] for each in client.status()["ranks"]})
            assert len(shares) == 2
            assert max(shares.values()) - min(shares.values()) <= 64
            victim = client.status()["ranks"][0]
            os.kill(victim["pid"], signal.SIGKILL)
            vectors = np.concatenate(await asyncio.gather(*work))
            np.testing.assert_allclose(vectors, expected, atol=1e-5)
            await until(lambda: len(client.serving_ranks) == 2)
            assert victim["rank_id"] not in client.serving_ranks
            assert client.queued_tokens == 0
            assert all(each["outstanding_tokens"] == 0 for each in client.status()["ranks"])

    asyncio.run(main())


def test_texts_go_on_where_a_dead_rank_left_them(language_model: Path) -> None:
    offline = LLM(str(language_model), dtype="float32", num_threads=1, **CACHE)
    expected = [each.outputs[0].token_ids for each in offline.generate(PROMPTS, GREEDY, use_tqdm=False)]

    async def main() -> None:
        async with running(language_model, faults="step_delay_ms=30", data_parallel_size=2, **CACHE) as client:
            await until(lambda: len(client.serving_ranks) == 2)
            work = asyncio.create_task(texts_of(client, PROMPTS * 2))
            await asyncio.sleep(0.3)
            os.kill(client.status()["ranks"][1]["pid"], signal.SIGKILL)
            await until(lambda: len(client.serving_ranks) == 1, timeout_s=5)
            assert await work == expected * 2

    asyncio.run(main())
