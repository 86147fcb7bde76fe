"""Vectors into files: jsonl, npy and parquet, chunk by chunk.

Owns file formats of output and how each survives an interruption: jsonl keeps its complete lines, so that a second run
goes on behind them; npy and parquet are written under a temporary name and appear under their own when complete.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import msgspec
import numpy as np

from nobiru.cli.rows import Row, RowId
from nobiru.errors import ConfigError, InvalidRequestError
from nobiru.request import Vectors

FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".npy": "npy", ".parquet": "parquet"}


class VectorFile(Protocol):
    """An output that grows by chunks. `close` completes it, `abandon` leaves it as an interruption would."""

    def write(self, rows: Sequence[Row], vectors: Vectors) -> None: ...

    def close(self) -> None: ...

    def abandon(self) -> None: ...


def output_format(path: Path) -> str:
    if found := FORMATS.get(path.suffix.lower()):
        return found
    raise ConfigError(f"{path}: unknown suffix; name the output {', '.join(FORMATS)}", param="output")


def create(path: Path, kind: str, *, dimension: int, with_ids: bool, append: bool) -> VectorFile:
    """An output for vectors of `dimension` values; `append` continues a jsonl file."""
    if kind == "jsonl":
        return JsonlFile(path, with_ids=with_ids, append=append)
    if kind == "npy":
        return NpyFile(path, dimension)
    return ParquetFile(path, dimension, with_ids=with_ids)


# ---- jsonl -----------------------------------------------------------------------------------------------------------


class _Key(msgspec.Struct):
    """What a line says of its row; the vector is skipped over."""

    id: RowId | None = None
    index: int | None = None


class _Line(_Key):
    embedding: list[float] = []


_Decoded = TypeVar("_Decoded", bound=_Key)


class JsonlFile:
    """Lines `{"id": …, "embedding": […]}`, or with "index" where rows have no id. Numbers round-trip as float32."""

    def __init__(self, path: Path, *, with_ids: bool, append: bool) -> None:
        self._stream: BinaryIO = path.open("ab" if append else "wb")
        self._name = "id" if with_ids else "index"

    def write(self, rows: Sequence[Row], vectors: Vectors) -> None:
        numbers = ",".join(["%.9g"] * vectors.shape[1])  # nine digits tell any two float32 apart
        lines = []
        for row, vector in zip(rows, vectors.tolist(), strict=True):
            key = msgspec.json.encode(row.key).decode()
            lines.append(f'{{"{self._name}":{key},"embedding":[{numbers % tuple(vector)}]}}\n')
        self._stream.write("".join(lines).encode())
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()

    abandon = close


class WrittenLines:
    """The lines of a jsonl output that an earlier run left; a last line that is incomplete is cut off.

    Iterating gives their ids, or indices. Afterwards `dimension` is the size of the last vector, None without lines.
    """

    def __init__(self, path: Path, *, with_ids: bool) -> None:
        self.dimension: int | None = None
        self._path = path
        self._name = "id" if with_ids else "index"
        _drop_torn_line(path)

    def __iter__(self) -> Iterator[RowId]:
        decoder = msgspec.json.Decoder(_Key)
        number, line = 0, b""
        with self._path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                key: RowId | None = getattr(self._decode(decoder, number, line), self._name)
                if key is None:
                    raise self._foreign(number, f"has no {self._name}")
                yield key
        if line:
            self.dimension = len(self._decode(msgspec.json.Decoder(_Line), number, line).embedding)

    def _decode(self, decoder: msgspec.json.Decoder[_Decoded], number: int, line: bytes) -> _Decoded:
        try:
            return decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._foreign(number, "is not a line of vectors") from error

    def _foreign(self, number: int, what: str) -> ConfigError:
        return ConfigError(f"{self._path}, line {number} {what}: no output to continue (--overwrite starts anew)")


def _drop_torn_line(path: Path) -> None:
    with path.open("r+b") as stream:
        end = stream.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 2**16)
            stream.seek(start)
            newline = stream.read(end - start).rfind(b"\n")
            end = start + newline + 1
            if newline >= 0:
                break
        stream.truncate(end)


# ---- files that appear when complete ---------------------------------------------------------------------------------


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


class NpyFile:
    """One array [N, D] of float32, rows in the order of the input; N is put into the header at the end."""

    def __init__(self, path: Path, dimension: int) -> None:
        self._path = path
        self._dimension = dimension
        self._num_rows = 0
        self._stream: BinaryIO = _partial(path).open("wb")
        self._write_header()

    def write(self, rows: Sequence[Row], vectors: Vectors) -> None:
        self._stream.write(np.ascontiguousarray(vectors, dtype="<f4").tobytes())
        self._num_rows += len(rows)

    def close(self) -> None:
        self._stream.seek(0)
        self._write_header()
        self._stream.close()
        _partial(self._path).replace(self._path)

    def abandon(self) -> None:
        self._stream.close()
        _partial(self._path).unlink(missing_ok=True)

    def _write_header(self) -> None:
        # NumPy pads the header so that the first axis can grow without moving the data.
        shape = {"descr": "<f4", "fortran_order": False, "shape": (self._num_rows, self._dimension)}
        np.lib.format.write_array_header_1_0(self._stream, shape)


class ParquetFile:
    """Columns `id` (or `index`) and `embedding`, a list of D float32; one row group per chunk."""

    def __init__(self, path: Path, dimension: int, *, with_ids: bool) -> None:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise ConfigError("parquet files need pyarrow: pip install 'nobiru[parquet]'") from error
        self._arrow: Any = pyarrow
        self._parquet: Any = parquet
        self._path = path
        self._dimension = dimension
        self._name = "id" if with_ids else "index"
        self._key_type: Any = None if with_ids else pyarrow.int64()
        self._writer: Any = None

    def write(self, rows: Sequence[Row], vectors: Vectors) -> None:
        if self._key_type is None:
            self._key_type = self._arrow.int64() if isinstance(rows[0].row_id, int) else self._arrow.string()
        try:
            keys = self._arrow.array([row.key for row in rows], type=self._key_type)
        except (self._arrow.ArrowException, OverflowError) as error:
            raise InvalidRequestError(
                f"{self._path}: a parquet column has one type, and the ids are now texts, now integers ({error})"
            ) from error
        flat = self._arrow.array(vectors.reshape(-1), type=self._arrow.float32())
        embeddings = self._arrow.FixedSizeListArray.from_arrays(flat, self._dimension)
        self._open().write_table(self._arrow.table([keys, embeddings], schema=self._schema()))

    def close(self) -> None:
        self._open().close()
        _partial(self._path).replace(self._path)

    def abandon(self) -> None:
        if self._writer is not None:
            self._writer.close()
        _partial(self._path).unlink(missing_ok=True)

    def _open(self) -> Any:
        if self._writer is None:
            self._writer = self._parquet.ParquetWriter(_partial(self._path), self._schema())
        return self._writer

    def _schema(self) -> Any:
        embedding = self._arrow.list_(self._arrow.float32(), self._dimension)
        key_type = self._key_type or self._arrow.string()
        return self._arrow.schema([(self._name, key_type), ("embedding", embedding)])
