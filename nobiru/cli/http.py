"""Requests of the commands to a running server: JSON in, JSON out, failures as errors that say what to do.

Owns addresses, keys, timeouts and how answers become errors. Knows no route.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException, HTTPMessage
from typing import IO, Any
from urllib.parse import urlsplit

from nobiru.cli import options
from nobiru.errors import (
    AuthenticationError,
    ConfigError,
    ConflictError,
    InvalidRequestError,
    NobiruError,
    NotFoundError,
    UnavailableError,
)

TIMEOUT_S = 10.0
_BY_STATUS: dict[int, type[NobiruError]] = {
    kind.status: kind
    for kind in (InvalidRequestError, AuthenticationError, NotFoundError, ConflictError, UnavailableError)
}


class Server:
    """The server at `url`, with or without /v1. `key`, if any, is sent as bearer token.

    All methods raise `UnavailableError` when nobody answers in time, and for an answer that is an error the type with
    its status, `NobiruError` if there is none. Proxies and redirects are not followed: a key goes nowhere else.
    """

    def __init__(self, url: str, key: str | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        self.url = _checked(url)
        self._key = key
        self._timeout_s = timeout_s
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)

    def get(self, path: str) -> dict[str, Any]:
        return self._ask("GET", path)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._ask("POST", path, json.dumps(body).encode())

    def delete(self, path: str) -> dict[str, Any]:
        return self._ask("DELETE", path)

    def _ask(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self.url + path, data=body, headers=headers, method=method)
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(error) from None
        except (OSError, HTTPException) as error:
            raise self._unreachable(error) from None
        document = _json_object(content)
        if document is None:
            raise NobiruError(f"{self.url} answered {path} with something else than JSON; is it 'nobiru serve'?")
        return document

    def _refusal(self, error: urllib.error.HTTPError) -> NobiruError:
        try:
            told = (_json_object(error.read()) or {}).get("error")
        except (OSError, HTTPException):
            told = None
        if not isinstance(told, dict) or not isinstance(told.get("message"), str):
            return NobiruError(f"{self.url} answered with HTTP {error.code}; is it a 'nobiru serve' of this version?")
        message = told["message"]
        if error.code == AuthenticationError.status:
            message = f"{self.url} refuses the key: {message} (NOBIRU_ADMIN_KEY or NOBIRU_API_KEY can hold it)"
        return _BY_STATUS.get(error.code, NobiruError)(message, param=told.get("param"), code=told.get("code"))

    def _unreachable(self, error: Exception) -> UnavailableError:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(cause, TimeoutError):
            return UnavailableError(f"{self.url} did not answer in {self._timeout_s:g} s; is it the right --url?")
        told = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        return UnavailableError(
            f"no server answers at {self.url} ({told}); start one with 'nobiru serve', or give its address with --url"
        )


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


def key_for(explicit: str | None, *names: str) -> str | None:
    """The key to send: the one given, else the first that the environment has for these options of the server."""
    if explicit is not None:
        return explicit
    found, _ = options.with_environment({}, [each for each in options.SERVER_OPTIONS if each.name in names])
    return next((found[name][0] for name in names if found.get(name)), None)


def _checked(url: str) -> str:
    text = url.strip().rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(text)
        is_good = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good or not text.isascii() or any(letter <= " " for letter in text):
        raise ConfigError(f"url is {url!r}; it must be like http://127.0.0.1:8000", param="url")
    return text


def _json_object(content: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(content)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
