"""What the HTTP layer asks of its neighbours: the tokenizer pool and the engine client.

Owns no behaviour. The server is written against these, so that tests can put stand-ins in their place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from nobiru.request import EncodedPrompts, PoolingParams, PoolingRequest, Vectors

EmbeddingInput = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


class Tokenizer(Protocol):
    """The model's tokenizer. Its methods take their time: they belong in a thread."""

    @property
    def prefix(self) -> tuple[int, ...]:
        """The special tokens in front of every text."""
        ...

    @property
    def suffix(self) -> tuple[int, ...]:
        """The special tokens behind every text."""
        ...

    def encode(self, texts: Sequence[str]) -> EncodedPrompts:
        """Texts as they are, neither prompted nor cut. Raises `InvalidRequestError`."""
        ...

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Ids as the vocabulary writes them."""
        ...


class Frontend(Protocol):
    """What the pool's threads work with."""

    @property
    def tokenizer(self) -> Tokenizer: ...


class Pool(Protocol):
    """Turns texts into token ids, off the event loop."""

    @property
    def frontend(self) -> Frontend: ...

    async def prepare(self, input: EmbeddingInput, params: PoolingParams) -> EncodedPrompts:
        """Validate and tokenize one request's inputs as one batch. Raises `InvalidRequestError`."""
        ...

    def close(self) -> None:
        """End the threads."""
        ...


class QueueView(Protocol):
    """What admission needs to know of the engine's queue."""

    @property
    def queued_tokens(self) -> int: ...

    @property
    def tokens_per_s(self) -> float | None: ...


class Engine(QueueView, Protocol):
    """The ranks, seen from the HTTP process. Requests wait in its queue while a model loads or a rank restarts."""

    @property
    def queued_requests(self) -> int: ...

    @property
    def has_working_rank(self) -> bool: ...

    @property
    def last_forward_s(self) -> float | None:
        """`time.monotonic()` when the last forward pass ended."""
        ...

    @property
    def model_info(self) -> Mapping[str, Any] | None:
        """dtype, device, threads, limits …, for the start line; None until the model is loaded."""
        ...

    @property
    def failed(self) -> asyncio.Future[Any]:
        """Resolves with the cause when ranks keep failing. Exists once `start` has been called."""
        ...

    def launch_now(self) -> None:
        """Begin to load the model, before the event loop runs."""
        ...

    async def start(self) -> None:
        """Launch the ranks. Returns when requests can be queued, not when the model is loaded."""
        ...

    async def stop(self) -> None:
        """End the ranks and fail whatever still waits."""
        ...

    async def embed(self, request: PoolingRequest) -> Vectors:
        """[N, D] float32. Raises `NobiruError`. Cancelling the caller frees the work on the rank."""
        ...

    async def probe(self, timeout_s: float) -> bool:
        """Run a small forward pass; whether it ended in time."""
        ...

    def status(self) -> Mapping[str, Any]:
        """`{"epoch": int, "ranks": [{"rank_id", "pid", "state"}]}`."""
        ...
