"""`nobiru embed` from the command line to the file, with a model that is quick to tell apart."""

from __future__ import annotations

import json
import os
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from nobiru.cli.embed import prepare
from nobiru.cli.embed_job import chunks, run
from nobiru.cli.main import main
from nobiru.cli.rows import Row
from nobiru.errors import InferenceError
from nobiru.request import EmbeddingOutput, EmbeddingRequestOutput, PoolingParams

DIMENSION = 4


def vector_of(text: str, dimension: int = DIMENSION) -> np.ndarray:
    numbers = [len(text), sum(map(ord, text)) / 1000, ord(text[0]) if text else 0, 0.1]
    return np.array(numbers[:dimension], dtype=np.float32)


class FakeLLM:
    """Stands in for `nobiru.LLM`; remembers how it was used, and fails after `fail_after` chunks."""

    def __init__(self, record: list[Any], fail_after: int | None, failure: BaseException, **options: Any) -> None:
        self.embedding_dim = DIMENSION
        self._record = record
        self._fail_after = fail_after
        self._failure = failure
        record.append(options)

    def embed(
        self, prompts: Sequence[str], pooling_params: PoolingParams | None = None, *, use_tqdm: bool = True
    ) -> list[EmbeddingRequestOutput]:
        assert use_tqdm is False
        if self._fail_after is not None and len(self._record) - 1 >= self._fail_after:
            raise self._failure
        self._record.append((list(prompts), pooling_params))
        dimension = (pooling_params and pooling_params.dimensions) or DIMENSION
        return [
            EmbeddingRequestOutput(
                outputs=EmbeddingOutput(embedding=vector_of(text, dimension)),
                prompt_token_ids=[1],
                truncated=len(text) > 1000,
            )
            for text in prompts
        ]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("NOBIRU_")]:
        monkeypatch.delenv(name)


