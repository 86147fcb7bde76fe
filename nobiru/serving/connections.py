"""Connections beside their requests: the parser that reads them, the socket they come from, and idle ones.

Owns how the server listens and how long a connection may stay without a request. Knows nothing of routes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from typing import Any

from nobiru.errors import ConfigError

BACKLOG = 2048
# Longer than the 60 s of common load balancers, so that a connection is never closed under a request being sent.
KEEP_ALIVE_S = 75
# From the end of the last answer (or the start of the connection) to the end of the next request's head.
HEAD_TIMEOUT_S = 90.0


class IdleConnections:
    """Closes connections that neither wait for an answer nor get a request across, such as dripping ones.

    uvicorn closes idle connections itself, but its timer stops at the first byte. `sweep` is called about once a second
    and costs nothing per request. Of a connection it reads `cycle` and `transport`, which those of all parsers have.
    """

    def __init__(self, timeout_s: float = HEAD_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._since_s: dict[Any, tuple[object, float]] = {}

    def sweep(self, connections: Iterable[Any], now_s: float) -> None:
        """Close what has been without a request for too long."""
        since_s: dict[Any, tuple[object, float]] = {}
        for connection in connections:
            cycle = connection.cycle
            if cycle is not None and not cycle.response_complete:
                continue
            last_cycle, idle_since_s = self._since_s.get(connection, (None, now_s))
            if last_cycle is not cycle:
                idle_since_s = now_s
            since_s[connection] = cycle, idle_since_s
            if now_s - idle_since_s > self._timeout_s:
                connection.transport.close()
        self._since_s = since_s


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that listens already, so that connections wait instead of being refused while the server starts.

    Raises `ConfigError` when the address cannot be used.
    """
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, address = infos[0][0], infos[0][4]
        dualstack = family == socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=dualstack)
    except socket.gaierror as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror}; check --host", param="host") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {reason}; choose another --port", param="port"
        ) from None


def http_protocol() -> type[asyncio.Protocol]:
    """The fastest parser that is installed."""
    try:
        # Not everywhere: it has no wheels for some platforms.
        from nobiru.serving.limited_httptools import LimitedHttpToolsProtocol
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol

        return H11Protocol
    return LimitedHttpToolsProtocol
