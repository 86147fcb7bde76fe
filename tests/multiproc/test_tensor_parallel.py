"""Ranks of several workers: the texts of one process, and no trace of a worker that has died."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generation_requests import CACHE, GREEDY, PROMPTS, generation, text_of, texts_of
from ranks import Steps, children, is_alive, running, until
from real_models import stories260k
from warm_processes import warm_starts

from nobiru import LLM, PoolingParams, SamplingParams
from nobiru.engine.client import ZmqClient
from nobiru.errors import ConfigError, GroupError
from nobiru.layers.rms_norm import RmsNorm

TOLERANCE = 1e-4
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, seed=1, logprobs=0)
SAMPLED = SamplingParams(n=2, temperature=0.9, top_p=0.9, max_tokens=12, seed=3, logprobs=2)
SLOW_4 = pytest.param(4, marks=pytest.mark.slow)

Text = tuple[list[int], list[float]]


@pytest.fixture
def warm() -> Iterator[None]:
    """For tests that are about what workers compute. Of others, these are children of this process."""
    with warm_starts():
        yield


def make_llm(model: Path, size: int, **options: Any) -> LLM:
    return LLM(str(model), dtype="float32", num_threads=1, tensor_parallel_size=size, **{**CACHE, **options})


def texts(llm: LLM, params: SamplingParams = PARAMS, prompts: list[list[int]] = PROMPTS) -> list[Text]:
    found = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        for each in output.outputs:
            assert each.logprobs is not None
            found.append((each.token_ids, [token.logprob or 0.0 for token in each.logprobs]))
    return found


def check_alike(found: list[Text], expected: list[Text]) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, logprobs), (_, others) in zip(found, expected, strict=True):
        np.testing.assert_allclose(logprobs, others, atol=TOLERANCE)


def anonymous_bytes(pid: int) -> int:
    """Memory that is no file's."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


# ---- offline ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("size", [2, SLOW_4])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_small_models(tmp_path: Path, name: str, size: int) -> None:
    from small_models import make

    folder = make(name, tmp_path)
    expected, sampled = (texts(make_llm(folder, 1), params) for params in (PARAMS, SAMPLED))
    llm = make_llm(folder, size)
    check_alike(texts(llm), expected)
    check_alike(texts(llm, SAMPLED), sampled)
    llm.close()


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("stories260K", 2),
        pytest.param("stories260K", 4, marks=pytest.mark.slow),
        ("stories260K-moe8x-noisy", 2),
        ("stories260K-qwen3moe8x-noisy", 2),
    ],
)
def test_trained_models(name: str, size: int) -> None:
    folder = stories260k().parent / name
    prompts = [[1, 403, 407, 261, 378], [1, 262, 415], *PROMPTS[3:]]
    expected = texts(make_llm(folder, 1), prompts=prompts)
    llm = make_llm(folder, size)
    check_alike(texts(llm, prompts=prompts), expected)
    llm.close()


@pytest.mark.usefixtures("warm")
def test_prompts_in_parts_and_preemption(language_model: Path) -> None:
    """Blocks run out, and prompts are computed in parts: workers keep in their caches what the leader thinks."""
    limits = {"max_num_batched_tokens": 16, "kv_cache_memory_bytes": 200_000, "block_size": 8, "max_model_len": 96}
    expected = texts(make_llm(language_model, 1))
    llm = make_llm(language_model, 2, **limits)
    check_alike(texts(llm), expected)
    check_alike(texts(llm), expected)  # from the prefix cache
    llm.close()


@pytest.mark.usefixtures("warm")
def test_embeddings(tmp_path: Path) -> None:
    from small_models import make

    folder = make("qwen3-embedding", tmp_path)
    params = PoolingParams()
    expected, found = (make_llm(folder, size).embed(PROMPTS, params, use_tqdm=False) for size in (1, 2))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.outputs.embedding, other.outputs.embedding, atol=TOLERANCE)


