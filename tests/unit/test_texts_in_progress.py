"""Streams of tokens as streams of text: merging, coalescing, early ends, failures; on a scripted engine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import small_tokenizer
from tokenizers import decoders

from nobiru.errors import InferenceError
from nobiru.frontend.text_stream import TextStream
from nobiru.frontend.token_texts import TokenTexts
from nobiru.generation import FinishReason, GenerationDelta, GenerationRequest, SampledToken, SamplingParams
from nobiru.metrics import Metrics
from nobiru.serving.sse import EventStream
from nobiru.serving.texts_in_progress import TextsInProgress

_TOKENIZER = small_tokenizer("byte_bpe")
_TOKENIZER.decoder = decoders.ByteLevel()
TEXTS = TokenTexts(_TOKENIZER)
IDS = {TEXTS.bytes_of(token): token for token in range(_TOKENIZER.get_vocab_size())}


class Stream:
    """An engine's stream; the test puts deltas in."""

    def __init__(self) -> None:
        self.deltas: deque[GenerationDelta] = deque()
        self.error: Exception | None = None
        self.ended = False
        self.stopped: list[int] = []
        self.num_closed = 0
        self._news = asyncio.Event()

    def put(self, text: str, *, child: int = 0, finish: FinishReason | None = None) -> None:
        tokens = [SampledToken(IDS[character.encode()]) for character in text]
        self.deltas.append(
            GenerationDelta(child=child, first_index=0, tokens=tokens, finish_reason=finish, num_cached_tokens=4)
        )
        self._news.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self._news.set()

    def __aiter__(self) -> AsyncIterator[GenerationDelta]:
        return self

    async def __anext__(self) -> GenerationDelta:
        while not self.deltas:
            if self.error is not None:
                raise self.error
            if self.ended:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self.deltas.popleft()

    def waiting(self) -> GenerationDelta | None:
        return self.deltas.popleft() if self.deltas else None

    def stop(self, child: int) -> None:
        self.stopped.append(child)

    def close(self) -> None:
        self.num_closed += 1


class Engine:
    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.fails_at: int | None = None

    def generate(self, request: GenerationRequest) -> Stream:
        if len(self.streams) == self.fails_at:
            raise InferenceError("no more")
        self.streams.append(Stream())
        return self.streams[-1]


class Source:
    token_texts = TEXTS

    def text_streams(self, request: GenerationRequest) -> list[TextStream]:
        return [TextStream(TEXTS, request.params, child=child) for child in range(request.params.n)]


def started(engine: Engine, *, num_prompts: int = 1, keep: bool = True, **params: Any) -> TextsInProgress:
    requests = [
        GenerationRequest(
            request_id=str(number),
            prompt_token_ids=np.array([5, 6], dtype=np.int32),
            params=SamplingParams(**params),
            max_tokens=100,
        )
        for number in range(num_prompts)
    ]
    return TextsInProgress(engine, Source(), requests, Metrics(), arrived_s=0.0, keep=keep)  # type: ignore[arg-type]


async def soon(progress: TextsInProgress) -> list[tuple[int, str]]:
    updates = await asyncio.wait_for(progress.next(), 5)
    for text, delta in updates:
        progress.add(text, delta)
    return [(text.index, delta.text) for text, delta in updates]


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_what_waits_already_comes_as_one(num_prompts: int) -> None:
    async def scenario() -> None:
        engine = Engine()
        progress = started(engine, num_prompts=num_prompts, n=2)
        for stream in engine.streams:
            for letter in "abc":
                stream.put(letter, child=0)
                stream.put(letter.upper(), child=1)
        await asyncio.sleep(0)
        expected = [(0, "abc"), (1, "ABC"), (2, "abc"), (3, "ABC")][: 2 * num_prompts]
        assert sorted(await soon(progress)) == expected
        for stream in engine.streams:
            stream.put("d", child=0, finish="length")
            stream.put("", child=1, finish="stop")
        await asyncio.sleep(0)
        assert sorted(await soon(progress)) == [(0, "d"), (1, ""), (2, "d"), (3, "")][: 2 * num_prompts]
        assert await progress.next() == []
        assert [text.text for text in progress.texts] == ["abcd", "ABC"] * num_prompts
        assert [text.finish_reason for text in progress.texts] == ["length", "stop"] * num_prompts
        usage = progress.usage()
        assert (usage.prompt_tokens, usage.completion_tokens) == (2 * num_prompts, 7 * num_prompts)
        assert usage.prompt_tokens_details.cached_tokens == 4 * num_prompts

    asyncio.run(scenario())


def test_a_stop_string_stops_the_child_only() -> None:
    async def scenario() -> None:
        engine = Engine()
        progress = started(engine, n=2, stop=("c",))
        [stream] = engine.streams
        stream.put("abcd", child=0)
        stream.put("xy", child=1)
        assert await soon(progress) == [(0, "ab"), (1, "xy")]
        assert stream.stopped == [0]
        stream.put("late", child=0)  # was on its way already
        stream.put("z", child=1, finish="length")
        assert await soon(progress) == [(1, "z")]
        assert await progress.next() == []
        assert [text.stop_reason for text in progress.texts] == ["c", None]

    asyncio.run(scenario())


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_failures_reach_whoever_waits(num_prompts: int) -> None:
    async def scenario() -> None:
        for error in (InferenceError("broken"), RuntimeError("a bug")):
            engine = Engine()
            progress = started(engine, num_prompts=num_prompts)
            waiting = asyncio.create_task(progress.next())
            await asyncio.sleep(0)
            engine.streams[-1].fail(error)
            with pytest.raises(type(error)):
                await asyncio.wait_for(waiting, 5)
            progress.close()
            progress.close()
            assert all(stream.num_closed for stream in engine.streams)

    asyncio.run(scenario())


