"""A rank process: receives slices, steps its engine core, sends results.

Owns the process' life: it starts from a description on standard input, beats its heart into the flight recorder, and
ends when it is told to or when standard input closes, which the kernel does when the parent dies however it dies.
Interrupts and SIGTERM are ignored: they reach the whole process group, and the parent decides when a rank ends.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np
import zmq

from nobiru import env
from nobiru.engine import messages
from nobiru.engine.core import EngineCore, StepOutput
from nobiru.engine.limits import SERVER_STEP_S, SERVER_TOKEN_BUDGET
from nobiru.engine.messages import (
    Abandon,
    Abort,
    Add,
    Applied,
    Arm,
    Awake,
    Begin,
    Crashed,
    EngineState,
    Failure,
    Forget,
    Form,
    Generate,
    Generated,
    Idle,
    Loaded,
    MoveExperts,
    Probe,
    ProbeDone,
    StartFailed,
    StepDone,
    Stop,
    Switched,
    Vacate,
    Wake,
)
from nobiru.engine.rank_spec import RankSpec, control_identity
from nobiru.engine.recorder import FlightRecorder, StepRecorder
from nobiru.engine.sequences import embedding_sequence, generation_sequence
from nobiru.errors import ConfigError, GroupError, InvalidRequestError, ModelFolderError, NobiruError
from nobiru.folder.state import check_unchanged
from nobiru.generation import FinishReason, SampledToken
from nobiru.machine import name_process
from nobiru.request import SequenceInput
from nobiru.runner.faults import parse_faults
from nobiru.scheduler import CausalState, Part, Plan, Sequence

HEARTBEAT_S = 0.25
IDLE_POLL_MS = 1000
PREPARING_POLL_MS = 5
PROBE_ID = -1

if TYPE_CHECKING:
    from nobiru.engine.expert_member import ExpertMember  # brings torch

logger = logging.getLogger(__name__)


class RankServer:
    """Moves messages between the socket and the core, a step at a time.

    With `member`, it steps only together with the other members of an epoch, once one has begun.
    """

    def __init__(
        self,
        core: EngineCore,
        socket: zmq.Socket[bytes],
        recorder: StepRecorder,
        member: ExpertMember | None = None,
    ) -> None:
        self._core = core
        self._member = member
        self._socket = socket
        self._recorder = recorder
        self._slices: dict[int, range] = {}
        self._probes: list[int] = []
        self._num_preemptions = 0
        self._sent_state = EngineState()
        self._stopping = False

    def run(self) -> None:
        """Until a `Stop`. What queued up during a step becomes the next batch."""
        while not self._stopping:
            self._receive_all()
            output = self._core.step() if self._member is None else self._step_together(self._member)
            if output is not None:
                self._send_results(output)
                if not self._core.is_executing:
                    self._recorder.step_ends()
            elif self._sent_state.num_running or self._sent_state.num_waiting:
                self._say_idle()
            if self._member is not None:
                self._report_experts(self._member)
            self._answer_probes(forward_pass_done=output is not None)

    def _step_together(self, member: ExpertMember) -> StepOutput | None:
        """One step of the epoch, if there is one and somebody has work; its failure is undone, and the epoch left."""
        if member.epoch is None or member.is_parked or (member.is_asleep and not self._core.has_work):
            return None
        epoch = member.epoch
        if member.is_asleep:
            self._send(Awake(epoch=epoch, seq=member.seq))
            member.is_asleep = False
        plan = self._core.plan()
        try:
            what = member.gather(plan)
            self._say_applied(member)
            if what != "step":
                if plan is not None:
                    self._core.scheduler.abandon(plan)
                return None
            if plan is not None:
                return self._core.run(plan)
            member.run_idle()
        except GroupError as error:
            if plan is not None and member.is_before_step:
                self._core.scheduler.abandon(plan)
            logger.warning("leaving epoch %d: %s", epoch, error)
            member.leave(str(error))
            self._recorder.step_ends()
        return None

    def _say_applied(self, member: ExpertMember) -> None:
        if not member.has_applied and member.attempt is not None:
            member.has_applied = True
            self._send(Applied(attempt=member.attempt))

    def _report_experts(self, member: ExpertMember) -> None:
        """What the controller has to know of preparations, moves and loads."""
        if (formed := member.take_prepared()) is not None:
            self._send(formed)
        if (reminder := member.take_reminder()) is not None:
            self._send(reminder)
        if member.moves is None:
            return
        if (outcome := member.moves.take_outcome()) is not None:
            self._send(outcome)
        if member.has_switched:
            member.has_switched = False
            self._send(Switched(version=member.moves.version))
        if (loads := member.take_loads()) is not None:
            self._send(loads)

    def _say_idle(self) -> None:
        """What was left has been aborted."""
        if not self._core.has_work:
            self._sent_state = EngineState()
            self._send(Idle(state=self._sent_state))

    def _receive_all(self) -> None:
        timeout_ms = IDLE_POLL_MS
        if self._has_step_to_run():
            timeout_ms = 0
        elif self._member is not None and self._member.is_preparing:
            timeout_ms = PREPARING_POLL_MS
        while self._socket.poll(timeout_ms):
            self._handle(messages.decode_to_rank(self._socket.recv()))
            timeout_ms = 0

    def _has_step_to_run(self) -> bool:
        member = self._member
        if member is None:
            return self._core.has_work
        return member.epoch is not None and not member.is_parked and (self._core.has_work or not member.is_asleep)

    def _handle(self, message: messages.ToRank) -> None:
        match message:
            case Add():
                self._add(message)
            case Generate():
                self._generate(message)
            case Form():
                self._expert_member.prepare(message)
            case Arm():
                self._expert_member.arm(message.attempt)
            case Forget():
                self._expert_member.forget(message.attempt)
            case Begin():
                self._expert_member.begin(message.attempt)
            case Wake():
                self._expert_member.wake(message.epoch, message.seq)
            case MoveExperts():
                if self._expert_member.moves is not None:
                    self._expert_member.moves.begin(message)
            case Vacate():
                if self._expert_member.moves is not None:
                    self._expert_member.moves.vacate(message.version)
            case Abandon():
                self._expert_member.break_out(message.attempt)
            case Abort():
                for slice_id in message.slice_ids:
                    self._core.abort(self._slices.pop(slice_id, (slice_id,)))
            case Probe():
                self._probes.append(message.nonce)
            case Stop():
                self._stopping = True

    @property
    def _expert_member(self) -> ExpertMember:
        assert self._member is not None, "only expert-parallel ranks form groups"
        return self._member

    def _send(self, message: messages.FromRank) -> None:
        self._socket.send(messages.encode(message))

    def _add(self, add: Add) -> None:
        lengths = np.frombuffer(add.lengths, dtype="<i4")
        ends = np.cumsum(lengths).tolist()
        token_ids = np.frombuffer(add.token_ids, dtype="<i4")
        arrival_s = time.monotonic() - add.age_s
        self._slices[add.slice_id] = range(add.first_seq_id, add.first_seq_id + len(ends))
        sequences, begin = [], 0
        for seq_id, end in zip(self._slices[add.slice_id], ends, strict=True):
            payload = SequenceInput(
                token_ids=token_ids[begin:end],
                dimensions=add.dimensions,
                normalize=add.normalize,
                num_skipped_tokens=add.num_skipped_tokens,
            )
            sequences.append(
                embedding_sequence(
                    payload,
                    is_causal=self._core.scheduler.has_cache,
                    seq_id=seq_id,
                    arrival=add.arrival,
                    arrival_s=arrival_s,
                    priority=add.priority,
                    alone=add.alone,
                )
            )
            begin = end
        self._core.add(sequences)

    def _generate(self, message: Generate) -> None:
        sequence = generation_sequence(
            message.params,
            child=message.child,
            prompt=np.frombuffer(message.prompt, dtype="<i4").tolist(),
            outputs=np.frombuffer(message.outputs, dtype="<i4").tolist(),
            max_tokens=message.max_tokens,
            stop_token_ids=message.stop_token_ids,
            seq_id=message.seq_id,
            arrival=message.arrival,
            arrival_s=time.monotonic() - message.age_s,
            alone=message.alone,
        )
        self._core.add([sequence])

    def _send_results(self, output: StepOutput) -> None:
        results = list(zip(output.sequences, output.outcomes, strict=True))
        ended = [(sequence, outcome) for sequence, outcome in results if not isinstance(outcome, SampledToken)]
        failures = [
            Failure(
                index=index,
                message=outcome.message,
                code=outcome.code,
                is_invalid=isinstance(outcome, InvalidRequestError),
            )
            for index, (_, outcome) in enumerate(ended)
            if isinstance(outcome, NobiruError)
        ]
        vectors = [each if isinstance(each, np.ndarray) else np.empty(0, np.float32) for _, each in ended]
        done = StepDone(
            seq_ids=np.array([sequence.seq_id for sequence, _ in ended], dtype="<i8").tobytes(),
            vector_sizes=np.array([vector.size for vector in vectors], dtype="<i4").tobytes(),
            vectors=np.concatenate(vectors).astype("<f4", copy=False).tobytes() if vectors else b"",
            failures=failures,
            generated=[_generated(sequence, each) for sequence, each in results if isinstance(each, SampledToken)],
            state=self._state(output) if self._core.scheduler.has_cache else None,
            queue_s=output.queue_s,
            num_sequences=output.num_sequences,
            num_tokens=output.num_tokens,
            compute_s=output.compute_s,
        )
        self._send(done)
        self._forget_slices()

    def _state(self, output: StepOutput) -> EngineState:
        scheduler = self._core.scheduler
        begun = [sequence.causal for sequence in output.newcomers if sequence.causal is not None]
        state = EngineState(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_usage=scheduler.kv_usage,
            num_preemptions=scheduler.num_preemptions - self._num_preemptions,
            num_cached_tokens=sum(each.num_cached_tokens or 0 for each in begun),
            num_prompt_tokens=sum(each.num_prompt_tokens for each in begun),
        )
        self._num_preemptions = scheduler.num_preemptions
        self._sent_state = state
        return state

    def _forget_slices(self) -> None:
        """Drop slices whose last sequence is done; partial ones stay for a possible abort."""
        if len(self._slices) > 4096 or not self._core.has_work:
            self._slices = {
                slice_id: ids
                for slice_id, ids in self._slices.items()
                if any(seq_id in self._core.scheduler.waiting for seq_id in ids)
            }

    def _answer_probes(self, *, forward_pass_done: bool) -> None:
        """A step that just ended proves as much as a pass of the probe's own."""
        if not self._probes:
            return
        if not forward_pass_done and not self._run_probe():
            return
        for nonce in self._probes:
            self._send(ProbeDone(nonce=nonce))
        self._probes.clear()

    def _run_probe(self) -> bool:
        """Run a small forward pass; false if it has to wait for the others of the epoch."""
        scheduler = self._core.scheduler
        if not scheduler.has_cache:
            self._core.executor.execute(probe_plan())
            return True
        if PROBE_ID not in scheduler.waiting and PROBE_ID not in scheduler.running:
            self._core.add([probe_sequence()])
        if self._member is not None:
            return False
        self._core.step()
        return True


