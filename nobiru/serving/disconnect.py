"""Noticing that a client has left, so that its work can be dropped.

Owns the watch on an ASGI `receive`. Knows nothing of what is being waited for: it cancels the task that waits.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive


class ClientDisconnectedError(Exception):
    """The client has left; there is nobody to answer."""


class DisconnectWatch:
    """Inside `with DisconnectWatch(receive):` the current task is cancelled when the client leaves.

    The cancellation leaves the block as `ClientDisconnectedError`. The request's body must have been read before.
    """

    __slots__ = ("_disconnected", "_receive", "_task", "_watcher")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._disconnected = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "a watch needs a task that it can cancel"
        self._task = task
        self._watcher = asyncio.create_task(self._watch())

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        if self._disconnected and exc_type is asyncio.CancelledError:
            self._task.uncancel()
            raise ClientDisconnectedError from None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._disconnected = True
        self._task.cancel()
