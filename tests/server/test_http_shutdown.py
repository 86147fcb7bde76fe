"""How the server ends: draining, a second signal, an engine that gives up, a port that is taken."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from server.http_fakes import ServerProcess, running_server


def post(server: ServerProcess, text: str) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/embeddings", json={"input": text}, timeout=60)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain until {what}"
        time.sleep(0.01)


def num_queued(server: ServerProcess) -> float:
    for line in httpx.get(f"{server.url}/metrics").text.splitlines():
        if line.startswith("nobiru_queued_requests "):
            return float(line.split()[1])
    raise AssertionError("no such metric")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_accepted_request_is_answered_and_new_ones_are_refused(number: int) -> None:
    with running_server() as server, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(post, server, "sleep:1.5")
        wait_until(lambda: num_queued(server) == 1, "the request is in the engine")
        server.signal(number)
        wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 503, "ready says 503")
        assert "shutting down" in httpx.get(f"{server.url}/ready").json()["error"]["message"]
        assert httpx.get(f"{server.url}/health").status_code == 200
        refused = post(server, "new work")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "unavailable"
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["connection"] == "close"
        assert accepted.result().status_code == 200
        assert accepted.result().headers["connection"] == "close"
        assert server.wait() == 0
        assert "engine stopped" in server.log()
        assert "Traceback" not in server.log()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", server.port), timeout=5)


def test_it_serves_and_drains_without_the_fast_loop_and_parser() -> None:
    with (
        running_server(without=["uvloop", "httptools"], max_body_bytes=100_000) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        assert httpx.post(f"{server.url}/v1/embeddings", content=b"x" * 200_000).status_code == 413
        assert post(server, "text").status_code == 200
        accepted = pool.submit(post, server, "sleep:1")
        wait_until(lambda: num_queued(server) == 1, "the request is in the engine")
        server.signal()
        wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 503, "ready says 503")
        assert accepted.result().status_code == 200
        assert server.wait() == 0


def test_an_idle_server_ends_at_once_whatever_connections_are_open() -> None:
    with running_server() as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/health").status_code == 200  # kept alive
        with (
            socket.create_connection(("127.0.0.1", server.port)) as silent,
            socket.create_connection(("127.0.0.1", server.port)) as dripping,
        ):
            dripping.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            started_s = time.monotonic()
            server.signal()
            assert server.wait() == 0
            assert time.monotonic() - started_s < 5
            silent.settimeout(5)
            assert silent.recv(10) == b""
            dripping.settimeout(5)
            assert dripping.recv(100).startswith(b"HTTP/1.1 503")


def test_requests_that_take_too_long_are_told_so() -> None:
    with running_server(shutdown_timeout_s=0.5) as server, ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(post, server, "sleep:600")
        wait_until(lambda: num_queued(server) == 1, "the request is in the engine")
        server.signal()
        assert server.wait() == 0
        assert stuck.result().status_code == 503
        assert "shut down before this request was done" in stuck.result().json()["error"]["message"]
        assert "1 requests are not done after 0.5 s" in server.log()


def test_a_second_signal_does_not_wait() -> None:
    with running_server(shutdown_timeout_s=600) as server, ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(post, server, "sleep:600")
        wait_until(lambda: num_queued(server) == 1, "the request is in the engine")
        server.signal()
        server.wait_for_log("finishing 1 accepted")
        started_s = time.monotonic()
        server.signal()
        assert server.wait() == 128 + signal.SIGTERM
        assert time.monotonic() - started_s < 5
        assert "engine stopped" in server.log()
        assert stuck.exception() is not None or stuck.result().status_code == 503


def test_a_long_answer_is_sent_to_its_end() -> None:
    """The answer exceeds what sockets buffer, and its client reads slowly, while the server wants to end."""
    with running_server() as server:
        body = b'{"input": [' + b",".join([b'"text"'] * 5000) + b"]}"
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
            client.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            received = client.recv(1000)
            server.signal()
            server.wait_for_log("finishing 1 accepted")
            while piece := client.recv(1 << 20):
                received += piece
                time.sleep(0.001)
        assert received.endswith(b"0\r\n\r\n")
        assert received.count(b'"index"') == 5000
        assert server.wait() == 0


def test_an_engine_that_gives_up_ends_the_server() -> None:
    with running_server() as server, ThreadPoolExecutor(1) as pool:
        last = pool.submit(post, server, "break")
        assert server.wait() == 1
        assert last.exception() is not None or last.result().status_code == 503
        assert "the rank died 5 times: out of memory" in server.log()


def ends_at_start(**options: Any) -> tuple[int, str]:
    server = ServerProcess(**options)
    try:
        return server.wait(), server.log()
    except subprocess.TimeoutExpired:
        raise AssertionError(f"it still runs:\n{server.log()}") from None
    finally:
        server.end()


def test_a_taken_port_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, log = ends_at_start(port=port)
    assert code == 1
    assert len(log.strip().splitlines()) == 1
    assert f"port {port}: address already in use" in log


def test_an_engine_that_cannot_be_started_is_named() -> None:
    code, log = ends_at_start(engine={"start_error": "the model folder is empty"})
    assert code == 1
    assert "the model folder is empty" in log
    assert "Traceback" not in log


def test_an_unknown_log_level_is_named() -> None:
    code, log = ends_at_start(log_level="loud")
    assert code == 1
    assert "log_level is 'loud'" in log
