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

from nobiru.engine.expert_member import ExpertMember
from nobiru.engine.messages import Form, MoveExperts, Vacate
from nobiru.engine.rank import beat, end_with_parent, in_background
from nobiru.engine.recorder import FlightRecorder
from nobiru.engine.shares import load_share, make_member
from nobiru.engine.team import Place, meet, worker_identity
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
    WorkerFormed,
    WorkerSpec,
    decode_to_worker,
    encode,
    unpack_step,
)
from nobiru.errors import ConfigError, GroupError, ModelFolderError
from nobiru.folder.read import read_folder
from nobiru.layers.sharding import Shard
from nobiru.parallel.tensor import WorkerGroup
from nobiru.runner.causal import CausalRunner

COPYING_POLL_MS = 20

logger = logging.getLogger(__name__)


def main() -> None:
    """The process' entry point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerSpec)
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
    place = Place(position=spec.position, slots=spec.slots, host=spec.host)
    runner = load_share(spec.engine, folder, place, group)
    socket.send(encode(ShareLoaded()))
    steps_with_others = spec.engine.enable_expert_parallel
    member = make_member(spec.engine, runner.moe, place, workers=group) if steps_with_others else None
    worker = Worker(runner, member, socket)
    while True:
        worker.obey()


class Worker:
    """Does what the leader says. `member` is its part in epochs, where ranks step together."""

    def __init__(self, runner: CausalRunner, member: ExpertMember | None, socket: zmq.Socket[bytes]) -> None:
        self._runner = runner
        self._member = member
        self._socket = socket
        self._is_copying = False

    def obey(self) -> None:
        """One message; or, while experts are copied, perhaps none. `GroupError` if that is this process' end."""
        if self._is_copying:
            self._report_moved()
            if not self._socket.poll(COPYING_POLL_MS):
                return
        message = decode_to_worker(self._socket.recv())
        try:
            self._do(message)
        except GroupError as error:
            if self._member is None:
                raise
            logger.warning("leaving the epoch: %s", error)
            self._member.leave()

    def _do(self, message: ToWorker) -> None:
        match message:
            case Step():
                self._runner.follow(unpack_step(message))
            case Allocate():
                self._runner.allocate_cache(message.num_blocks, message.block_size)
            case _:
                assert self._member is not None, "the rank is one of several that step together"
                self._do_with_others(self._member, message)

    def _do_with_others(self, member: ExpertMember, message: ToWorker) -> None:
        moves = member.moves
        match message:
            case IdleStep():
                member.run_idle()
            case CollectLoads():
                member.collect_loads()
            case Form():
                self._form(member, message)
            case MoveExperts() if moves is not None:
                moves.begin(message)
                self._is_copying = True
            case Switch() if moves is not None:
                moves.switch()
            case Vacate() if moves is not None:
                moves.vacate(message.version)

    def _form(self, member: ExpertMember, form: Form) -> None:
        self._is_copying = False
        try:
            member.form(form)
        except GroupError as error:
            self._socket.send(encode(WorkerFormed(attempt=form.attempt, error=str(error))))
        else:
            self._socket.send(encode(WorkerFormed(attempt=form.attempt)))

    def _report_moved(self) -> None:
        moves = self._member.moves if self._member is not None else None
        if moves is None:
            self._is_copying = False
        elif (outcome := moves.take_outcome()) is not None:
            self._is_copying = False
            self._socket.send(encode(outcome))
