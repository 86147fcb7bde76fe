"""`nobiru serve` of a language model when things go wrong: killed ranks, clients that leave, shutdown in mid-stream."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from servers import Server, serving
from small_models import SENTENCES, make

from nobiru import LLM, SamplingParams

NUM_TOKENS = 30
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
OPTIONS = ("--dtype", "float32", "--kv-cache-memory-bytes", "8000000")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [text[:40] for text in SENTENCES[:8]]


@pytest.fixture(scope="module")
def expected(model: Path, prompts: list[str]) -> list[list[int]]:
    llm = LLM(str(model), dtype="float32", num_threads=1, kv_cache_memory_bytes=8_000_000)
    return [each.outputs[0].token_ids for each in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with serving(model, *OPTIONS, faults="step_delay_ms=20") as started:
        yield started


def body(prompt: str, **fields: object) -> dict[str, object]:
    return {
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }


def stream(server: Server, prompt: str) -> list[int]:
    """The token ids of a streamed completion, which has one end and nothing behind it."""
    tokens: list[int] = []
    events: list[str] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body(prompt, stream=True), timeout=120) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
    assert events.pop() == "[DONE]"
    reasons = []
    for event in events:
        choice = json.loads(event)["choices"][0]
        tokens += choice["token_ids"]
        reasons.append(choice["finish_reason"])
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    return tokens


def metric(server: Server, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", httpx.get(f"{server.url}/metrics").text, re.MULTILINE)
    assert found, f"{name} is not in /metrics"
    return float(found[1])


def wait_until_idle(server: Server) -> None:
    deadline_s = time.monotonic() + 30
    while metric(server, "nobiru_kv_cache_usage_ratio") or metric(server, "nobiru_queued_requests"):
        assert time.monotonic() < deadline_s, "KV blocks or requests were left behind"
        time.sleep(0.05)


def test_streams_go_on_when_their_rank_is_killed(server: Server, prompts: list[str], expected: list[list[int]]) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        streams = threads.map(lambda prompt: stream(server, prompt), prompts)
        time.sleep(0.35)
        os.kill(server.rank_pid, signal.SIGKILL)
        assert list(streams) == expected
    wait_until_idle(server)
    assert metric(server, "nobiru_time_to_first_token_seconds_count") == len(prompts)
    assert metric(server, "nobiru_generated_tokens_total") == len(prompts) * NUM_TOKENS


def test_clients_that_leave_free_their_blocks(server: Server, prompts: list[str]) -> None:
    before = metric(server, "nobiru_generated_tokens_total")

    def leave_early(prompt: str) -> None:
        fields = body(prompt, stream=True, max_tokens=40)
        with httpx.stream("POST", f"{server.url}/v1/completions", json=fields, timeout=60) as response:
            next(response.iter_lines())

    threads = [threading.Thread(target=leave_early, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until_idle(server)
    assert metric(server, "nobiru_generated_tokens_total") - before < len(prompts) * 40 / 2


def test_a_shutdown_lets_streams_end(model: Path, prompts: list[str], expected: list[list[int]]) -> None:
    with (
        serving(model, *OPTIONS, faults="step_delay_ms=30") as server,
        concurrent.futures.ThreadPoolExecutor(4) as threads,
    ):
        streams = [threads.submit(stream, server, prompt) for prompt in prompts[:4]]
        time.sleep(0.5)
        server.signal(signal.SIGTERM)
        assert [each.result(timeout=60) for each in streams] == expected[:4]
        assert server.wait_exit() == 0
