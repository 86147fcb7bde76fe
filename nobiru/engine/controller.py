"""The controller of a server's ranks: performs what the membership machine decides, and tells it what happens.

Owns the ranks' processes, the rendezvous store, operations and their history, timers and healing. Runs on the server's
event loop. Decisions are `nobiru.elastic.membership`'s, placements `ExpertBalance`'s; requests are the client's.

Replicas, ranks that share nothing, go through the same machine: what it asks of them is done at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from nobiru.config import EngineConfig
from nobiru.elastic import membership
from nobiru.elastic.membership import Action, Membership
from nobiru.elastic.planner import MembershipPlan
from nobiru.elastic.records import OperationRecord
from nobiru.engine import messages
from nobiru.engine.expert_balance import ExpertBalance
from nobiru.engine.messages import (
    Abandon,
    Applied,
    Arm,
    Awake,
    Begin,
    ExpertLoads,
    Forget,
    Form,
    Formed,
    Loaded,
    Moved,
    Parked,
    Stop,
    StoreReady,
    Suspended,
    Switched,
    Vacate,
    Wake,
)
from nobiru.engine.rank_spec import control_identity
from nobiru.engine.ranks import Ranks
from nobiru.engine.recorder import Recorder
from nobiru.engine.store_process import StoreProcess
from nobiru.engine.supervisor import Rank, RankProcess, RankSupervisor, backoff_s
from nobiru.errors import ConflictError, InvalidRequestError, NotFoundError

logger = logging.getLogger(__name__)

FromMember = Formed | Suspended | Parked | Applied | Awake | ExpertLoads | Moved | Switched
MOVING_POLL_S = 0.05
MAX_HEAL_FAILURES = 5
MAX_OPERATIONS = 1000


class Client(Protocol):
    """What the controller asks of whoever holds the requests."""

    def send_to(self, identity: str, message: messages.ToRank) -> None: ...

    def takes_requests(self, rank_ids: Sequence[str]) -> None:
        """These ranks, and no others, get new requests from now on."""
        ...

    def rank_leaves(self, rank_id: str) -> None:
        """It is gone by plan: what it has not finished runs elsewhere."""
        ...

    def outstanding(self, rank_id: str) -> int: ...


class Controller:
    """`start` to `stop`; `request` and `cancel` change the membership, `document` and `documents` tell of operations.

    `failed` resolves with a message when no rank can be brought up.
    """

    def __init__(
        self,
        config: EngineConfig,
        client: Client,
        begin_process: Callable[[str, int, list[list[int]] | None], tuple[RankProcess, Recorder]],
        *,
        endpoint: str,
        host: str,
        environment: Mapping[str, str],
        balance: ExpertBalance | None,
        rank_timeout_s: float,
        max_start_failures: int,
        on_loaded: Callable[[Rank, Loaded], None],
        on_lost: Callable[[Rank, Sequence[int]], None],
    ) -> None:
        self._config = config
        self._client = client
        self._begin_process = begin_process
        self.balance = balance
        self.machine = Membership(desired_size=config.data_parallel_size)
        self.ranks = Ranks(
            self._launch,
            rank_timeout_s=rank_timeout_s,
            on_loaded=self._loaded,
            on_lost=self._lost,
        )
        self._max_start_failures = max_start_failures
        self._on_loaded = on_loaded
        self._on_lost = on_lost
        self._store = StoreProcess(endpoint, host, environment) if balance is not None else None
        self._plans: dict[int, MembershipPlan] = {}
        self._planned_slots: dict[str, list[list[int]]] = {}
        self._epoch_attempt = 0
        self._draining: tuple[str, ...] = ()
        self._records: list[OperationRecord] = []
        self._waiting_for_store: list[membership.Prepare] = []
        self._timers: set[asyncio.TimerHandle] = set()
        self._num_start_failures = 0
        self._num_heal_failures = 0
        self._has_started = False
        self.num_losses = 0
        self.failed: asyncio.Future[str] | None = None

    # ---- life --------------------------------------------------------------------------------------------------------

    def launch_now(self) -> None:
        """Start the first processes before the event loop runs."""
        self._perform(self.machine.start())

    def start(self) -> None:
        self.failed = asyncio.get_running_loop().create_future()
        self._has_started = True
        if not self.machine.operations:
            self.launch_now()
        self.ranks.start()
        if self._store is not None:
            self._store.start()

    async def stop(self) -> None:
        for timer in self._timers:
            timer.cancel()
        await self.ranks.stop()
        if self._store is not None:
            await self._store.stop()

    def give_up_after(self, task: asyncio.Task[None]) -> None:
        """A task without which no rank can serve has ended: by an error, if it was not told to."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s ended", task.get_name(), exc_info=error)
            self._give_up(f"{task.get_name()} ended with {type(error).__name__}: {error}")

    # ---- operations --------------------------------------------------------------------------------------------------

    @property
    def max_size(self) -> int:
        """The most ranks that may be asked for."""
        return self._config.max_data_parallel_size or max(8, self._config.data_parallel_size)

    def request(
        self,
        *,
        size: int | None = None,
        remove: Sequence[str] = (),
        replace: Sequence[str] = (),
        drain_timeout_s: float | None = None,
        drain_may_replay: bool = True,
        deadline_s: float = 600.0,
        dry_run: bool = False,
        idempotency_key: str | None = None,
    ) -> dict[str, Any]:
        """Begin an operation; its document. Raises `InvalidRequestError` or `ConflictError`."""
        for record in self._records:
            if idempotency_key is not None and record.idempotency_key == idempotency_key:
                return self._document(record)
        size = self._checked_size(size, remove, replace)
        gone = (*remove, *replace)
        if dry_run:
            return self._forecast(size, gone)
        machine = self.machine
        if self.is_busy:
            running = machine.operation
            number = "" if running is None else f" ({self._records[running.number].operation_id})"
            raise ConflictError(f"another change of the ranks is running{number}; wait for its end, or cancel it")
        if self._config.tensor_parallel_size > 1:
            raise InvalidRequestError("ranks of several workers cannot be added or removed while serving yet")
        actions = machine.request(
            size=size, remove=gone, drain_timeout_s=drain_timeout_s, drain_may_replay=drain_may_replay
        )
        target = {"data_parallel_size": size, "remove_ranks": list(remove), "replace_ranks": list(replace)}
        record = self._note_new(target, idempotency_key)
        asyncio.get_running_loop().call_later(deadline_s, self._on_deadline, record)
        self._perform(actions)
        return self._document(record)

    @property
    def is_busy(self) -> bool:
        """Whether the membership is changing."""
        return self.machine.operation is not None or not self.machine.lives

    def cancel(self, operation_id: str) -> dict[str, Any]:
        """Undo an operation before its commit; `ConflictError` when it is too late."""
        record = self._find(operation_id)
        actions = self.machine.cancel("cancelled") if self.machine.operation is record.operation else []
        if not actions:
            raise ConflictError(
                f"operation {operation_id} is {record.operation.phase}; it cannot be cancelled any more"
            )
        self._perform(actions)
        return self._document(record)

    def document(self, operation_id: str) -> dict[str, Any]:
        return self._document(self._find(operation_id))

    def documents(self) -> list[dict[str, Any]]:
        """All remembered operations, newest last."""
        return [self._document(record) for record in self._records]

    def status(self) -> dict[str, Any]:
        """What `GET /elastic/status` says beside the ranks."""
        operation = self.machine.operation
        status: dict[str, Any] = {
            "epoch": self.machine.epoch,
            "desired_size": self.machine.desired_size,
            "operation": None if operation is None else self._document(self._records[operation.number]),
        }
        if self.balance is not None and (placement := self.balance.placement) is not None:
            status["placement"] = {
                "num_experts": placement.num_experts,
                "slot_capacity": placement.slot_capacity,
                "slots": {
                    rank_id: placement.slots[:, place].tolist()
                    for place, rank_id in enumerate(self.machine.members)
                    if place < placement.num_ranks
                },
                **self.balance.status(),
            }
        return status

    def state_of(self, rank: Rank) -> str:
        """launching, preparing, serving, leaving or dead."""
        if rank.rank_id in self._draining:
            return "leaving"
        if rank.rank_id in self.machine.members and self.machine.epoch:
            return "serving"
        return "launching" if rank.state == "starting" else "preparing"

    def __iter__(self) -> Iterator[Rank]:
        return iter(self.ranks)

    def find(self, rank_id: str) -> Rank | None:
        return self.ranks.find(rank_id)

    def supervisor_of(self, rank: Rank) -> RankSupervisor:
        return self.ranks.supervisor_of(rank)

    # ---- what ranks say ----------------------------------------------------------------------------------------------

    def store_is_ready(self, message: StoreReady) -> None:
        assert self._store is not None
        self._store.address = (message.host, message.port)
        waiting, self._waiting_for_store = self._waiting_for_store, []
        self._perform(waiting)

    def handle(self, rank_id: str, message: FromMember) -> None:
        machine = self.machine
        match message:
            case Formed():
                if message.error is not None:
                    logger.warning("rank %s could not prepare: %s", rank_id, message.error)
                self._perform(machine.rank_prepared(rank_id, message.attempt, message.error))
            case Parked():
                operation = machine.operation
                if operation is not None and self._records[operation.number].first_parked_s is None:
                    self._records[operation.number].first_parked_s = time.monotonic()
                self._perform(machine.rank_parked(rank_id, message.attempt))
            case Applied():
                self._perform(machine.rank_applied(rank_id, message.attempt))
            case Suspended():
                logger.warning("rank %s has left epoch %d: %s", rank_id, message.epoch, message.error)
                self._perform(machine.rank_suspended(rank_id, message.epoch))
            case Awake():
                self._wake_others(rank_id, message)
            case ExpertLoads() | Moved() | Switched():
                if self.balance is not None and machine.lives and rank_id in machine.members:
                    for order in self.balance.handle(machine.members.index(rank_id), message):
                        self._tell(machine.members, order)

    def _wake_others(self, rank_id: str, message: Awake) -> None:
        if message.epoch == self.machine.epoch and self.machine.lives:
            others = [other for other in self.machine.members if other != rank_id]
            self._tell(others, Wake(epoch=message.epoch, seq=message.seq))

    def _loaded(self, rank: Rank, message: Loaded) -> None:
        self._num_start_failures = 0
        self._on_loaded(rank, message)
        if self.balance is not None:
            assert message.inventory is not None, "an expert-parallel rank has experts"
            self.balance.rank_holds(rank.rank_id, message.inventory)
        self._perform(self.machine.rank_loaded(rank.rank_id))

    def _lost(self, rank: Rank, executing: Sequence[int]) -> None:
        had_loaded = rank.rank_id in self.machine.loaded
        self.num_losses += 1
        self._num_start_failures = 0 if had_loaded else self._num_start_failures + 1
        if self.balance is not None:
            self.balance.rank_is_gone(rank.rank_id)
            self.balance.epoch_ends()
        actions = self.machine.rank_lost(rank.rank_id)
        self._on_lost(rank, executing)
        operation = self.machine.operation
        is_needed = not self.machine.lives and operation is not None and operation.origin in ("start", "failure")
        if is_needed and (rank.permanent or self._num_start_failures >= self._max_start_failures):
            self._give_up(rank.cause or f"{self._num_start_failures} starts failed")
            return
        self._perform(actions)

    # ---- actions -----------------------------------------------------------------------------------------------------

    def _perform(self, actions: Iterable[Action]) -> None:
        self._note_phases()
        for action in actions:
            self._act(action)
        self._note_phases()
        self._heal_if_due()

    def _act(self, action: Action) -> None:
        match action:
            case membership.Launch(rank_id):
                self._launch_later(rank_id)
            case membership.Prepare():
                self._prepare(action)
            case membership.Arm():
                if self.balance is None:
                    self._soon(lambda: [e for r in action.ranks for e in self.machine.rank_parked(r, action.attempt)])
                else:
                    self._tell(action.ranks, Arm(attempt=action.attempt))
            case membership.Begin():
                self._begin(action)
            case membership.Forget():
                self._plans.pop(action.attempt, None)
                if self.balance is not None:
                    self._tell(action.ranks, Forget(attempt=action.attempt))
                    self.balance.thaw()
            case membership.Abandon():
                if self.balance is not None:
                    for rank_id in action.ranks:
                        self._client.send_to(control_identity(rank_id), Abandon(attempt=self._epoch_attempt))
            case membership.Drain():
                self._drain(action.ranks)
            case membership.Undrain():
                self._draining = ()
                self._client.takes_requests(self.machine.members)
            case membership.Stop(rank_id):
                self._stop_rank(rank_id)
            case membership.SetTimer():
                self._set_timer(action)

    def _launch_later(self, rank_id: str) -> None:
        """At once, unless ranks keep dying before they are loaded."""
        wait_s = backoff_s(self._num_start_failures)
        self._plan_slots(rank_id)
        if wait_s and self._has_started:
            asyncio.get_running_loop().call_later(wait_s, self._launch_if_wanted, rank_id)
        else:
            self._launch_if_wanted(rank_id)

    def _launch_if_wanted(self, rank_id: str) -> None:
        if rank_id not in self.machine.launching:
            return
        try:
            self.ranks.launch(rank_id)
        except OSError as error:
            logger.error("rank %s cannot be started: %s", rank_id, error)
            self._soon(lambda: self.machine.rank_lost(rank_id))

    def _plan_slots(self, rank_id: str) -> None:
        """What a newcomer loads: what the membership it is launched for would give it."""
        operation = self.machine.operation
        if self.balance is None or self.balance.placement is None or operation is None:
            return
        stay = [rank for rank in self.machine.members if rank not in operation.leaving]
        members = (*stay, *operation.newcomers)
        plan = self.balance.plan(members)
        self._planned_slots[rank_id] = plan.placement.slots[:, members.index(rank_id)].tolist()

    def _launch(self, rank_id: str) -> tuple[RankProcess, Recorder]:
        operation = self.machine.operation
        newcomers = operation.newcomers if operation is not None else []
        position = newcomers.index(rank_id) if rank_id in newcomers else 0
        return self._begin_process(rank_id, position, self._planned_slots.pop(rank_id, None))

    def _prepare(self, action: membership.Prepare) -> None:
        if self.balance is None:
            self._soon(lambda: [e for r in action.members for e in self.machine.rank_prepared(r, action.attempt)])
            return
        self.balance.freeze()
        assert self._store is not None
        if self._store.address is None:
            self._waiting_for_store.append(action)
            return
        if self.balance.is_moving and self.machine.lives:
            self._later(MOVING_POLL_S, lambda: self._prepare(action))
            return
        if self.machine.attempt is None or self.machine.attempt.number != action.attempt:
            return
        plan = self._plans[action.attempt] = self.balance.plan(action.members)
        operation = self.machine.operation
        if operation is not None:
            self._records[operation.number].bytes_moved = plan.num_fills * self._expert_bytes
        slots = plan.placement.slots
        host, port = self._store.address
        for position, rank_id in enumerate(action.members):
            form = Form(
                attempt=action.attempt,
                epoch=action.epoch,
                position=position,
                size=len(action.members),
                store_host=host,
                store_port=port,
                version=self.balance.version + 1,
                shape=(slots.shape[0], slots.shape[1], slots.shape[2]),
                slots=slots.astype("<i4").tobytes(),
                fills=[(fill.layer, fill.expert, fill.slot) for fill in plan.fills.get(rank_id, ())],
            )
            self._client.send_to(rank_id, form)

    @property
    def _expert_bytes(self) -> int:
        return 0 if self.balance is None else self.balance.expert_bytes

    def _begin(self, action: membership.Begin) -> None:
        logger.info("epoch %d begins with %s", action.epoch, ", ".join(action.members))
        self._epoch_attempt = action.attempt
        self._draining = ()
        if self.balance is not None:
            self.balance.commit(self._plans.pop(action.attempt), action.members)
            self._tell(action.members, Begin(attempt=action.attempt))
        else:
            self._soon(lambda: [e for r in action.members for e in self.machine.rank_applied(r, action.attempt)])
        self._client.takes_requests(action.members)

    def _drain(self, rank_ids: tuple[str, ...]) -> None:
        self._draining = rank_ids
        self._client.takes_requests([rank for rank in self.machine.members if rank not in rank_ids])
        self._look_whether_drained()

    def _look_whether_drained(self) -> None:
        operation = self.machine.operation
        if operation is None or operation.phase != "draining":
            return
        if any(self._client.outstanding(rank_id) for rank_id in self._draining):
            self._later(MOVING_POLL_S, self._look_whether_drained)
        else:
            self._perform(self.machine.drained())

    def _stop_rank(self, rank_id: str) -> None:
        if self.balance is not None:
            self.balance.rank_is_gone(rank_id)
        self._client.send_to(rank_id, Stop())
        self.ranks.end(rank_id)
        self._client.rank_leaves(rank_id)

    def _tell(self, rank_ids: Iterable[str], message: messages.ToRank) -> None:
        for rank_id in rank_ids:
            self._client.send_to(rank_id, message)

    # ---- time --------------------------------------------------------------------------------------------------------

    def _set_timer(self, action: membership.SetTimer) -> None:
        self._later(action.seconds, lambda: self._perform(self.machine.timer(action.name, action.number)))

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        if not self._has_started:
            return  # before there is an event loop only launches happen, whose time limits are the supervisors'

        def run() -> None:
            self._timers.discard(timer)
            call()

        timer = asyncio.get_running_loop().call_later(seconds, run)
        self._timers.add(timer)

    def _soon(self, events: Callable[[], list[Action]]) -> None:
        """Enter events that follow at once, when the present ones are done with."""
        self._later(0.0, lambda: self._perform(events()))

    def _on_deadline(self, record: OperationRecord) -> None:
        if self.machine.operation is record.operation:
            self._perform(self.machine.cancel("the deadline has passed"))

    def _heal_if_due(self) -> None:
        """Grow back to the size that was asked for, some time after a failure."""
        machine = self.machine
        if not self._config.self_heal or self.is_busy or len(machine.members) >= machine.desired_size:
            return
        if self._num_heal_failures >= MAX_HEAL_FAILURES:
            return
        last = machine.operations[-1]
        if last.origin == "heal" and last.phase == "rolled_back" and self._records[last.number].idempotency_key is None:
            self._records[last.number].idempotency_key = ""  # counted
            self._num_heal_failures += 1
            if self._num_heal_failures >= MAX_HEAL_FAILURES:
                logger.error("%d tries to replace ranks failed; not trying again", MAX_HEAL_FAILURES)
                return
        epoch = machine.epoch
        self._later(backoff_s(self._num_heal_failures + 1), lambda: self._heal(epoch))

    def _heal(self, epoch: int) -> None:
        machine = self.machine
        if epoch != machine.epoch or self.is_busy or len(machine.members) >= machine.desired_size:
            return
        actions = machine.request(size=machine.desired_size, origin="heal")
        self._note_new({"data_parallel_size": machine.desired_size}, None)
        self._perform(actions)

    # ---- records -----------------------------------------------------------------------------------------------------

    def _note_new(self, target: dict[str, Any], idempotency_key: str | None) -> OperationRecord:
        operation = self.machine.operations[len(self._records)]
        record = OperationRecord(
            operation=operation,
            operation_id=f"op-{operation.number}-{uuid.uuid4().hex[:8]}",
            from_epoch=self.machine.epoch,
            target=target,
            idempotency_key=idempotency_key,
        )
        self._records.append(record)
        return record

    def _note_phases(self) -> None:
        now_s = time.time()
        while len(self._records) < len(self.machine.operations):
            operation = self.machine.operations[len(self._records)]
            self._note_new({"data_parallel_size": operation.size}, None)
        for record in self._records[-4:]:
            was_ended = record.began and record.began[-1][0] in membership.ENDED
            record.note_phase(now_s)
            if record.operation.has_ended and not was_ended:
                self._note_end(record)

    def _note_end(self, record: OperationRecord) -> None:
        operation = record.operation
        if operation.phase == "done":
            record.to_epoch = self.machine.epoch
            waited_s = 0.0 if record.first_parked_s is None else time.monotonic() - record.first_parked_s
            record.pause_s = round(waited_s, 6)
            if operation.origin in ("user", "heal"):
                self._num_heal_failures = 0
            if self.balance is not None and self.machine.lives:
                self._tell(self.machine.members, Vacate(version=self.balance.version))
        logger.info(
            "operation %s (%s): %s %s", record.operation_id, operation.origin, operation.phase, operation.error or ""
        )

    def _document(self, record: OperationRecord) -> dict[str, Any]:
        record.ranks = {rank.rank_id: self.state_of(rank) for rank in self.ranks}
        return record.document(time.time())

    def _find(self, operation_id: str) -> OperationRecord:
        for record in self._records:
            if record.operation_id == operation_id:
                return record
        raise NotFoundError(f"there is no operation {operation_id[:100]!r}", code="operation_not_found")

    # ---- what may be asked -------------------------------------------------------------------------------------------

    def _checked_size(self, size: int | None, remove: Sequence[str], replace: Sequence[str]) -> int:
        members = self.machine.members
        for name, ranks in (("remove_ranks", remove), ("replace_ranks", replace)):
            if unknown := [rank for rank in ranks if rank not in members]:
                raise InvalidRequestError(
                    f"{name} names {', '.join(map(str, unknown))}; the ranks are {', '.join(members)}", param=name
                )
        if size is None:
            size = len(members) - len(remove)
            if size < self._config.min_survivable_size:
                raise InvalidRequestError(
                    f"remove_ranks would leave {size} ranks; at least {self._config.min_survivable_size} must stay",
                    param="remove_ranks",
                )
        least = self._config.min_survivable_size
        if not least <= size <= self.max_size:
            raise InvalidRequestError(
                f"data_parallel_size is {size}; it must be from {least} to {self.max_size} "
                "(min_survivable_size, max_data_parallel_size)",
                param="data_parallel_size",
            )
        return size

    def _forecast(self, size: int, gone: Sequence[str]) -> dict[str, Any]:
        """What an operation would do, without doing it."""
        stay = [rank for rank in self.machine.members if rank not in gone][:size]
        newcomers = [f"new-{number}" for number in range(size - len(stay))]
        document: dict[str, Any] = {
            "operation_id": None,
            "phase": "planning",
            "dry_run": True,
            "target": {"data_parallel_size": size, "members": [*stay, *newcomers]},
            "bytes_moved": 0,
        }
        if self.balance is not None and self.balance.placement is not None:
            plan = self.balance.plan([*stay, *newcomers])
            held = (plan.placement.slots >= 0).sum((0, 2)).tolist()
            document["bytes_moved"] = plan.num_fills * self._expert_bytes
            document["expert_bytes"] = {
                rank: count * self._expert_bytes for rank, count in zip([*stay, *newcomers], held, strict=True)
            }
        pauses = [record.pause_s for record in self._records if record.pause_s]
        document["expected_pause_seconds"] = max(pauses) if pauses else None
        return document

    def _give_up(self, cause: str) -> None:
        if self.failed is not None and not self.failed.done():
            self.failed.set_result(cause)
