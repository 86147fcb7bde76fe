"""`nobiru serve` as users run it: real processes, real sockets, a real model, killed ranks, signals."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import openai
import pytest
from ranks import is_alive
from servers import Server, serving
from small_models import SENTENCES, make

from nobiru import LLM

TEXTS = [*SENTENCES, "", "one", *(f"{first} {second}" for first, second in itertools.pairwise(SENTENCES))]
POISON_TEXT = "zebra"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("bert-mean-normalize", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(str(model), dtype="float32", num_threads=1)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> np.ndarray:
    return np.stack([output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)])


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with serving(model, "--dtype", "float32") as started:
        yield started


def vectors(answer: httpx.Response) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    return np.array([item["embedding"] for item in answer.json()["data"]], dtype=np.float32)


def embed(server: Server, texts: str | list[str] | list[int], **fields: object) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/embeddings", json={"input": texts, **fields}, timeout=60)


def test_vectors_over_http_equal_the_offline_ones(server: Server, expected: np.ndarray) -> None:
    np.testing.assert_allclose(vectors(embed(server, TEXTS)), expected, atol=1e-5)
    for text, vector in zip(TEXTS[:5], expected, strict=False):
        np.testing.assert_allclose(vectors(embed(server, text))[0], vector, atol=1e-5)


def test_the_openai_client_works_unmodified(server: Server, model: Path, expected: np.ndarray) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any")
    assert [item.id for item in client.models.list()] == [model.name]
    answer = client.embeddings.create(model=model.name, input=TEXTS)
    found = np.array([item.embedding for item in answer.data], dtype=np.float32)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert answer.usage.prompt_tokens > len(TEXTS)


def test_int8_over_http(model: Path, expected: np.ndarray) -> None:
    with serving(model, "--quantization", "int8") as server:
        found = vectors(embed(server, TEXTS))
        offline = LLM(str(model), quantization="int8", num_threads=1).embed(TEXTS, use_tqdm=False)
        np.testing.assert_allclose(found, np.stack([each.outputs.embedding for each in offline]), atol=1e-3)
        assert (found * expected).sum(axis=1).min() > 0.99
        assert np.abs(found - expected).max() > 1e-4
    assert any("arithmetic" in line for line in server.log)


def test_five_thousand_texts_do_not_hold_up_a_single_one(model: Path) -> None:
    with serving(model, faults="step_delay_ms=30") as server, httpx.Client(timeout=60) as client:
        texts = [f"{SENTENCES[number % len(SENTENCES)]} {number}" for number in range(5000)]

        async def main() -> tuple[float, float, httpx.Response]:
            async with httpx.AsyncClient(base_url=server.url, timeout=120) as session:
                started_s = time.monotonic()
                large = asyncio.create_task(session.post("/v1/embeddings", json={"input": texts}))
                await asyncio.sleep(0.5)
                small_started_s = time.monotonic()
                assert (await session.post("/v1/embeddings", json={"input": "small"})).status_code == 200
                small_s = time.monotonic() - small_started_s
                answer = await large
                return small_s, time.monotonic() - started_s, answer

        small_s, large_s, answer = asyncio.run(main())
        assert len(vectors(answer)) == 5000
        assert small_s < large_s / 3
        assert client.get(f"{server.url}/ready").status_code == 200


def test_killed_ranks_cost_clients_nothing_but_time(model: Path, expected: np.ndarray) -> None:
    with serving(model, faults="step_delay_ms=20") as server:

        async def client(session: httpx.AsyncClient, number: int) -> None:
            for index in range(number, len(TEXTS) * 4, 16):
                which = index % len(TEXTS)
                answer = await session.post("/v1/embeddings", json={"input": TEXTS[which]})
                np.testing.assert_allclose(vectors(answer)[0], expected[which], atol=2e-2)

        async def main() -> None:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as session:
                work = asyncio.gather(*(client(session, number) for number in range(16)))
                for _ in range(2):
                    await asyncio.sleep(0.05)
                    os.kill(await asyncio.to_thread(lambda: server.rank_pid), signal.SIGKILL)
                    assert (await session.get("/health")).status_code == 200
                await work

        asyncio.run(main())
        restarts = httpx.get(f"{server.url}/metrics").text
        assert "nobiru_rank_restarts_total 2.0" in restarts


def test_an_input_that_kills_ranks_gets_its_own_error(model: Path, llm: LLM, expected: np.ndarray) -> None:
    [output] = llm.embed([POISON_TEXT], use_tqdm=False)
    used = {token for text in TEXTS for token in llm.embed([text], use_tqdm=False)[0].prompt_token_ids}
    poison = next(token for token in range(60, 10_000) if token not in used and token < llm.folder.vocab_size)
    assert output.outputs.embedding.size == expected.shape[1]
    with serving(model, faults=f"kill_on_token={poison}") as server:

        async def main() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as session:
                bad = asyncio.create_task(session.post("/v1/embeddings", json={"input": [poison]}))
                good = await asyncio.gather(*(session.post("/v1/embeddings", json={"input": text}) for text in TEXTS))
                assert [answer.status_code for answer in good] == [200] * len(TEXTS)
                answer = await bad
                assert answer.status_code == 500
                assert answer.json()["error"]["code"] == "request_killed_rank"

        asyncio.run(main())
        assert embed(server, "still here").status_code == 200


def test_sigterm_finishes_what_was_accepted(model: Path, expected: np.ndarray) -> None:
    with serving(model, faults="step_delay_ms=1000") as server:
        pid = server.rank_pid

        async def main() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as session:
                accepted = asyncio.create_task(session.post("/v1/embeddings", json={"input": TEXTS[0]}))
                await asyncio.sleep(0.4)
                server.signal(signal.SIGTERM)
                await asyncio.sleep(0.1)
                assert (await session.get("/ready")).status_code == 503
                assert (await session.get("/health")).status_code == 200
                refused = await session.post("/v1/embeddings", json={"input": "late"})
                assert refused.status_code == 503
                assert int(refused.headers["retry-after"]) >= 1
                np.testing.assert_allclose(vectors(await accepted)[0], expected[0], atol=2e-2)

        asyncio.run(main())
        assert server.wait_exit() == 0
        assert not is_alive(pid)
        assert not listens(server.url)


def test_a_second_signal_stops_at_once(model: Path) -> None:
    with serving(model, faults="step_delay_ms=20000") as server:
        pid = server.rank_pid
        with socket.create_connection(address(server.url)) as connection:
            body = b'{"input": "never answered"}'
            head = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            time.sleep(0.5)
            server.signal(signal.SIGTERM)
            time.sleep(0.3)
            assert server.process.poll() is None
            server.signal(signal.SIGTERM)
            assert server.wait_exit(15) != 0
        assert not is_alive(pid)


def test_nothing_is_left_when_the_server_itself_is_killed(model: Path) -> None:
    with serving(model) as server:
        pid = server.rank_pid
        server.signal(signal.SIGKILL)
        server.wait_exit()
        deadline_s = time.monotonic() + 10
        while is_alive(pid) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert not is_alive(pid)
        assert not listens(server.url)


def test_a_server_whose_ranks_never_start_ends_and_says_why(model: Path) -> None:
    server = Server(model, faults="fail_at_start=1000")
    try:
        assert server.wait_exit(90) == 1
        assert "fault injection" in "".join(server.log)
    finally:
        server.close()


def test_bad_folders_and_options_are_one_clear_line(model: Path, tmp_path: Path) -> None:
    for arguments, said in (((), "config.json"), (("--max-num-batched-tokens", "8"), "max_num_batched_tokens")):
        server = Server(tmp_path if not arguments else model, *arguments)
        try:
            assert server.wait_exit(30) == 2
            assert said in "".join(server.log)
            assert "Traceback" not in "".join(server.log)
        finally:
            server.close()


def test_a_taken_port_is_one_clear_line(model: Path, server: Server) -> None:
    other = Server(model, "--port", str(address(server.url)[1]))
    try:
        assert other.wait_exit(30) != 0
        assert str(address(server.url)[1]) in "".join(other.log)
        assert "Traceback" not in "".join(other.log)
    finally:
        other.close()


def address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname and parts.port
    return parts.hostname, parts.port


def listens(url: str) -> bool:
    try:
        socket.create_connection(address(url), timeout=1).close()
    except OSError:
        return False
    return True
