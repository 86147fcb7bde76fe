"""Rows of text out of files: txt, jsonl, csv, tsv and parquet, one after another.

Owns file formats of input and what makes a row unusable. Holds one row (parquet: one batch) at a time. Knows nothing of
models; what to do about a bad row is the caller's decision.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from nobiru.errors import ConfigError

FORMATS = ("txt", "jsonl", "csv", "tsv", "parquet")
MAX_CSV_FIELD_CHARS = 64 * 2**20  # the csv module's own limit of 131,072 is below what a long text may have
_SUFFIXES = {".txt": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
_BOM = b"\xef\xbb\xbf"

RowId = str | int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`index` counts the input's rows from 0, bad ones included; `row_id` is None without an id column."""

    index: int
    text: str
    row_id: RowId | None = None

    @property
    def key(self) -> RowId:
        return self.index if self.row_id is None else self.row_id


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A row without a usable text; `place` is "line 17" or "row 17", counted from 1."""

    index: int
    place: str
    reason: str


class Bad(Exception):
    """Why one row cannot be used."""


def input_format(path: str, given: str | None) -> str:
    """The format by `--format` or by the file's suffix."""
    if given is not None:
        if given not in FORMATS:
            raise ConfigError(f"--format is {given!r}; choose from {', '.join(FORMATS)}", param="format")
        return given
    if path == "-":
        raise ConfigError("standard input has no suffix to tell its format by; say --format txt, jsonl, csv or tsv")
    if found := _SUFFIXES.get(Path(path).suffix.lower()):
        return found
    raise ConfigError(f"{path}: unknown suffix; name it {', '.join(_SUFFIXES)}, or say --format")


