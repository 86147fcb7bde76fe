"""The process that holds the rendezvous store, where the members of a group find each other.

Owns a `TCPStore` and nothing else. It belongs to the server and not to a rank, so that no rank is special; it ends when
its standard input closes. Groups that stand do not need it any more.
"""

from __future__ import annotations

import os
import signal
import sys

import msgspec
import zmq
from torch._C._distributed_c10d import TCPStore

from nobiru.engine import messages
from nobiru.engine.messages import StoreReady

STORE_IDENTITY = b"store"


class StoreSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One JSON line on standard input: where to say that the store is ready, and the address it is reached at."""

    endpoint: str
    host: str = "127.0.0.1"


def main() -> None:
    """The process' entry point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=StoreSpec)
    store = TCPStore(spec.host, 0, is_master=True, wait_for_workers=False)
    socket = zmq.Context().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, STORE_IDENTITY)
    socket.connect(spec.endpoint)
    socket.send(messages.encode(StoreReady(host=spec.host, port=store.port)))
    while os.read(0, 4096):
        continue
    os._exit(0)
