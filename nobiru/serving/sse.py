"""Answers that are written while they are made, as server-sent events.

Owns the framing of events and how a stream ends, well or not. Knows nothing of what is in them.
Format: https://html.spec.whatwg.org/multipage/server-sent-events.html; that `[DONE]` is last is OpenAI's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nobiru.errors import NobiruError, UnavailableError
from nobiru.serving.disconnect import DisconnectWatch
from nobiru.serving.responses import error_content

DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # for proxies that would collect the answer first
]
_encode = msgspec.json.Encoder().encode

log = logging.getLogger("nobiru.server")


def event(content: Any) -> bytes:
    """One event; JSON has no line ends."""
    return b"data: " + _encode(content) + b"\n\n"


class EventStream(Response):
    """Sends pieces of encoded events as they come; `close` is called when it ends, however it does.

    A client that leaves is noticed at once. What goes wrong in the middle is the last event before `[DONE]`.
    """

    def __init__(self, pieces: AsyncGenerator[bytes], *, close: Callable[[], None]) -> None:
        self._pieces = pieces
        self._close = close
        self.status_code = 200
        self.background = None
        self.raw_headers = list(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with DisconnectWatch(receive):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                try:
                    async with contextlib.aclosing(self._pieces) as pieces:
                        async for piece in pieces:
                            await send(_body(piece))
                except NobiruError as error:
                    await send(_body(event(error_content(error))))
                except Exception:
                    request_id = scope["nobiru"].request_id
                    log.exception("the stream of request %s failed", request_id)
                    message = f"internal error; the server's log tells more about request {request_id}"
                    await send(_body(event(error_content(NobiruError(message, code="internal_error")))))
                await send(_body(DONE))
                await send(_body(b"", more=False))
        except asyncio.CancelledError:
            await _say_goodbye(send)
            raise
        finally:
            self._close()


async def _say_goodbye(send: Send) -> None:
    """The server shuts down in the middle of a stream: its end should not look like the text's."""
    error = UnavailableError("the server shut down before this text was done; send the request again")
    await send(_body(event(error_content(error)) + DONE))
    await send(_body(b"", more=False))


def _body(piece: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": piece, "more_body": more}
