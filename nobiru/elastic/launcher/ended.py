"""The end of a process as it is told from one thread to others and to coroutines, and what processes have in common."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
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


class StartedProcess(ABC):
    """A process of this machine; whoever waits for its end tells `_ended`."""

    node = "127.0.0.1"

    def __init__(self) -> None:
        self._ended = Ended()

    @property
    def is_alive(self) -> bool:
        """Also while it is about to begin."""
        return not self._ended

    async def wait_dead(self) -> str:
        """Until the process has ended; how it ended, in words."""
        return await self._ended.heard()

    @abstractmethod
    def kill(self) -> None:
        """End it now, also when it is stopped."""

    def join(self, timeout_s: float) -> bool:
        """Wait for its end; kill it when it takes longer. Whether it ended by itself."""
        if self._ended.wait(timeout_s):
            return True
        self.kill()
        self._ended.wait()
        return False
