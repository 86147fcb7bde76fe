"""The commands and the code that README.md shows, run in order on small models: `./my-model`, which embeds, and
`./my-chat-model`, which generates."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient
from sentence_transformers import SentenceTransformer

from tests.servers import Server, serving
from tests.small_models import HIDDEN_SIZE, make

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str, marker: str) -> str:
    """The one block of README.md in that language that contains `marker`."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    (text,) = [text for text in found if marker in text]
    return str(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the models in it."""
    folder = tmp_path_factory.mktemp("readme")
    make("bert-mean-normalize", folder).rename(folder / "my-model")
    make("qwen2", folder).rename(folder / "my-chat-model")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder / "my-model") as server:
        yield server


@pytest.fixture(scope="module")
def chat_server(folder: Path) -> Iterator[Server]:
    with serving(folder / "my-chat-model") as server:
        yield server


def run(words: list[str], folder: Path) -> str:
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    script = bin_folder / "nobiru"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m nobiru "$@"\n')
    script.chmod(0o755)
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl(folder: Path, server: Server) -> None:
    command = block("bash", "v1/embeddings").replace("http://127.0.0.1:8000", server.url)
    answer = json.loads(run(["bash", "-euc", command], folder))
    assert [len(item["embedding"]) for item in answer["data"]] == [HIDDEN_SIZE, HIDDEN_SIZE]
    assert answer["model"] == "my-model"


def test_openai_client(folder: Path, server: Server) -> None:
    pytest.importorskip("openai")
    code = block("python", "client.embeddings").replace("http://127.0.0.1:8000", server.url)
    assert run([sys.executable, "-c", code], folder) == f"2 vectors of {HIDDEN_SIZE} values\n"


def test_llm(folder: Path) -> None:
    lines = run([sys.executable, "-c", block("python", "PoolingParams")], folder).splitlines()
    assert len(lines) == 3
    assert lines[-1] == "(32,)"
    assert all(line.endswith("False") for line in lines[:-1])


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_for_a_completion(folder: Path, chat_server: Server) -> None:
    command = block("bash", "v1/completions").replace("http://127.0.0.1:8000", chat_server.url)
    answer = json.loads(run(["bash", "-euc", command], folder))
    assert answer["model"] == "my-chat-model"
    assert 1 <= answer["usage"]["completion_tokens"] <= 32
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")


def test_streamed_chat(folder: Path, chat_server: Server) -> None:
    pytest.importorskip("openai")
    code = block("python", "stream=True").replace("http://127.0.0.1:8000", chat_server.url)
    *_, last = run([sys.executable, "-c", code], folder).splitlines()
    number, word = last.split()
    assert 1 <= int(number) <= 64
    assert word == "tokens"


def test_guided_chat(folder: Path, chat_server: Server) -> None:
    pytest.importorskip("openai")
    pytest.importorskip("xgrammar")
    code = block("python", "response_format").replace("http://127.0.0.1:8000", chat_server.url)
    days, word = run([sys.executable, "-c", code], folder).split()
    assert 1 <= int(days) <= 14
    assert word == "days"


def test_llm_generates(folder: Path) -> None:
    first, second, answer = run([sys.executable, "-c", block("python", "SamplingParams(")], folder).splitlines()
    assert all(line.endswith((" stop", " length")) for line in (first, second))
    assert 1 <= int(answer.removesuffix(" tokens")) <= 16


def test_bench_serve(folder: Path, chat_server: Server) -> None:
    pytest.importorskip("aiohttp")
    words = block("bash", "nobiru bench serve").split()
    report = run([*words, "--url", chat_server.url], folder)
    assert re.search(r"Successful requests\W+100\b", report), report


def test_embed(folder: Path) -> None:
    run(["bash", "-euo", "pipefail", "-c", block("bash", "nobiru embed")], folder)
    lines = [json.loads(line) for line in (folder / "vectors.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [1, 2]
    np.testing.assert_allclose([line["embedding"] for line in lines], np.load(folder / "vectors.npy"), atol=1e-6)
    assert len((folder / "lines.jsonl").read_text().splitlines()) == 2


def test_similarity_example(folder: Path) -> None:
    table = run([sys.executable, str(ROOT / "examples" / "similarity.py"), "my-model"], folder)
    assert table.count("1.00") == 5


def test_the_home_made_server_answers_as_openai_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from home_made_server import create_app  # lies outside of the package

    model = SentenceTransformer(str(folder / "my-model"), device="cpu")
    client = TestClient(create_app(model, "my-model"))
    answer = client.post("/v1/embeddings", json={"model": "my-model", "input": ["a", "b"]}).json()
    assert [item["index"] for item in answer["data"]] == [0, 1]
    np.testing.assert_allclose([item["embedding"] for item in answer["data"]], model.encode(["a", "b"]), atol=1e-6)
    assert client.get("/v1/models").json()["data"][0]["id"] == "my-model"
    assert client.get("/health").status_code == 200
