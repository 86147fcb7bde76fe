"""The loop of `nobiru embed`: rows in, vectors out, chunk by chunk.

Owns going on after an interruption, what happens to bad rows, and the progress bar. Knows nothing of options.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from nobiru.cli import vector_files
from nobiru.cli.options import say
from nobiru.cli.rows import BadRow, Row, RowSource
from nobiru.errors import ConfigError, InvalidRequestError, NobiruError
from nobiru.request import EmbeddingRequestOutput, PoolingParams

MAX_CHUNK_CHARS = 4 * 2**20  # long texts make smaller chunks, so that memory stays bounded
MAX_REPORTED_BAD_ROWS = 20
INTERRUPTED = 130


class Model(Protocol):
    """What of `nobiru.LLM` is used here."""

    @property
    def embedding_dim(self) -> int: ...

    def embed(
        self, prompts: Sequence[str], pooling_params: PoolingParams | None = None, *, use_tqdm: bool = True
    ) -> list[EmbeddingRequestOutput]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run of the command. `kind` is the format of the output; `with_ids`: its rows are named by an id column."""

    source: RowSource
    output: Path
    kind: str
    with_ids: bool
    skip_bad_rows: bool
    overwrite: bool
    batch_rows: int
    params: PoolingParams


def run(job: Job, load_model: Callable[[], Model]) -> None:
    """Do the job and say what was done. The model is loaded only if something is left to do."""
    try:
        _run(job, load_model)
    except KeyboardInterrupt:
        hint = "the same command goes on from here" if job.kind == "jsonl" else f"{job.output} was not written"
        say(f"interrupted; {hint}")
        sys.exit(INTERRUPTED)


def _run(job: Job, load_model: Callable[[], Model]) -> None:
    rows = GoodRows(job.source, skip_bad=job.skip_bad_rows)
    stream = iter(rows)
    num_written, written_dimension = 0, None
    continued = job.kind == "jsonl" and not job.overwrite and job.output.exists()
    if continued:
        written = vector_files.WrittenLines(job.output, with_ids=job.with_ids)
        num_written = skip_written(job, stream, written)
        written_dimension = written.dimension
    first = next(stream, None)
    if first is None and continued:
        say(f"nothing left to do: {job.output} has all {num_written:,} vectors")
        return
    model = load_model()
    dimension = job.params.dimensions or model.embedding_dim
    if written_dimension not in (None, dimension):
        raise ConfigError(
            f"{job.output} has vectors of {written_dimension} values and this run makes {dimension}: another model or "
            "other options (--overwrite starts anew)"
        )
    if num_written:
        say(f"going on behind the {num_written:,} vectors of {job.output}")
    remaining = stream if first is None else chain([first], stream)
    with growing_output(job, dimension, append=continued) as file, Display(job.source) as display:
        embed_rows(job, model, remaining, file, display)
    say(display.summary(job.output, dimension, num_bad=rows.num_bad))


class GoodRows:
    """The rows of a source that can be used; a bad one ends the job, or is reported and counted in `num_bad`."""

    def __init__(self, source: RowSource, *, skip_bad: bool) -> None:
        self.num_bad = 0
        self._source = source
        self._skip_bad = skip_bad

    def __iter__(self) -> Iterator[Row]:
        for row in self._source:
            if isinstance(row, Row):
                yield row
            else:
                self._skip(row)

    def _skip(self, row: BadRow) -> None:
        what = f"{self._source.path}, {row.place}: {row.reason}"
        if not self._skip_bad:
            raise InvalidRequestError(f"{what} (--skip-bad-rows leaves such rows out)")
        self.num_bad += 1
        if self.num_bad <= MAX_REPORTED_BAD_ROWS:
            say(f"left out: {what}")
        elif self.num_bad == MAX_REPORTED_BAD_ROWS + 1:
            say("more bad rows are left out without being named")


def skip_written(job: Job, rows: Iterator[Row], written: Iterable[str | int]) -> int:
    """Read past the rows whose vectors are in the output; raises `ConfigError` if it was made from other rows."""
    number = 0
    for number, key in enumerate(written, 1):
        row = next(rows, None)
        if row is None:
            raise ConfigError(f"{job.output} has more vectors than {job.source.path} has rows ({number - 1:,})")
        if row.key != key:
            raise ConfigError(
                f"{job.output}, line {number} is of row {key!r}, but {job.source.path} has {row.key!r} there: it was "
                "made from another input or with other options (--overwrite starts anew)"
            )
    return number


def embed_rows(job: Job, model: Model, rows: Iterable[Row], file: vector_files.VectorFile, display: Display) -> None:
    for chunk in chunks(rows, job.batch_rows):
        try:
            outputs = model.embed([row.text for row in chunk], job.params, use_tqdm=False)
        except NobiruError as error:
            # Which of the chunk's texts it was, if one was, stands in `param` as an index.
            error.message = f"{job.source.path}, rows {chunk[0].index + 1} to {chunk[-1].index + 1}: {error.message}"
            raise
        file.write(chunk, np.stack([output.outputs.embedding for output in outputs]))
        display.advance(len(chunk), num_truncated=sum(output.truncated for output in outputs))


def chunks(rows: Iterable[Row], max_rows: int, max_chars: int = MAX_CHUNK_CHARS) -> Iterator[list[Row]]:
    """Rows in lists of at most `max_rows`, fewer when their texts reach `max_chars` together."""
    chunk: list[Row] = []
    num_chars = 0
    for row in rows:
        chunk.append(row)
        num_chars += len(row.text)
        if len(chunk) >= max_rows or num_chars >= max_chars:
            yield chunk
            chunk, num_chars = [], 0
    if chunk:
        yield chunk


@contextmanager
def growing_output(job: Job, dimension: int, *, append: bool) -> Iterator[vector_files.VectorFile]:
    file = vector_files.create(job.output, job.kind, dimension=dimension, with_ids=job.with_ids, append=append)
    try:
        yield file
    except BaseException:
        file.abandon()
        raise
    file.close()


class Display:
    """A progress bar on a terminal, with texts/s and the time left; elsewhere only what `summary` says."""

    def __init__(self, source: RowSource) -> None:
        self._source = source
        self._num_texts = 0
        self._num_truncated = 0
        self._started_s = time.monotonic()
        console = Console(stderr=True)
        self._bar = Progress(
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=source.size, completed=source.position, speed="")

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, num_texts: int, *, num_truncated: int) -> None:
        self._num_texts += num_texts
        self._num_truncated += num_truncated
        speed = f"{self._num_texts:,} texts · {self._texts_per_s():,.1f} texts/s"
        self._bar.update(self._task, completed=self._source.position, speed=speed)

    def summary(self, output: Path, dimension: int, *, num_bad: int) -> str:
        elapsed_s = time.monotonic() - self._started_s
        parts = [
            f"{self._num_texts:,} vectors of {dimension} values written to {output} in {elapsed_s:,.1f} s "
            f"({self._texts_per_s():,.1f} texts/s)"
        ]
        if self._num_truncated:
            parts.append(f"{self._num_truncated:,} texts were longer than the model's limit and cut")
        if num_bad:
            parts.append(f"{num_bad:,} bad rows left out")
        return "; ".join(parts)

    def _texts_per_s(self) -> float:
        return self._num_texts / max(time.monotonic() - self._started_s, 1e-9)
