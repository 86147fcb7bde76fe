"""Threads that prepare requests, so that the event loop does not.

Owns two lanes: requests with much text have a thread of their own and never stand in the way of short ones. The
tokenizer releases the interpreter lock while it works. Knows nothing of what a prepared request is for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from nobiru.errors import InvalidRequestError, OverloadedError, UnavailableError
from nobiru.frontend.chat import Message
from nobiru.frontend.frontend import Frontend, Input
from nobiru.frontend.generation import GenerationFrontend
from nobiru.generation import GenerationRequest, SamplingParams
from nobiru.pools import fixed_pool
from nobiru.request import EncodedPrompts, PoolingParams

T = TypeVar("T")

LONG_CHARS = 200_000
# Far more text than the engine's queue takes as tokens; bounds the memory of requests that are not yet counted there.
MAX_QUEUED_CHARS = 128 * 2**20


class TokenizerPool:
    """Runs a frontend's `prepare` in threads; used from one event loop, and to be closed.

    An embedding model has a `Frontend`, a language model a `GenerationFrontend`; what the model is not made for is
    refused with `InvalidRequestError`. Requests of more than `long_chars` characters go to the long lane. When more
    than `max_queued_chars` wait already, further ones are refused with `OverloadedError`, whatever their own size.
    """

    def __init__(
        self,
        frontend: Frontend | GenerationFrontend,
        *,
        num_threads: int = 2,
        long_chars: int = LONG_CHARS,
        max_queued_chars: int = MAX_QUEUED_CHARS,
    ) -> None:
        self.frontend = frontend
        self._long_chars = long_chars
        self._max_queued_chars = max_queued_chars
        self._short_lane = fixed_pool(num_threads, "tokenize-short")
        self._long_lane = fixed_pool(1, "tokenize-long")
        self._is_closed = False
        self.num_queued_chars = 0

    async def prepare(self, input: Input, params: PoolingParams) -> EncodedPrompts:
        """As `Frontend.prepare`. Cancelling a request that has not begun leaves nothing to do."""
        if isinstance(self.frontend, GenerationFrontend):
            raise InvalidRequestError(
                f"the model {self.frontend.folder.name!r} generates text and makes no embeddings; use /v1/completions "
                "or /v1/chat/completions",
                param="model",
                code="model_does_not_embed",
            )
        return await self._run(_num_chars(input), partial(self.frontend.prepare, input, params))

    async def prepare_generation(
        self, prompt: str | Sequence[int], params: SamplingParams, **options: Any
    ) -> GenerationRequest:
        """As `GenerationFrontend.prepare`."""
        prepare = partial(self.generation.prepare, prompt, params, **options)
        return await self._run(_num_chars(prompt), prepare)

    async def prepare_chat(
        self, messages: Sequence[Message], params: SamplingParams, **options: Any
    ) -> GenerationRequest:
        """As `GenerationFrontend.prepare_chat`."""
        prepare = partial(self.generation.prepare_chat, messages, params, **options)
        return await self._run(num_chat_chars(messages), prepare)

    @property
    def generation(self) -> GenerationFrontend:
        """The frontend of a language model. Raises `InvalidRequestError` for a model that generates nothing."""
        if not isinstance(self.frontend, GenerationFrontend):
            raise InvalidRequestError(
                f"the model {self.frontend.folder.name!r} makes embeddings and generates no text; use /v1/embeddings",
                param="model",
                code="model_does_not_generate",
            )
        return self.frontend

    async def _run(self, num_chars: int, prepare: Callable[[], T]) -> T:
        if self._is_closed:
            raise UnavailableError("the server shuts down")
        if self.num_queued_chars > self._max_queued_chars:
            raise OverloadedError(
                f"{self.num_queued_chars} characters wait to be tokenized; the limit is {self._max_queued_chars}",
                retry_after_s=1.0,
            )
        lane = self._long_lane if num_chars > self._long_chars else self._short_lane
        self.num_queued_chars += num_chars
        try:
            return await asyncio.get_running_loop().run_in_executor(lane, prepare)
        except asyncio.CancelledError:
            if self._was_dropped():
                raise UnavailableError("the server shuts down") from None
            raise
        finally:
            self.num_queued_chars -= num_chars

    def _was_dropped(self) -> bool:
        """Whether `close` cancelled the work, and not its caller."""
        task = asyncio.current_task()
        return self._is_closed and task is not None and not task.cancelling()

    def close(self) -> None:
        """Take no more requests, drop those that have not begun, and let the others end."""
        self._is_closed = True
        for lane in (self._short_lane, self._long_lane):
            lane.shutdown(wait=False, cancel_futures=True)


def _num_chars(input: object) -> int:
    """Characters in texts; token ids count as one each, and what is neither is refused soon enough."""
    if isinstance(input, str):
        return len(input)
    if not isinstance(input, list | tuple):
        return 0
    if not input or isinstance(input[0], int):
        return len(input)
    try:
        return sum(map(len, input))
    except TypeError:  # mixed: refused soon enough
        return len(input)


def num_chat_chars(messages: object) -> int:
    """Characters in the contents of messages, roughly: what makes no sense is refused soon enough."""
    if not isinstance(messages, list | tuple):
        return 0
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    return sum(map(_num_content_chars, contents))


def _num_content_chars(content: object) -> int:
    if isinstance(content, str):
        return len(content)
    parts = content if isinstance(content, list) else []
    return sum(len(str(part.get("text", ""))) for part in parts if isinstance(part, dict))
