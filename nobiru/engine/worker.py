"""A worker process of a rank: computes its share of every step that the leader takes.

Owns the process' life, as a rank does: it starts from a description on standard input and ends when that closes.
Between steps it waits for the leader's next message and uses no CPU. An exchange that fails ends it, and with it the
rank; but where ranks step together, it only leaves the epoch, and the leader learns of the failure by itself.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

import msgspec
import torch
import zmq

from nobiru.engine.rank import end_with_parent, in_background
from nobiru.engine.shares import load_share
from nobiru.engine.team import meet, worker_identity
from nobiru.engine.team_messages import (
    Allocate,
    IdleStep,
    Ready,
    ShareLoaded,
    Step,
    WorkerFailed,
    WorkerSpec,
    decode_to_worker,
    encode,
    unpack_step,
)
from nobiru.errors import ConfigError, ModelFolderError
from nobiru.folder.read import read_folder
from nobiru.layers.sharding import Shard
from nobiru.parallel.tensor import WorkerGroup
from nobiru.runner.causal import CausalRunner

logger = logging.getLogger(__name__)


def main() -> None:
    """The process' entry point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerSpec)
    logging.basicConfig(level=spec.log_level.upper(), format=f"worker {spec.index} %(levelname)s %(message)s")
    in_background("parent-watch", end_with_parent)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, worker_identity(spec.index))
    socket.setsockopt(zmq.LINGER, 2000)
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)
    socket.connect(spec.endpoint)
    try:
        _work(spec, socket)
    except Exception as error:
        permanent = isinstance(error, ConfigError | ModelFolderError)
        if not permanent:
            logger.exception("the worker ends")
        message = str(error) if permanent else f"{type(error).__name__}: {error}"
        socket.send(encode(WorkerFailed(message=message, permanent=permanent)))
    socket.close()
    context.term()
    sys.stderr.flush()
    os._exit(1)


def _work(spec: WorkerSpec, socket: zmq.Socket[bytes]) -> None:
    """Load, say so, compute until the process ends."""
    torch.set_num_threads(spec.num_threads)
    socket.send(encode(Ready()))
    group = WorkerGroup(Shard(spec.index, spec.engine.tensor_parallel_size))
    group.join(meet(spec.store_port, group.shard, spec.engine.step_timeout_s))
    folder = read_folder(Path(spec.engine.model), max_model_len=spec.engine.max_model_len)
    runner = load_share(spec.engine, folder, group, position=spec.position, slots=spec.slots)
    socket.send(encode(ShareLoaded()))
    while True:
        _obey(runner, socket.recv())


def _obey(runner: CausalRunner, payload: bytes) -> None:
    match decode_to_worker(payload):
        case Allocate() as message:
            runner.allocate_cache(message.num_blocks, message.block_size)
        case Step() as message:
            runner.follow(unpack_step(message))
        case IdleStep():
            assert runner.moe is not None
            runner.moe.run_idle()
