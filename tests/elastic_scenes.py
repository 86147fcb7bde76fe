"""Scenes for tests of ranks that come and go: a group of real ranks under load, whose texts are compared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from generation_requests import CACHE, PROMPTS, generation, text_of
from ranks import is_alive, running, until

from nobiru import LLM, SamplingParams
from nobiru.elastic.holds import Point
from nobiru.engine.client import ZmqClient

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, seed=1)
LIMIT_S = 120.0  # for starts of ranks on busy machines
SPREAD = {**CACHE, "enable_expert_parallel": True, "data_parallel_size": 2}
RANK_TIMEOUT_S = 30.0  # on a busy machine heartbeats come late, and nobody is silent in these scenes

Scene = Callable[[ZmqClient], Awaitable[None]]


def undisturbed_texts(model: Path) -> list[list[int]]:
    """What one rank that holds the whole model writes for each of `PROMPTS`."""
    llm = LLM(str(model), dtype="float32", num_threads=1, **CACHE)
    return [each.outputs[0].token_ids for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@asynccontextmanager
async def under_load(client: ZmqClient, expected: list[list[int]]) -> AsyncIterator[None]:
    """Clients ask for texts one after another, and each text is the undisturbed one."""
    ends = asyncio.Event()

    async def ask(number: int) -> None:
        count = 0
        while not ends.is_set():
            place = (number + count) % len(PROMPTS)
            assert await text_of(client.generate(generation(PROMPTS[place], GREEDY))) == expected[place]
            count += 1

    work = [asyncio.create_task(ask(number)) for number in range(4)]
    try:
        yield
    finally:
        ends.set()
        async with asyncio.timeout(60):
            await asyncio.gather(*work)


async def stopped_at(client: ZmqClient, point: Point, **asked: Any) -> str:
    """Begin an operation and let it come to the end of a phase, where it stands; its id."""
    client.ranks.holds.hold(point)
    operation_id: str = client.operations.request(**asked)["operation_id"]
    machine = client.ranks.machine

    def is_there() -> bool:
        assert machine.operation is not None, client.operations.document(operation_id)
        num_waiting = client.ranks.holds.num_waiting(point)
        if point in ("load", "drain"):
            return num_waiting == 1
        if machine.attempt is None:
            return False
        return num_waiting == len(machine.members if point == "park" else machine.attempt.members)

    await until(is_there)
    return operation_id


async def ended(client: ZmqClient, operation_id: str) -> dict[str, Any]:
    """The document of an operation, once it has come to an end."""
    await until(lambda: client.operations.document(operation_id)["phase"] in ("done", "rolled_back", "failed"), LIMIT_S)
    return client.operations.document(operation_id)


def members(client: ZmqClient) -> list[str]:
    return [rank["rank_id"] for rank in client.status()["ranks"] if rank["state"] == "serving"]


def worker_pids(client: ZmqClient) -> list[int]:
    """Of all ranks that have loaded."""
    return [pid for rank in client.status()["ranks"] for pid in rank["worker_pids"]]


async def whole(client: ZmqClient, size: int) -> None:
    await until(lambda: not client.operations.is_busy and len(members(client)) == size, LIMIT_S)


def play(
    model: Path, expected: list[list[int]], scene: Scene, *, faults: str = "step_delay_ms=5", **options: Any
) -> None:
    """A scene under load; afterwards no request is left and no process."""

    async def main() -> None:
        async with running(model, faults=faults, rank_timeout_s=RANK_TIMEOUT_S, **{**SPREAD, **options}) as client:
            await until(lambda: not client.operations.is_busy, LIMIT_S)
            async with under_load(client, expected):
                await scene(client)
            assert client.queued_requests == 0
            pids = worker_pids(client)
        await until(lambda: not any(map(is_alive, pids)), timeout_s=30)

    asyncio.run(main())
