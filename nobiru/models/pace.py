"""Reading no faster than allowed, so that it does not hold up what else the machine does.

Owns the arithmetic of the limit; whoever reads does so in chunks and says how large each was.
"""

from __future__ import annotations

import time
from collections.abc import Callable

CHUNK_BYTES = 2**20


class Pace:
    """At most `max_bytes_per_s` on average since the first chunk, with a chunk in advance. For one thread at a time."""

    def __init__(
        self,
        max_bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._max_bytes_per_s = max_bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._began_s: float | None = None
        self._num_bytes = 0

    def took(self, num_bytes: int) -> None:
        """A chunk was read: wait as long as it should have taken."""
        now_s = self._clock()
        if self._began_s is None:
            self._began_s = now_s
        self._num_bytes += num_bytes
        wait_s = self._began_s + self._num_bytes / self._max_bytes_per_s - now_s
        if wait_s > 0:
            self._sleep(wait_s)
