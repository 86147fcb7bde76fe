"""Clients that leave, connections that drip, ports that are taken."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field
from typing import Any

import pytest

from nobiru.errors import ConfigError
from nobiru.serving.connections import IdleConnections, open_socket
from nobiru.serving.disconnect import ClientDisconnectedError, DisconnectWatch


class Client:
    """An ASGI `receive` that says nothing until the client leaves."""

    def __init__(self) -> None:
        self._left = asyncio.Event()
        self.num_calls = 0

    def leave(self) -> None:
        self._left.set()

    async def receive(self) -> dict[str, Any]:
        self.num_calls += 1
        await self._left.wait()
        return {"type": "http.disconnect"}


def test_leaving_cancels_what_the_block_waits_for() -> None:
    async def scenario() -> None:
        client, was_cancelled = Client(), False

        async def work() -> None:
            nonlocal was_cancelled
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                was_cancelled = True
                raise

        asyncio.get_running_loop().call_later(0.01, client.leave)
        with pytest.raises(ClientDisconnectedError), DisconnectWatch(client.receive):
            await work()
        assert was_cancelled
        await asyncio.sleep(0)  # not cancelled any more: the task goes on

    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_a_client_that_stays_is_watched_no_longer_than_the_block() -> None:
    async def scenario() -> int:
        client = Client()
        with DisconnectWatch(client.receive):
            await asyncio.sleep(0.01)
        client.leave()
        await asyncio.sleep(0.01)
        return client.num_calls

    assert asyncio.run(asyncio.wait_for(scenario(), 10)) == 1


def test_an_error_inside_the_block_stays_itself() -> None:
    async def scenario() -> None:
        with DisconnectWatch(Client().receive):
            await asyncio.sleep(0)
            raise KeyError("own")

    with pytest.raises(KeyError):
        asyncio.run(scenario())


def test_a_cancellation_from_elsewhere_stays_one() -> None:
    async def scenario() -> None:
        async def waiting() -> None:
            with DisconnectWatch(Client().receive):
                await asyncio.sleep(60)

        task = asyncio.create_task(waiting())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())


@dataclass(eq=False)
class Transport:
    closed: bool = False

    def close(self) -> None:
        self.closed = True


@dataclass(eq=False)
class Cycle:
    response_complete: bool


@dataclass(eq=False)
class Connection:
    cycle: Cycle | None = None
    transport: Transport = field(default_factory=Transport)


def test_only_connections_without_a_request_are_closed() -> None:
    fresh, between, busy = Connection(), Connection(Cycle(True)), Connection(Cycle(False))
    idle = IdleConnections(timeout_s=10)
    for now_s in (0.0, 5.0, 10.0):
        idle.sweep([fresh, between, busy], now_s)
        assert not any(connection.transport.closed for connection in (fresh, between, busy))
    idle.sweep([fresh, between, busy], 10.1)
    assert [connection.transport.closed for connection in (fresh, between, busy)] == [True, True, False]


def test_every_answer_starts_the_time_anew() -> None:
    connection = Connection(Cycle(True))
    idle = IdleConnections(timeout_s=10)
    for now_s in range(0, 100, 5):
        connection.cycle = Cycle(True)
        idle.sweep([connection], float(now_s))
    assert not connection.transport.closed


def test_a_taken_port_is_named() -> None:
    with open_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1 port {port}.*choose another --port"):
            open_socket("127.0.0.1", port)


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no-such-host\.invalid"):
        open_socket("no-such-host.invalid", 0)


def test_the_socket_listens_at_once() -> None:
    with open_socket("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()[:2], timeout=5):
        pass
