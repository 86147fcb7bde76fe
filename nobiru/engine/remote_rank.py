"""A rank whose launcher is on another machine: no memory to share with it, no descriptor that closes when it dies.

Owns what takes their place. The rank sends a beat four times a second, and tells of each step before it begins. The
server answers each beat of a rank that it counts on; after `LEASE_S` without an answer the rank ends. Everything else
is as in `nobiru.engine.rank`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np
import zmq

from nobiru.engine import messages
from nobiru.engine.messages import Beat, Executing
from nobiru.engine.rank import HEARTBEAT_S, connect, in_background, serve
from nobiru.engine.rank_spec import RankSpec, heart_identity

LEASE_S = 10.0
# Before the first answer: the server may still be starting.
FIRST_LEASE_S = 60.0
LEASE_EXIT_CODE = 3

logger = logging.getLogger(__name__)


class SentRecorder:
    """Writes by sending; the server's `RemoteRecorder` is what it reads. Over the rank's own socket, in its thread."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def step_begins(self, seq_ids: Sequence[int]) -> None:
        ids = np.array(seq_ids, dtype="<i8").tobytes()
        self._socket.send(messages.encode(Executing(seq_ids=ids)))

    def step_ends(self) -> None:
        self.step_begins([])


def main(spec: bytes, *, host: str, num_threads: int) -> int:
    """The entry point, called in a thread; the exit code. `host` is this machine's address, as others reach it.

    The process is the launcher's to end. Its signals and its standard streams are left alone.
    """
    described = msgspec.json.decode(spec, type=RankSpec)
    engine = msgspec.structs.replace(described.engine, num_threads=num_threads)
    described = msgspec.structs.replace(described, host=host, engine=engine)
    logging.basicConfig(level=described.log_level.upper(), format=f"{described.rank_id} %(levelname)s %(message)s")
    context = zmq.Context()
    in_background("heart", partial(_keep_lease, context, described))
    socket = connect(context, described, described.rank_id)
    exit_code = serve(described, context, socket, SentRecorder(socket))
    socket.close()
    context.term()
    return exit_code


def _keep_lease(context: zmq.Context[zmq.Socket[bytes]], spec: RankSpec) -> None:
    socket = connect(context, spec, heart_identity(spec.rank_id))
    # Counted in beats: while this process stood still, nobody could answer it.
    num_unanswered, limit_s = 0, FIRST_LEASE_S
    beat = messages.encode(Beat())
    try:
        while num_unanswered * HEARTBEAT_S < limit_s:
            socket.send(beat)
            num_unanswered += 1
            time.sleep(HEARTBEAT_S)
            while socket.poll(0):
                socket.recv()
                num_unanswered, limit_s = 0, LEASE_S
    except zmq.ContextTerminated:  # the rank ends
        socket.close()
        return
    logger.error("rank %s ends: the server has not answered for %.0f s", spec.rank_id, limit_s)
    os._exit(LEASE_EXIT_CODE)
