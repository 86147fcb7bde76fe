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

from nobiru.engine.expert_worker import ExpertWorker
from nobiru.engine.messages import Abandon, Begin, Forget, Form, MoveExperts, Vacate
from nobiru.engine.rank import beat, end_with_parent, in_background
from nobiru.engine.recorder import FlightRecorder
from nobiru.engine.shares import load_share, make_expert_worker
from nobiru.engine.team import meet, worker_identity
from nobiru.engine.team_messages import (
    Allocate,
    CollectLoads,
    IdleStep,
    Ready,
    ShareLoaded,
    Step,
    Switch,
    ToWorker,
    WorkerFailed,
    WorkerSpec,
    decode_to_worker,
    encode,
    unpack_step,
)
from nobiru.errors import ConfigError, GroupError, ModelFolderError
from nobiru.folder.read import read_folder
from nobiru.layers.sharding import Shard
from nobiru.machine import name_process
from nobiru.parallel.tensor import WorkerGroup
from nobiru.runner.causal import CausalRunner

BUSY_POLL_MS = 20  # while a thread prepares or copies

logger = logging.getLogger(__name__)


def main() -> None:
    """The process' entry point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerSpec)
    name_process(f"nobiru-worker-{spec.index}")
    logging.basicConfig(level=spec.log_level.upper(), format=f"worker {spec.index} %(levelname)s %(message)s")
    recorder = FlightRecorder.attach(spec.recorder_fd)
    in_background("parent-watch", end_with_parent)
    in_background("heartbeat", lambda: beat(recorder))
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
    runner = load_share(spec.engine, folder, spec.place, group)
    socket.send(encode(ShareLoaded()))
    steps_with_others = spec.engine.enable_expert_parallel
    experts = make_expert_worker(spec.engine, runner.moe, spec.place, group) if steps_with_others else None
    worker = Worker(runner, experts, socket)
    while True:
        worker.obey()


class Worker:
    """Does what the leader says. `experts` is its part in epochs, where ranks step together."""

    def __init__(self, runner: CausalRunner, experts: ExpertWorker | None, socket: zmq.Socket[bytes]) -> None:
        self._runner = runner
        self._experts = experts
        self._socket = socket
        self._is_copying = False

    def obey(self) -> None:
        """One message; or, while a thread is busy, perhaps none. `GroupError` if that is this process' end."""
        experts = self._experts
        if experts is not None and (experts.is_preparing or self._is_copying):
            self._report(experts)
            if not self._socket.poll(BUSY_POLL_MS):
                return
        message = decode_to_worker(self._socket.recv())
        try:
            self._do(message)
        except GroupError as error:
            if experts is None:
                raise
            logger.warning("leaving the epoch: %s", error)
            experts.leave()

    def _do(self, message: ToWorker) -> None:
        match message:
            case Step():
                self._runner.follow(unpack_step(message))
            case Allocate():
                self._runner.allocate_cache(message.num_blocks, message.block_size)
            case _:
                assert self._experts is not None, "the rank is one of several that step together"
                self._do_with_others(self._experts, message)

    def _do_with_others(self, experts: ExpertWorker, message: ToWorker) -> None:
        moves = experts.moves
        match message:
            case IdleStep():
                experts.run_idle()
            case CollectLoads():
                experts.collect_loads()
            case Form():
                experts.prepare(message)
            case Forget():
                experts.forget(message.attempt)
            case Begin():
                experts.begin(message.attempt)
                self._is_copying = False
            case Abandon():
                if experts.epoch is not None and experts.epoch.attempt <= message.attempt:
                    experts.leave()
            case MoveExperts() if moves is not None:
                moves.begin(message)
                self._is_copying = True
            case Switch() if moves is not None:
                moves.switch()
            case Vacate() if moves is not None:
                moves.vacate(message.version)

    def _report(self, experts: ExpertWorker) -> None:
        """What threads have brought to an end."""
        if (formed := experts.take_prepared()) is not None:
            self._socket.send(encode(formed))
        if not self._is_copying or experts.moves is None:
            self._is_copying = False
        elif (moved := experts.moves.take_outcome()) is not None:
            self._is_copying = False
            self._socket.send(encode(moved))
