"""Answers as bytes: JSON, errors in OpenAI's shape, and long JSON in slices.

Owns how an answer looks on the wire. Knows nothing of requests, routes or the engine.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nobiru.errors import AuthenticationError, InvalidRequestError, NobiruError
from nobiru.serving.disconnect import DisconnectWatch

RawHeaders = Iterable[tuple[bytes, bytes]]

_JSON = (b"content-type", b"application/json")
_json = msgspec.json.Encoder()


class JsonResponse(Response):
    """JSON from `content`, or from bytes that are JSON already."""

    def __init__(self, content: Any, status_code: int = 200, headers: RawHeaders = ()) -> None:
        body = content if isinstance(content, bytes) else _json.encode(content)
        self.body = body
        self.status_code = status_code
        self.background = None
        self.raw_headers = [_JSON, (b"content-length", b"%d" % len(body)), *headers]


class SlicedJsonResponse(Response):
    """JSON made while it is sent, so that other requests need not wait for all of it.

    Each slice should take about a millisecond to make. A client that leaves is noticed between slices.
    """

    def __init__(self, slices: Iterator[bytes]) -> None:
        self._slices = slices
        self.status_code = 200
        self.background = None
        self.raw_headers = [_JSON]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with DisconnectWatch(receive):
            for piece in self._slices:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def error_response(error: NobiruError, headers: RawHeaders = ()) -> JsonResponse:
    """`{"error": {"message", "type", "param", "code"}}` with the status and headers that belong to `error`."""
    extra = list(headers)
    if error.retry_after_s is not None:
        extra.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
    if isinstance(error, AuthenticationError):
        extra.append((b"www-authenticate", b"Bearer"))
    return JsonResponse(error_content(error), error.status, extra)


def error_content(error: NobiruError) -> dict[str, Any]:
    """The body of an error answer."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def unreadable_request(message: str) -> bytes:
    """The body of an error answer to something that HTTP itself cannot read."""
    return _json.encode(error_content(InvalidRequestError(message, code="bad_http_request")))
