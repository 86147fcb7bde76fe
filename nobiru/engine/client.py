"""The HTTP process' side of the engine: hands requests to rank processes and waits for their results.

Owns the socket, the ledgers of open requests and the measured throughput. Everything runs on one event loop; no torch.
Requests that arrive while no rank is ready wait in the ledgers; others go to the rank that has the least to compute.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import zmq
import zmq.asyncio

from nobiru.config import EngineConfig, SchedulerConfig
from nobiru.elastic.autoscale import Usage
from nobiru.engine import messages
from nobiru.engine.backends import make_backend
from nobiru.engine.controller import Controller, RankOptions
from nobiru.engine.expert_balance import ExpertObserver
from nobiru.engine.generation_stream import Aborts, GenerationStream, GenerationStreams
from nobiru.engine.ledger import Entry, Ledger
from nobiru.engine.messages import (
    Abort,
    Applied,
    Awake,
    Crashed,
    EngineState,
    ExpertLoads,
    Formed,
    Idle,
    Loaded,
    Moved,
    Parked,
    Probe,
    ProbeDone,
    StartFailed,
    StepDone,
    Stop,
    StoreFailed,
    StoreReady,
    Suspended,
    Switched,
)
from nobiru.engine.operations import Operations
from nobiru.engine.rank_spec import STORE_IDENTITY
from nobiru.engine.supervisor import Rank
from nobiru.errors import UnavailableError
from nobiru.folder.state import read_state
from nobiru.generation import GenerationRequest
from nobiru.request import PoolingRequest, Vectors

logger = logging.getLogger(__name__)

THROUGHPUT_HALF_LIFE_S = 5.0


class Observer(ExpertObserver, Protocol):
    """Where measurements go."""

    def observe_step(self, num_tokens: int, num_sequences: int, compute_s: float) -> None: ...

    def observe_queue(self, seconds: float) -> None: ...

    def observe_engine(self, state: EngineState) -> None: ...

    def rank_restarted(self) -> None: ...


class ZmqClient:
    """`await embed(request)` and `generate(request)` from any number of tasks, between `start` and `stop`."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        limits: SchedulerConfig,
        embedding_dim: int,
        environment: Mapping[str, str],
        observer: Observer,
        rank_timeout_s: float = 10.0,
        max_start_failures: int = 5,
        log_level: str = "info",
    ) -> None:
        self._observer = observer
        self._backend = make_backend(config, environment=environment, recorder_capacity=limits.max_num_seqs)
        ids = itertools.count()
        self._ledger = Ledger(
            embedding_dim=embedding_dim,
            max_slice_tokens=limits.max_num_batched_tokens,
            max_slice_sequences=limits.max_num_seqs,
            ids=ids,
        )
        self._generation = GenerationStreams(ids, send_waiting=self._send_children, abort=self._abort_all)
        options = RankOptions(
            environment=environment,
            rank_timeout_s=rank_timeout_s,
            max_start_failures=max_start_failures,
            log_level=log_level,
            files=read_state(Path(config.model)),
        )
        self.ranks = Controller(config, self, self._backend, options, observer)
        self._serving: dict[str, Rank] = {}
        self._futures: dict[Entry, asyncio.Future[Vectors]] = {}
        self._states: dict[str, EngineState] = {}
        self._probes: dict[int, asyncio.Future[bool]] = {}
        self._num_probes = 0
        self._max_num_seqs = limits.max_num_seqs
        self._throughput = Throughput(half_life_s=THROUGHPUT_HALF_LIFE_S)
        self._num_served_tokens = 0
        self._compute_s = 0.0
        self._receiver: asyncio.Task[None] | None = None
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self.last_forward_s: float | None = None
        self.model_info: dict[str, Any] | None = None

    def launch_now(self) -> None:
        """Begin to load the model before the event loop runs."""
        self.ranks.launch_now()

    async def start(self) -> None:
        self._context = zmq.asyncio.Context()
        socket = self._socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.LINGER, 0)
        for option in (zmq.SNDHWM, zmq.RCVHWM):  # the queue is bounded by admission, in tokens
            socket.setsockopt(option, 0)
        await self._backend.open(socket)
        self._receiver = asyncio.create_task(self._receive(socket), name="rank-messages")
        self.ranks.start()
        self._receiver.add_done_callback(self.ranks.give_up_after)

    async def stop(self) -> None:
        """End the ranks; requests still open get an `UnavailableError`."""
        for rank in self._serving.values():
            self._send(rank, Stop())
        await self.ranks.stop()
        if self._receiver is not None:
            self._receiver.cancel()
            await asyncio.gather(self._receiver, return_exceptions=True)
        has_shut_down = UnavailableError("the server has shut down")
        for future in self._futures.values():
            if not future.done():
                future.set_exception(has_shut_down)
        self._generation.fail_all(has_shut_down)
        if self._context is not None and self._socket is not None:
            self._socket.close()
            self._context.term()
        await self._backend.close()

    async def embed(self, request: PoolingRequest) -> Vectors:
        """The vectors [N, D] of a request. Raises `NobiruError`; cancelling the caller aborts the work."""
        entry = self._ledger.open(request, time.monotonic())
        future: asyncio.Future[Vectors] = asyncio.get_running_loop().create_future()
        self._futures[entry] = future
        self._send_slices()
        try:
            return await future
        finally:
            del self._futures[entry]
            self._abort(entry)

    def generate(self, request: GenerationRequest) -> GenerationStream:
        """The tokens of a request as they come. Whoever asked closes the stream, which aborts what is left."""
        return self._generation.open(request, time.monotonic())

    async def probe(self, timeout_s: float) -> bool:
        """Whether a forward pass ends within `timeout_s` from now."""
        rank = self._idlest()
        if rank is None:
            return False
        self._num_probes += 1
        nonce = self._num_probes
        future = self._probes[nonce] = asyncio.get_running_loop().create_future()
        self._send(rank, Probe(nonce=nonce))
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            return False
        finally:
            del self._probes[nonce]

    @property
    def has_working_rank(self) -> bool:
        return len(self._serving) > 0

    @property
    def operations(self) -> Operations:
        """What changes the ranks."""
        return self.ranks.operations

    @property
    def serving_ranks(self) -> tuple[str, ...]:
        """The ids of the ranks that take requests."""
        return tuple(self._serving)

    @property
    def queued_tokens(self) -> int:
        """Tokens that wait to be computed: of texts without a vector yet, and of prompts without a first token."""
        return self._ledger.num_tokens + self._generation.ledger.num_tokens

    @property
    def queued_requests(self) -> int:
        return len(self._ledger.entries) + len(self._generation.ledger.entries)

    @property
    def tokens_per_s(self) -> float | None:
        """How fast the queue gets shorter, by recent steps, with all ranks that serve; None before the first step."""
        rate = self._throughput.tokens_per_s
        return None if rate is None else rate * max(1, len(self._serving))

    def usage(self) -> Usage:
        """What the ranks are and what they have done."""
        size, states = len(self._serving), self._states.values()
        num_running = sum(state.num_running for state in states)
        return Usage(
            size=size,
            is_changing=size == 0 or not self.operations.is_settled,
            num_served_tokens=self._num_served_tokens,
            compute_s=self._compute_s,
            occupancy=max(
                num_running / (self._max_num_seqs * max(1, size)),
                sum(state.kv_usage for state in states) / max(1, len(states)),
            ),
        )

    @property
    def failed(self) -> asyncio.Future[str]:
        """Resolves with the cause when no rank can be brought up any more."""
        assert self.ranks.failed is not None, "start() comes first"
        return self.ranks.failed

    def status(self) -> dict[str, Any]:
        """The shape of `GET /elastic/status`."""
        ranks = [
            {
                "rank_id": rank.rank_id,
                "pid": rank.process.pid,
                "worker_pids": rank.worker_pids,
                "node": rank.process.node,
                "state": self.ranks.state_of(rank),
                "outstanding_tokens": self.outstanding(rank.rank_id),
            }
            for rank in self.ranks
        ]
        return {**self.ranks.status(), "ranks": ranks}

    # ---- ranks ------------------------------------------------------------------------------------------------------

    def rank_loaded(self, rank: Rank, message: Loaded) -> None:
        self.model_info = dict(message.info)
        self._ledger.max_slice_tokens = message.max_num_batched_tokens
        self.last_forward_s = time.monotonic()  # loading ends with a warm-up pass

    def takes_requests(self, rank_ids: Sequence[str]) -> None:
        """These ranks, and no others, get new requests from now on."""
        found = [(rank_id, self.ranks.find(rank_id)) for rank_id in rank_ids]
        self._serving = {rank_id: rank for rank_id, rank in found if rank is not None}
        self._send_slices()
        self._send_children()

    def rank_leaves(self, rank_id: str) -> None:
        """It is gone by plan: what it has not finished runs elsewhere."""
        self._forget_rank(rank_id, ())

    def rank_lost(self, rank: Rank, executing: Sequence[int]) -> None:
        """It died: what it had not finished runs elsewhere."""
        self._observer.rank_restarted()
        self._forget_rank(rank.rank_id, executing)
        for future in self._probes.values():
            if not future.done():
                future.set_result(False)

    def _forget_rank(self, rank_id: str, executing: Sequence[int]) -> None:
        self._serving.pop(rank_id, None)
        self._states.pop(rank_id, None)
        for entry in self._ledger.rank_lost(rank_id, executing):
            self._resolve(entry)
        self._generation.rank_lost(rank_id, executing)
        self._send_slices()
        self._send_children()

    def _idlest(self) -> Rank | None:
        """The rank with the fewest tokens to compute."""
        return min(self._serving.values(), key=lambda rank: self.outstanding(rank.rank_id), default=None)

    def outstanding(self, rank_id: str) -> int:
        """Tokens that it may still compute."""
        return self._ledger.tokens_on[rank_id] + self._generation.ledger.tokens_on[rank_id]

    # ---- messages ---------------------------------------------------------------------------------------------------

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            identity, payload = await socket.recv_multipart()
            rank = self.ranks.find(identity.partition(b"/")[0].decode())
            if rank is not None:
                self._handle(rank, messages.decode_from_rank(payload))
            elif identity == STORE_IDENTITY:
                message = messages.decode_from_rank(payload)
                if isinstance(message, StoreReady):
                    self.ranks.store_is_ready(message)
                elif isinstance(message, StoreFailed):
                    self.ranks.store_failed(message)

    def _handle(self, rank: Rank, message: messages.FromRank) -> None:
        match message:
            case StepDone():
                self._step_done(rank, message)
            case Idle():
                self._observe(rank, message.state)
            case Formed() | Suspended() | Parked() | Applied() | Awake() | ExpertLoads() | Moved() | Switched():
                self.ranks.handle(rank.rank_id, message)
            case ProbeDone():
                self.last_forward_s = time.monotonic()
                if (future := self._probes.get(message.nonce)) is not None and not future.done():
                    future.set_result(True)
            case Loaded():
                self.ranks.supervisor_of(rank).loaded(message)
            case StartFailed() | Crashed():
                self.ranks.supervisor_of(rank).says_why(message)

    def _step_done(self, rank: Rank, done: StepDone) -> None:
        self.last_forward_s = time.monotonic()
        num_queued = self.queued_tokens
        self._generation.apply(done.generated)
        if done.failures:
            seq_ids = np.frombuffer(done.seq_ids, dtype="<i8")
            for failure in done.failures:
                self._generation.fail(int(seq_ids[failure.index]), failure)
        for entry in self._ledger.apply(done):
            self._resolve(entry)
        self._compute_s += done.compute_s
        if num_queued:
            self._num_served_tokens += num_queued - self.queued_tokens
            self._throughput.add(num_queued - self.queued_tokens, done.compute_s)
        self._send_slices()
        self._send_children()
        if done.state is not None:
            self._observe(rank, done.state)
        self._observer.observe_step(done.num_tokens, done.num_sequences, done.compute_s)
        for seconds in done.queue_s:
            self._observer.observe_queue(seconds)

    def _observe(self, rank: Rank, state: EngineState) -> None:
        """The metrics are those of all ranks together."""
        self._states[rank.rank_id] = state
        states = self._states.values()
        self._observer.observe_engine(
            EngineState(
                num_running=sum(each.num_running for each in states),
                num_waiting=sum(each.num_waiting for each in states),
                kv_usage=sum(each.kv_usage for each in states) / len(states),
                num_preemptions=state.num_preemptions,
                num_cached_tokens=state.num_cached_tokens,
                num_prompt_tokens=state.num_prompt_tokens,
            )
        )

    def _resolve(self, entry: Entry) -> None:
        future = self._futures.get(entry)
        if future is None or future.done():
            return
        if entry.error is not None:
            future.set_exception(entry.error)
        else:
            future.set_result(entry.vectors)

    def _send_slices(self) -> None:
        now_s = time.monotonic()
        for piece in self._ledger.unsent() if self._serving else ():
            rank = self._idlest()
            assert rank is not None
            self._ledger.sent(piece, rank.rank_id)
            self._send(rank, piece.message(now_s))

    def _send_children(self) -> None:
        now_s = time.monotonic()
        for child in self._generation.unsent() if self._serving else ():
            first = child.entry.children[0].rank_id  # where the prompt is in the cache, for the others of a request
            rank = self._serving.get(first or "") or self._idlest()
            assert rank is not None
            self._generation.ledger.sent(child, rank.rank_id)
            self._send(rank, child.message(now_s))

    def _abort(self, entry: Entry) -> None:
        """Whoever waited is gone; nothing to do when all results had arrived."""
        self._abort_all(self._ledger.cancel(entry))

    def _abort_all(self, aborts: Aborts) -> None:
        for rank_id, slice_ids in aborts.items():
            if (rank := self._serving.get(rank_id)) is not None:
                self._send(rank, Abort(slice_ids=slice_ids))

    def _send(self, rank: Rank, message: messages.ToRank) -> None:
        self.send_to(rank.rank_id, message)

    def send_to(self, identity: str, message: messages.ToRank) -> None:
        """To a rank, or one of its other sockets."""
        assert self._socket is not None
        sent = self._socket.send_multipart([identity.encode(), messages.encode(message)])
        asyncio.ensure_future(sent).add_done_callback(_log_unreachable)


class Throughput:
    """Queued tokens that a rank serves in a second of computing, the recent past weighing most.

    Only steps count beside which something was queued. They may do other work: the more texts of a language model are
    in progress, the fewer tokens of prompts fit beside them, and where all places are taken, none.
    """

    def __init__(self, *, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, num_tokens: int, compute_s: float) -> None:
        """A step."""
        decay = 0.5 ** (compute_s / self._half_life_s)
        self._tokens = self._tokens * decay + num_tokens
        self._seconds = self._seconds * decay + compute_s

    @property
    def tokens_per_s(self) -> float | None:
        """None before the first tokens."""
        return self._tokens / self._seconds if self._tokens > 0 and self._seconds > 0 else None


def _log_unreachable(future: asyncio.Future[Any]) -> None:
    """A rank that died a moment ago cannot be reached; its death is noticed, and what it held runs again."""
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.info("a message to a rank was not delivered: %s", error)
