"""Runs all requests of a benchmark: warm-up, schedule, concurrency, and how busy the client itself was."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nobiru.bench.client import Client, Target
from nobiru.bench.statistics import RequestRecord
from nobiru.bench.workload import Prompt
from nobiru.errors import UnavailableError


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """`records` in the order of the prompts. `client_cpu_share` is how much of one core the client took.

    `late_s` is how much later than due the client sent the request at its 99th percentile, waiting for a free place
    under `max_concurrency` included.
    """

    records: list[RequestRecord]
    duration_s: float
    client_cpu_share: float
    late_s: float


async def warm_up(target: Target, prompts: Sequence[Prompt], *, timeout_s: float) -> None:
    """Send `prompts` one by one; raises `UnavailableError` when one fails, so that a wrong option shows at once."""
    async with Client(target, clock=time.perf_counter, timeout_s=timeout_s) as client:
        for prompt in prompts:
            record = RequestRecord(due_s=time.perf_counter())
            await client.send(prompt, record)
            if record.error is not None:
                raise UnavailableError(f"the warm-up request failed: {record.error}")


async def run_load(
    target: Target,
    prompts: Sequence[Prompt],
    due_s: Sequence[float],
    *,
    max_concurrency: int | None = None,
    timeout_s: float,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
) -> Result:
    """Send `prompts` when they are due, at most `max_concurrency` at once.

    When all are due at once, this is a closed loop: a request counts from when it was sent.
    """
    closed = not any(due_s)
    places = asyncio.Semaphore(max_concurrency or max(1, len(prompts)))
    records = [RequestRecord(due_s=due) for due in due_s]
    start_s, cpu_s = time.perf_counter(), time.process_time()

    def clock() -> float:
        return time.perf_counter() - start_s

    async def one(prompt: Prompt, record: RequestRecord) -> None:
        await asyncio.sleep(max(0.0, record.due_s - clock()))
        async with places:
            record.sent_s = clock()
            if closed:
                record.due_s = record.sent_s
            await client.send(prompt, record)
        on_done(record)

    async with Client(target, clock=clock, timeout_s=timeout_s) as client:
        await asyncio.gather(*(one(prompt, record) for prompt, record in zip(prompts, records, strict=True)))
    duration_s = max((record.end_s for record in records), default=clock())
    late_s = sorted(record.sent_s - record.due_s for record in records)
    return Result(
        records=records,
        duration_s=duration_s,
        client_cpu_share=(time.process_time() - cpu_s) / clock(),
        late_s=late_s[math.ceil(len(late_s) * 0.99) - 1] if late_s else 0.0,
    )
