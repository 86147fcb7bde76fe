"""Streams of tokens for those who asked for them, over the ledger of generation requests.

Owns which stream waits for which request. Runs on one event loop; sending is the client's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

from nobiru.engine.generation_ledger import Child, GenerationEntry, GenerationLedger
from nobiru.engine.messages import Failure, Generated
from nobiru.errors import NobiruError
from nobiru.generation import GenerationDelta, GenerationRequest

Aborts = Mapping[str, list[int]]


class GenerationStream:
    """The deltas of one request's children, in the order of arrival; ends when every child has ended.

    Raises the request's error, if it has one, behind what came before.
    """

    def __init__(self, entry: GenerationEntry, streams: GenerationStreams) -> None:
        self._entry = entry
        self._streams = streams
        self._deltas: deque[GenerationDelta] = deque()
        self._error: NobiruError | None = None
        self._news = asyncio.Event()

    def __aiter__(self) -> GenerationStream:
        return self

    async def __anext__(self) -> GenerationDelta:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._entry.has_ended:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._deltas.popleft()

    def waiting(self) -> GenerationDelta | None:
        """A delta that is here already, if any."""
        return self._deltas.popleft() if self._deltas else None

    def stop(self, child: int) -> None:
        """Nobody wants more of this child; no more deltas of it come."""
        self._streams.stop(self._entry, child)
        self._deltas = deque(delta for delta in self._deltas if delta.child != child)
        self._news.set()

    def close(self) -> None:
        """Abort what is left. May be called at any time, and again."""
        self._streams.close(self._entry)
        self._deltas.clear()
        self._news.set()

    def push(self, delta: GenerationDelta) -> None:
        self._deltas.append(delta)
        self._news.set()

    def fail(self, error: NobiruError) -> None:
        self._error = error
        self._news.set()


class GenerationStreams:
    """All open streams. `send_waiting` is to send what is `unsent`, `abort` to tell ranks what to drop."""

    def __init__(
        self, ids: Iterator[int], *, send_waiting: Callable[[], None], abort: Callable[[Aborts], None]
    ) -> None:
        self.ledger = GenerationLedger(ids)
        self._streams: dict[GenerationEntry, GenerationStream] = {}
        self._send_waiting = send_waiting
        self._abort = abort

    def open(self, request: GenerationRequest, now_s: float) -> GenerationStream:
        entry = self.ledger.open(request, now_s)
        stream = self._streams[entry] = GenerationStream(entry, self)
        self._send_waiting()
        return stream

    def stop(self, entry: GenerationEntry, child: int) -> None:
        self._abort(self.ledger.stop(entry, child))
        self._send_waiting()

    def close(self, entry: GenerationEntry) -> None:
        self._streams.pop(entry, None)
        self._abort(self.ledger.cancel(entry))

    def unsent(self) -> Iterator[Child]:
        return self.ledger.unsent()

    def apply(self, results: Iterable[Generated]) -> None:
        """New tokens from a rank."""
        for entry, delta in self.ledger.apply(results):
            if (stream := self._streams.get(entry)) is not None:
                stream.push(delta)

    def fail(self, seq_id: int, failure: Failure) -> None:
        """A rank says that a sequence failed, if it is one of ours."""
        if (entry := self.ledger.fail(seq_id, failure)) is not None:
            self._end_with_error(entry)

    def rank_lost(self, rank_id: str, executing: Iterable[int]) -> None:
        for entry in self.ledger.rank_lost(rank_id, executing):
            self._end_with_error(entry)

    def fail_all(self, error: NobiruError) -> None:
        for entry in list(self._streams):
            entry.error = error
            self._end_with_error(entry)

    def _end_with_error(self, entry: GenerationEntry) -> None:
        assert entry.error is not None
        self._abort(self.ledger.cancel(entry))
        if (stream := self._streams.pop(entry, None)) is not None:
            stream.fail(entry.error)
