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
from nobiru.engine.rank_spec import STORE_IDENTITY, StoreSpec


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