class RowSource:
    """The rows of one file or of standard input ("-").

    `position` of `size` tells how far the reading is (bytes, or rows of a parquet file); `size` is None where unknown.
    Raises `ConfigError` when the file cannot be read or has no usable text column.
    """

    def __init__(
        self, path: str, *, kind: str, text_column: str | None, id_column: str | None, stdin: BinaryIO | None = None
    ) -> None:
        self.path = "standard input" if path == "-" else path
        self.position = 0
        self.size: int | None = None
        self._text_column = text_column
        self._id_column = id_column
        if kind == "txt" and (text_column or id_column):
            raise ConfigError("a txt file has no columns: leave out --text-column and --id-column")
        if kind == "parquet":
            self._rows = self._parquet(path)
            return
        self._stream = self._open(path, stdin)
        delimiter = "\t" if kind == "tsv" else ","
        self._rows = {"txt": self._txt, "jsonl": self._jsonl}.get(kind, lambda: self._csv(delimiter))()

    def __iter__(self) -> Iterator[Row | BadRow]:
        return self._rows

    # ---- lines --------------------------------------------------------------------------------------------------

    def _open(self, path: str, stdin: BinaryIO | None) -> BinaryIO:
        if path == "-":
            return stdin if stdin is not None else sys.stdin.buffer
        try:
            self.size = Path(path).stat().st_size
            return Path(path).open("rb")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}") from error

    def _lines(self) -> Iterator[bytes]:
        with self._stream as stream:
            for number, line in enumerate(stream):
                self.position += len(line)
                yield line.removeprefix(_BOM) if number == 0 else line

    def _txt(self) -> Iterator[Row | BadRow]:
        for index, line in enumerate(self._lines()):
            place = f"line {index + 1}"
            try:
                yield Row(index=index, text=_text(line.rstrip(b"\r\n").decode("utf-8", "surrogateescape")))
            except Bad as problem:
                yield BadRow(index=index, place=place, reason=str(problem))

    def _jsonl(self) -> Iterator[Row | BadRow]:
        index = 0
        for number, line in enumerate(self._lines(), 1):
            if not line.strip():
                continue
            try:
                yield self._json_row(index, line)
            except Bad as problem:
                yield BadRow(index=index, place=f"line {number}", reason=str(problem))
            index += 1

    def _json_row(self, index: int, line: bytes) -> Row:
        try:
            value = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Bad(f"not valid JSON ({error})") from error
        if isinstance(value, str) and self._text_column is None and self._id_column is None:
            return Row(index=index, text=_text(value))
        if not isinstance(value, dict):
            raise Bad("expected a JSON object with a text in it")
        if self._text_column is None:
            strings = [name for name, each in value.items() if isinstance(each, str)]
            self._text_column = choose_text_column(strings, list(value), self._id_column, self.path)
        return self._row(index, value)

    def _csv(self, delimiter: str) -> Iterator[Row | BadRow]:
        csv.field_size_limit(MAX_CSV_FIELD_CHARS)
        lines = (line.decode("utf-8", "surrogateescape") for line in self._lines())
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            header = next(reader)
        except (StopIteration, csv.Error) as error:
            raise ConfigError(f"{self.path}: no header line with the names of the columns ({error})") from error
        self._choose_columns(header, header)
        return self._csv_rows(reader, header)

    def _csv_rows(self, reader: Any, header: list[str]) -> Iterator[Row | BadRow]:
        index = 0
        while True:
            first_line = reader.line_num + 1
            try:
                fields = next(reader, None)
                if fields is None:
                    return
                if not fields:  # an empty line
                    continue
                if len(fields) != len(header):
                    raise Bad(f"{len(fields)} fields, but the header has {len(header)}")
                yield self._row(index, dict(zip(header, fields, strict=True)))
            except (Bad, csv.Error) as problem:
                yield BadRow(index=index, place=f"line {first_line}", reason=str(problem))
            index += 1

    # ---- columns ------------------------------------------------------------------------------------------------

    def _parquet(self, path: str) -> Iterator[Row | BadRow]:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise ConfigError("parquet files need pyarrow: pip install 'nobiru[parquet]'") from error
        if path == "-":
            raise ConfigError("parquet cannot be read from standard input; give a file")
        try:
            file = parquet.ParquetFile(path)
        except (OSError, pyarrow.ArrowException) as error:
            raise ConfigError(f"{path}: {error}") from error
        self.size = file.metadata.num_rows
        types = {field.name: field.type for field in file.schema_arrow}
        is_string = (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_string_view)
        self._choose_columns([name for name, kind in types.items() if any(test(kind) for test in is_string)], types)
        return self._parquet_rows(file)

    def _parquet_rows(self, file: Any) -> Iterator[Row | BadRow]:
        columns = [name for name in (self._text_column, self._id_column) if name is not None]
        for batch in file.iter_batches(batch_size=1024, columns=columns):
            for values in batch.to_pylist():
                index, self.position = self.position, self.position + 1
                try:
                    yield self._row(index, values)
                except Bad as problem:
                    yield BadRow(index=index, place=f"row {index + 1}", reason=str(problem))

    def _choose_columns(self, strings: Sequence[str], columns: Sequence[str] | Mapping[str, object]) -> None:
        for option, name in (("--text-column", self._text_column), ("--id-column", self._id_column)):
            if name is not None and name not in columns:
                raise ConfigError(f"{self.path}: {option} is {name!r}, but the columns are {', '.join(columns)}")
        if self._text_column is None:
            self._text_column = choose_text_column(strings, list(columns), self._id_column, self.path)

    def _row(self, index: int, values: Mapping[str, Any]) -> Row:
        text_column = self._text_column
        assert text_column is not None, "chosen when the first row was seen"
        for name in (text_column, self._id_column):
            if name is not None and name not in values:
                raise Bad(f"no field {name!r}; the fields are {', '.join(values) or 'none'}")
        text = values[text_column]
        if not isinstance(text, str):
            raise Bad(f"{text_column} is {_brief(text)}, expected a text")
        row_id = None if self._id_column is None else _row_id(self._id_column, values[self._id_column])
        return Row(index=index, text=_text(text), row_id=row_id)


def choose_text_column(strings: Sequence[str], columns: Sequence[str], id_column: str | None, where: str) -> str:
    """The column called "text", else the only one that holds texts; `ConfigError` lists the columns otherwise."""
    candidates = [name for name in strings if name != id_column]
    if "text" in candidates:
        return "text"
    if len(candidates) == 1:
        return candidates[0]
    raise ConfigError(f"{where}: say which column holds the texts with --text-column; there are {', '.join(columns)}")


def _text(text: str) -> str:
    """The text itself; bytes that are no UTF-8 were decoded to lone surrogates, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Bad(f"not valid UTF-8 at character {error.start + 1} of the text") from error
    return text


def _row_id(column: str, value: object) -> RowId:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
        return value
    raise Bad(f"{column} is {_brief(value)}, expected a text or an integer of 64 bits")


def _brief(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:40] + "…"
