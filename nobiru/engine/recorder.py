"""The flight recorder: a few pages of memory that a rank writes and its launcher can still read when the rank is dead.

Owns two facts no message could carry in time: which sequences were being executed when the process died, and when the
process last gave a sign of life. One writer (the rank), one reader (whoever launched it); the memory is an anonymous
file whose descriptor the rank inherits, so nothing is left behind. A rank on another machine has to tell
them over a connection after all (`nobiru.engine.heart`), and `RemoteRecorder` is what has arrived.

Layout (little endian): heartbeat as float64 seconds of the machine's monotonic clock; a step's number of sequences as
int64, 0 between steps; then their ids as int64. A step's ids are written before its number.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

_HEADER_BYTES = 16


class StepRecorder(Protocol):
    """What a rank writes."""

    def step_begins(self, seq_ids: Sequence[int]) -> None: ...

    def step_ends(self) -> None: ...


class Recorder(Protocol):
    """What its launcher reads: the sequences in execution, and `time.monotonic()` at the last sign of life, or 0."""

    @property
    def seq_ids(self) -> list[int]: ...

    @property
    def heartbeat_s(self) -> float: ...

    def close(self) -> None: ...


class FlightRecorder:
    """`create` in the parent, `attach` in the rank, `close` in both."""

    def __init__(self, fd: int, capacity: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, _HEADER_BYTES + 8 * capacity)
        self._heartbeat_s = np.frombuffer(self._memory, dtype=np.float64, count=1)
        self._count = np.frombuffer(self._memory, dtype=np.int64, count=1, offset=8)
        self._ids = np.frombuffer(self._memory, dtype=np.int64, count=capacity, offset=_HEADER_BYTES)
        self.capacity = capacity

    @classmethod
    def create(cls, capacity: int) -> FlightRecorder:
        """Room for the ids of `capacity` sequences; `OSError` when the system has none."""
        fd = _anonymous_file()
        try:
            os.ftruncate(fd, _HEADER_BYTES + 8 * capacity)
            return cls(fd, capacity)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int) -> FlightRecorder:
        """The recorder behind an inherited descriptor."""
        return cls(fd, (os.fstat(fd).st_size - _HEADER_BYTES) // 8)

    def step_begins(self, seq_ids: Sequence[int]) -> None:
        self._ids[: len(seq_ids)] = seq_ids
        self._count[0] = len(seq_ids)

    def step_ends(self) -> None:
        self._count[0] = 0

    def beat(self) -> None:
        self._heartbeat_s[0] = time.monotonic()

    @property
    def seq_ids(self) -> list[int]:
        """The sequences in execution; empty between steps."""
        ids: list[int] = self._ids[: int(self._count[0])].tolist()
        return ids

    @property
    def heartbeat_s(self) -> float:
        """`time.monotonic()` at the last beat; 0 before the first."""
        return float(self._heartbeat_s[0])

    def close(self) -> None:
        del self._heartbeat_s, self._count, self._ids  # views keep the memory from closing
        self._memory.close()
        os.close(self.fd)


class RemoteRecorder:
    """Held by the launcher: what a rank on another machine has told, by this machine's clock."""

    def __init__(self) -> None:
        self.seq_ids: list[int] = []
        self.heartbeat_s = 0.0
        self.is_closed = False

    def step_begins(self, seq_ids: Sequence[int]) -> None:
        self.seq_ids = list(seq_ids)

    def beat(self) -> None:
        self.heartbeat_s = time.monotonic()

    def close(self) -> None:
        """The rank is not wanted any more."""
        self.is_closed = True


def _anonymous_file() -> int:
    """A descriptor of a file without a name: in memory on Linux, elsewhere on disk and already unlinked."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("nobiru-flight-recorder")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
