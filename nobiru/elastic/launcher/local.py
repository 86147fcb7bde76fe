"""Starts rank processes on this machine and notices their deaths.

Owns processes. Knows nothing of engines: it runs an entry point with a description on standard input, whose write end
stays open for as long as the launcher wants the process to live.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from nobiru.elastic.launcher.ended import StartedProcess


class LocalProcess(StartedProcess):
    """One started process. `pid` is its process id; `kill` and `close` may be called at any time, more than once."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        super().__init__()
        self._process = process
        threading.Thread(target=self._wait, name=f"wait-{process.pid}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        if self.is_alive:
            self._process.kill()

    def close(self) -> None:
        """Close its standard input, at which it ends by itself."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it ended first, which is what closing asks for
                self._process.stdin.close()

    def _wait(self) -> None:
        self._ended.tell(describe_exit(self._process.wait()))


class LocalLauncher:
    """Launches entry points ("package.module:function"), each in a fresh interpreter."""

    def __init__(self, *, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)

    def launch(self, entry: str, spec: bytes, *, pass_fds: Sequence[int] = ()) -> LocalProcess:
        """Start a process with `spec`, one line, as the beginning of its standard input, and with these descriptors.

        Raises `OSError` when the system cannot start one.
        """
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", bootstrap(entry)],
            stdin=subprocess.PIPE,
            env=self._environment,
            pass_fds=tuple(pass_fds),
        )
        assert process.stdin is not None
        handle = LocalProcess(process)
        with contextlib.suppress(BrokenPipeError):  # it died at once; whoever waits for it learns how
            process.stdin.write(spec + b"\n")
            process.stdin.flush()
        return handle

    def close(self) -> None:
        """Nothing is held."""


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (by hand, or by the kernel for want of memory)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def bootstrap(entry: str, arguments: str = "[]") -> str:
    """Python code that finds modules where this process does, whatever the working directory, and calls the entry.

    `arguments` are a list in JSON.
    """
    module, _, function = entry.partition(":")
    paths = [os.path.abspath(path) if path else os.getcwd() for path in sys.path]
    call = f"{function}(*json.loads({arguments!r}))"
    return f"import json, sys; sys.path[:] = {json.dumps(paths)}; from {module} import {function}; {call}"
