"""What the HTTP layer asks of its neighbours: the tokenizer pool and the engine client.

Owns no behaviour. The server is written against these, so that tests can put stand-ins in their place.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

from nobiru.elastic.autoscale import Usage
from nobiru.elastic.membership import Origin
from nobiru.frontend.text_stream import TextStream
from nobiru.frontend.token_texts import TokenTexts
from nobiru.generation import GenerationDelta, GenerationRequest, SamplingParams
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

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids."""
        ...


class Frontend(Protocol):
    """What the pool's threads work with."""

    @property
    def tokenizer(self) -> Tokenizer: ...


class TextSource(Protocol):
    """Makes texts of tokens."""

    @property
    def token_texts(self) -> TokenTexts:
        """What each token adds to a text."""
        ...

    def text_streams(self, request: GenerationRequest) -> list[TextStream]:
        """For each child, what turns its tokens into text."""
        ...


class GenerationFrontend(Frontend, TextSource, Protocol):
    """What the pool's threads work with when the model is a language model."""

    @property
    def render_chat(self) -> Callable[..., str]:
        """Messages as the text the model is prompted with. Takes its time. Raises `InvalidRequestError`."""
        ...


class Pool(Protocol):
    """Turns texts into token ids, off the event loop."""

    @property
    def frontend(self) -> Frontend: ...

    @property
    def generation(self) -> GenerationFrontend:
        """Raises `InvalidRequestError` when the model is not a language model."""
        ...

    async def prepare_generation(
        self, prompt: str | Sequence[int], params: SamplingParams, **options: Any
    ) -> GenerationRequest:
        """Validate and tokenize one prompt. Raises `InvalidRequestError`."""
        ...

    async def prepare_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams, **options: Any
    ) -> GenerationRequest:
        """Validate, render and tokenize one chat. Raises `InvalidRequestError`."""
        ...

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


class GenerationStream(Protocol):
    """The deltas of one request's children, in the order of arrival, until each has had one with a `finish_reason`.

    Iterating raises `NobiruError` when the request failed.
    """

    def __aiter__(self) -> AsyncIterator[GenerationDelta]: ...

    async def __anext__(self) -> GenerationDelta: ...

    def waiting(self) -> GenerationDelta | None:
        """A delta that is here already, if any."""
        ...

    def stop(self, child: int) -> None:
        """Nobody wants more of this child; no more deltas of it come."""
        ...

    def close(self) -> None:
        """Abort what is left. May be called at any time, and again."""
        ...


class RankControl(Protocol):
    """What may be asked of the group of ranks. Documents are operations as the API shows them."""

    @property
    def is_busy(self) -> bool:
        """Whether the membership is changing."""
        ...

    def request(
        self,
        *,
        size: int | None = None,
        remove: Sequence[str] = (),
        replace: Sequence[str] = (),
        drain_timeout_s: float | None = None,
        drain_may_replay: bool = True,
        deadline_s: float = 600.0,
        dry_run: bool = False,
        idempotency_key: str | None = None,
        origin: Origin = "user",
    ) -> dict[str, Any]:
        """Begin an operation. Raises `InvalidRequestError` or `ConflictError`."""
        ...

    def cancel(self, operation_id: str) -> dict[str, Any]:
        """Raises `NotFoundError`, or `ConflictError` when it is too late."""
        ...

    def document(self, operation_id: str) -> dict[str, Any]: ...

    def documents(self) -> list[dict[str, Any]]: ...


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

    def generate(self, request: GenerationRequest) -> GenerationStream:
        """The tokens of a request as they come. Whoever asked closes the stream."""
        ...

    @property
    def operations(self) -> RankControl: ...

    async def probe(self, timeout_s: float) -> bool:
        """Run a small forward pass; whether it ended in time."""
        ...

    def usage(self) -> Usage:
        """What the ranks are and what they have done."""
        ...

    def status(self) -> Mapping[str, Any]:
        """`{"epoch": int, "ranks": [{"rank_id", "pid", "state"}]}`."""
        ...
