"""A server whose number of ranks follows the load: it grows under load and shrinks when that is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import Server, serving
from small_models import SENTENCES, make

NUMBERS = "min=1,max=2,target_wait_s=0.5,up_after_s=0.5,down_after_s=2,up_cooldown_s=1,down_cooldown_s=1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("bert-mean-normalize", tmp_path_factory.mktemp("model"))


def status(server: Server) -> dict[str, Any]:
    return dict(httpx.get(f"{server.url}/elastic/status", timeout=30).json())


def num_serving(document: dict[str, Any]) -> int:
    return sum(rank["state"] == "serving" for rank in document["ranks"])


async def until(server: Server, condition: Callable[[dict[str, Any]], bool], timeout_s: float = 60) -> dict[str, Any]:
    deadline_s = time.monotonic() + timeout_s
    while not condition(document := await asyncio.to_thread(status, server)):
        assert time.monotonic() < deadline_s, f"{document}\n{''.join(server.log)}"
        await asyncio.sleep(0.1)
    return document


def test_replicas_grow_under_load_and_shrink_when_it_is_over(model: Path) -> None:
    options = ("--dtype", "float32", "--autoscale", NUMBERS, "--rank-timeout-s", "30")
    with serving(model, *options, faults="step_delay_ms=100") as server:
        answers: list[int] = []
        ends = asyncio.Event()

        async def ask(session: httpx.AsyncClient, number: int) -> None:
            texts = [f"{SENTENCES[(number + each) % len(SENTENCES)]} {each}" for each in range(200)]
            while not ends.is_set():
                answers.append((await session.post("/v1/embeddings", json={"input": texts})).status_code)

        async def main() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as session:
                clients = [asyncio.create_task(ask(session, number)) for number in range(8)]
                await until(server, lambda found: num_serving(found) == 2)
                document = await until(server, lambda found: found["autoscaler"]["last_decision"]["phase"] == "done")
                decision = document["autoscaler"]["last_decision"]
                assert (decision["action"], decision["from_ranks"], decision["to_ranks"]) == ("grow", 1, 2)
                assert decision["numbers"]["estimated_wait_s"] > 0.5
                assert "is above target_wait_s = 0.5" in decision["reason"]
                assert document["autoscaler"]["not_before"]["shrink"] > decision["time"]
                ends.set()
                await asyncio.gather(*clients)
                shrunk = await until(
                    server, lambda found: num_serving(found) == 1 and not found["operation"], timeout_s=30
                )
                assert shrunk["autoscaler"]["last_decision"]["action"] == "shrink"
                assert (await session.post("/v1/embeddings", json={"input": "still here"})).status_code == 200
                operations = (await session.get("/elastic/operations")).json()["operations"]
                assert [each["origin"] for each in operations] == ["start", "autoscaler", "autoscaler"]
                metrics = (await session.get("/metrics")).text
                for line in (
                    'nobiru_autoscaler_decisions_total{action="grow"} 1.0',
                    'nobiru_autoscaler_decisions_total{action="shrink"} 1.0',
                    "nobiru_autoscaler_undone_total 0.0",
                    "nobiru_serving_ranks 1.0",
                ):
                    assert line in metrics

        asyncio.run(main())
        assert answers
        assert set(answers) == {200}
        log = "".join(server.log)
        assert "grow to 2 ranks from 1: the wait, " in log
        assert "shrink to 1 ranks from 2: the wait, " in log
