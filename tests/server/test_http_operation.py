"""The routes for operators, request ids, logs, and what a process imports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from server.http_fakes import ServerProcess, running_server

from nobiru import __version__


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server(access_log=True, log_format="json", served_model_names=["a/b", "c"]) as started:
        yield started


def get(server: ServerProcess, path: str, **options: Any) -> httpx.Response:
    return httpx.get(server.url + path, timeout=30, **options)


def test_health_version_and_ranks(server: ServerProcess) -> None:
    assert get(server, "/health").json() == {"status": "ok"}
    assert get(server, "/version").json() == {"version": __version__}
    status = get(server, "/elastic/status").json()
    assert status["epoch"] == 0
    assert set(status["ranks"][0]) == {"rank_id", "pid", "state"}
    head = httpx.head(f"{server.url}/health")
    assert (head.status_code, head.content) == (200, b"")


def test_models_and_their_aliases(server: ServerProcess) -> None:
    cards = get(server, "/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["a/b", "c"]
    assert {card["max_model_len"] for card in cards} == {256}
    for card in cards:
        assert get(server, f"/v1/models/{card['id']}").json() == card
    assert get(server, "/v1/models/a%2Fb").json() == cards[0]


def test_documentation_names_every_route_and_field(server: ServerProcess) -> None:
    paths = get(server, "/openapi.json").json()["paths"]
    assert set(paths) == {
        *("/v1/embeddings", "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{model_id}"),
        *("/tokenize", "/detokenize"),
        *("/health", "/ready", "/version", "/metrics", "/elastic/status"),
        *("/elastic/operations", "/elastic/operations/{operation_id}", "/scale_elastic_ep", "/is_scaling_elastic_ep"),
    }
    body = paths["/v1/embeddings"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    refused = httpx.post(f"{server.url}/v1/embeddings", json={"no_such_field": 1}).json()["error"]["message"]
    assert set(body["properties"]) == set(refused.rpartition("known are ")[2].split(", "))
    assert get(server, "/docs").status_code == 200


def test_ready_probes_an_idle_rank_once_for_all_who_ask() -> None:
    with running_server() as server:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: get(server, "/ready").status_code, range(40)))
        assert set(answers) == {200}
        assert get(server, "/elastic/status").json()["probes"] == 1


def test_a_forward_pass_just_now_needs_no_probe() -> None:
    with running_server() as server:
        httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"})
        assert get(server, "/ready").status_code == 200
        assert get(server, "/elastic/status").json()["probes"] == 0


def test_while_the_model_loads_requests_wait_and_ready_says_so() -> None:
    with running_server(engine={"load_s": 1.5}) as server, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(httpx.post, f"{server.url}/v1/embeddings", json={"input": "a"}, timeout=30)
        ready = get(server, "/ready")
        assert ready.status_code == 503
        assert "loading" in ready.json()["error"]["message"]
        assert ready.headers["retry-after"]
        assert get(server, "/health").status_code == 200
        assert get(server, "/metrics").status_code == 200
        assert waiting.result().status_code == 200
        assert get(server, "/ready").status_code == 200
        start_line = server.wait_for_log("ready after.*")[0]
        assert "dtype float32, device cpu, num_threads 1" in start_line


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [
        (b"abc-123_x.y", "abc-123_x.y"),
        (b"a b<script>\xe9", "abscript"),
        (b"x" * 500, "x" * 128),
    ],
)
def test_request_ids_come_back_clean(server: ServerProcess, sent: bytes, echoed: str) -> None:
    for path in ("/health", "/nope"):
        assert get(server, path, headers={b"x-request-id": sent}).headers["x-request-id"] == echoed


def test_request_ids_are_made_up_when_there_is_none(server: ServerProcess) -> None:
    ids = {get(server, "/health").headers["x-request-id"] for _ in range(5)}
    ids.add(get(server, "/health", headers={"x-request-id": "<>"}).headers["x-request-id"])
    assert len(ids) == 6
    assert all(re.fullmatch(r"[0-9a-f]+-\d+", request_id) for request_id in ids)


def test_the_access_log_tells_what_was_answered(server: ServerProcess) -> None:
    get(server, "/nope?secret=1", headers={"x-request-id": "find-me"})
    line = json.loads(server.wait_for_log('{.*"find-me".*}')[0])
    assert (line["method"], line["path"], line["status"]) == ("GET", "/nope", 404)
    assert line["ms"] > 0
    assert line["logger"] == "nobiru.access"
    for text in server.log().splitlines():
        if text.startswith("{"):
            json.loads(text)


def test_metrics_count_what_happened() -> None:
    with running_server() as server:
        for _ in range(3):
            httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"})
        httpx.post(f"{server.url}/v1/embeddings", json={"input": "a", "nope": 1})
        httpx.get(f"{server.url}/made/up/by/a/client")
        answer = get(server, "/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=")
        for line in (
            'nobiru_requests_total{route="/v1/embeddings",status="200"} 3.0',
            'nobiru_requests_total{route="/v1/embeddings",status="400"} 1.0',
            'nobiru_requests_total{route="other",status="404"} 1.0',
            'nobiru_rejections_total{reason="unknown_field"} 1.0',
            'nobiru_request_seconds_count{route="/v1/embeddings"} 4.0',
            "nobiru_tokenize_seconds_count 3.0",
            'nobiru_tokenize_seconds_bucket{le="0.001"}',
            "nobiru_queued_requests 0.0",
            "nobiru_queued_tokens 0.0",
            "nobiru_estimated_wait_seconds 0.0",
            "nobiru_rank_restarts_total 0.0",
        ):
            assert line in answer.text
        assert "made/up" not in answer.text
        assert "nope" not in server.log()  # no access log unless asked for


def test_ipv6() -> None:
    try:
        with running_server(host="::1") as server:
            assert httpx.get(f"http://[::1]:{server.port}/health").status_code == 200
    except AssertionError as error:
        if "cannot listen" in str(error):
            pytest.skip("no IPv6 on this machine")
        raise


def test_the_process_is_light() -> None:
    code = (
        "import sys, nobiru.serving.server, nobiru.metrics;"
        "heavy = {'torch', 'transformers', 'sentence_transformers'} & set(sys.modules);"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_it_listens_within_seconds() -> None:
    started_s = time.monotonic()
    with running_server(engine={"load_s": 30}):
        assert time.monotonic() - started_s < 10
