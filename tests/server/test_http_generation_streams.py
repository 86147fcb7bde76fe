"""Streamed completions and chats: events, their order and end, errors and clients that leave in the middle."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from server.generation_fakes import EOS, LIMIT, NUM_CACHED, generation_server, ids_of
from server.http_fakes import ServerProcess
from server.test_http_generation import metric, status, wait_until

CHAT = [{"role": "user", "content": "@say the answer"}]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with generation_server(served_model_names=["tiny"]) as started:
        yield started


def events(server: ServerProcess, path: str = "/v1/completions", **body: Any) -> list[Any]:
    """All events of a stream, the last "[DONE]"."""
    with httpx.stream("POST", f"{server.url}{path}", json={"stream": True, **body}, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        raw = answer.read().decode()
    parts = raw.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    data = [part.removeprefix("data: ") for part in parts]
    return [event if event == "[DONE]" else json.loads(event) for event in data]


def choices(found: list[Any]) -> list[dict[str, Any]]:
    return [choice for event in found if event != "[DONE]" for choice in event.get("choices", [])]


def test_a_streamed_completion(server: ServerProcess) -> None:
    found = events(server, prompt="@slow 0.01 the quick fox")
    assert found[-1] == "[DONE]"
    assert found.count("[DONE]") == 1
    chunks = found[:-1]
    assert {(chunk["object"], chunk["model"], chunk["id"]) for chunk in chunks} == {
        ("text_completion", "tiny", chunks[0]["id"])
    }
    assert all("usage" not in chunk for chunk in chunks)
    parts = choices(found)
    assert "".join(part["text"] for part in parts) == "the quick fox"
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert len(parts) > 3
    assert all(set(part) == {"index", "text", "logprobs", "finish_reason", "stop_reason"} for part in parts)


def test_a_streamed_chat(server: ServerProcess) -> None:
    found = events(server, "/v1/chat/completions", messages=CHAT)
    assert {event["object"] for event in found[:-1]} == {"chat.completion.chunk"}
    parts = choices(found)
    assert parts[0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in part["delta"] for part in parts[1:])
    assert "".join(part["delta"].get("content", "") for part in parts) == "the answer"
    assert parts[-1]["finish_reason"] == "stop"
    assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_at_the_end(server: ServerProcess, path: str) -> None:
    body: dict[str, Any] = {"prompt": "@say the answer"} if path == "/v1/completions" else {"messages": CHAT}
    found = events(server, path, **body, stream_options={"include_usage": True})
    assert found[-1] == "[DONE]"
    assert found[-2]["choices"] == []
    usage = found[-2]["usage"]
    assert usage["completion_tokens"] == len(ids_of("the answer")) + 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": NUM_CACHED}
    assert all(event["usage"] is None for event in found[:-2])


def test_token_ids_of_streams(server: ServerProcess) -> None:
    parts = choices(events(server, prompt="@say the quick fox", return_token_ids=True, stop="qui"))
    ids = [token for part in parts for token in part["token_ids"]]
    assert "".join(part["text"] for part in parts) == "the "
    whole = ids_of("the quick fox")
    assert ids == whole[: len(ids)]
    assert "qui" in "the quick fox"[: len("the qui")]
    assert parts[0]["prompt_token_ids"] == ids_of("@say the quick fox")
    assert all("prompt_token_ids" not in part for part in parts[1:])
    found = events(server, "/v1/chat/completions", messages=CHAT, return_token_ids=True)
    assert found[0]["prompt_token_ids"] == ids_of("<s>user: @say the answer</s>>")
    ids = [token for part in choices(found) for token in part.get("token_ids", [])]
    assert ids == [*ids_of("the answer"), EOS]


@pytest.mark.parametrize("prompts", [["@say ab"], ["@say ab", "@slow 0.01 cd"]])
def test_several_texts_in_a_stream(server: ServerProcess, prompts: list[str]) -> None:
    parts = choices(events(server, prompt=prompts, n=2, logprobs=1, echo=False))
    texts: dict[int, str] = {}
    ends: dict[int, int] = {}
    offsets: dict[int, list[int]] = {}
    for part in parts:
        index = part["index"]
        assert index not in ends
        texts[index] = texts.get(index, "") + part["text"]
        offsets.setdefault(index, []).extend(part["logprobs"]["text_offset"])
        if part["finish_reason"]:
            ends[index] = 1
    expected = [f"{text}#{child}" for text in ("ab", "cd")[: len(prompts)] for child in range(2)]
    assert [texts[index] for index in range(len(expected))] == expected
    assert len(ends) == len(expected)
    assert all(each == sorted(each) and each[0] == 0 for each in offsets.values())


def test_echo_comes_first(server: ServerProcess) -> None:
    parts = choices(events(server, prompt="@slow 0.01 ab", echo=True))
    assert parts[0]["text"].startswith("@slow 0.01 ab")
    assert "".join(part["text"] for part in parts) == "@slow 0.01 abab"


def test_characters_are_never_cut(server: ServerProcess) -> None:
    parts = choices(events(server, prompt="@slow 0.005 \U0001f469\u200d\U0001f467 日本 é", max_tokens=60))
    assert "".join(part["text"] for part in parts) == "\U0001f469\u200d\U0001f467 日本 é"
    assert all("\ufffd" not in part["text"] for part in parts)


def test_errors_before_the_first_token_are_plain_answers(server: ServerProcess) -> None:
    for body, expected in (({"prompt": "@fail"}, 500), ({"prompt": "a", "top_p": 5}, 400), ({"prompt": "@bug"}, 500)):
        answer = httpx.post(f"{server.url}/v1/completions", json={"stream": True, **body}, timeout=60)
        assert answer.status_code == expected
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert status(server)["open"] == 0


@pytest.mark.parametrize(("order", "code"), [("failafter", "inference_failed"), ("bugafter", "internal_error")])
def test_errors_in_the_middle_are_the_last_event(server: ServerProcess, order: str, code: str) -> None:
    found = events(server, prompt=f"@{order} the fox", ignore_eos=True, stream_options={"include_usage": True})
    assert found[-1] == "[DONE]"
    assert found[-2]["error"]["code"] == code
    assert "secret" not in json.dumps(found)
    assert "".join(part["text"] for part in choices(found)) == "the fox"
    assert all(part["finish_reason"] is None for part in choices(found))
    assert status(server)["open"] == 0
    several = events(server, prompt=[f"@{order} the fox", "@slow 0.01 a"], ignore_eos=True, max_tokens=100)
    assert several[-2]["error"]["code"] == code
    assert status(server)["open"] == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_leaves_between_events_frees_its_work(server: ServerProcess, path: str) -> None:
    before = status(server)["aborted"]
    order = "@slow 0.05 a"
    messages = [{"role": "user", "content": order}]
    body: dict[str, Any] = {"prompt": order} if path == "/v1/completions" else {"messages": messages}
    coded = json.dumps({"stream": True, "ignore_eos": True, "max_tokens": 150, **body}).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(coded)}\r\n\r\n"
        client.sendall(head.encode() + coded)
        assert client.recv(200).startswith(b"HTTP/1.1 200")
        assert status(server)["open"] == 1
    left_s = time.monotonic()
    wait_until(lambda: status(server)["open"] == 0, "nothing is open")
    assert time.monotonic() - left_s < 2
    assert status(server)["aborted"] == before + 1
    wait_until(lambda: metric(server, f'nobiru_requests_total{{route="{path}",status="200"}}') >= 1, "it is counted")


@pytest.mark.parametrize("n", [1, 2])
def test_openai_s_client_streams(server: ServerProcess, n: int) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="anything", max_retries=0)
    texts = dict.fromkeys(range(n), "")
    usage = None
    for chunk in client.completions.create(
        model="tiny", prompt="@slow 0.01 a fox", n=n, stream=True, stream_options={"include_usage": True}, max_tokens=30
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        usage = chunk.usage or usage
    assert list(texts.values()) == (["a fox"] if n == 1 else ["a fox#0", "a fox#1"])
    assert usage is not None
    assert usage.completion_tokens >= 3

    texts, roles, reasons = dict.fromkeys(range(n), ""), [], []
    for event in client.chat.completions.create(model="tiny", messages=CHAT, n=n, stream=True):  # type: ignore[arg-type]
        for choice in event.choices:
            roles.append(choice.delta.role)
            texts[choice.index] += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert list(texts.values()) == (["the answer"] if n == 1 else ["the answer#0", "the answer#1"])
    assert roles.count("assistant") == n
    assert reasons == ["stop"] * n
    with client.chat.completions.stream(model="tiny", messages=CHAT) as stream:  # type: ignore[arg-type]
        assert stream.get_final_completion().choices[0].message.content == "the answer"
    with pytest.raises(openai.APIError, match="fails behind this"):
        list(client.completions.create(model="tiny", prompt="@failafter the fox", stream=True))


def test_openai_s_asynchronous_client_may_leave(server: ServerProcess) -> None:
    async def scenario() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="anything", max_retries=0) as client:
            stream = await client.completions.create(
                model="tiny", prompt="@slow 0.02 a", stream=True, max_tokens=150, extra_body={"ignore_eos": True}
            )
            async for _ in stream:
                break
            await stream.close()

    asyncio.run(scenario())
    wait_until(lambda: status(server)["open"] == 0, "nothing is open")


@pytest.mark.parametrize("signals", [1, 2])
def test_a_shutdown_in_the_middle_of_a_stream(signals: int) -> None:
    """The first signal lets the stream end; the second one ends it with an error that says so."""
    with generation_server(shutdown_timeout_s=30.0) as server:
        body = {"stream": True, "prompt": "@slow 0.03 a", "ignore_eos": True, "max_tokens": 100}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            assert answer.status_code == 200
            pieces = answer.iter_text()
            raw = next(pieces)
            for _ in range(signals):
                server.signal(signal.SIGTERM)
                time.sleep(0.3)
            raw += "".join(pieces)
        assert server.wait() == (0 if signals == 1 else 128 + signal.SIGTERM)
    assert raw.endswith("data: [DONE]\n\n")
    assert ('"finish_reason":"length"' in raw) == (signals == 1)
    assert ('"code":"unavailable"' in raw) == (signals == 2)


def test_streams_side_by_side(server: ServerProcess) -> None:
    async def one(client: httpx.AsyncClient, number: int) -> str:
        text = ""
        body = {"stream": True, "prompt": f"@slow 0.002 text {number}", "max_tokens": LIMIT // 2}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
        return text

    async def scenario() -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            return await asyncio.gather(*(one(client, number) for number in range(40)))

    assert asyncio.run(scenario()) == [f"text {number}" for number in range(40)]
