"""A whole `nobiru serve` with a trained language model: the right text over every route, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from real_models import stories260k
from servers import Server, serving
from small_tokenizers import edit_json

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% if not loop.last %} {% endif %}{% endfor %}"
PROMPT = "Once upon a time"
PROMPTS = (
    PROMPT,
    "One day, a big dog",
    "Tom had a red ball. He",
    "The sun was warm and",
    "Lily and Ben went to",
    "A boy",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models") / "stories"
    shutil.copytree(stories260k(), folder)
    edit_json(folder / "tokenizer_config.json", chat_template=TEMPLATE)
    with serving(folder, "--dtype", "float32") as started:
        yield started


@pytest.fixture(scope="module")
def expected() -> Any:
    """What `transformers` says: 60 greedy tokens behind the prompt."""
    return json.loads((stories260k().parent / "expected.json").read_text())


def complete(server: Server, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/v1/completions", json={"temperature": 0, **body}, timeout=120)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def metric(server: Server, name: str) -> float:
    found = [line for line in httpx.get(f"{server.url}/metrics").text.splitlines() if line.startswith(name + " ")]
    return float(found[0].rpartition(" ")[2]) if found else 0.0


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain until {what}"
        time.sleep(0.01)


async def streamed(client: httpx.AsyncClient, **body: Any) -> tuple[str, list[int], str]:
    """Text, token ids and finish reason of a stream."""
    text, ids, reason = "", [], ""
    options = {"stream": True, "temperature": 0, "return_token_ids": True, **body}
    async with client.stream("POST", "/v1/completions", json=options) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line[6:])["choices"]
                text += choice["text"]
                ids += choice["token_ids"]
                reason = choice["finish_reason"] or reason
    return text, ids, reason


def stream_all(server: Server, bodies: list[dict[str, Any]]) -> list[tuple[str, list[int], str]]:
    async def scenario() -> list[tuple[str, list[int], str]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            return await asyncio.gather(*(streamed(client, **body) for body in bodies))

    return asyncio.run(scenario())


def test_the_text_is_the_one_transformers_gives(server: Server, expected: Any) -> None:
    reference = expected["stories260K"]["greedy_token_ids"]
    body = complete(server, prompt=PROMPT, max_tokens=60, return_token_ids=True, ignore_eos=True)
    assert body["choices"][0]["token_ids"] == reference
    [(text, ids, reason)] = stream_all(server, [{"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True}])
    assert (ids, reason, text) == (reference, "length", body["choices"][0]["text"])
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    chat = client.chat.completions.create(
        model="stories", messages=[{"role": "user", "content": PROMPT}], temperature=0, max_completion_tokens=60
    )
    assert chat.choices[0].message.content == text
    assert text.startswith(", there was a little girl named Lily.")


def test_stories_end(server: Server) -> None:
    choice = complete(server, prompt=PROMPT, max_tokens=500, return_token_ids=True)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert choice["token_ids"][-1] in (1, 2)
    assert not choice["text"].endswith(("<s>", "</s>"))
    stopped = complete(server, prompt=PROMPT, max_tokens=500, stop=["Lily", " red"])["choices"][0]
    assert (stopped["text"], stopped["stop_reason"]) == (", there was a little girl named ", "Lily")


def test_streams_side_by_side_are_as_alone(server: Server) -> None:
    bodies = [
        {"prompt": prompt, "max_tokens": 40, "temperature": temperature, "seed": seed}
        for seed, prompt in enumerate(PROMPTS)
        for temperature in (0.0, 0.9)
    ]
    alone = [stream_all(server, [body])[0] for body in bodies]
    assert stream_all(server, bodies) == alone
    assert len({text for text, _, _ in alone}) == len(bodies)


def test_logprobs_belong_to_the_tokens(server: Server) -> None:
    choice = complete(server, prompt=PROMPT, max_tokens=12, logprobs=3, return_token_ids=True)["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == logprob == max(top.values())  # greedy


def test_a_client_that_leaves_frees_its_blocks(server: Server) -> None:
    async def scenario() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            body = {"stream": True, "prompt": PROMPT, "max_tokens": 500, "ignore_eos": True, "n": 4}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        break

    asyncio.run(scenario())
    wait_until(lambda: metric(server, "nobiru_queued_requests") == 0, "nothing is queued")
    complete(server, prompt="A", max_tokens=2)  # a step, after which the rank tells how it is
    wait_until(lambda: metric(server, "nobiru_running_sequences") == 0, "nothing runs")
    assert metric(server, "nobiru_kv_cache_usage_ratio") == 0
    generated = metric(server, "nobiru_generated_tokens_total")
    time.sleep(0.2)
    assert metric(server, "nobiru_generated_tokens_total") == generated


def test_guided_json_is_json(server: Server) -> None:
    pytest.importorskip("xgrammar")
    schema = {"type": "object", "properties": {"a": {"enum": ["red", "blue"]}}, "required": ["a"]}
    body = complete(server, prompt=PROMPT, max_tokens=200, guided_json=schema, temperature=0.5, seed=3)
    choice = body["choices"][0]
    if choice["finish_reason"] == "stop":
        assert json.loads(choice["text"])["a"] in ("red", "blue")
    else:
        assert choice["text"].lstrip().startswith("{")


def test_a_rank_that_dies_changes_no_text(server: Server) -> None:
    bodies = [{"prompt": prompt, "max_tokens": 150, "ignore_eos": True} for prompt in PROMPTS]
    undisturbed = stream_all(server, bodies)

    async def scenario() -> list[tuple[str, list[int], str]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            streams = [asyncio.create_task(streamed(client, **body)) for body in bodies]
            while metric(server, "nobiru_generated_tokens_total") < generated + 20:
                await asyncio.sleep(0.005)
            assert not any(stream.done() for stream in streams)
            os.kill(rank_pid, signal.SIGKILL)
            return await asyncio.gather(*streams)

    generated, rank_pid = metric(server, "nobiru_generated_tokens_total"), server.rank_pid
    assert asyncio.run(scenario()) == undisturbed
    assert server.rank_pid != rank_pid


def test_nothing_is_left(server: Server) -> None:
    assert metric(server, "nobiru_queued_requests") == 0
    server.signal(signal.SIGTERM)
    assert server.wait_exit() == 0


def test_a_model_without_a_chat_template() -> None:
    """Chats are refused with the reason; completions work."""
    with serving(stories260k(), "--max-model-len", "64") as server:
        chat = {"messages": [{"role": "user", "content": "x"}]}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_chat_template")
        too_long = httpx.post(f"{server.url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 60})
        assert "64 tokens" in too_long.json()["error"]["message"]
        assert complete(server, prompt=PROMPT, max_tokens=3)["usage"]["completion_tokens"] == 3
