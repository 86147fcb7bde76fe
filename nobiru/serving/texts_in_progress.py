"""The texts of one HTTP request while the engine makes them.

Owns the merging of the engine's streams, one for each prompt, into one sequence of updates, the end of each text, and
what is measured on the way. Whatever happens, `close` frees what is left. Knows nothing of the shape of answers.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from nobiru.errors import InferenceError
from nobiru.frontend.text_stream import TextDelta, TextStream
from nobiru.generation import GenerationDelta, GenerationRequest
from nobiru.metrics import Metrics
from nobiru.serving.generation_answer import CachedTokens, Text, Usage
from nobiru.serving.protocols import Engine, GenerationStream, TextSource

Numbered = tuple[int, GenerationDelta]  # the prompt's number, and what came


class TextsInProgress:
    """All texts of `requests`; the text of child c of prompt p is choice p * n + c.

    `arrived_s` is when the HTTP request came (`time.perf_counter`), from which the first token is timed. With `keep`,
    texts hold what they were told, for a whole answer.
    """

    def __init__(
        self,
        engine: Engine,
        source: TextSource,
        requests: Sequence[GenerationRequest],
        metrics: Metrics,
        *,
        arrived_s: float,
        keep: bool,
    ) -> None:
        self._num_children = requests[0].params.n
        self._requests = requests
        self._metrics = metrics
        self._arrived_s = arrived_s
        self._keep = keep
        self._text_streams: list[TextStream] = [
            stream for request in requests for stream in source.text_streams(request)
        ]
        self.texts = [Text(index, index // self._num_children) for index in range(len(self._text_streams))]
        self._clocks = [_Clock() for _ in self.texts]
        self._num_open = len(self.texts)
        self._num_cached = [0] * len(requests)
        self._streams: list[GenerationStream] = []
        self._deltas: _OneStream | _ManyStreams | None = None
        try:
            for request in requests:
                self._streams.append(engine.generate(request))
            self._deltas = _OneStream(self._streams[0]) if len(requests) == 1 else _ManyStreams(self._streams)
        except BaseException:
            self.close()
            raise

    async def next(self) -> list[tuple[Text, TextDelta]]:
        """What has come since the last call, at most one delta a text; waits for something, and is empty at the end.

        The text itself gets the delta by `add`. Raises `NobiruError` when the engine fails.
        """
        while self._num_open:
            assert self._deltas is not None, "the streams are open"
            arrived = await self._deltas.next()
            if not arrived:
                raise InferenceError(f"the engine ended with {self._num_open} texts unfinished")
            updates = [update for number, delta in _combined(arrived) if (update := self._update(number, delta))]
            if updates:
                return updates
        return []

    def add(self, text: Text, delta: TextDelta) -> None:
        text.add(delta, keep=self._keep)

    def usage(self) -> Usage:
        num_prompt = sum(int(request.prompt_token_ids.size) for request in self._requests)
        num_generated = sum(text.num_tokens for text in self.texts)
        return Usage(num_prompt, num_generated, num_prompt + num_generated, CachedTokens(sum(self._num_cached)))

    def close(self) -> None:
        """Stop whatever has not ended. May be called again."""
        if self._deltas is not None:
            self._deltas.close()
        for stream in self._streams:
            stream.close()

    def _update(self, number: int, delta: GenerationDelta) -> tuple[Text, TextDelta] | None:
        index = number * self._num_children + delta.child
        stream = self._text_streams[index]
        if stream.finished:  # was on its way when a stop string was found
            return None
        self._measure(index, len(delta.tokens))
        if delta.child == 0:
            self._num_cached[number] = max(self._num_cached[number], delta.num_cached_tokens)
        text_delta = stream.push(delta)
        if text_delta.stopped_early:
            self._streams[number].stop(delta.child)
        if text_delta.finish_reason is not None:
            self._num_open -= 1
            self._metrics.observe_generation(
                finish_reason=text_delta.finish_reason,
                seconds_per_token=self._clocks[index].seconds_per_token(),
            )
        return self.texts[index], text_delta

    def _measure(self, index: int, num_tokens: int) -> None:
        if not num_tokens:
            return
        now_s = time.perf_counter()
        clock, metrics = self._clocks[index], self._metrics
        if clock.first_s is None:
            clock.first_s = now_s
            metrics.observe_first_token(now_s - self._arrived_s)
        else:
            metrics.observe_inter_token(now_s - clock.last_s)
        clock.last_s = now_s
        clock.num_tokens += num_tokens
        metrics.count_generated_tokens(num_tokens)


@dataclass(slots=True)
class _Clock:
    """When tokens of one text came."""

    first_s: float | None = None
    last_s: float = 0.0
    num_tokens: int = 0

    def seconds_per_token(self) -> float | None:
        """Between the first and the last token; None for a single one."""
        if self.first_s is None or self.num_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_tokens - 1)


class _OneStream:
    """The deltas of one engine stream: the next one, and those that wait behind it."""

    def __init__(self, stream: GenerationStream) -> None:
        self._stream = stream

    async def next(self) -> list[Numbered]:
        try:
            arrived = [(0, await self._stream.__anext__())]
        except StopAsyncIteration:
            return []
        while (delta := self._stream.waiting()) is not None:
            arrived.append((0, delta))
        return arrived

    def close(self) -> None:
        pass


class _ManyStreams:
    """The deltas of several engine streams, each read by a task of its own."""

    def __init__(self, streams: Sequence[GenerationStream]) -> None:
        self._arrived: deque[Numbered] = deque()
        self._news = asyncio.Event()
        self._error: Exception | None = None
        self._num_open = len(streams)
        self._tasks = [asyncio.create_task(self._read(number, stream)) for number, stream in enumerate(streams)]

    async def next(self) -> list[Numbered]:
        while not self._arrived and self._num_open and self._error is None:
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise self._error
        arrived = list(self._arrived)
        self._arrived.clear()
        return arrived

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _read(self, number: int, stream: GenerationStream) -> None:
        try:
            async for delta in stream:
                self._arrived.append((number, delta))
                self._news.set()
        except Exception as error:  # for whoever calls `next`
            self._error = self._error or error
        finally:
            self._num_open -= 1
            self._news.set()


def _combined(arrived: list[Numbered]) -> list[Numbered]:
    """Deltas of the same child as one, so that a slow client gets fewer and larger pieces."""
    if len(arrived) == 1:
        return arrived
    last_of: dict[tuple[int, int], GenerationDelta] = {}
    for number, delta in arrived:
        key = number, delta.child
        earlier = last_of.get(key)
        last_of[key] = delta if earlier is None else _joined(earlier, delta)
    return [(number, delta) for (number, _), delta in last_of.items()]


def _joined(earlier: GenerationDelta, later: GenerationDelta) -> GenerationDelta:
    return GenerationDelta(
        child=earlier.child,
        first_index=earlier.first_index,
        tokens=[*earlier.tokens, *later.tokens],
        finish_reason=later.finish_reason,
        stop_token_id=later.stop_token_id,
        num_cached_tokens=max(earlier.num_cached_tokens, later.num_cached_tokens),
    )