class Command:
    """The command with a fake model; `used` is what the model saw: its options, then its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.used: list[Any] = []
        self.fail_after: int | None = None
        self.failure: BaseException = KeyboardInterrupt()
        self._capsys = capsys
        module: Any = ModuleType("nobiru.llm")
        module.LLM = lambda **options: FakeLLM(self.used, self.fail_after, self.failure, **options)
        monkeypatch.setitem(sys.modules, "nobiru.llm", module)

    def __call__(self, *arguments: str | Path) -> tuple[int, str]:
        """Exit code and standard error; `used` starts anew."""
        self.used.clear()
        with pytest.raises(SystemExit) as ended:
            main(["embed", *map(str, arguments)])
        return int(ended.value.code or 0), self._capsys.readouterr().err

    @property
    def texts(self) -> list[str]:
        return [text for texts, _ in self.used[1:] for text in texts]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def write_texts(path: Path, count: int = 10) -> list[str]:
    texts = [f"text number {n}" for n in range(count)]
    path.write_text("".join(json.dumps({"id": f"r{n}", "text": text}) + "\n" for n, text in enumerate(texts)))
    return texts


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_to_jsonl(tmp_path: Path, command: Command) -> None:
    texts = write_texts(tmp_path / "in.jsonl")
    code, errors = command(tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "--batch-rows", "4")
    assert code == 0
    assert [len(call[0]) for call in command.used[1:]] == [4, 4, 2]
    lines = read_lines(tmp_path / "out.jsonl")
    assert [line["index"] for line in lines] == list(range(10))
    np.testing.assert_array_equal(
        np.array([line["embedding"] for line in lines], dtype=np.float32), np.stack([vector_of(t) for t in texts])
    )
    assert "10 vectors of 4 values" in errors
    assert "texts/s" in errors


def test_csv_to_npy_and_txt_to_parquet(tmp_path: Path, command: Command) -> None:
    (tmp_path / "in.csv").write_text("n,body\n1,aa\n2,bbb\n")
    assert command(tmp_path / "in.csv", "-o", tmp_path / "out.npy", "--text-column", "body")[0] == 0
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), np.stack([vector_of("aa"), vector_of("bbb")]))
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "in.txt").write_text("x\ny\n")
    assert command(tmp_path / "in.txt", "-o", tmp_path / "out.parquet")[0] == 0
    assert parquet.read_table(tmp_path / "out.parquet").column("index").to_pylist() == [0, 1]


def test_options_reach_the_model(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    write_texts(tmp_path / "in.jsonl", 1)
    monkeypatch.setenv("NOBIRU_DTYPE", "bfloat16")
    monkeypatch.setenv("NOBIRU_PROMPT_NAME", "passage")
    monkeypatch.setenv("NOBIRU_MODEL", "from-environment")
    options = ["--model", "my-model", "--dimensions", "2", "--no-normalize", "--max-num-batched-tokens", "99"]
    assert command(tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", *options)[0] == 0
    engine, (_, params) = command.used
    assert engine == {"model": "my-model", "dtype": "bfloat16", "max_num_batched_tokens": 99}
    assert params == PoolingParams(dimensions=2, normalize=False, prompt_name="passage")


@pytest.mark.parametrize("ids", [[], ["--id-column", "id"]])
def test_an_interrupted_run_goes_on(tmp_path: Path, command: Command, ids: list[str]) -> None:
    texts, out = write_texts(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    arguments = [tmp_path / "in.jsonl", "-o", out, "--batch-rows", "3", *ids]
    command.fail_after = 1
    code, errors = command(*arguments)
    assert code == 130
    assert "goes on" in errors
    assert len(read_lines(out)) == 3
    command.fail_after = None
    with out.open("ab") as stream:
        stream.write(b'{"id":"r3","embedding":[0.1,0.')  # the torn line of a process that was killed
    code, errors = command(*arguments)
    assert code == 0
    assert "going on behind the 3 vectors" in errors
    assert command.texts == texts[3:]
    lines = read_lines(out)
    assert [line["id" if ids else "index"] for line in lines] == (
        [f"r{n}" for n in range(10)] if ids else list(range(10))
    )
    assert lines[3]["embedding"][0] == len(texts[3])
    code, errors = command(*arguments)
    assert code == 0
    assert "nothing left to do" in errors
    assert command.used == [], "no model is loaded when all is done"


def test_resumed_ids_must_match(tmp_path: Path, command: Command) -> None:
    write_texts(tmp_path / "in.jsonl", 4)
    out = tmp_path / "out.jsonl"
    command(tmp_path / "in.jsonl", "-o", out, "--id-column", "id")
    lines = (tmp_path / "in.jsonl").read_text().splitlines()
    (tmp_path / "other.jsonl").write_text("\n".join([lines[0], lines[2], lines[1], lines[3]]) + "\n")
    before = out.read_bytes()
    code, errors = command(tmp_path / "other.jsonl", "-o", out, "--id-column", "id")
    assert code == 2
    assert "line 2" in errors
    assert "'r1'" in errors
    assert "'r2'" in errors
    assert "--overwrite" in errors
    (tmp_path / "short.jsonl").write_text(lines[0] + "\n")
    code, errors = command(tmp_path / "short.jsonl", "-o", out, "--id-column", "id")
    assert code == 2
    assert "more vectors" in errors
    code, errors = command(tmp_path / "in.jsonl", "-o", out)
    assert code == 2
    assert "has no index" in errors
    assert out.read_bytes() == before


def test_resumed_vectors_must_have_the_same_size(tmp_path: Path, command: Command) -> None:
    write_texts(tmp_path / "in.jsonl", 4)
    out = tmp_path / "out.jsonl"
    command(tmp_path / "in.jsonl", "-o", out, "--dimensions", "2")
    write_texts(tmp_path / "in.jsonl", 6)
    code, errors = command(tmp_path / "in.jsonl", "-o", out)
    assert code == 2
    assert "2 values" in errors
    assert len(read_lines(out)) == 4


def test_overwrite(tmp_path: Path, command: Command) -> None:
    texts, out = write_texts(tmp_path / "in.jsonl", 3), tmp_path / "out.npy"
    out.write_text("something dear")
    code, errors = command(tmp_path / "in.jsonl", "-o", out)
    assert code == 2
    assert "--overwrite" in errors
    assert out.read_text() == "something dear"
    assert command(tmp_path / "in.jsonl", "-o", out, "--overwrite")[0] == 0
    assert np.load(out).shape == (3, DIMENSION)
    lines = tmp_path / "out.jsonl"
    lines.write_text("not ours\n")
    assert command(tmp_path / "in.jsonl", "-o", lines, "--overwrite")[0] == 0
    assert command.texts == texts
    assert len(read_lines(lines)) == 3


def test_bad_rows_fail_by_line_or_are_left_out(tmp_path: Path, command: Command) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text('{"text": "a"}\n{"text": 3}\n{"text": "c"}\n')
    code, errors = command(path, "-o", out)
    assert code == 1
    assert f"{path}, line 2: text is 3" in errors
    assert "--skip-bad-rows" in errors
    code, errors = command(path, "-o", out, "--skip-bad-rows")
    assert code == 0
    assert f"left out: {path}, line 2" in errors
    assert "1 bad rows left out" in errors
    assert [line["index"] for line in read_lines(out)] == [0, 2]
    assert command(path, "-o", out, "--skip-bad-rows") == (0, errors.splitlines()[0] + "\n" + _nothing_left(out, 2))


def _nothing_left(out: Path, count: int) -> str:
    return f"nobiru: nothing left to do: {out} has all {count} vectors\n"


def test_many_bad_rows_are_named_up_to_a_number(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a"}\n' + "{\n" * 100)
    code, errors = command(path, "-o", tmp_path / "out.jsonl", "--skip-bad-rows")
    assert code == 0
    assert errors.count("left out: ") == 20
    assert "100 bad rows left out" in errors


def test_a_failing_model_names_the_rows_and_leaves_no_partial_file(tmp_path: Path, command: Command) -> None:
    write_texts(tmp_path / "in.jsonl")
    command.fail_after, command.failure = 1, InferenceError("the model failed", param="prompts[1]")
    code, errors = command(tmp_path / "in.jsonl", "-o", tmp_path / "out.npy", "--batch-rows", "3")
    assert code == 1
    assert "rows 4 to 6: the model failed" in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_truncated_texts_are_counted(tmp_path: Path, command: Command) -> None:
    (tmp_path / "in.txt").write_text("short\n" + "x" * 2000 + "\n")
    _, errors = command(tmp_path / "in.txt", "-o", tmp_path / "out.jsonl")
    assert "1 texts were longer than the model's limit and cut" in errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["in.jsonl"], "-o vectors.jsonl"),
        (["in.jsonl", "-o", "out.csv"], ".parquet"),
        (["in.jsonl", "-o", "in.jsonl"], "the input too"),
        (["in.jsonl", "-o", "none/out.npy"], "no folder none"),
        (["none.jsonl", "-o", "out.npy"], "none.jsonl"),
        (["in.jsonl", "-o", "out.npy", "--id-column", "id"], "no room for ids"),
        (["in.jsonl", "-o", "out.npy", "--skip-bad-rows"], "which rows"),
        (["in.jsonl", "-o", "out.npy", "--batch-rows", "0"], "--batch-rows"),
        (["in.jsonl", "-o", "out.npy", "--dtype", "int3"], "dtype"),
        (["-", "-o", "out.npy"], "--format"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "in.jsonl", 1)
    code, errors = command(*arguments)
    assert code == 2
    (line,) = errors.splitlines()
    assert line.startswith("nobiru: ")
    assert words in line
    assert command.used == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


@pytest.mark.parametrize(("suffix", "size"), [(".jsonl", 0), (".npy", 128), (".parquet", 100)])
def test_an_empty_input_gives_an_empty_output(tmp_path: Path, command: Command, suffix: str, size: int) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    (tmp_path / "in.txt").write_text("")
    out = tmp_path / f"out{suffix}"
    assert command(tmp_path / "in.txt", "-o", out)[0] == 0
    assert out.stat().st_size >= size


def test_chunks_are_bounded_by_rows_and_by_characters() -> None:
    rows = [Row(index=n, text="x" * n) for n in range(8)]
    sizes = [[row.index for row in chunk] for chunk in chunks(rows, 3, max_chars=9)]
    assert sizes == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [len(chunk) for chunk in chunks(rows, 100, max_chars=5)] == [4, 2, 1, 1]
    assert list(chunks([], 3)) == []


class ConstantLLM:
    """Remembers nothing, so that the memory measured is the command's own."""

    embedding_dim = DIMENSION

    def embed(
        self, prompts: Sequence[str], pooling_params: PoolingParams | None = None, *, use_tqdm: bool = True
    ) -> list[EmbeddingRequestOutput]:
        output = EmbeddingOutput(embedding=np.zeros(DIMENSION, dtype=np.float32))
        return [EmbeddingRequestOutput(outputs=output, prompt_token_ids=[], truncated=False) for _ in prompts]


@pytest.mark.parametrize("suffix", [".jsonl", ".npy", ".parquet"])
def test_memory_does_not_grow_with_the_input(tmp_path: Path, suffix: str) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet")
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": f"{n} " + "word " * 50}) + "\n" for n in range(20_000)))
    values = {"input": source, "output": tmp_path / f"out{suffix}", "batch_rows": 256}
    job = prepare(values)
    tracemalloc.start()
    try:
        run(job, ConstantLLM)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert source.stat().st_size > 5_000_000
    assert peak_bytes < 2_000_000