def test_an_engine_that_ends_too_early_is_a_failure() -> None:
    async def scenario() -> None:
        for num_prompts in (1, 2):
            engine = Engine()
            progress = started(engine, num_prompts=num_prompts)
            for stream in engine.streams:
                stream.ended = True
            with pytest.raises(InferenceError, match="unfinished"):
                await asyncio.wait_for(progress.next(), 5)
            progress.close()

    asyncio.run(scenario())


def test_nothing_stays_open_when_the_engine_takes_only_some_prompts() -> None:
    async def scenario() -> None:
        engine = Engine()
        engine.fails_at = 2
        with pytest.raises(InferenceError):
            started(engine, num_prompts=3)
        assert [stream.num_closed for stream in engine.streams] == [1, 1]

    asyncio.run(scenario())


def test_closing_ends_the_readers() -> None:
    async def scenario() -> None:
        progress = started(Engine(), num_prompts=3)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 4
        progress.close()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text("abc", max_size=8), min_size=1, max_size=6),
    n=st.sampled_from([1, 2]),
    turns=st.lists(st.integers(0, 3), max_size=40),
    stops=st.lists(st.text("abc", min_size=1, max_size=3), max_size=2),
)
def test_any_order_of_arrival_gives_the_same_texts(
    texts: Sequence[str], n: int, turns: list[int], stops: list[str]
) -> None:
    async def scenario(num_at_once: list[int]) -> list[tuple[str, Any]]:
        engine = Engine()
        progress = started(engine, num_prompts=len(texts), n=n, stop=tuple(stops))
        pending = deque(
            (number, child, letter)
            for index in range(10)
            for number, text in enumerate(texts)
            for child in range(n)
            for letter in ([text[index]] if index < len(text) else [None] if index == len(text) else [])
        )
        turn = 0
        while pending:
            for _ in range(1 + (num_at_once[turn % len(num_at_once)] if num_at_once else 0)):
                if pending:
                    number, child, letter = pending.popleft()
                    if child not in engine.streams[number].stopped:
                        engine.streams[number].put(letter or "", child=child, finish=None if letter else "length")
            turn += 1
            await asyncio.sleep(0)
            if any(stream.deltas for stream in engine.streams) or turn % 3 == 0:
                while any(stream.deltas for stream in engine.streams):
                    await soon(progress)
        while await soon(progress):
            pass
        progress.close()
        return [(text.text, text.stop_reason) for text in progress.texts]

    assert asyncio.run(scenario(turns)) == asyncio.run(scenario([]))


async def answer(pieces: Any, receive: Any, send: Any) -> tuple[list[bytes], int, BaseException | None]:
    """What an event stream sent, how often it was closed, and what it raised."""
    sent: list[bytes] = []
    closed: list[None] = []

    async def sending(message: Any) -> None:
        sent.append(message.get("body", b""))
        await send(message)

    caught: BaseException | None = None
    try:
        await EventStream(pieces, close=lambda: closed.append(None))({"type": "http"}, receive, sending)
    except BaseException as error:
        caught = error
    return sent, len(closed), caught


async def stays() -> Any:
    await asyncio.sleep(60)


async def leaves() -> Any:
    await asyncio.sleep(0.01)
    return {"type": "http.disconnect"}


async def send(message: Any) -> None:
    await asyncio.sleep(0)


async def broken_send(message: Any) -> None:
    raise OSError("gone")


async def endless() -> Any:
    while True:
        await asyncio.sleep(0.001)
        yield b"data: x\n\n"


async def failing() -> Any:
    yield b"data: x\n\n"
    raise InferenceError("broken")


def test_a_stream_is_closed_when_the_client_leaves() -> None:
    _, num_closed, caught = asyncio.run(answer(endless(), leaves, send))
    assert (num_closed, type(caught).__name__) == (1, "ClientDisconnectedError")
    _, num_closed, caught = asyncio.run(answer(endless(), stays, broken_send))
    assert (num_closed, type(caught)) == (1, OSError)


def test_a_stream_that_fails_says_so_and_is_closed() -> None:
    sent, num_closed, caught = asyncio.run(answer(failing(), stays, send))
    assert (num_closed, caught) == (1, None)
    assert b'"code":"inference_failed"' in sent[2]
    assert sent[3:] == [b"data: [DONE]\n\n", b""]


def test_a_stream_that_is_cancelled_says_so_and_is_closed() -> None:
    async def scenario() -> tuple[list[bytes], int, BaseException | None]:
        task = asyncio.create_task(answer(endless(), stays, send))
        await asyncio.sleep(0.01)
        task.cancel()
        return await task

    sent, num_closed, caught = asyncio.run(scenario())
    assert (num_closed, type(caught)) == (1, asyncio.CancelledError)
    assert b'"code":"unavailable"' in sent[-2]
    assert sent[-2].endswith(b"data: [DONE]\n\n")
