"""Starts processes as forks of one that has imported what they need, and notices their deaths.

A fresh interpreter takes a second or more of a core to import torch. The fork server is one that has done so and does
nothing else: its forks begin at once, and share the memory of what was imported. It is started by the first launch,
which waits for its imports as it would for its own, and again when it has died; those that it started live on.

Knows nothing of engines, like `nobiru.elastic.launcher.local`, and hands over what that does.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from nobiru.elastic.launcher.ended import StartedProcess
from nobiru.elastic.launcher.local import bootstrap, describe_exit

# From a request to its process, imports included.
BEGIN_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 5.0
_PIPE_BYTES = 1 << 20  # as much as the system gives without being asked for more


class ForkedProcess(StartedProcess):
    """One process. `pid` is None until there is one; `kill` and `close` may be called at any time, more than once."""

    def __init__(self, server: subprocess.Popen[bytes], standard_input: int, status: socket.socket) -> None:
        """Its standard input, and what the fork server sends of it: its id, then its exit code."""
        super().__init__()
        self.pid: int | None = None
        self._server = server
        self._input: int | None = standard_input
        self._lock = threading.Lock()
        self._handle: int | None = None
        self._is_killed = False
        threading.Thread(target=self._wait, args=(status,), name="wait-forked", daemon=True).start()

    def kill(self) -> None:
        """End it now, also when it is stopped, or as soon as there is one."""
        with self._lock:
            self._is_killed = True
            if self._handle is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def close(self) -> None:
        """Close its standard input, at which it ends by itself."""
        with self._lock:
            number, self._input = self._input, None
        if number is not None:
            os.close(number)

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _wait(self, status: socket.socket) -> None:
        with status:
            try:
                how = self._live(status)
            except OSError as error:
                how = f"is lost: {error}"
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)
        self._ended.tell(how)

    def _live(self, status: socket.socket) -> str:
        status.settimeout(BEGIN_TIMEOUT_S)
        try:
            pid, handles, *_ = socket.recv_fds(status, 64, 1)
        except TimeoutError:
            self._server.kill()
            return f"was not begun within {BEGIN_TIMEOUT_S:.0f} s; the fork server was killed"
        if not handles:
            return "could not begin: the fork server has ended"
        with self._lock:
            self._handle = handles[0]
            self.pid = int(pid)
            is_killed = self._is_killed
        if is_killed:
            self.kill()
        status.settimeout(None)
        code = status.recv(64)
        if code:
            return describe_exit(int(code))
        poll = select.poll()
        poll.register(handles[0], select.POLLIN)
        poll.poll()  # until the process has ended
        return "has ended, nobody knows how: the fork server ended before it"


class ForkServer:
    """Launches entry points ("package.module:function") in forks of a process that has imported `modules`."""

    def __init__(self, modules: Sequence[str], *, environment: Mapping[str, str]) -> None:
        """`environment` is that of all processes. OpenBLAS gets no threads in them, unless it says so: ranks have
        others, and a process should have one thread when it is forked."""
        self._modules = list(modules)
        self._environment = {"OPENBLAS_NUM_THREADS": "1", **environment}
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """Of the fork server, if it was started."""
        return None if self._process is None else self._process.pid

    def launch(self, entry: str, spec: bytes, *, pass_fds: Sequence[int] = ()) -> ForkedProcess:
        """Begin a process with `spec`, one line, as the beginning of its standard input, and with these descriptors.

        Raises `OSError` when the system cannot start one.
        """
        process, control = self._running()
        status, their_status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with their_status:
            reads, writes = os.pipe()
            try:
                _write_all(writes, spec + b"\n")
                request = json.dumps({"entry": entry, "numbers": list(pass_fds)}).encode()
                socket.send_fds(control, [request], [their_status.fileno(), reads, *pass_fds])
            except OSError:
                process.kill()  # the next launch starts another one
                os.close(writes)
                status.close()
                raise
            finally:
                os.close(reads)
        return ForkedProcess(process, writes, status)

    def close(self) -> None:
        """End the fork server, which may be in the middle of its imports. Those that it started live on."""
        if self._process is not None and self._control is not None:
            self._control.close()
            self._process.kill()
            self._process.wait()
        self._process = self._control = None

    def _running(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        if self._process is not None and self._control is not None and self._process.poll() is None:
            return self._process, self._control
        self.close()
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.settimeout(REQUEST_TIMEOUT_S)
        with theirs:
            arguments = json.dumps([theirs.fileno(), self._modules])
            code = bootstrap("nobiru.elastic.launcher.forkserver_process:main", arguments)
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                env=self._environment,
                pass_fds=[theirs.fileno()],
            )
        self._process, self._control = process, control
        return process, control


def can_fork() -> bool:
    """Whether this system has what a fork server needs."""
    if not hasattr(os, "pidfd_open") or not hasattr(socket, "send_fds"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # an old kernel, or a container that does not allow it
        return False
    return True


def _write_all(pipe: int, data: bytes) -> None:
    """All of it without waiting for a reader; `OSError` where the system allows no pipe of that size."""
    if len(data) > fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, max(_PIPE_BYTES, len(data)))
    while data:
        data = data[os.write(pipe, data) :]
