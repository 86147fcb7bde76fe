"""Real processes that form groups, for tests of what ranks do together.

A test hands `run_ranks` a function of its module; each process calls it with a `Member` and gets a store of the test.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch._C._distributed_c10d import Store, TCPStore
from warm_processes import forkserver

from nobiru.parallel.groups import Group, connect_store, form_group

DEADLINE_S = 60.0


@dataclass
class Member:
    """What a process knows of itself."""

    rank: int
    size: int
    port: int
    connection: Connection
    _store: Store | None = field(default=None, init=False)

    def group(self, name: str = "test", *, timeout_s: float = 20.0, **options: Any) -> Group:
        return form_group(
            self.store(), attempt_id="a1", name=name, rank=self.rank, size=self.size, timeout_s=timeout_s, **options
        )

    def store(self) -> Store:
        if self._store is None:
            self._store = connect_store("127.0.0.1", self.port, timeout_s=20.0)
        return self._store

    def say(self, what: object) -> None:
        """To the test, which `hear`s it."""
        self.connection.send((True, what))

    def wait_for_the_test(self) -> None:
        assert self.connection.poll(DEADLINE_S), "the test said nothing"
        self.connection.recv()


class Ranks:
    """The processes, as the test sees them."""

    def __init__(self, function: Callable[..., object], size: int, *arguments: object) -> None:
        context = forkserver()
        self._server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
        self.processes = []
        self._connections = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            member = Member(rank, size, self._server.port, theirs)
            process = context.Process(target=_run, args=(function, member, *arguments), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._connections.append(ours)

    @property
    def store(self) -> Store:
        return self._server

    def pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert pid is not None
        return pid

    def hear(self, rank: int) -> Any:
        """The next thing the rank says, or what its function returned; an error there is one here."""
        connection = self._connections[rank]
        assert wait([connection, self.processes[rank].sentinel], DEADLINE_S), f"rank {rank} said nothing"
        assert connection.poll(0.2), f"rank {rank} died"
        is_well, what = connection.recv()
        assert is_well, f"rank {rank} failed:\n{what}"
        return what

    def tell(self, rank: int) -> None:
        self._connections[rank].send(None)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(DEADLINE_S)


def _run(function: Callable[..., object], member: Member, *arguments: object) -> None:
    torch.set_num_threads(1)
    try:
        member.connection.send((True, function(member, *arguments)))
    except BaseException:
        member.connection.send((False, traceback.format_exc()))
    member.connection.poll(DEADLINE_S)  # stay, so that nobody's last exchange meets a closed connection
    os._exit(0)


@contextmanager
def ranks(function: Callable[..., object], size: int, *arguments: object) -> Iterator[Ranks]:
    """Processes that call `function(member, *arguments)`; they end with the block."""
    running = Ranks(function, size, *arguments)
    try:
        yield running
    finally:
        running.end()


def run_ranks(function: Callable[..., Any], size: int, *arguments: object) -> list[Any]:
    """What the function returns in each of the processes."""
    with ranks(function, size, *arguments) as running:
        return [running.hear(rank) for rank in range(size)]


def wait_until(happened: Callable[[], bool], *, within_s: float = 10.0) -> None:
    end = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
