"""Vectors into files: every format reads back equal, and an interruption leaves what it should."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nobiru.cli import vector_files
from nobiru.cli.rows import Row
from nobiru.cli.vector_files import WrittenLines
from nobiru.errors import ConfigError, InvalidRequestError


def rows(first: int, count: int, *, ids: bool = False) -> list[Row]:
    return [Row(index=n, text="t", row_id=f"id-{n}" if ids else None) for n in range(first, first + count)]


def vectors(count: int, dimension: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, dimension)).astype(np.float32)


def create(path: Path, *, ids: bool = False, append: bool = False) -> vector_files.VectorFile:
    kind = vector_files.output_format(path)
    return vector_files.create(path, kind, dimension=3, with_ids=ids, append=append)


def test_formats() -> None:
    assert vector_files.output_format(Path("a.NPY")) == "npy"
    with pytest.raises(ConfigError, match=r"\.parquet"):
        vector_files.output_format(Path("a.csv"))


def test_jsonl_gives_the_same_float32_values(tmp_path: Path) -> None:
    path, values = tmp_path / "a.jsonl", vectors(5)
    values[0] = [1.0, -0.0, 1.1754944e-38]
    file = create(path, ids=True)
    file.write(rows(0, 2, ids=True), values[:2])
    file.write(rows(2, 3, ids=True), values[2:])
    file.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["id"] for line in lines] == [f"id-{n}" for n in range(5)]
    np.testing.assert_array_equal(np.array([line["embedding"] for line in lines], dtype=np.float32), values)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=3, max_size=3))
def test_every_float32_survives_jsonl(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    file = create(path)
    file.write(rows(0, 1), np.array([values], dtype=np.float32))
    file.close()
    line = json.loads(path.read_text())
    assert line["index"] == 0
    np.testing.assert_array_equal(np.array(line["embedding"], dtype=np.float32), np.array(values, dtype=np.float32))


def test_ids_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    file = create(path, ids=True)
    file.write([Row(index=0, text="t", row_id='a"\n%s\\ü')], vectors(1))
    file.close()
    assert json.loads(path.read_text())["id"] == 'a"\n%s\\ü'


def test_npy_grows_and_appears_when_complete(tmp_path: Path) -> None:
    path, values = tmp_path / "a.npy", vectors(2500)
    file = create(path)
    for first in range(0, 2500, 1000):
        part = values[first : first + 1000]
        file.write(rows(first, len(part)), part)
        assert not path.exists()
    file.close()
    read = np.load(path, mmap_mode="r")
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, values)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("suffix", [".npy", ".parquet"])
def test_an_abandoned_file_leaves_nothing(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_text("old")
    file = create(path)
    file.write(rows(0, 2), vectors(2))
    file.abandon()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("ids", [False, True])
def test_parquet(tmp_path: Path, ids: bool) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path, values = tmp_path / "a.parquet", vectors(5)
    file = create(path, ids=ids)
    file.write(rows(0, 3, ids=ids), values[:3])
    file.write(rows(3, 2, ids=ids), values[3:])
    file.close()
    table = parquet.read_table(path)
    assert table.column_names == ["id" if ids else "index", "embedding"]
    assert table.column(0).to_pylist() == ([f"id-{n}" for n in range(5)] if ids else list(range(5)))
    np.testing.assert_array_equal(np.array(table.column(1).to_pylist(), dtype=np.float32), values)
    assert parquet.ParquetFile(path).num_row_groups == 2


def test_parquet_ids_have_one_type(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    file = create(tmp_path / "a.parquet", ids=True)
    file.write([Row(index=0, text="t", row_id=1)], vectors(1))
    with pytest.raises(InvalidRequestError, match="one type"):
        file.write([Row(index=1, text="t", row_id="b")], vectors(1))
    file.abandon()


@pytest.mark.parametrize("suffix", [".npy", ".parquet", ".jsonl"])
def test_no_rows_at_all(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    create(path).close()
    if suffix == ".npy":
        assert np.load(path).shape == (0, 3)
    elif suffix == ".parquet":
        assert pytest.importorskip("pyarrow.parquet").read_table(path).num_rows == 0
    else:
        assert path.read_bytes() == b""


@pytest.mark.parametrize("num_cut", [0, 1, 20, 45])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, num_cut: int) -> None:
    path = tmp_path / "a.jsonl"
    file = create(path)
    file.write(rows(0, 3), vectors(3))
    file.close()
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - num_cut])
    written = WrittenLines(path, with_ids=False)
    num_left = 3 if num_cut == 0 else 2
    assert list(written) == list(range(num_left))
    assert written.dimension == 3
    assert path.read_bytes() == b"".join(content.splitlines(keepends=True)[:num_left])


def test_a_torn_line_longer_than_a_block(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"index":0,"embedding":[1.0]}\n{"index":1,"embedding":[' + b"0.1," * 50_000)
    assert list(WrittenLines(path, with_ids=False)) == [0]
    path.write_bytes(b'{"index":0,"embedding":[' + b"0.1," * 50_000)
    empty = WrittenLines(path, with_ids=False)
    assert list(empty) == []
    assert empty.dimension is None
    assert path.read_bytes() == b""


@pytest.mark.parametrize("line", ['{"index": 1}', "no json", '{"id": "a"}', "[]", '{"id": [1]}'])
def test_foreign_lines_are_not_continued(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": "x", "embedding": [1]}\n' + line + "\n")
    if line == '{"id": "a"}':
        assert list(WrittenLines(path, with_ids=True)) == ["x", "a"]
        return
    with pytest.raises(ConfigError, match=r"line 2.*--overwrite"):
        list(WrittenLines(path, with_ids=True))
