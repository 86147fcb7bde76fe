"""Helpers for tests of a whole `nobiru serve`, its own process, on a loopback port."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx


class Server:
    """A started server. `log` collects what it prints; `url` is known once it listens."""

    def __init__(self, model: Path, *arguments: str, faults: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nobiru", "serve", str(model), "--port", "0", "--num-threads", "1", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "NOBIRU_FAULT_INJECTION": faults, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.log: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.url = ""

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)
            self._lines.put(line)
        self._lines.put(None)

    def wait_listening(self, timeout_s: float = 60) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not self.url:
            line = self._lines.get(timeout=max(0.01, deadline_s - time.monotonic()))
            assert line is not None, f"the server ended: {self.log}"
            if found := re.search(r"listens on (http://\S+)", line):
                self.url = found[1].rstrip(",")

    def wait_ready(self, timeout_s: float = 90) -> None:
        deadline_s = time.monotonic() + timeout_s
        while httpx.get(f"{self.url}/ready").status_code != 200:
            assert time.monotonic() < deadline_s, f"not ready: {self.log}"
            time.sleep(0.05)

    @property
    def rank_pid(self) -> int:
        """The living rank's process id; waits for a restart in progress."""
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            ranks = httpx.get(f"{self.url}/elastic/status").json()["ranks"]
            if ranks and ranks[0]["state"] == "serving":
                return int(ranks[0]["pid"])
            time.sleep(0.05)
        raise AssertionError(f"no serving rank: {self.log}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_exit(self, timeout_s: float = 40) -> int:
        return self.process.wait(timeout_s)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@contextmanager
def serving(model: Path, *arguments: str, faults: str = "", ready: bool = True) -> Iterator[Server]:
    """A server that listens, and by default is ready; killed at the end if the test left it running."""
    server = Server(model, *arguments, faults=faults)
    try:
        server.wait_listening()
        if ready:
            server.wait_ready()
        yield server
    finally:
        server.close()
