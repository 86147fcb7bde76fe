"""Embeddings over HTTP: shapes, formats, long answers, clients that leave, OpenAI's own client."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from server.http_fakes import DIM, ServerProcess, expected_vector, ids_of, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server(served_model_names=["mini", "alias/two"]) as started:
        yield started


def post(server: ServerProcess, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60)


def rows(answer: httpx.Response) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    return np.array([item["embedding"] for item in answer.json()["data"]], dtype=np.float32)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain until {what}"
        time.sleep(0.01)


def counts(server: ServerProcess) -> dict[str, int]:
    return dict(httpx.get(f"{server.url}/elastic/status").json())


@pytest.mark.parametrize(
    ("value", "ids"),
    [
        ("hello", [ids_of("hello")]),
        ("", [ids_of("")]),
        (["a", "bc"], [ids_of("a"), ids_of("bc")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_every_form_of_input(server: ServerProcess, value: Any, ids: list[list[int]]) -> None:
    answer = post(server, input=value)
    np.testing.assert_array_equal(rows(answer), np.stack([expected_vector(row) for row in ids]))
    body = answer.json()
    assert [item["index"] for item in body["data"]] == list(range(len(ids)))
    assert {item["object"] for item in body["data"]} == {"embedding"}
    assert (body["object"], body["model"]) == ("list", "mini")
    assert body["usage"] == dict.fromkeys(("prompt_tokens", "total_tokens"), sum(map(len, ids)))
    assert "truncated" not in body


def test_base64_equals_float(server: ServerProcess) -> None:
    texts = ["one", "two", "three"]
    coded = post(server, input=texts, encoding_format="base64").json()["data"]
    decoded = np.stack([np.frombuffer(base64.b64decode(item["embedding"]), dtype="<f4") for item in coded])
    assert decoded.tobytes() == rows(post(server, input=texts)).tobytes()


def test_dimensions_reach_the_engine(server: ServerProcess) -> None:
    np.testing.assert_array_equal(rows(post(server, input="a", dimensions=3))[0], expected_vector(ids_of("a"))[:3])


def test_the_answer_has_the_name_that_was_asked_for(server: ServerProcess) -> None:
    assert post(server, input="a", model="alias/two").json()["model"] == "alias/two"


def test_cut_inputs_are_named_and_counted_as_cut(server: ServerProcess) -> None:
    body = post(server, input=["a", "x" * 500, "b"], truncate_prompt_tokens=-1).json()
    assert body["truncated"] == [1]
    assert body["usage"]["prompt_tokens"] == 3 + 256 + 3


def test_an_unusual_content_type_that_is_json(server: ServerProcess) -> None:
    body = json.dumps({"input": "a"})
    for content_type in ("application/json; charset=utf-8", "application/vnd.api+json", None):
        headers = {"content-type": content_type} if content_type else {}
        assert httpx.post(f"{server.url}/v1/embeddings", content=body, headers=headers).status_code == 200


@pytest.mark.alone
def test_a_long_answer_is_whole_and_holds_nobody_up(server: ServerProcess) -> None:
    texts = [f"text {number}" for number in range(20_000)]  # so many that even a fast machine is asked often meanwhile

    async def scenario() -> tuple[list[float], httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            large = asyncio.create_task(client.post("/v1/embeddings", json={"input": texts}))
            waits_s: list[float] = []
            while not large.done():
                started_s = time.perf_counter()
                small = await client.get("/health")
                waits_s.append(time.perf_counter() - started_s)
                assert small.status_code == 200
                await asyncio.sleep(0.002)
            return waits_s, await large

    waits_s, large = asyncio.run(scenario())
    found = rows(large)
    assert found.shape == (20_000, DIM)
    for index in (0, 63, 64, 10_000, 19_999):
        np.testing.assert_array_equal(found[index], expected_vector(ids_of(texts[index])))
    assert len(waits_s) > 20, waits_s


def test_a_long_answer_leaves_the_event_loop_free() -> None:
    """The same on the loop itself, where no other process' work disturbs the measurement."""
    from nobiru.request import EncodedPrompts
    from nobiru.serving.embeddings_answer import write_answer
    from nobiru.serving.responses import SlicedJsonResponse

    vectors_ND = np.random.default_rng(0).standard_normal((5000, DIM)).astype(np.float32)
    prompts = EncodedPrompts(
        token_ids=np.zeros(5000, np.int32), lengths=np.ones(5000, np.int32), truncated=np.zeros(5000, np.bool_)
    )
    num_turns = num_messages = 0

    async def scenario() -> None:
        nonlocal num_turns

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(60)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal num_messages
            num_messages += 1

        response = SlicedJsonResponse(write_answer(vectors_ND, prompts, model="m", base64=False))
        sending = asyncio.create_task(response({"type": "http"}, receive, send))
        while not sending.done():
            num_turns += 1
            await asyncio.sleep(0)
        await sending

    asyncio.run(scenario())
    assert num_messages > 5000 // 64
    assert num_turns >= num_messages - 3  # another task ran between any two slices


