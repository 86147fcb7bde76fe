"""What happens to a serving group, and clients that must not notice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from generation_requests import PROMPTS, generation, text_of
from ranks import until

from nobiru import SamplingParams
from nobiru.engine.client import ZmqClient

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, seed=1)


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


async def ended(client: ZmqClient, operation_id: str) -> dict[str, Any]:
    await until(lambda: client.operations.document(operation_id)["phase"] in ("done", "rolled_back", "failed"))
    return client.operations.document(operation_id)


def members(client: ZmqClient) -> list[str]:
    return [rank["rank_id"] for rank in client.status()["ranks"] if rank["state"] == "serving"]


async def whole(client: ZmqClient, size: int) -> None:
    await until(lambda: not client.operations.is_busy and len(members(client)) == size)
