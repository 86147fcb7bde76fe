"""Rank processes for real: they serve, die of every cause, come back, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from ranks import children, is_alive, name_of, request, running, until

from nobiru import LLM
from nobiru.elastic.launcher.forkserver import can_fork
from nobiru.engine.client import ZmqClient
from nobiru.errors import InferenceError, NobiruError, RequestKilledRankError

POISON = 77
RNG = np.random.default_rng(0)
TEXTS = [[2, *RNG.integers(100, 160, RNG.integers(1, 60)).tolist(), 3] for _ in range(60)]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[np.ndarray]:
    """The vectors of `TEXTS`, computed in this process."""
    outputs = LLM(str(model), dtype="float32", num_threads=1).embed(TEXTS, use_tqdm=False)
    return [output.outputs.embedding for output in outputs]


def rank_pid(client: ZmqClient) -> int:
    return int(client.status()["ranks"][0]["pid"])


async def embed_all(client: ZmqClient, texts: list[list[int]]) -> list[np.ndarray]:
    return list(np.concatenate(await asyncio.gather(*(client.embed(request(text)) for text in texts))))


def test_requests_wait_for_the_model_and_equal_the_offline_vectors(model: Path, expected: list[np.ndarray]) -> None:
    async def main() -> None:
        async with running(model, starts_warm=False) as client:
            assert not client.has_working_rank
            together = asyncio.create_task(client.embed(request(*TEXTS)))
            alone = await embed_all(client, TEXTS)
            np.testing.assert_allclose(alone, expected, atol=1e-5)
            np.testing.assert_allclose(await together, expected, atol=1e-5)
            assert client.queued_tokens == client.queued_requests == 0
            assert client.model_info is not None
            assert await client.probe(timeout_s=10)
            pid = rank_pid(client)
        assert not is_alive(pid)

    asyncio.run(main())


@pytest.mark.skipif(not can_fork(), reason="this system has no fork server")
def test_ranks_are_forks_and_outlive_their_fork_server(model: Path, expected: list[np.ndarray]) -> None:
    async def main() -> None:
        before = set(children(os.getpid()))
        async with running(model, starts_warm=False) as client:
            await until(lambda: client.has_working_rank)
            (fork_server,) = set(children(os.getpid())) - before
            first = rank_pid(client)
            assert children(fork_server) == [first] and name_of(first) == "nobiru-rank-r0"
            os.kill(first, signal.SIGKILL)
            await until(lambda: client.has_working_rank and rank_pid(client) != first)
            second = rank_pid(client)
            assert children(fork_server) == [second]
            os.kill(fork_server, signal.SIGKILL)
            np.testing.assert_allclose(await embed_all(client, TEXTS[:9]), expected[:9], atol=1e-5)
            assert rank_pid(client) == second and is_alive(second)
            os.kill(second, signal.SIGKILL)
            np.testing.assert_allclose(await embed_all(client, TEXTS[:9]), expected[:9], atol=1e-5)
            assert rank_pid(client) != second
            (another,) = set(children(os.getpid())) - before
            assert children(another) == [rank_pid(client)]
        assert set(children(os.getpid())) == before
        assert not is_alive(another)

    asyncio.run(main())


def test_killed_ranks_cost_no_request(model: Path, expected: list[np.ndarray]) -> None:
    async def main() -> None:
        async with running(model, faults="step_delay_ms=50") as client:
            await until(lambda: client.has_working_rank)
            work = asyncio.create_task(embed_all(client, TEXTS * 4))
            for _ in range(2):
                await asyncio.sleep(0.12)
                pid = rank_pid(client)
                os.kill(pid, signal.SIGKILL)
                await until(lambda pid=pid: client.has_working_rank and rank_pid(client) != pid)
            np.testing.assert_allclose(await work, expected * 4, atol=1e-5)
            assert client.status()["epoch"] == 3
            assert client.status()["ranks"][0]["rank_id"] == "r2"

    asyncio.run(main())


def test_an_input_that_kills_ranks_fails_alone(model: Path, expected: list[np.ndarray]) -> None:
    async def main() -> None:
        async with running(model, faults=f"kill_on_token={POISON}") as client:
            poisoned = asyncio.create_task(client.embed(request(TEXTS[0], [2, POISON, 3])))
            good = await embed_all(client, TEXTS)
            np.testing.assert_allclose(good, expected, atol=1e-5)
            with pytest.raises(RequestKilledRankError, match=r"input\[1\]"):
                await poisoned
            np.testing.assert_allclose(await embed_all(client, TEXTS[:3]), expected[:3], atol=1e-5)
            assert client.status()["epoch"] == 4
            assert client.queued_tokens == 0

    asyncio.run(main())


@pytest.mark.parametrize("fault", ["raise_on_token", "nan_on_token"])
def test_an_input_the_model_fails_on_fails_alone(model: Path, expected: list[np.ndarray], fault: str) -> None:
    async def main() -> None:
        async with running(model, faults=f"{fault}={POISON}") as client:
            poisoned = asyncio.create_task(client.embed(request([2, POISON, 3])))
            np.testing.assert_allclose(await embed_all(client, TEXTS), expected, atol=1e-5)
            with pytest.raises(InferenceError):
                await poisoned
            assert client.status()["epoch"] == 1

    asyncio.run(main())


def test_out_of_memory_halves_the_batch(model: Path, expected: list[np.ndarray]) -> None:
    async def main() -> None:
        async with running(model, faults="memory_tokens=100") as client:
            np.testing.assert_allclose(await client.embed(request(*TEXTS)), expected, atol=1e-5)

    asyncio.run(main())


def test_a_stopped_rank_is_replaced(model: Path, expected: list[np.ndarray]) -> None:
    async def main() -> None:
        async with running(model, rank_timeout_s=2.0) as client:
            await until(lambda: client.has_working_rank)
            pid = rank_pid(client)
            os.kill(pid, signal.SIGSTOP)
            np.testing.assert_allclose(await embed_all(client, TEXTS[:5]), expected[:5], atol=1e-5)
            assert not is_alive(pid)

    asyncio.run(main())


def test_abandoned_requests_free_their_work(model: Path) -> None:
    async def main() -> None:
        async with running(model, faults="step_delay_ms=20") as client:
            await until(lambda: client.has_working_rank)
            tasks = [asyncio.create_task(client.embed(request(*TEXTS))) for _ in range(50)]
            await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert client.queued_tokens == client.queued_requests == 0
            started_s = time.monotonic()
            await client.embed(request(TEXTS[0]))
            assert time.monotonic() - started_s < 2  # the rank is not busy with what nobody wants (40 steps and more)

    asyncio.run(main())


def test_urgent_requests_overtake_bulk(model: Path) -> None:
    async def main() -> None:
        async with running(model, faults="step_delay_ms=30") as client:
            await until(lambda: client.has_working_rank)
            bulk = asyncio.create_task(client.embed(request(*TEXTS * 80, priority=10)))
            await asyncio.sleep(0.2)
            await client.embed(request(TEXTS[0], priority=0))
            assert not bulk.done()
            await bulk

    asyncio.run(main())


def test_a_rank_that_fails_to_start_at_first_is_tried_again(model: Path, expected: list[np.ndarray]) -> None:
    async def main() -> None:
        async with running(model, faults="fail_at_start=2", starts_warm=False) as client:
            np.testing.assert_allclose(await embed_all(client, TEXTS[:2]), expected[:2], atol=1e-5)
            assert client.status()["ranks"][0]["rank_id"] == "r2"

    asyncio.run(main())


def test_starts_that_keep_failing_are_given_up_with_their_cause(model: Path) -> None:
    async def main() -> None:
        async with running(model, faults="fail_at_start=99", max_start_failures=2) as client:
            waiting = asyncio.create_task(client.embed(request(TEXTS[0])))
            cause = await asyncio.wait_for(asyncio.shield(client.failed), 60)
            assert "2 starts failed" in cause
            assert "fault injection" in cause
        with pytest.raises(NobiruError, match="shut down"):
            await waiting

    asyncio.run(main())


def test_a_damaged_folder_is_given_up_at_once(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes()[: 100 if file.suffix == ".safetensors" else None])
        else:
            (tmp_path / file.name).mkdir()
            for inner in file.iterdir():
                (tmp_path / file.name / inner.name).write_bytes(inner.read_bytes())

    async def main() -> None:
        async with running(tmp_path) as client:
            cause = await asyncio.wait_for(asyncio.shield(client.failed), 60)
            assert "safetensors" in cause
            assert client.status()["epoch"] == 0

    asyncio.run(main())


PARENT = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = {paths!r}
from ranks import running, until
async def main():
    async with running(Path({model!r}), starts_warm=False) as client:
        await until(lambda: client.has_working_rank)
        print(client.status()["ranks"][0]["pid"], flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


def test_a_rank_ends_when_its_parent_is_killed(model: Path) -> None:
    tests = Path(__file__).resolve().parent.parent
    paths = [str(tests), str(tests.parent)]
    code = PARENT.format(paths=paths, model=str(model))
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_alive(pid)
    os.kill(pid, signal.SIGTERM)  # a signal to the whole group is the parent's to answer
    os.kill(pid, signal.SIGINT)
    time.sleep(0.2)
    assert is_alive(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline_s = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not is_alive(pid)
