"""Reads parts of tensors from one safetensors file, without mapping it.

Owns the file's format (https://github.com/huggingface/safetensors#format) as far as reading needs it. A mapped file
counts as the process' memory page by page, ends the process with a signal if somebody cuts it short, and changes under
the reader's hands if somebody writes into it; positioned reads do none of that. The descriptor stays open, so a file
that was replaced since still gives what it had; one that was changed in place is refused.
"""

from __future__ import annotations

import json
import os
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nobiru.errors import ModelFolderError
from nobiru.models.pace import CHUNK_BYTES, Pace

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MAX_HEADER_BYTES = 100_000_000
_MAX_PASSING_BYTES = 8 * 2**20


class SafetensorsFile:
    """Several threads may read at once."""

    def __init__(self, path: Path) -> None:
        """`ModelFolderError` if it cannot be opened or is not such a file."""
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ModelFolderError(f"{path} cannot be read: {error}") from None
        weakref.finalize(self, os.close, self._descriptor)
        self._state = self._current_state()
        size = int.from_bytes(self._read(bytearray(8), 0), "little")
        if size > _MAX_HEADER_BYTES:
            raise self._damaged(f"its header would have {size} bytes")
        self._begin = 8 + size
        try:
            self._tensors: dict[str, dict[str, Any]] = json.loads(self._read(bytearray(size), 8))
        except ValueError:
            raise self._damaged("its header is not JSON") from None

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """`ModelFolderError` unless it is floating point of 16 bits or more."""
        dtype = self._tensors[name]["dtype"]
        if dtype not in _DTYPES:
            raise ModelFolderError(f"{self._path}: tensor {name!r} has dtype {dtype}; floating point is expected")
        return _DTYPES[dtype]

    def rows(self, name: str, begin: int, end: int, *, pace: Pace | None = None) -> Tensor:
        """A copy of the tensor's entries `begin` to `end` (exclusive) along its first dimension, on the CPU."""
        rows = torch.empty((end - begin, *self.shape(name)[1:]), dtype=self.dtype(name))
        self._read_rows(name, begin, rows, pace)
        return rows

    def columns(self, name: str, begin: int, end: int) -> Tensor:
        """The same along the second dimension. A file has rows whole, so they are read, a few at a time."""
        shape = self.shape(name)
        columns = torch.empty((shape[0], end - begin, *shape[2:]), dtype=self.dtype(name))
        row_bytes = torch.Size(shape[1:]).numel() * columns.element_size()
        num_rows = max(1, _MAX_PASSING_BYTES // max(1, row_bytes))
        passing = torch.empty((min(num_rows, shape[0]), *shape[1:]), dtype=columns.dtype)
        for row in range(0, shape[0], num_rows):
            rows = passing[: min(num_rows, shape[0] - row)]
            self._read_rows(name, row, rows)
            columns[row : row + len(rows)] = rows[:, begin:end]
        return columns

    def _read_rows(self, name: str, begin: int, rows: Tensor, pace: Pace | None = None) -> None:
        """Fill `rows` with the tensor's from number `begin` on."""
        shape = self.shape(name)
        row_bytes = torch.Size(shape[1:]).numel() * rows.element_size()
        first, last = self._tensors[name]["data_offsets"]
        if last - first != row_bytes * shape[0]:
            raise self._damaged(f"tensor {name!r} has {last - first} bytes")
        self._read(rows.view(-1).view(torch.uint8).numpy().data, self._begin + first + begin * row_bytes, pace)
        if self._current_state() != self._state:
            raise ModelFolderError(f"{self._path} was changed since it was opened; it must stay as it is")

    def _read(self, target: Any, offset: int, pace: Pace | None = None) -> Any:
        """Fill `target`; a read gives 2 GiB at most, and with a `pace` a chunk."""
        view, done = memoryview(target), 0
        most = len(view) if pace is None else CHUNK_BYTES
        while done < len(view):
            try:
                count = os.preadv(self._descriptor, [view[done : done + most]], offset + done)
            except OSError as error:
                raise ModelFolderError(f"{self._path} cannot be read: {error}") from None
            if not count:
                raise self._damaged(f"it ends at byte {offset + done}")
            done += count
            if pace is not None:
                pace.took(count)
        return target

    def _current_state(self) -> tuple[int, int]:
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns

    def _damaged(self, reason: str) -> ModelFolderError:
        return ModelFolderError(f"{self._path} is damaged or not a safetensors file: {reason}")