def probe_plan() -> Plan:
    """The smallest forward pass: one sequence of one token."""
    payload = SequenceInput(token_ids=np.zeros(1, np.int32))
    sequence = Sequence(seq_id=PROBE_ID, num_tokens=1, arrival=-1, arrival_s=0.0, payload=payload)
    return Plan(parts=(Part(sequence=sequence, start=0, num_tokens=1, is_last=True),), num_tokens=1)


def probe_sequence() -> Sequence:
    """The same over the KV cache, in a block that it gets like any other sequence: nobody's may be written."""
    state = CausalState(token_ids=[0], num_prompt_tokens=1, max_num_tokens=1, cache_salt="probe")
    return Sequence(seq_id=PROBE_ID, num_tokens=1, arrival=-1, arrival_s=0.0, causal=state)


def _generated(sequence: Sequence, token: SampledToken) -> Generated:
    state = sequence.causal
    assert state is not None
    reason = cast("FinishReason | None", state.finish_reason)  # "pooled" belongs to sequences without tokens
    return Generated(
        seq_id=sequence.seq_id,
        first_index=state.num_outputs - 1,
        tokens=[token],
        finish_reason=reason,
        num_cached_tokens=state.num_cached_tokens or 0,
    )


def main() -> None:
    """The process' entry point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankSpec)
    name_process(f"nobiru-rank-{spec.rank_id}")
    logging.basicConfig(level=spec.log_level.upper(), format=f"{spec.rank_id} %(levelname)s %(message)s")
    assert spec.recorder_fd is not None
    recorder = FlightRecorder.attach(spec.recorder_fd)
    in_background("parent-watch", end_with_parent)
    in_background("heartbeat", lambda: beat(recorder))
    context = zmq.Context()
    socket = connect(context, spec, spec.rank_id)
    exit_code = serve(spec, context, socket, recorder)
    socket.close()
    context.term()
    with contextlib.suppress(OSError):  # logs may go to a disk that is full
        sys.stderr.flush()
    os._exit(exit_code)  # device libraries' exit handlers can hang; nothing is left to save


def connect(context: zmq.Context[zmq.Socket[bytes]], spec: RankSpec, identity: str) -> zmq.Socket[bytes]:
    """To the server, which knows this end of it by `identity`."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity.encode())
    socket.setsockopt(zmq.LINGER, 2000)
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)
    socket.connect(spec.endpoint)
    return socket


