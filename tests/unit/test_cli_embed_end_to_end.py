"""`nobiru embed` as a process with a real, small model: right vectors, and nothing lost when it is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from tests.small_models import SENTENCES, make

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("bert-mean-normalize", tmp_path_factory.mktemp("models"))


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "nobiru", "embed", *map(str, arguments), "--num-threads", "1", "--dtype", "float32"]


def environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_vectors_are_those_of_sentence_transformers(model: Path, tmp_path: Path) -> None:
    texts = [*SENTENCES, "", "long " * 300]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts)))
    expected = SentenceTransformer(str(model), device="cpu").encode(texts)
    for name in ("out.jsonl", "out.npy"):
        done = subprocess.run(
            command(source, "-o", tmp_path / name, "-m", model), env=environment(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert f"{len(texts)} vectors of {expected.shape[1]} values" in done.stderr
        assert "1 texts were longer" in done.stderr
    from_lines = np.array([line["embedding"] for line in read_lines(tmp_path / "out.jsonl")], dtype=np.float32)
    np.testing.assert_allclose(from_lines, expected, atol=1e-5)
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), from_lines)


def test_killed_and_run_again_it_gives_the_same_file(model: Path, tmp_path: Path) -> None:
    source, out, whole = tmp_path / "in.txt", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    num_texts = 2000
    source.write_text("".join(f"{SENTENCES[n % len(SENTENCES)]} {n}\n" for n in range(num_texts)))
    arguments = [source, "-m", model, "--batch-rows", "16"]
    process = subprocess.Popen(command(*arguments, "-o", out), env=environment(), stderr=subprocess.DEVNULL)
    deadline_s = time.monotonic() + 60
    while not out.exists() or out.stat().st_size < 20_000:
        assert time.monotonic() < deadline_s
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    num_before = out.read_bytes().count(b"\n")
    assert 0 < num_before < num_texts
    done = subprocess.run(command(*arguments, "-o", out), env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "going on behind the" in done.stderr
    subprocess.run(command(*arguments, "-o", whole), env=environment(), check=True, capture_output=True)
    resumed, expected = read_lines(out), read_lines(whole)
    assert [line["index"] for line in resumed] == list(range(num_texts))
    np.testing.assert_allclose(
        [line["embedding"] for line in resumed], [line["embedding"] for line in expected], atol=1e-5
    )
