"""Lanes of the tokenizer pool: long texts never in front of short ones, bounded, cancelled, closed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_tokenizers import write_folder

from nobiru.errors import InvalidRequestError, OverloadedError, UnavailableError
from nobiru.folder.read import read_folder
from nobiru.frontend.frontend import Frontend
from nobiru.frontend.pool import TokenizerPool
from nobiru.request import EncodedPrompts, PoolingParams

PARAMS = PoolingParams()
LONG = "the fox " * 30
WAIT_S = 20.0


class GatedFrontend:
    """Stands for a `Frontend` whose work on `LONG` lasts until the gate opens."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self.gate = threading.Event()
        self.begun: list[int] = []

    def prepare(self, input: Any, params: PoolingParams) -> EncodedPrompts:
        self.begun.append(len(input))
        if len(input) >= len(LONG):
            assert self.gate.wait(WAIT_S)
        return self._frontend.prepare(input, params)


@pytest.fixture
def frontend(tmp_path: Path) -> Frontend:
    return Frontend(read_folder(write_folder(tmp_path)), auto_truncate=True)


@pytest.fixture
def gated(frontend: Frontend) -> Iterator[GatedFrontend]:
    gated = GatedFrontend(frontend)
    yield gated
    gated.gate.set()


def pool_of(frontend: Any, **options: Any) -> TokenizerPool:
    return TokenizerPool(frontend, long_chars=100, **options)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.001)


def test_prepares_as_the_frontend_does(frontend: Frontend) -> None:
    async def scenario() -> None:
        pool = pool_of(frontend)
        encoded = await pool.prepare(["the fox", "dog"], PARAMS)
        assert encoded.token_ids.tolist() == frontend.prepare(["the fox", "dog"], PARAMS).token_ids.tolist()
        with pytest.raises(InvalidRequestError, match="empty list"):
            await pool.prepare([], PARAMS)
        with pytest.raises(InvalidRequestError, match="an integer"):
            await pool.prepare(3, PARAMS)  # type: ignore[arg-type]
        assert pool.num_queued_chars == 0
        pool.close()

    asyncio.run(scenario())


def test_long_requests_do_not_block_short_ones(gated: GatedFrontend) -> None:
    async def scenario() -> None:
        pool = pool_of(gated)
        long = [asyncio.create_task(pool.prepare(LONG, PARAMS)) for _ in range(4)]
        await until(lambda: len(LONG) in gated.begun)
        for _ in range(10):
            async with asyncio.timeout(WAIT_S):
                await pool.prepare("the fox", PARAMS)
        assert pool.num_queued_chars == 4 * len(LONG)
        assert not any(task.done() for task in long)
        gated.gate.set()
        assert len(await asyncio.gather(*long)) == 4
        pool.close()

    asyncio.run(scenario())


def test_the_event_loop_stays_free(gated: GatedFrontend) -> None:
    async def scenario() -> None:
        pool = pool_of(gated)
        task = asyncio.create_task(pool.prepare(LONG, PARAMS))
        await until(lambda: bool(gated.begun))  # the loop turns while the thread waits
        gated.gate.set()
        await task
        pool.close()

    asyncio.run(scenario())


def test_a_cancelled_request_does_not_begin(gated: GatedFrontend) -> None:
    async def scenario() -> None:
        pool = pool_of(gated)
        first = asyncio.create_task(pool.prepare(LONG, PARAMS))
        await until(lambda: bool(gated.begun))
        second = asyncio.create_task(pool.prepare(LONG + "dog", PARAMS))
        await until(lambda: pool.num_queued_chars == 2 * len(LONG) + 3)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert pool.num_queued_chars == len(LONG)
        gated.gate.set()
        await first
        pool.close()

    asyncio.run(scenario())
    assert gated.begun == [len(LONG)]


def test_too_much_text_in_the_queue(gated: GatedFrontend) -> None:
    async def scenario() -> None:
        pool = pool_of(gated, max_queued_chars=len(LONG))
        tasks = [asyncio.create_task(pool.prepare(LONG, PARAMS)) for _ in range(2)]
        await until(lambda: pool.num_queued_chars == 2 * len(LONG))
        with pytest.raises(OverloadedError) as caught:
            await pool.prepare("x", PARAMS)
        assert caught.value.retry_after_s
        gated.gate.set()
        await asyncio.gather(*tasks)
        assert (await pool.prepare("x", PARAMS)).num_tokens == 3
        pool.close()

    asyncio.run(scenario())


def test_closing_drops_what_has_not_begun(gated: GatedFrontend) -> None:
    async def scenario() -> None:
        pool = pool_of(gated)
        begun = asyncio.create_task(pool.prepare(LONG, PARAMS))
        await until(lambda: bool(gated.begun))
        waiting = asyncio.create_task(pool.prepare(LONG, PARAMS))
        await until(lambda: pool.num_queued_chars == 2 * len(LONG))
        pool.close()
        with pytest.raises(UnavailableError):
            await waiting
        with pytest.raises(UnavailableError):
            await pool.prepare("x", PARAMS)
        gated.gate.set()
        assert (await begun).num_tokens > 2

    asyncio.run(scenario())


def test_closing_leaves_no_threads(frontend: Frontend) -> None:
    async def scenario() -> None:
        pool = pool_of(frontend)
        await asyncio.gather(pool.prepare("x", PARAMS), pool.prepare(LONG, PARAMS))
        assert [thread for thread in threading.enumerate() if thread not in before]
        pool.close()
        await until(lambda: all(thread in before for thread in threading.enumerate()))

    before = set(threading.enumerate())
    asyncio.run(scenario())
