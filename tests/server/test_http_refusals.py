"""What the server refuses, and how: status, error shape, headers, and that nothing else suffers."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from server.http_fakes import ServerProcess, running_server

KEYS = ["first-key", "schlüssel"]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    options = {"max_body_bytes": 10_000, "body_timeout_s": 0.5, "max_queued_tokens": 50}
    with running_server(policy="fcfs", **options) as started:
        yield started


@pytest.fixture(scope="module")
def locked() -> Iterator[ServerProcess]:
    with running_server(api_keys=KEYS) as started:
        yield started


def check_error(answer: httpx.Response, status: int, *, param: str | None = None, code: str | None = None) -> str:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    body = answer.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["param"] == param
    if code is not None:
        assert body["error"]["code"] == code
    return str(body["error"]["message"])


def post(server: ServerProcess, content: bytes | None = None, **options: Any) -> httpx.Response:
    body = json.dumps({"input": "a"}).encode() if content is None else content
    return httpx.post(f"{server.url}/v1/embeddings", content=body, timeout=30, **options)


def raw(server: ServerProcess, *pieces: bytes, timeout_s: float = 20.0) -> tuple[int | None, bytes]:
    """Send bytes, read until the server closes or has sent a whole answer; the status, or None for no answer."""
    received = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=timeout_s) as client:
        try:
            for piece in pieces:
                client.sendall(piece)
        except OSError:
            pass  # it answered before everything was sent, and closed
        try:
            while piece := client.recv(65536):
                received += piece
                head, separator, body = received.partition(b"\r\n\r\n")
                length = next(
                    (int(v.split(b":")[1]) for v in head.split(b"\r\n") if v.startswith(b"content-length")), 0
                )
                if separator and len(body) >= length:
                    break
        except ConnectionResetError:
            pass
    return (int(received[9:12]) if received else None), received


def test_bodies_that_are_no_json(server: ServerProcess) -> None:
    for content in (b"", b"hello", b'{"input": "a",}', b'{"input": "\xff"}', b"[" * 9000):
        check_error(post(server, content), 400, code="invalid_json")


def test_fields(server: ServerProcess) -> None:
    def refused(**fields: Any) -> tuple[int, dict[str, Any]]:
        answer = post(server, json.dumps(fields).encode())
        return answer.status_code, answer.json()["error"]

    status, error = refused(input="a", no_such_field=1)
    assert (status, error["param"]) == (400, "no_such_field")
    status, error = refused(input="a", dimensions=True)
    assert (status, error["param"]) == (400, "dimensions")
    status, error = refused()
    assert (status, error["param"]) == (400, "input")
    status, error = refused(input="x" * 300)
    assert status == 400
    assert "256" in error["message"]


def test_priority_under_fcfs(server: ServerProcess) -> None:
    check_error(post(server, b'{"input": "a", "priority": 1}'), 400, param="priority")
    assert post(server, b'{"input": "a", "priority": 0}').status_code == 200


def test_unknown_model_route_and_method(server: ServerProcess) -> None:
    message = check_error(post(server, b'{"input": "a", "model": "x"}'), 404, param="model", code="model_not_found")
    assert "mini" in message
    check_error(httpx.get(f"{server.url}/v1/models/nope"), 404, param="model")
    check_error(httpx.post(f"{server.url}/v1/nope"), 404)
    check_error(httpx.post(f"{server.url}/v1/embeddings/"), 404)
    for method in ("GET", "PUT", "DELETE", "PATCH"):
        answer = httpx.request(method, f"{server.url}/v1/embeddings")
        check_error(answer, 405, code="method_not_allowed")
        assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_content_types(server: ServerProcess, content_type: str) -> None:
    assert content_type in check_error(post(server, headers={"content-type": content_type}), 415)


def test_compressed_bodies(server: ServerProcess) -> None:
    answer = post(server, gzip.compress(b'{"input": "a"}'), headers={"content-encoding": "gzip"})
    assert "gzip" in check_error(answer, 415)


def test_a_large_body_is_refused_before_it_is_read(server: ServerProcess) -> None:
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n"
    status, received = raw(server, head)
    assert status == 413
    assert b"1000000000" in received
    assert b"max_body_bytes = 10000" in received


def test_a_large_body_is_refused_while_it_is_read(server: ServerProcess) -> None:
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"1000\r\n" + b"x" * 4096 + b"\r\n"
    status, received = raw(server, head, *[chunk] * 3)
    assert status == 413
    assert b"max_body_bytes = 10000" in received


def test_a_connection_survives_a_refused_body(server: ServerProcess) -> None:
    with httpx.Client(base_url=server.url) as client:
        assert client.post("/v1/embeddings", content=b"x" * 100_000).status_code == 413
        assert client.post("/v1/embeddings", json={"input": "a"}).status_code == 200


def test_a_body_that_drips(server: ServerProcess) -> None:
    head = b'POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"input"'
    status, received = raw(server, head)
    assert status == 408
    assert b"0.5 s" in received


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01 hello\r\n\r\n",
        b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n",
        b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
    ],
)
def test_what_is_no_http(server: ServerProcess, data: bytes) -> None:
    status, received = raw(server, data)
    assert status == 400
    assert b'"code":"bad_http_request"' in received


def test_an_endless_head(server: ServerProcess) -> None:
    pytest.importorskip("httptools")
    status, _ = raw(server, b"GET /health HTTP/1.1\r\nX-Long: ", *[b"a" * 65536] * 40)
    assert status in (431, None)
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_more_than_fits_the_queue(server: ServerProcess) -> None:
    """The first request is larger than the whole queue and is taken; the next one meets a full queue."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        body = json.dumps({"input": ["sleep:600", *["x" * 100] * 20]}).encode()
        client.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        answer = post(server)
        for _ in range(1000):
            if answer.status_code != 200:
                break
            answer = post(server)
        message = check_error(answer, 429, code="queue_full")
        assert "max_queued_tokens = 50" in message
        assert int(answer.headers["retry-after"]) >= 1
        metrics = httpx.get(f"{server.url}/metrics").text
        assert 'nobiru_rejections_total{reason="queue_full"}' in metrics
    for _ in range(1000):  # the large one's client has left
        answer = post(server)
        if answer.status_code == 200:
            break
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "value",
    [None, "Bearer wrong", "Bearer", "Basic first-key", "Bearer first-keyx", "first-key", b"Bearer \xe9"],
)
def test_wrong_keys(locked: ServerProcess, value: Any) -> None:
    headers = {} if value is None else {"authorization": value}
    answer = post(locked, headers=headers)
    check_error(answer, 401, code="invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"


def test_an_empty_key(locked: ServerProcess) -> None:
    status, _ = raw(locked, b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \r\n\r\n")
    assert status == 401


@pytest.mark.parametrize("value", ["Bearer first-key", "bearer first-key", "Bearer schlüssel".encode()])
def test_right_keys(locked: ServerProcess, value: Any) -> None:
    assert post(locked, headers={"authorization": value}).status_code == 200


def test_which_routes_need_a_key(locked: ServerProcess) -> None:
    for path in ("/health", "/ready", "/metrics"):
        assert httpx.get(locked.url + path).status_code == 200
    for path in ("/v1/models", "/v1/models/mini", "/version", "/elastic/status", "/docs", "/openapi.json", "/nope"):
        assert httpx.get(locked.url + path).status_code == 401
    assert httpx.post(f"{locked.url}/tokenize", json={"prompt": "a"}).status_code == 401


def test_without_keys_any_key_will_do(server: ServerProcess) -> None:
    assert post(server, headers={"authorization": "Bearer whatever"}).status_code == 200