def serve(
    spec: RankSpec,
    context: zmq.Context[zmq.Socket[bytes]],
    socket: zmq.Socket[bytes],
    recorder: StepRecorder,
) -> int:
    """Load, say so, serve; the exit code."""
    try:
        _injected_start_fault(spec.rank_id)
        gc.disable()  # imports make many objects and no garbage: looking through them is a seventh of the start
        from nobiru.engine.build import build_engine  # torch, after the process has said that it lives

        gc.freeze()
        gc.enable()
        _check_folder(spec)
        engine = build_engine(
            spec.engine,
            default_budget=SERVER_TOKEN_BUDGET,
            step_s=SERVER_STEP_S,
            on_plan=lambda plan: recorder.step_begins([each.seq_id for each in plan.sequences]),
            place=spec.place,
            worker_timeout_s=spec.worker_timeout_s,
        )
        _check_folder(spec)  # nobody wrote into it meanwhile
    except Exception as error:
        permanent = isinstance(error, ConfigError | ModelFolderError)
        if not permanent:
            logger.exception("the rank cannot start")
        message = str(error) if permanent else f"{type(error).__name__}: {error}"
        socket.send(messages.encode(StartFailed(message=message, permanent=permanent)))
        return 1
    if engine.team is not None:
        engine.team.on_death = partial(os._exit, 1)  # it has logged why
    if engine.member is not None:
        control = connect(context, spec, control_identity(spec.rank_id))
        in_background("control", partial(_obey, control, engine.member))
    budget = engine.core.scheduler.config.max_num_batched_tokens
    loaded = Loaded(
        max_num_batched_tokens=budget,
        info=engine.info,
        inventory=engine.inventory,
        memory=engine.memory,
        worker_pids=[os.getpid(), *(engine.team.pids if engine.team is not None else ())],
    )
    socket.send(messages.encode(loaded))
    try:
        RankServer(engine.core, socket, recorder, engine.member).run()
    except Exception as error:
        logger.exception("the rank ends")
        socket.send(messages.encode(Crashed(message=f"{type(error).__name__}: {error}")))
        return 1
    engine.close()
    return 0