def test_a_client_that_leaves_frees_its_work(server: ServerProcess) -> None:
    before = counts(server)["cancelled"]
    body = b'{"input": "sleep:600"}'
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        wait_until(lambda: gauge(server, "nobiru_queued_requests") == 1, "the request waits in the engine")
    wait_until(lambda: counts(server)["cancelled"] == before + 1, "the engine's work is cancelled")
    wait_until(lambda: gauge(server, "nobiru_queued_requests") == 0, "nothing is queued")
    wait_until(
        lambda: gauge(server, 'nobiru_requests_total{route="/v1/embeddings",status="499"}') >= 1, "a 499 is counted"
    )


def gauge(server: ServerProcess, name: str) -> float:
    for line in httpx.get(f"{server.url}/metrics").text.splitlines():
        if line.startswith(name + " "):
            return float(line.rpartition(" ")[2])
    return 0.0


def test_a_client_that_leaves_during_a_long_answer_is_noticed(server: ServerProcess) -> None:
    def num_left() -> float:
        return gauge(server, 'nobiru_requests_total{route="/v1/embeddings",status="499"}')

    before = num_left()
    body = json.dumps({"input": ["text"] * 20_000}).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        assert client.recv(100).startswith(b"HTTP/1.1 200")  # and reads no further
    wait_until(lambda: num_left() == before + 1, "the abandoned answer is counted")


def test_a_failed_input_fails_alone(server: ServerProcess) -> None:
    async def scenario() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            texts = ["fail", "good", "bug", "fine"]
            return await asyncio.gather(*(client.post("/v1/embeddings", json={"input": text}) for text in texts))

    failed, good, bug, fine = asyncio.run(scenario())
    assert failed.status_code == 500
    assert failed.json()["error"]["code"] == "inference_failed"
    assert (good.status_code, fine.status_code) == (200, 200)
    assert bug.status_code == 500
    error = bug.json()["error"]
    assert error["code"] == "internal_error"
    assert bug.headers["x-request-id"] in error["message"]
    assert "secret" not in bug.text
    server.wait_for_log(f"request {bug.headers['x-request-id']} failed(.|\n)*RuntimeError: secret internals")


def test_tokenize(server: ServerProcess) -> None:
    def tokenized(**body: Any) -> dict[str, Any]:
        answer = httpx.post(f"{server.url}/tokenize", json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    assert tokenized(prompt="ab") == {"count": 4, "max_model_len": 256, "tokens": ids_of("ab"), "token_strs": None}
    bare = tokenized(prompt="ab", add_special_tokens=False, return_token_strs=True, model="mini")
    assert (bare["tokens"], bare["token_strs"]) == (ids_of("ab")[1:-1], ["a", "b"])
    for body in ({}, {"prompt": 5}, {"prompt": "a", "input": "b"}, {"prompt": "a", "add_special_tokens": 1}):
        assert httpx.post(f"{server.url}/tokenize", json=body).status_code == 400


@pytest.mark.parametrize("encoding_format", [None, "float", "base64"])
def test_openai_s_client_needs_no_change(server: ServerProcess, encoding_format: Any) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="anything", max_retries=0)
    extra = {} if encoding_format is None else {"encoding_format": encoding_format}
    answer = client.embeddings.create(model="mini", input=["a", "bc"], **extra)
    assert [item.index for item in answer.data] == [0, 1]
    for item, text in zip(answer.data, ("a", "bc"), strict=True):
        vector = item.embedding
        if isinstance(vector, str):  # the client decodes base64 only when it asked for it by itself
            vector = np.frombuffer(base64.b64decode(vector), dtype="<f4").tolist()
        np.testing.assert_array_equal(np.array(vector, dtype=np.float32), expected_vector(ids_of(text)))
    assert answer.usage.prompt_tokens == 3 + 4


def test_openai_s_client_sees_models_and_errors(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="anything", max_retries=0)
    assert [model.id for model in client.models.list()] == ["mini", "alias/two"]
    assert client.models.retrieve("alias/two").id == "alias/two"
    with pytest.raises(openai.NotFoundError, match="model"):
        client.embeddings.create(model="other", input="a")
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="mini", input="a", dimensions=0)