def open_descriptors() -> list[str]:
    """What they lead to, sockets and the like without their numbers, once nothing is being closed any more."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("close "):  # a group's end, for which `destroy` does not wait
            thread.join(10)
    return sorted(os.readlink(entry).partition(":")[0] for entry in Path("/proc/self/fd").iterdir() if entry.exists())


def test_workers_end_with_their_llm(language_model: Path) -> None:
    make_llm(language_model, 2).close()  # what is opened once for all stays
    before, descriptors = set(children(os.getpid())), open_descriptors()
    llm = make_llm(language_model, 2)
    assert len(set(children(os.getpid())) - before) == 1
    llm.close()
    assert set(children(os.getpid())) == before
    assert open_descriptors() == descriptors
    llm.close()
    llm = make_llm(language_model, 2)
    del llm
    gc.collect()
    assert set(children(os.getpid())) == before


def test_a_dead_worker_is_an_error(language_model: Path) -> None:
    before = set(children(os.getpid()))
    llm = make_llm(language_model, 2)
    (worker,) = set(children(os.getpid())) - before
    os.kill(worker, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(GroupError):
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    llm.close()
    assert set(children(os.getpid())) == before


def test_an_interrupted_step_leaves_no_wrong_texts(language_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are somewhere in the middle of it, so there can be no further step."""
    llm = make_llm(language_model, 2)
    with monkeypatch.context() as patched:
        patched.setattr(RmsNorm, "__call__", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    with pytest.raises(GroupError, match="interrupted by KeyboardInterrupt"):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    llm.close()


def interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt


def test_what_is_refused(tmp_path: Path, language_model: Path, model: Path) -> None:
    from small_models import make

    before = set(children(os.getpid()))
    with pytest.raises(ConfigError, match="tensor_parallel_size is 0"):
        make_llm(language_model, 0)
    with pytest.raises(ConfigError, match="must divide the model's 4 attention heads"):
        make_llm(language_model, 3)
    with pytest.raises(ConfigError, match="'bert' is an encoder"):
        make_llm(model, 2)
    with pytest.raises(ConfigError, match="'gpt2' cannot be spread over workers"):
        make_llm(make("gpt2", tmp_path), 2)
    assert set(children(os.getpid())) == before


# ---- ranks -----------------------------------------------------------------------------------------------------------


def workers_of(client: ZmqClient) -> list[list[int]]:
    return [children(rank["pid"]) for rank in client.status()["ranks"]]


def all_pids(client: ZmqClient) -> list[int]:
    return [pid for rank in client.status()["ranks"] for pid in (rank["pid"], *children(rank["pid"]))]


async def all_dead(pids: list[int]) -> None:
    await until(lambda: not any(map(is_alive, pids)), timeout_s=30)


def test_a_rank_of_two_workers(language_model: Path) -> None:
    expected = [tokens for tokens, _ in texts(make_llm(language_model, 1))]

    async def main() -> None:
        async with running(language_model, tensor_parallel_size=2, **CACHE) as client:
            await until(lambda: client.has_working_rank)
            assert await texts_of(client, PROMPTS) == expected
            assert await client.probe(timeout_s=20)
            pids = all_pids(client)
            assert len(pids) == 2
        await all_dead(pids)

    asyncio.run(main())


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_killed_worker_takes_its_rank_along(language_model: Path, is_busy: bool) -> None:
    expected = [tokens for tokens, _ in texts(make_llm(language_model, 1))]
    steps = Steps()

    async def main() -> None:
        options = {"tensor_parallel_size": 2, "faults": "step_delay_ms=20", "steps": steps}
        async with running(language_model, **options, **CACHE) as client:
            await until(lambda: client.has_working_rank)
            before = all_pids(client)
            work = asyncio.create_task(texts_of(client, PROMPTS)) if is_busy else None
            await asyncio.sleep(0.3)
            os.kill(workers_of(client)[0][0], signal.SIGKILL)
            await until(lambda: steps.num_restarts == 1, timeout_s=30)
            await all_dead(before)
            found = await (work or texts_of(client, PROMPTS))
            assert found == expected
            after = all_pids(client)
            assert len(after) == 2
        await all_dead(after)

    asyncio.run(main())


def test_a_killed_leader_takes_its_workers_along(language_model: Path) -> None:
    expected = [tokens for tokens, _ in texts(make_llm(language_model, 1))]

    async def main() -> None:
        async with running(language_model, tensor_parallel_size=2, faults="step_delay_ms=20", **CACHE) as client:
            await until(lambda: client.has_working_rank)
            before = all_pids(client)
            work = asyncio.create_task(texts_of(client, PROMPTS))
            await asyncio.sleep(0.3)
            os.kill(client.status()["ranks"][0]["pid"], signal.SIGKILL)
            await all_dead(before)
            assert await work == expected

    asyncio.run(main())


def test_two_ranks_of_two_workers(language_model: Path) -> None:
    expected = [tokens for tokens, _ in texts(make_llm(language_model, 1))]

    async def main() -> None:
        async with running(language_model, data_parallel_size=2, tensor_parallel_size=2, **CACHE) as client:
            await until(lambda: len(client.serving_ranks) == 2)
            assert await texts_of(client, PROMPTS * 2) == expected * 2
            assert len(all_pids(client)) == 4

    asyncio.run(main())


def test_a_stopped_worker_is_replaced(language_model: Path) -> None:
    expected = [tokens for tokens, _ in texts(make_llm(language_model, 1))]

    async def main() -> None:
        async with running(language_model, tensor_parallel_size=2, step_timeout_s=2.0, **CACHE) as client:
            await until(lambda: client.has_working_rank)
            before = all_pids(client)
            os.kill(workers_of(client)[0][0], signal.SIGSTOP)
            assert await text_of(client.generate(generation(PROMPTS[0], GREEDY))) == expected[0]
            os.kill(before[1], signal.SIGCONT)
            await all_dead(before)

    asyncio.run(main())


@pytest.fixture(scope="module")
def heavy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 38 million parameters, 150 MB."""
    from small_models import make
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = make("llama", tmp_path_factory.mktemp("heavy"))
    config = AutoConfig.from_pretrained(folder)
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
    config.update({**sizes, "num_key_value_heads": 8, "head_dim": 64})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def test_memory_of_each_worker_shrinks(heavy_model: Path) -> None:
    weight_bytes = (heavy_model / "model.safetensors").stat().st_size
    assert weight_bytes > 100_000_000

    async def largest(size: int) -> int:
        async with running(heavy_model, tensor_parallel_size=size, kv_cache_memory_bytes=10_000_000) as client:
            await until(lambda: client.has_working_rank)
            pids = all_pids(client)
            assert len(pids) == size
            return max(map(anonymous_bytes, pids))

    one, two, four = (asyncio.run(largest(size)) for size in (1, 2, 4))
    assert one - two > 0.4 * weight_bytes
    assert two - four > 0.2 * weight_bytes
