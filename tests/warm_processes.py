"""Processes of ranks that begin with torch imported, for tests that start many of them.

A fresh interpreter needs more than a second of a core to import torch, which would be most of what tests of several
ranks take. Here such processes are forks of one that has imported it. All else is as the launcher does it: the entry
point by its name, an environment, descriptors, and a standard input whose end is the end of the process.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from multiprocessing.popen_forkserver import Popen
from multiprocessing.reduction import DupFd
from types import SimpleNamespace
from typing import Any

import pytest

from nobiru.elastic.launcher import local
from nobiru.engine import backends

ENTRIES = ("rank", "store", "worker")
ABOVE_ALL = 1000  # no descriptor of a young process is as high


def forkserver() -> ForkServerContext:
    """Of which this process has one, with what processes of tests have in common."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "nobiru.engine.build", *(f"nobiru.engine.{each}" for each in ENTRIES)])
    return context


class WarmProcess:
    """What the launcher uses of `subprocess.Popen`, for its commands `[python, "-P", "-c", code]`."""

    def __init__(self, command: Sequence[str], *, stdin: int, env: Mapping[str, str], pass_fds: Sequence[int]) -> None:
        assert stdin == subprocess.PIPE
        reads, writes = os.pipe()
        descriptors = {0: _Sent(reads), 2: _Sent(2), **{number: _Sent(number) for number in pass_fds}}
        process = forkserver().Process(target=_become, args=(command[-1], dict(env), descriptors))
        # Not `process.start()`, which looks after all other processes too, from whatever thread it is called in.
        self._popen = Popen(process)
        self.pid = self._popen.pid
        os.close(reads)
        self.stdin = open(writes, "wb")  # noqa: SIM115

    def wait(self) -> int:
        code: int = self._popen.wait()
        self._popen.close()
        return code

    def kill(self) -> None:
        self._popen.kill()


class _Sent:
    """A descriptor of this process that is an open one of the new process there."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self._number),)


def _received(sent: Any) -> int:
    return int(sent.detach())


def _become(code: str, environment: dict[str, str], descriptors: dict[int, int]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    copies = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, ABOVE_ALL) for number, fd in descriptors.items()}
    for number, copy in copies.items():
        os.dup2(copy, number)
    for fd in {*copies.values(), *descriptors.values()} - {*descriptors}:
        os.close(fd)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    exec(code, {"__name__": "__main__"})


@contextmanager
def warm_starts() -> Iterator[None]:
    """What this process starts with the launcher starts in this way: ranks, their workers and the rendezvous store."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "can_fork", lambda: False)
        patch.setattr(local, "subprocess", SimpleNamespace(Popen=WarmProcess, PIPE=subprocess.PIPE))
        yield
