"""The fork server for real: what its processes get, how their ends are told, and what is left when anybody dies."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from ranks import children, is_alive

from nobiru.elastic.launcher.forkserver import ForkedProcess, ForkServer, can_fork

pytestmark = pytest.mark.skipif(not can_fork(), reason="this system has no fork server")
ENTRY = "forked_entries:answer"


@pytest.fixture
def server() -> Iterator[ForkServer]:
    made = make_server()
    try:
        yield made
    finally:
        made.close()


def make_server(**environment: str) -> ForkServer:
    return ForkServer(["forked_entries"], environment={**os.environ, **environment})


class Launched:
    """A process of `forked_entries`; `facts` waits for what it says of itself."""

    def __init__(self, server: ForkServer, **spec: object) -> None:
        self._reads, writes = os.pipe()
        self.number = writes
        spec = {"answers": writes, **spec}
        self.process: ForkedProcess = server.launch(ENTRY, json.dumps(spec).encode(), pass_fds=[writes])
        os.close(writes)

    def facts(self) -> Any:
        ready, _, _ = select.select([self._reads], [], [], 30)
        assert ready, "it says nothing"
        with open(self._reads, "rb", closefd=False) as pipe:
            facts = json.loads(pipe.readline())
        end_s = time.monotonic() + 10
        while self.process.pid is None and time.monotonic() < end_s:
            time.sleep(0.005)  # the fork server's news of it comes by another way
        return facts

    def end(self) -> str:
        """How it ended."""
        return asyncio.run(asyncio.wait_for(self.process.wait_dead(), 30))

    def close(self) -> None:
        self.process.kill()
        self.process.close()
        os.close(self._reads)


@contextmanager
def launched(server: ForkServer, **spec: object) -> Iterator[Launched]:
    one = Launched(server, **spec)
    try:
        yield one
    finally:
        one.close()


def test_processes_get_what_they_are_given_and_nothing_else() -> None:
    server = make_server(NOBIRU_TEST="here")
    try:
        with launched(server, filler="x" * 300_000) as first, launched(server, then="wait") as second:
            facts, others = first.facts(), second.facts()
            assert first.end() == "exited with code 0"
            assert facts["pid"] == first.process.pid != others["pid"] == second.process.pid
            assert facts["parent"] == others["parent"] == server.pid == facts["imported_by"] == others["imported_by"]
            assert facts["size"] == 300_000
            assert facts["variable"] == "here"
            assert facts["threads"] == facts["python_threads"] == 1
            assert facts["descriptors"] == [0, 1, 2, first.number]
            assert others["descriptors"] == [0, 1, 2, second.number]
    finally:
        server.close()


def test_how_they_end(server: ForkServer) -> None:
    with launched(server, then="wait") as told, launched(server, then="raise") as raises:
        told.facts()
        assert told.process.is_alive
        told.process.close()
        assert told.end() == "exited with code 4"
        assert not told.process.is_alive and told.process.join(1)
        assert raises.end() == "exited with code 1"
    with launched(server, then="stand still") as stubborn, launched(server, then="wait") as stopped:
        stubborn.facts()
        stubborn.process.close()
        assert not stubborn.process.join(0.2)
        assert stubborn.end().startswith("was killed by SIGKILL")
        os.kill(stopped.facts()["pid"], signal.SIGSTOP)
        stopped.process.kill()
        assert stopped.end().startswith("was killed by SIGKILL")
        assert not is_alive(stopped.process.pid or 0)


def test_one_may_be_ended_before_it_begins(server: ForkServer) -> None:
    with launched(server, then="stand still") as killed, launched(server, then="wait") as closed:
        killed.process.kill()
        closed.process.close()
        assert killed.end().startswith("was killed by SIGKILL")
        assert closed.end() == "exited with code 4"


def test_processes_outlive_their_fork_server(server: ForkServer) -> None:
    with launched(server, then="wait") as one:
        pid, before = one.facts()["pid"], server.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        time.sleep(0.2)
        assert one.process.is_alive and is_alive(pid)
        with launched(server, then="wait") as another:
            assert another.facts()["parent"] == server.pid != before
            assert another.process.is_alive
        one.process.close()
        assert "nobody knows how" in one.end()
        assert not is_alive(pid)


def test_one_that_cannot_import_says_so() -> None:
    server = make_server(NOBIRU_TEST="no import")
    try:
        with launched(server) as one:
            assert one.end() == "could not begin: the fork server has ended"
    finally:
        server.close()


def test_nothing_outlives_a_killed_parent() -> None:
    code = (
        "import os, time\n"
        "from nobiru.elastic.launcher.forkserver import ForkServer\n"
        "server = ForkServer(['forked_entries'], environment=dict(os.environ))\n"
        'process = server.launch(\'forked_entries:answer\', b\'{"answers": 1, "then": "wait"}\', pass_fds=[1])\n'
        "time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        facts = json.loads(parent.stdout.readline())
        assert children(parent.pid) == [facts["parent"]]
        parent.kill()
        end_s = time.monotonic() + 10
        while is_alive(facts["pid"]) or is_alive(facts["parent"]):
            assert time.monotonic() < end_s
            time.sleep(0.02)
