"""Threads that prepare requests, so that the event loop does not.

Owns two lanes: requests with much text have a thread of their own and never stand in the way of short ones. The
tokenizer releases the interpreter lock while it works. Knows nothing of what a prepared request is for.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from nobiru.errors import OverloadedError, UnavailableError
from nobiru.frontend.frontend import Frontend, Input
from nobiru.request import EncodedPrompts, PoolingParams

LONG_CHARS = 200_000
# Far more text than the engine's queue takes as tokens; bounds the memory of requests that are not yet counted there.
MAX_QUEUED_CHARS = 128 * 2**20


class TokenizerPool:
    """Runs `Frontend.prepare` in threads; used from one event loop, and to be closed.

    Requests of more than `long_chars` characters go to the long lane. When more than `max_queued_chars` wait already,
    further ones are refused with `OverloadedError`, whatever their own size.
    """

    def __init__(
        self,
        frontend: Frontend,
        *,
        num_threads: int = 2,
        long_chars: int = LONG_CHARS,
        max_queued_chars: int = MAX_QUEUED_CHARS,
    ) -> None:
        self.frontend = frontend
        self._long_chars = long_chars
        self._max_queued_chars = max_queued_chars
        self._short_lane = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize-short")
        self._long_lane = ThreadPoolExecutor(1, thread_name_prefix="tokenize-long")
        self._is_closed = False
        self.num_queued_chars = 0

    async def prepare(self, input: Input, params: PoolingParams) -> EncodedPrompts:
        """As `Frontend.prepare`. Cancelling a request that has not begun leaves nothing to do."""
        if self._is_closed:
            raise UnavailableError("the server shuts down")
        if self.num_queued_chars > self._max_queued_chars:
            raise OverloadedError(
                f"{self.num_queued_chars} characters wait to be tokenized; the limit is {self._max_queued_chars}",
                retry_after_s=1.0,
            )
        num_chars = _num_chars(input)
        lane = self._long_lane if num_chars > self._long_chars else self._short_lane
        self.num_queued_chars += num_chars
        try:
            return await asyncio.get_running_loop().run_in_executor(lane, self.frontend.prepare, input, params)
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
