"""Reading a request's JSON body: bounded in size and time, and refused with the reason when it is not JSON.

Owns the limits on bodies. Knows nothing of the fields inside.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import Receive

from nobiru.errors import BodyTooLargeError, InvalidRequestError, RequestTimeoutError, UnsupportedMediaTypeError
from nobiru.serving.disconnect import ClientDisconnectedError

_BOM = b"\xef\xbb\xbf"
_LARGE_BYTES = 2**20
_decode = msgspec.json.Decoder().decode


async def read_object(request: Request, *, max_bytes: int, timeout_s: float) -> dict[str, Any]:
    """The JSON object a client sent. Raises a `NobiruError` that says why there is none."""
    _check_headers(request.scope["headers"], max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            body = await _read(request.receive, max_bytes)
    except TimeoutError:
        raise RequestTimeoutError(
            f"the body did not arrive within {timeout_s:g} s; send it faster or in smaller requests"
        ) from None
    return parse_object(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """Decode; whatever is wrong with the body becomes an `InvalidRequestError`."""
    try:
        with _collector_paused() if len(body) > _LARGE_BYTES else nullcontext():
            value = _decode(body.removeprefix(_BOM))
    except msgspec.ValidationError as error:
        raise _not_json(f"a number in the body is out of range ({error})") from None
    except (ValueError, UnicodeError) as error:
        raise _not_json(f"the body is not valid JSON: {error}" if body else "the body is empty") from None
    except RecursionError:
        raise _not_json("the body is nested too deeply") from None
    if not isinstance(value, dict):
        raise _not_json(f"the body is {json_kind(value)}; it must be an object")
    return value


def json_kind(value: object) -> str:
    """What JSON calls a decoded value, with its article."""
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, list):
        return "a list"
    return "an object" if isinstance(value, dict) else "null"


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Millions of lists made at once would be searched for garbage again and again: four times the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check_headers(headers: list[tuple[bytes, bytes]], max_bytes: int) -> None:
    for name, value in headers:
        if name == b"content-length":
            if int(value) > max_bytes:
                raise _too_large(f"has {int(value)} bytes", max_bytes)
        elif name == b"content-type":
            media_type = value.partition(b";")[0].strip().lower()
            if media_type and media_type != b"application/json" and not media_type.endswith(b"+json"):
                shown = media_type.decode("latin-1")
                raise UnsupportedMediaTypeError(f"Content-Type is {shown!r}; send application/json")
        elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            shown = value.decode("latin-1")
            raise UnsupportedMediaTypeError(f"Content-Encoding is {shown!r}; send the body without compression")


async def _read(receive: Receive, max_bytes: int) -> bytes:
    pieces: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        piece = message.get("body", b"")
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            raise _too_large("is longer", max_bytes)
        pieces.append(piece)
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _too_large(what: str, max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body {what}; the limit is max_body_bytes = {max_bytes}. Send the inputs in several requests"
    )


def _not_json(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, code="invalid_json")
