"""The fork server's process: imports, then a fork for each request, and news of how each ended.

A request is the entry point and the numbers of descriptors, with a socket for news, a standard input and these
descriptors beside it. News are the process id, with a handle of the process beside it, and later its exit code. The
server is gone when its end of the control socket is, and then the fork server ends; its forks see that for themselves.

It has one thread: what others held while a process is forked would be held for ever in the child.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence

from nobiru.machine import name_process

_MAX_DESCRIPTORS = 64


def main(control_number: int, modules: Sequence[str]) -> None:
    """Until the server has closed its end of this socket."""
    # They reach the whole process group; the server decides when its processes end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    name_process("nobiru-fork")
    gc.disable()  # imports make many objects and no garbage
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # so that collections in forks leave these pages shared
    gc.enable()
    control = socket.socket(fileno=control_number)
    children: dict[int, tuple[int, socket.socket]] = {}  # by handle: process id, and where to send news
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for number, _ in poll.poll():
            if number == control_number:
                _begin(control, children, poll)
            else:
                _reap(number, *children.pop(number))
                poll.unregister(number)
                os.close(number)


def _begin(control: socket.socket, children: dict[int, tuple[int, socket.socket]], poll: select.poll) -> None:
    message, descriptors, *_ = socket.recv_fds(control, 1 << 16, _MAX_DESCRIPTORS)
    if not message:
        os._exit(0)
    request = json.loads(message)
    pid = os.fork()
    if pid == 0:
        _become(request["entry"], descriptors[1:], [0, *request["numbers"]])
    news = socket.socket(fileno=descriptors[0])
    for number in descriptors[1:]:
        os.close(number)
    handle = os.pidfd_open(pid)
    children[handle] = pid, news
    poll.register(handle, select.POLLIN)
    _tell(news, pid, [handle])


def _reap(handle: int, pid: int, news: socket.socket) -> None:
    _, status = os.waitpid(pid, 0)
    _tell(news, os.waitstatus_to_exitcode(status), [])
    news.close()


def _tell(news: socket.socket, number: int, descriptors: list[int]) -> None:
    with contextlib.suppress(OSError):  # nobody wants to know any more
        socket.send_fds(news, [b"%d" % number], descriptors)


def _become(entry: str, descriptors: list[int], numbers: list[int]) -> None:
    """What the forked process does: it gets these descriptors under these numbers and no others, and never returns."""
    code = 1
    try:
        above = max(numbers) + 1
        copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, max(above, 3)) for descriptor in descriptors]
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number not in copies:
                with contextlib.suppress(OSError):  # the one with which they were listed
                    os.close(number)
        for copy, number in zip(copies, numbers, strict=True):
            os.dup2(copy, number)
            os.close(copy)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        module, _, function = entry.partition(":")
        getattr(importlib.import_module(module), function)()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
