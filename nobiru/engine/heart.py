"""Signs of life of ranks on other machines, over a TCP connection for each: what the flight recorder is to local ones.

Owns both ends and what goes over the connection. A rank beats four times a second and tells of each step before it
begins. What it has told survives it: `step_begins` returns when the kernel has it, which sends it also when the process
dies at once (a message queue's own thread would often have been too late). The server answers each beat of a rank that
it counts on. A rank that gets no answer for `LEASE_S`, or whose connection closes, has no server any more, or is not
wanted by it, and ends.

To the server: the rank's id and a line feed; then int64 numbers, little endian: `BEAT`, or how many sequences a step
has (0: the step has ended) and their ids. To the rank: one byte for each beat.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from nobiru.engine.recorder import RemoteRecorder

logger = logging.getLogger(__name__)

BEAT = -1
INTERVAL_S = 0.25
LEASE_S = 10.0
# Before the first answer: the server may still be starting.
FIRST_LEASE_S = 60.0
LEASE_EXIT_CODE = 3
CLOSE_TIMEOUT_S = 1.0
GRACE_S = 0.25
_WORD_BYTES = 8
_ANSWER = b"\x01"


class Hearts:
    """The server's ends. Listens at `host` from the beginning, and hears from `start` to `close`."""

    def __init__(self, host: str) -> None:
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._ranks: dict[str, _Expected] = {}
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None

    def expect(self, rank_id: str, on_lost: Callable[[], None]) -> RemoteRecorder:
        """The recorder of a rank that will come; once it is closed, the rank is not wanted any more.

        `on_lost` hears that the rank's connection was closed at the other end, which is the rank's end. It comes
        `GRACE_S` late, so that whoever knows more of it can say so first.
        """
        self._ranks = {known: rank for known, rank in self._ranks.items() if not rank.recorder.is_closed}
        self._ranks[rank_id] = _Expected(RemoteRecorder(), on_lost)
        return self._ranks[rank_id].recorder

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._hear, sock=self._listener)

    async def close(self) -> None:
        if self._server is None:
            self._listener.close()
            return
        self._server.close()
        for writer in self._connections.values():
            writer.transport.abort()
        if self._connections:
            await asyncio.wait(self._connections, timeout=CLOSE_TIMEOUT_S)

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        rank = None
        try:
            rank_id = (await reader.readuntil(b"\n")).decode().strip()
            if (rank := self._ranks.get(rank_id)) is not None:
                await _record(rank.recorder, reader, writer)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, ValueError) as error:
            logger.debug("the connection of rank %s ended: %s", "?" if rank is None else rank_id, error)
        finally:
            del self._connections[task]
            writer.close()
        if rank is not None and self._server is not None and self._server.is_serving():
            asyncio.get_running_loop().call_later(GRACE_S, rank.lost)


@dataclass(slots=True)
class _Expected:
    recorder: RemoteRecorder
    on_lost: Callable[[], None]

    def lost(self) -> None:
        if not self.recorder.is_closed:
            self.on_lost()


async def _record(recorder: RemoteRecorder, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the rank is not wanted; an error when its connection ends before."""
    while not recorder.is_closed:
        count = int.from_bytes(await reader.readexactly(_WORD_BYTES), "little", signed=True)
        if count == BEAT:
            recorder.beat()
            writer.write(_ANSWER)
        else:
            ids = await reader.readexactly(_WORD_BYTES * count)
            recorder.step_begins(np.frombuffer(ids, dtype="<i8").tolist())


class Heart:
    """The rank's end; a `StepRecorder`. `start` begins to beat, in a thread that ends the process when it has to."""

    def __init__(self, address: str, rank_id: str, *, lease_s: float = LEASE_S) -> None:
        host, _, port = address.rpartition(":")
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._connection = socket.create_connection((host, int(port)), timeout=lease_s)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.sendall(f"{rank_id}\n".encode())

    def start(self) -> None:
        threading.Thread(target=self._beat, name="heart", daemon=True).start()

    def step_begins(self, seq_ids: Sequence[int]) -> None:
        self._send([len(seq_ids), *seq_ids])

    def step_ends(self) -> None:
        self.step_begins([])

    def _send(self, words: Sequence[int]) -> None:
        data = np.array(words, dtype="<i8").tobytes()
        with self._lock:
            try:
                self._connection.sendall(data)
            except OSError as error:  # or a `TimeoutError`: nobody has read for the length of the lease
                _end(f"cannot reach the server: {error}")

    def _beat(self) -> None:
        # The lease is counted in beats: while this process stands still, nobody can answer it.
        num_unanswered, limit_s = 0, max(FIRST_LEASE_S, self._lease_s)
        while num_unanswered * INTERVAL_S < limit_s:
            self._send([BEAT])
            num_unanswered += 1
            time.sleep(INTERVAL_S)
            if self._is_answered():
                num_unanswered, limit_s = 0, self._lease_s
        _end(f"has had no answer of the server for {limit_s:.0f} s")

    def _is_answered(self) -> bool:
        if not select.select([self._connection], [], [], 0)[0]:
            return False
        answer = b""
        with contextlib.suppress(OSError):  # as good as closed
            answer = self._connection.recv(4096)
        if not answer:
            _end("is not connected to the server any more")
        return True


def _end(why: str) -> None:
    logger.error("the rank %s: it ends", why)
    os._exit(LEASE_EXIT_CODE)
