"""The process that holds the rendezvous store, where the members of a group find each other.

Owns a `TCPStore` and nothing else. It belongs to the server and not to a rank, so that no rank is special; it ends when
its standard input closes. Groups that stand do not need it any more, so what they wrote is deleted when it is told to.
"""

from __future__ import annotations

import os
import signal
import sys

import msgspec
import zmq
from torch._C._distributed_c10d import TCPStore

from nobiru import env
from nobiru.engine import messages
from nobiru.engine.messages import Forget, StoreFailed, StoreReady
from nobiru.engine.rank_spec import STORE_IDENTITY, StoreSpec
from nobiru.machine import name_process
from nobiru.runner.faults import parse_faults


def main() -> None:
    """The process' entry point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    name_process("nobiru-store")
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=StoreSpec)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, STORE_IDENTITY)
    socket.setsockopt(zmq.LINGER, 2000)
    socket.connect(spec.endpoint)
    faults = parse_faults(env.fault_injection() or "") if spec.is_restart else {}
    port = faults.get("restarted_store_port", 0)  # 0: one that is free
    try:
        store = TCPStore(spec.host, port, is_master=True, wait_for_workers=False)
    except (RuntimeError, OSError) as error:  # no port is left, or no descriptor
        socket.send(messages.encode(StoreFailed(message=str(error).splitlines()[0])))
        socket.close()
        context.term()  # when it is sent
        os._exit(1)
    socket.send(messages.encode(StoreReady(host=spec.host, port=store.port)))
    poller = zmq.Poller()
    for source in (0, socket):
        poller.register(source, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if 0 in ready and not os.read(0, 4096):
            os._exit(0)
        if socket in ready and isinstance(message := messages.decode_to_rank(socket.recv()), Forget):
            forget(store, message.attempt)


def forget(store: TCPStore, attempt: int) -> None:
    """Delete the keys of this attempt and earlier ones, with which members that were late may have come meanwhile."""
    for key in store.list_keys():
        number, slash, _ = key.partition("/")
        if slash and int(number) <= attempt:
            store.delete_key(key)
