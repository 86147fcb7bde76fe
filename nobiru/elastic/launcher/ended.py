"""The end of a process as it is told from one thread to others and to coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable


class Ended:
    """Told once, with how it came about, in words."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._how = ""

    def tell(self, how: str) -> None:
        with self._lock:
            self._how = how
            self._event.set()
        for callback in self._callbacks:
            callback()

    def __bool__(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it was told within that time."""
        return self._event.wait(timeout_s)

    async def heard(self) -> str:
        """Until it is told; how it came about."""
        loop, told = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(told.set)

        with self._lock:
            if self:
                told.set()
            else:
                self._callbacks.append(wake)
        await told.wait()
        return self._how