def _check_folder(spec: RankSpec) -> None:
    """`ModelFolderError` unless the folder is the one that the ranks before have loaded."""
    is_same_machine = spec.recorder_fd is not None
    check_unchanged(Path(spec.engine.model), spec.files, compare_times=is_same_machine)


def _obey(control: zmq.Socket[bytes], member: ExpertMember) -> None:
    """What must reach a rank that is stuck in a step."""
    try:
        while True:
            message = messages.decode_to_rank(control.recv())
            if isinstance(message, Abandon):
                member.break_out(message.attempt)
    except zmq.ContextTerminated:  # the rank ends
        control.close()


def _injected_start_fault(rank_id: str) -> None:
    faults = parse_faults(env.fault_injection() or "")
    number = int(rank_id.removeprefix("r"))
    if number < faults.get("fail_at_start", 0) or number >= faults.get("fail_from_rank", number + 1):
        raise RuntimeError("fault injection: this rank does not start")


def in_background(name: str, target: Callable[[], object]) -> None:
    threading.Thread(target=target, name=name, daemon=True).start()


def end_with_parent() -> None:
    """To be run in a thread: ends the process when its standard input closes."""
    # os.read, because a blocked read of the buffered object would hold its lock at exit.
    while os.read(0, 4096):
        continue
    os._exit(3)


def beat(recorder: FlightRecorder) -> None:
    while True:
        recorder.beat()
        time.sleep(HEARTBEAT_S)
