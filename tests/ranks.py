"""Helpers for tests of real rank processes behind the real client."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from warm_processes import warm_starts

from nobiru.config import EngineConfig
from nobiru.engine.client import ZmqClient
from nobiru.engine.limits import SERVER_TOKEN_BUDGET, scheduler_config
from nobiru.engine.messages import EngineState
from nobiru.folder.read import read_folder
from nobiru.request import EncodedPrompts, PoolingRequest


@dataclass
class Steps:
    """What the client measured."""

    num_restarts: int = 0
    state: EngineState | None = None
    num_bytes_moved: int = 0
    num_rebalances: int = 0
    balances: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)

    def observe_step(self, num_tokens: int, num_sequences: int, compute_s: float) -> None:
        self.batches.append(num_sequences)

    def observe_queue(self, seconds: float) -> None:
        assert seconds >= 0

    def observe_engine(self, state: EngineState) -> None:
        self.state = state

    def observe_experts(self, *, by_expert: Mapping[int, int], by_rank: Mapping[int, int], balance: float) -> None:
        self.balances.append(balance)

    def experts_moved(self, *, num_bytes: int, num_rebalances: int) -> None:
        self.num_bytes_moved += num_bytes
        self.num_rebalances += num_rebalances

    def rank_restarted(self) -> None:
        self.num_restarts += 1


@asynccontextmanager
async def running(
    model: Path,
    *,
    faults: str = "",
    rank_timeout_s: float = 10.0,
    max_start_failures: int = 5,
    steps: Steps | None = None,
    starts_warm: bool = True,
    **options: Any,
) -> AsyncIterator[ZmqClient]:
    """A started client, with options of `EngineConfig`; its ranks end with the block.

    They start as `warm_processes` does it, or with `starts_warm=False` as those of a server.
    """
    config = EngineConfig(**{"model": str(model), "num_threads": 1, "dtype": "float32", **options})
    folder = read_folder(model)
    with warm_starts() if starts_warm else nullcontext():
        client = ZmqClient(
            config,
            limits=scheduler_config(config, folder, default_budget=SERVER_TOKEN_BUDGET),
            embedding_dim=folder.embedding_dim,
            environment={**os.environ, "NOBIRU_FAULT_INJECTION": faults},
            observer=steps or Steps(),
            rank_timeout_s=rank_timeout_s,
            max_start_failures=max_start_failures,
        )
        await client.start()
        try:
            yield client
        finally:
            await client.stop()


def request(*sequences: list[int], priority: int = 0) -> PoolingRequest:
    """A request of token id lists."""
    return PoolingRequest(
        request_id="test",
        prompts=EncodedPrompts(
            token_ids=np.concatenate([np.array(each, dtype=np.int32) for each in sequences]),
            lengths=np.array([len(each) for each in sequences], dtype=np.int32),
            truncated=np.zeros(len(sequences), dtype=np.bool_),
        ),
        priority=priority,
    )


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait for a condition, at most `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        await asyncio.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def name_of(pid: int) -> str:
    """What the process calls itself."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except FileNotFoundError:
        return ""


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    own = children(pid)
    return own + [each for child in own for each in descendants(child)]


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid and fields[0] not in "ZX":
            found.append(int(status.parent.name))
    return found
