"""The door of the server: what happens to every HTTP request, whatever its route.

Owns API keys, request ids, the table of hot routes, what becomes of exceptions, and the counting and logging of
answers. Knows nothing of what routes do. It is a plain ASGI callable: each microsecond here is taken from the ranks.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nobiru.errors import AuthenticationError, NobiruError, UnavailableError
from nobiru.metrics import Metrics
from nobiru.serving.admission import DRAIN_RETRY_AFTER_S, Admission, Ticket
from nobiru.serving.disconnect import ClientDisconnectedError
from nobiru.serving.responses import error_response

Endpoint = Callable[[Request], Awaitable[Response]]

# Whoever restarts or measures the server has no key.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
CLIENT_LEFT = 499
_MAX_REQUEST_ID_CHARS = 128
_NOT_IN_REQUEST_ID = re.compile(rb"[^A-Za-z0-9._:/+=@-]")

log = logging.getLogger("nobiru.server")
access_log = logging.getLogger("nobiru.access")


class RequestContext:
    """What belongs to one HTTP request, found at `scope["nobiru"]`.

    `request_id` is the client's own if it sent one; `unique_id` never comes from a client. `started_s` is when its head
    had arrived (`time.perf_counter`).
    """

    __slots__ = ("request_id", "started_s", "ticket", "unique_id")

    def __init__(self, unique_id: str, request_id: str, started_s: float) -> None:
        self.started_s = started_s
        self.unique_id = unique_id
        self.request_id = request_id
        self.ticket: Ticket | None = None


def context_of(request: Request) -> RequestContext:
    context = request.scope["nobiru"]
    assert isinstance(context, RequestContext)
    return context


class Gate:
    """`endpoints` are called directly, by method and path; everything else goes to `fallback`."""

    def __init__(
        self,
        *,
        endpoints: Mapping[tuple[str, str], Endpoint],
        fallback: ASGIApp,
        api_keys: Iterable[str],
        admission: Admission,
        metrics: Metrics,
        log_access: bool,
    ) -> None:
        self._endpoints = endpoints
        self._fallback = fallback
        self._key_digests = [_digest(key.encode()) for key in api_keys]
        self._admission = admission
        self._metrics = metrics
        self._log_access = log_access
        self._id_prefix = secrets.token_hex(6)
        self._counter = itertools.count(1)
        # Set when the time for draining is over: requests that are cancelled from then on still get an answer.
        self.closing = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_s = time.perf_counter()
        context = self._new_context(scope, started_s)
        reply = _Reply(send, context.request_id, self._admission)
        try:
            await self._dispatch(scope, receive, reply)
        except ClientDisconnectedError:
            reply.status = CLIENT_LEFT
        except asyncio.CancelledError:
            if not self.closing:
                raise
            await self._answer(_cut_off(), scope, receive, reply)
        except NobiruError as error:
            if scope["path"] not in OPEN_PATHS:
                self._metrics.rejected(error.code or error.type)
            await self._answer(error, scope, receive, reply)
        except Exception:
            log.exception("request %s failed: %s %s", context.request_id, scope["method"], scope["path"])
            await self._answer(_internal(context.request_id), scope, receive, reply)
        finally:
            if context.ticket is not None:
                context.ticket.close()
            self._record(scope, context, reply.status or CLIENT_LEFT, time.perf_counter() - started_s)

    async def _dispatch(self, scope: Scope, receive: Receive, reply: Send) -> None:
        path = scope["path"]
        if self._key_digests and path not in OPEN_PATHS:
            self._authenticate(scope)
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        endpoint = self._endpoints.get((method, path))
        if endpoint is None:
            await self._fallback(scope, receive, reply)
            return
        response = await endpoint(Request(scope, receive))
        await response(scope, receive, reply)

    async def _answer(self, error: NobiruError, scope: Scope, receive: Receive, reply: _Reply) -> None:
        """Send an error, unless an answer has begun: then the connection is closed in the middle of it."""
        if reply.status is None:
            await error_response(error)(scope, receive, reply)

    def _new_context(self, scope: Scope, started_s: float) -> RequestContext:
        unique_id = request_id = f"{self._id_prefix}-{next(self._counter)}"
        if (given := _header(scope, b"x-request-id")) is not None:
            request_id = _NOT_IN_REQUEST_ID.sub(b"", given)[:_MAX_REQUEST_ID_CHARS].decode("ascii") or unique_id
        context = scope["nobiru"] = RequestContext(unique_id, request_id, started_s)
        return context

    def _authenticate(self, scope: Scope) -> None:
        given = _header(scope, b"authorization")
        scheme, _, key = (given or b"").partition(b" ")
        if not given or scheme.lower() != b"bearer":
            raise AuthenticationError("this server needs an API key; send it as 'Authorization: Bearer KEY'")
        digest = _digest(key.strip())
        # All keys are compared, so that the time taken does not tell which one was right.
        num_equal = sum(hmac.compare_digest(digest, known) for known in self._key_digests)
        if not num_equal:
            raise AuthenticationError("the API key is not one of this server's")

    def _record(self, scope: Scope, context: RequestContext, status: int, seconds: float) -> None:
        self._metrics.observe_request(self._route_of(scope), status, seconds)
        if self._log_access:
            fields = {
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "ms": round(seconds * 1e3, 3),
                "request_id": context.request_id,
            }
            access_log.info(
                "%(method)s %(path)s %(status)d %(ms).1f ms %(request_id)s", fields, extra={"fields": fields}
            )

    def _route_of(self, scope: Scope) -> str:
        """A path as registered, so that clients cannot make up label values."""
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        if (method, scope["path"]) in self._endpoints:
            return str(scope["path"])
        return str(getattr(scope.get("route"), "path", "other"))


class _Reply:
    """`send` that knows the status and puts the headers every answer has."""

    __slots__ = ("_admission", "_request_id", "_send", "status")

    def __init__(self, send: Send, request_id: str, admission: Admission) -> None:
        self._send = send
        self._request_id = request_id
        self._admission = admission
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self._request_id.encode("ascii"))]
            if self._admission.draining:
                headers.append((b"connection", b"close"))
            message["headers"] = headers
        await self._send(message)


def _header(scope: Scope, wanted: bytes) -> bytes | None:
    for name, value in scope["headers"]:
        if name == wanted:
            found: bytes = value
            return found
    return None


def _digest(key: bytes) -> bytes:
    """Keys are compared by digests of equal length, so that the time taken does not tell a key's length."""
    return hashlib.sha256(key).digest()


def _cut_off() -> UnavailableError:
    return UnavailableError(
        "the server shut down before this request was done; send it again", retry_after_s=DRAIN_RETRY_AFTER_S
    )


def _internal(request_id: str) -> NobiruError:
    return NobiruError(f"internal error; the server's log tells more about request {request_id}", code="internal_error")
