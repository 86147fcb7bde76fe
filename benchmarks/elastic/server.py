"""A `nobiru serve` of one's own, and the calls that change its ranks.

Owns the process. Seconds are of the wall clock (`time.time()`), as in the server's documents of operations.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

ENDED = ("done", "rolled_back", "failed")
POLL_S = 0.02
CALL_TIMEOUT_S = 10.0


class ServerError(Exception):
    """The server did not do what it must; the message says what."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ElasticServer:
    """`start`, then `size` ranks at `url`; `stop` ends it. Used as an asynchronous context it does both."""

    def __init__(self, model: str, *, size: int, log: Path, arguments: Sequence[str] = ()) -> None:
        self.size = size
        self._model = model
        self._log = log
        self._arguments = arguments
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._session: aiohttp.ClientSession | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def __aenter__(self) -> ElasticServer:
        timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True))
        try:
            self.start()
            await self.wait_whole(self.size)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        assert self._session is not None
        await self._session.close()

    def start(self, size: int | None = None) -> None:
        command = [
            sys.executable,
            "-m",
            "nobiru",
            "serve",
            self._model,
            "--port",
            str(self._port),
            "--dtype",
            "float32",
        ]
        command += ["--data-parallel-size", str(size or self.size), "--enable-expert-parallel", *self._arguments]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
            )

    async def stop(self, timeout_s: float = 60.0) -> int:
        """Ask it to end; its exit code. `ServerError` when it does not."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            return await asyncio.to_thread(self._process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            raise ServerError(f"the server has not ended {timeout_s:g} s after SIGTERM") from None

    # ---- calls -------------------------------------------------------------------------------------------------------

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        assert self._session is not None
        async with self._session.request(method, self.url + path, json=body) as answer:
            content: dict[str, Any] = await answer.json()
            return answer.status, content

    async def status(self) -> dict[str, Any]:
        return (await self.call("GET", "/elastic/status"))[1]

    async def members(self) -> dict[str, int]:
        """Process ids of the serving ranks by their rank id."""
        ranks = (await self.status())["ranks"]
        return {rank["rank_id"]: rank["pid"] for rank in ranks if rank["state"] in ("serving", "leaving")}

    async def request(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Begin an operation; its document."""
        code, document = await self.call("POST", "/elastic/operations", body)
        if code != 202:
            raise ServerError(f"{dict(body)} was answered {code}: {document}")
        return document

    async def document(self, operation_id: str) -> dict[str, Any]:
        return (await self.call("GET", f"/elastic/operations/{operation_id}"))[1]

    async def operations(self) -> list[dict[str, Any]]:
        operations: list[dict[str, Any]] = (await self.call("GET", "/elastic/operations"))[1]["operations"]
        return operations

    async def ended(self, operation_id: str, timeout_s: float = 120.0) -> dict[str, Any]:
        """The operation's document, once it has ended."""
        deadline_s = time.monotonic() + timeout_s
        while (document := await self.document(operation_id))["phase"] not in ENDED:
            if time.monotonic() > deadline_s:
                raise ServerError(f"{operation_id} is {document['phase']} after {timeout_s:g} s")
            await asyncio.sleep(POLL_S)
        return document

    async def wait_whole(self, size: int | None = None, timeout_s: float = 120.0) -> None:
        """Until nothing changes, and as many ranks serve as are wanted: `size`, or what was asked for last."""

        def is_whole(status: Mapping[str, Any]) -> bool:
            states = [rank["state"] for rank in status["ranks"]]
            wanted = status.get("desired_size", size) if size is None else size
            return status.get("operation") is None and states == ["serving"] * wanted

        await self._until(is_whole, timeout_s)

    async def _until(self, holds: Callable[[Mapping[str, Any]], bool], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        status: Mapping[str, Any] = {}
        while True:
            if self._process is not None and self._process.poll() is not None:
                raise ServerError(f"the server ended with code {self._process.returncode}; its log is {self._log}")
            try:
                status = await self.status()
            except (aiohttp.ClientError, OSError):  # it does not listen yet
                status = {}
            if status and holds(status):
                return
            if time.monotonic() > deadline_s:
                raise ServerError(f"after {timeout_s:g} s the server is not as it should be: {_summary(status)}")
            await asyncio.sleep(POLL_S)


def _summary(status: Mapping[str, Any]) -> str:
    ranks = ", ".join(f"{rank['rank_id']} {rank['state']}" for rank in status.get("ranks", ()))
    return f"ranks {ranks or 'none'}; wanted {status.get('desired_size')}; operation {status.get('operation')}"
