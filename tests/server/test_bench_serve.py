"""`nobiru bench serve` as a whole, against a scripted server whose delays are known."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nobiru.cli.main import main

pytestmark = pytest.mark.alone

FIRST_S, GAP_S = 0.15, 0.03
SLACK_MS = 400  # for a machine that is busy with other things


@dataclass
class Scripted:
    """A server with OpenAI's interface. A request's `script` says what goes wrong."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""
    key: str | None = None

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/completions", self.answer, methods=["POST"]),
                Route("/v1/chat/completions", self.answer, methods=["POST"]),
                Route("/v1/embeddings", self.embed, methods=["POST"]),
            ]
        )

    async def models(self, request: Request) -> Response:
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "no key"}}, status_code=401)
        return JSONResponse({"object": "list", "data": [{"id": "tiny"}, {"id": "other"}]})

    async def note(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        return body

    async def embed(self, request: Request) -> Response:
        body = await self.note(request)
        await asyncio.sleep(FIRST_S)
        usage = {"prompt_tokens": len(body["input"].split())}
        return JSONResponse({"data": [{"embedding": [0.5, 0.5]}], "usage": usage})

    async def answer(self, request: Request) -> Response:
        body = await self.note(request)
        script = body.get("script", "")
        if script == "busy":
            return JSONResponse({"error": {"message": "come back later"}}, status_code=429)
        if script == "plain":
            return JSONResponse({"choices": []})
        if script == "silent":
            await asyncio.sleep(30)
        chat = request.url.path.endswith("/chat/completions")
        return StreamingResponse(self.stream(body, chat, script), media_type="text/event-stream")

    async def stream(self, body: dict[str, Any], chat: bool, script: str) -> AsyncIterator[bytes]:
        if chat:
            yield event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(FIRST_S)
        for index in range(body["max_tokens"]):
            if index:
                await asyncio.sleep(GAP_S)
            data = event({"choices": [{"delta": {"content": "é"}} if chat else {"text": "é"}]})
            yield data[:20]
            yield data[20:]
            if script == "breaks" and index == 1:
                yield event({"error": {"message": "rank lost"}})
                return
            if script == "leaves" and index == 1:
                return
        last = {"delta": {}} if chat else {"text": ""}
        yield event({"choices": [{**last, "finish_reason": "length"}]})
        if script != "no usage":
            words = body["prompt"] if not chat else " ".join(message["content"] for message in body["messages"])
            usage = {"prompt_tokens": len(words.split()), "completion_tokens": body["max_tokens"]}
            yield event({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    for name in [name for name in os.environ if name.startswith("NOBIRU_")]:
        monkeypatch.delenv(name)
    scripted = Scripted()
    listener = socket.create_server(("127.0.0.1", 0))
    scripted.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(scripted.app(), log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        deadline_s = time.monotonic() + 30
        while not server.started:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        yield scripted
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        listener.close()


def bench(scripted: Scripted, *arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", "--url", scripted.url, *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def measured(scripted: Scripted, tmp_path: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    path = tmp_path / "result.json"
    assert bench(scripted, *arguments, "--save-result", str(path)) == code
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_the_command_prints_the_table_and_writes_its_files(scripted: Scripted, tmp_path: Path) -> None:
    arguments = [
        *("--num-prompts", "12", "--max-concurrency", "4", "--input-len", "9", "--output-len", "5", "--ignore-eos"),
        *("--goodput", "ttft:5000,tpot:5000", "--save-result", "run.json", "--plot", "run.svg"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "nobiru", "bench", "serve", "--url", scripted.url + "/v1/", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parents[2]), *sys.path])},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    rows = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in done.stdout.splitlines() if "│" in line}
    assert rows["Model"] == "tiny", "the first that the server lists"
    assert rows["Successful requests"] == "12" and rows["Failed requests"] == "0"
    assert rows["Total input tokens"] == str(12 * 9) and rows["Total generated tokens"] == str(12 * 5)
    assert rows["Peak concurrent requests"] == "4"
    assert float(rows["Mean TTFT (ms)"]) >= FIRST_S * 1000
    assert float(rows["Median ITL (ms)"]) >= GAP_S * 1000 * 0.5
    assert rows["Request goodput (req/s)"] == rows["Request throughput (req/s)"]
    assert {"P90 TPOT (ms)", "P99 E2EL (ms)", "Output token throughput (tok/s)"} <= set(rows)
    assert "wrote run.json" in done.stderr
    assert json.loads((tmp_path / "run.json").read_text())["completed"] == 12
    assert (tmp_path / "run.svg").read_text().lstrip().startswith("<?xml")
    assert len(scripted.bodies) == 13, "and one to warm up"
    assert scripted.bodies[0] == {
        "model": "tiny",
        "prompt": scripted.bodies[0]["prompt"],
        "max_tokens": 5,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_latencies_are_the_servers(scripted: Scripted, tmp_path: Path, endpoint: str) -> None:
    """The chat's first piece says only who speaks; it is no token."""
    found = measured(
        scripted, tmp_path, "--endpoint", endpoint, "--num-prompts", "6", "--max-concurrency", "2", "--output-len", "8"
    )
    assert found["total_output_tokens"] == 48
    assert FIRST_S * 1000 <= found["p50_ttft_ms"] < FIRST_S * 1000 + SLACK_MS
    assert GAP_S * 900 <= found["median_tpot_ms"] < GAP_S * 1000 + SLACK_MS
    total_s = FIRST_S + 7 * GAP_S
    assert total_s * 1000 <= found["median_e2el_ms"] < total_s * 1000 + 2 * SLACK_MS
    assert found["duration"] >= 3 * total_s, "six requests, two at a time"
    assert [len(request["itl_s"]) for request in found["requests"]] == [7] * 6
    if endpoint == "chat":
        assert scripted.bodies[0]["messages"][0]["role"] == "user"


def test_embeddings(scripted: Scripted, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(scripted, tmp_path, "--endpoint", "embeddings", "--num-prompts", "8", "--input-len", "5")
    assert found["total_input_tokens"] == 40 and found["total_output_tokens"] == 0
    assert found["mean_e2el_ms"] >= FIRST_S * 1000 and "mean_ttft_ms" not in found
    assert "TTFT" not in capsys.readouterr().out
    assert set(scripted.bodies[0]) == {"model", "input"}


def test_an_open_loop_counts_from_when_a_request_was_due(scripted: Scripted, tmp_path: Path) -> None:
    common = ["--num-prompts", "6", "--max-concurrency", "1", "--output-len", "1"]
    closed = measured(scripted, tmp_path, *common)
    opened = measured(scripted, tmp_path, *common, "--request-rate", "1000")
    assert all(request["due_s"] == request["sent_s"] for request in closed["requests"])
    waits_s = [request["sent_s"] - request["due_s"] for request in opened["requests"]]
    assert waits_s[-1] > 4 * FIRST_S, "the last waited for five others"
    last = opened["requests"][-1]
    assert last["ttft_s"] > 5 * FIRST_S > closed["requests"][-1]["ttft_s"] - SLACK_MS / 1000


def test_requests_are_sent_when_due(scripted: Scripted, tmp_path: Path) -> None:
    found = measured(scripted, tmp_path, "--num-prompts", "10", "--request-rate", "20", "--output-len", "1")
    due_s = [request["due_s"] for request in found["requests"]]
    assert due_s == sorted(due_s) and due_s[-1] > 0.1
    assert all(request["sent_s"] >= request["due_s"] for request in found["requests"])
    assert found["request_rate"] == 20


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("busy", "status 429: come back later"),
        ("breaks", "error in the stream: rank lost"),
        ("leaves", "the stream ended without [DONE]"),
        ("plain", "the answer is application/json, not text/event-stream"),
    ],
)
def test_failures_are_counted_by_kind(
    scripted: Scripted, tmp_path: Path, capsys: pytest.CaptureFixture[str], script: str, error: str
) -> None:
    arguments = ["--num-prompts", "3", "--num-warmups", "0", "--extra-body", json.dumps({"script": script})]
    found = measured(scripted, tmp_path, *arguments, code=1)
    assert found["failed"] == 3 and found["completed"] == 0 and found["errors"] == {error: 3}
    assert f"3 failed: {error}" in capsys.readouterr().out
    assert "mean_ttft_ms" not in found


def test_a_request_without_an_end(scripted: Scripted, tmp_path: Path) -> None:
    arguments = ["--num-prompts", "2", "--num-warmups", "0", "--timeout", "0.4", "--extra-body", '{"script": "silent"}']
    found = measured(scripted, tmp_path, *arguments, code=1)
    assert found["errors"] == {"no whole answer within 0.4 s": 2}


def test_without_usage_pieces_are_counted(
    scripted: Scripted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--num-prompts", "2", "--output-len", "4", "--extra-body", '{"script": "no usage"}']
    found = measured(scripted, tmp_path, *arguments)
    assert found["total_output_tokens"] == 8 and found["total_input_tokens"] == 0
    assert "reports no usage" in capsys.readouterr().err


def test_a_failing_warm_up_ends_the_command(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(scripted, "--extra-body", '{"script": "busy"}') == 1
    assert capsys.readouterr().err == "nobiru: the warm-up request failed: status 429: come back later\n"
    assert len(scripted.bodies) == 1


def test_keys_and_headers(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.key = "secret"
    common = ["--num-prompts", "1", "--num-warmups", "0", "--output-len", "1"]
    assert bench(scripted, *common) == 2
    assert "wants a key" in capsys.readouterr().err
    assert bench(scripted, *common, "--api-key", "secret", "--header", "X-Team: a:b") == 0
    assert scripted.headers[0]["x-team"] == "a:b"
    monkeypatch.setenv("NOBIRU_API_KEY", "secret")
    assert bench(scripted, *common) == 0
    assert scripted.headers[1]["authorization"] == "Bearer secret"


def test_prompts_from_a_file(scripted: Scripted, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "to be or not"}], "output_len": 2}\n')
    arguments = ["--dataset", "jsonl", "--dataset-path", str(path), "--endpoint", "chat", "--num-prompts", "2"]
    found = measured(scripted, tmp_path, *arguments)
    assert found["total_input_tokens"] == 8 and found["total_output_tokens"] == 4
    assert scripted.bodies[0]["messages"] == [{"role": "user", "content": "to be or not"}]


@pytest.mark.parametrize("suffix", ["png", "html", "pdf"])
@pytest.mark.parametrize("endpoint", ["completions", "embeddings"])
def test_plots(scripted: Scripted, tmp_path: Path, suffix: str, endpoint: str) -> None:
    path = tmp_path / f"run.{suffix}"
    arguments = ["--num-prompts", "3", "--output-len", "3", "--endpoint", endpoint, "--plot", str(path)]
    assert bench(scripted, *arguments) == 0
    content = path.read_bytes()
    assert content.startswith({"png": b"\x89PNG", "pdf": b"%PDF", "html": b"<!doctype html>"}[suffix])
    if suffix == "html":
        assert b"<svg" in content and b"<?xml" not in content


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-prompts", "0"], "num_prompts is 0; it must be at least 1"),
        (["--request-rate", "0"], "request_rate is 0.0"),
        (["--request-rate", "nan"], "request_rate is nan"),
        (["--endpoint", "images"], "endpoint is 'images'"),
        (["--url", "localhost:8000"], "url is 'localhost:8000'"),
        (["--plot", "run.gif"], "plot is 'run.gif'"),
        (["--save-result", "/no/such/folder/x.json"], "in a folder that exists"),
        (["--header", "nothing"], "header is 'nothing'"),
        (["--extra-body", "[1]"], "extra_body is '[1]'"),
        (["--dataset", "sharegpt"], "dataset is 'sharegpt'"),
        (["--dataset", "jsonl"], "--dataset-path"),
        (["--goodput", "speed:1"], "goodput is 'speed:1'"),
        (["--percentiles", "x"], "percentiles is 'x'"),
        (["--range-ratio", "1"], "range_ratio is 1.0"),
        (["--model", "huge"], "has no model 'huge', only tiny, other"),
    ],
)
def test_wrong_options(
    scripted: Scripted, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert bench(scripted, *arguments) == 2
    assert message in capsys.readouterr().err
    assert scripted.bodies == []


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert bench(Scripted(url=f"http://127.0.0.1:{port}")) == 1
    error = capsys.readouterr().err
    assert f"no server answers at http://127.0.0.1:{port}: Connection refused" in error and "--url" in error


def test_without_aiohttp_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert bench(Scripted(url="http://127.0.0.1:1")) == 2
    assert "pip install 'nobiru[bench]'" in capsys.readouterr().err
