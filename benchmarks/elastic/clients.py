"""Clients that stream greedy texts without a break and know what each must be.

Owns what makes an answer wrong, and when each token came. Knows nothing of what the server goes through meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from nobiru.bench.sse import EventDecoder

PROMPTS = (
    "Once upon a time, there was",
    "The big dog ran to the park and",
    "Lily had a red ball. She",
    "One sunny day, a small bird",
    "Tom and his mom went to the",
    "It was raining. The cat did not",
    "A little boat sailed on the lake",
    "Ben found a shiny stone in the",
)
RETRY_S = 0.05


@dataclass(kw_only=True)
class Stream:
    """One request. Seconds are of the wall clock; `arrivals_s` has one for each token."""

    prompt: int
    sent_s: float
    arrivals_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    ended_s: float | None = None
    problem: str | None = None


class Clients:
    """`learn` the undisturbed texts, then from `start` to `stop` `count` clients ask for them, one after another.

    `streams` are the requests since the start, those in progress included; `problems` what was wrong with any. While
    `may_fail` is true, a request that was refused or broken off is not a problem, and is tried again.
    """

    def __init__(self, url: str, *, count: int, max_tokens: int, prompts: Sequence[str] = PROMPTS) -> None:
        self._url = url
        self._count = count
        self._max_tokens = max_tokens
        self._prompts = prompts
        self._expected: list[list[int]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._ends = False
        self.may_fail = False
        self.streams: list[Stream] = []
        self.problems: list[str] = []
        self.num_requests = 0

    async def learn(self) -> None:
        """Each text alone; `ValueError` when one is not answered."""
        async with _session() as session:
            for place in range(len(self._prompts)):
                stream = Stream(prompt=place, sent_s=time.time())
                await self._read(session, stream)
                if stream.problem is not None:
                    raise ValueError(f"an undisturbed request failed: {stream.problem}")
                self._expected.append(stream.token_ids)

    def start(self) -> None:
        self._ends = False
        self._tasks = [asyncio.create_task(self._ask(number)) for number in range(self._count)]

    async def stop(self) -> None:
        """Requests in progress are read to their end; connections are closed."""
        self._ends = True
        await asyncio.gather(*self._tasks)

    def arrivals_s(self) -> list[float]:
        """When tokens came, of all streams, in order."""
        return sorted(at_s for stream in self.streams for at_s in stream.arrivals_s)

    def forget_ended(self) -> None:
        """Drop streams that have ended: what is wrong with them is among the problems."""
        self.streams = [stream for stream in self.streams if stream.ended_s is None]

    async def _ask(self, number: int) -> None:
        async with _session() as session:
            count = 0
            while not self._ends:
                stream = Stream(prompt=(number + count) % len(self._prompts), sent_s=time.time())
                self.streams.append(stream)
                await self._read(session, stream)
                count += 1
                self.num_requests += 1
                if stream.problem is None and stream.token_ids != self._expected[stream.prompt]:
                    stream.problem = f"prompt {stream.prompt} has another text: {stream.token_ids}"
                elif stream.problem is not None and self.may_fail:
                    stream.problem = None
                    await asyncio.sleep(RETRY_S)
                if stream.problem is not None:
                    self.problems.append(stream.problem)

    async def _read(self, session: aiohttp.ClientSession, stream: Stream) -> None:
        body = {
            "prompt": self._prompts[stream.prompt],
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        try:
            async with session.post(f"{self._url}/v1/completions", json=body) as answer:
                if answer.status == 200:
                    stream.problem = await self._read_events(answer, stream)
                else:
                    stream.problem = f"status {answer.status}: {(await answer.text())[:200]}"
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            stream.problem = f"{type(error).__name__} after {len(stream.token_ids)} tokens: {error}"
        stream.ended_s = time.time()

    async def _read_events(self, answer: aiohttp.ClientResponse, stream: Stream) -> str | None:
        """What is wrong with the stream of events, if anything."""
        decoder, reasons = EventDecoder(), []
        has_ended = False
        async for chunk in answer.content.iter_any():
            now_s = time.time()
            for data in decoder.feed(chunk):
                if has_ended:
                    return "an event after [DONE]"
                if data == "[DONE]":
                    has_ended = True
                    continue
                event: dict[str, Any] = json.loads(data)
                if "error" in event:
                    return f"an error in the stream: {event['error']}"
                for choice in event["choices"]:
                    stream.token_ids += choice["token_ids"] or ()
                    stream.arrivals_s += [now_s] * len(choice["token_ids"] or ())
                    reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        if not has_ended or reasons != ["length"]:
            return f"a stream of {len(stream.token_ids)} tokens ended with {reasons}, [DONE] {has_ended}"
        return None


def _session() -> aiohttp.ClientSession:
    # A connection for each request: one that closes in the moment it is used again would look like a failure.
    connector = aiohttp.TCPConnector(force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=900.0))
