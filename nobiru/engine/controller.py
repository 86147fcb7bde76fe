"""The controller of a server's ranks: performs what the membership machine decides, and tells it what happens.

Owns the ranks' processes, the rendezvous store and timers. Runs on the server's event loop. Decisions are
`nobiru.elastic.membership`'s, placements `ExpertBalance`'s, what is asked `Operations`'; requests are the client's.

Replicas, ranks that share nothing, go through the same machine: what it asks of them is done at once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from nobiru import env
from nobiru.config import EngineConfig
from nobiru.elastic import membership
from nobiru.elastic.holds import Holds, Point, delays_from
from nobiru.elastic.membership import Action, Membership
from nobiru.elastic.planner import MembershipPlan
from nobiru.engine import messages
from nobiru.engine.backends import Backend
from nobiru.engine.expert_balance import ExpertBalance, ExpertObserver
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
    StoreFailed,
    StoreReady,
    Suspended,
    Switched,
    Vacate,
    Wake,
)
from nobiru.engine.operations import Operations
from nobiru.engine.planning import Planning
from nobiru.engine.rank_spec import STORE_IDENTITY, Place, RankSpec, control_identity
from nobiru.engine.ranks import Ranks
from nobiru.engine.recorder import Recorder
from nobiru.engine.store_process import StoreProcess
from nobiru.engine.supervisor import Rank, RankProcess, RankSupervisor, backoff_s
from nobiru.folder.state import FileState
from nobiru.runner.faults import parse_faults

logger = logging.getLogger(__name__)

FromMember = Formed | Suspended | Parked | Applied | Awake | ExpertLoads | Moved | Switched
MOVING_POLL_S = 0.05


class Client(Protocol):
    """What the controller asks of whoever holds the requests."""

    def send_to(self, identity: str, message: messages.ToRank) -> None: ...

    def takes_requests(self, rank_ids: Sequence[str]) -> None:
        """These ranks, and no others, get new requests from now on."""
        ...

    def rank_leaves(self, rank_id: str) -> None:
        """It is gone by plan: what it has not finished runs elsewhere."""
        ...

    def rank_loaded(self, rank: Rank, message: Loaded) -> None: ...

    def rank_lost(self, rank: Rank, executing: Sequence[int]) -> None:
        """It died, with these sequences in execution."""
        ...

    def outstanding(self, rank_id: str) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOptions:
    """How ranks are started and watched: one that gives no sign of life for `rank_timeout_s` is dead, and after
    `max_start_failures` failed starts in a row, with no rank left, the server is. `files` are those of the model folder
    when the server started."""

    environment: Mapping[str, str]
    rank_timeout_s: float
    max_start_failures: int
    files: tuple[FileState, ...]
    log_level: str = "info"


class Controller:
    """Runs from `start` to `stop`; `operations` are what changes the membership.

    `failed` resolves with a message when no rank can be brought up. `holds` is for tests.
    """

    def __init__(
        self,
        config: EngineConfig,
        client: Client,
        backend: Backend,
        options: RankOptions,
        observer: ExpertObserver,
    ) -> None:
        self._config = config
        self._client = client
        self._backend = backend
        self._options = options
        balance = ExpertBalance(config, observer) if config.enable_expert_parallel else None
        self.balance = balance
        least = min(config.min_survivable_size, config.data_parallel_size)
        self.machine = Membership(desired_size=config.data_parallel_size, min_size=least)
        self.ranks = Ranks(
            self._begin_process,
            rank_timeout_s=options.rank_timeout_s,
            on_loaded=self._loaded,
            on_lost=self._lost,
            on_end=self.give_up_after,
        )
        self._planning = Planning(config, balance, files=options.files, host=backend.host)
        self.operations = Operations(
            config,
            self.machine,
            self._planning,
            perform=self._perform,
            later=self._later,
            states=lambda: {rank.rank_id: self.state_of(rank) for rank in self.ranks},
            on_done=self._vacate,
            num_places=lambda: backend.num_places,
        )
        self.holds = Holds(self._later, delays_from(parse_faults(options.environment.get(env.FAULT_INJECTION, ""))))
        self._store: StoreProcess | None = None
        if balance is not None:
            self._store = StoreProcess(backend.endpoint, backend.host, backend.launch_store)
        self._plans: dict[int, MembershipPlan] = {}
        self._planned_slots: dict[str, list[list[int]]] = {}
        self._positions: dict[str, int] = {}
        self._epoch_attempt = 0
        self._draining: tuple[str, ...] = ()
        self._waiting_for_store: list[membership.Prepare] = []
        self._timers: set[asyncio.TimerHandle] = set()
        self._num_start_failures = 0
        self._has_started = False
        self.failed: asyncio.Future[str] | None = None

    # ---- life --------------------------------------------------------------------------------------------------------

    def launch_now(self) -> None:
        """Start the first processes before the event loop runs."""
        self._perform(self.machine.start())

    def start(self) -> None:
        self.failed = asyncio.get_running_loop().create_future()
        self._has_started = True
        if self.machine.latest is None:
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

    def status(self) -> dict[str, Any]:
        """What `GET /elastic/status` says beside the ranks."""
        running = self.operations.running
        status: dict[str, Any] = {
            "epoch": self.machine.epoch,
            "desired_size": self.machine.desired_size,
            "max_data_parallel_size": self.operations.max_size,
            "operation": None if running is None else self.operations.document(running.operation_id),
        }
        if self.balance is not None and self.balance.placement is not None:
            status["placement"] = self.balance.status()
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

    def store_failed(self, message: StoreFailed) -> None:
        """Whoever waits for it learns why it does not come; a failure's operation asks again a little later."""
        logger.error("the rendezvous store cannot be opened: %s", message.message)
        waiting, self._waiting_for_store = self._waiting_for_store, []
        error = f"the rendezvous store cannot be opened: {message.message}"
        for prepare in waiting:
            self._perform(self.machine.rank_prepared(prepare.members[0], prepare.attempt, error))

    def handle(self, rank_id: str, message: FromMember) -> None:
        machine = self.machine
        match message:
            case Formed():
                if message.error is not None:
                    logger.warning("rank %s could not prepare: %s", rank_id, message.error)
                prepared = partial(machine.rank_prepared, rank_id, message.attempt, message.error)
                self._report("prepare", partial(prepared, missed_others=message.missed_others))
            case Parked():
                running = self.operations.running
                is_current = machine.attempt is not None and machine.attempt.number == message.attempt
                if is_current and running is not None and running.stopped_s is None:
                    running.stopped_s = time.monotonic()
                self._report("park", partial(machine.rank_parked, rank_id, message.attempt))
            case Applied():
                self._report("apply", partial(machine.rank_applied, rank_id, message.attempt))
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
        self._client.rank_loaded(rank, message)
        self._planning.rank_loaded(rank, message.memory)
        if self.balance is not None:
            assert message.inventory is not None, "an expert-parallel rank has experts"
            self.balance.rank_holds(rank.rank_id, message.inventory)
        self._report("load", partial(self.machine.rank_loaded, rank.rank_id))

    def _lost(self, rank: Rank, executing: Sequence[int]) -> None:
        had_loaded = rank.rank_id in self.machine.loaded
        self._planning.rank_is_gone(rank.rank_id)
        self._num_start_failures = 0 if had_loaded else self._num_start_failures + 1
        if self.balance is not None:
            self.balance.rank_is_gone(rank.rank_id)
        self.machine.num_places = self._backend.num_places
        actions = self.machine.rank_lost(rank.rank_id, rank.cause)
        self._client.rank_lost(rank, executing)
        operation = self.machine.operation
        is_needed = not self.machine.lives and operation is not None and operation.origin in ("start", "failure")
        if is_needed and (rank.permanent or self._num_start_failures >= self._options.max_start_failures):
            starts = f"{self._num_start_failures} starts failed: "
            self._give_up(f"{'' if rank.permanent else starts}{rank.cause or 'for no known cause'}")
            return
        self._perform(actions)

    # ---- actions -----------------------------------------------------------------------------------------------------

    def _perform(self, actions: Iterable[Action]) -> None:
        self.operations.note_phases()
        for action in actions:
            self._act(action)
        self.operations.note_phases()
        self.operations.heal_if_due()

    def _act(self, action: Action) -> None:
        match action:
            case membership.Launch(rank_id):
                self._launch_later(rank_id)
            case membership.Prepare():
                self._prepare(action)
            case membership.Arm():
                if self.balance is None:
                    self._soon("park", [partial(self.machine.rank_parked, r, action.attempt) for r in action.ranks])
                else:
                    self._tell(action.ranks, Arm(attempt=action.attempt))
            case membership.Begin():
                self._begin(action)
            case membership.Forget():
                self._plans.pop(action.attempt, None)
                if self.balance is not None:
                    self._tell(action.ranks, Forget(attempt=action.attempt))
                    self._store_forgets(action.attempt)
                    self.balance.thaw()
            case membership.Abandon():
                if self.balance is not None:
                    self.balance.epoch_ends()  # a move of experts in progress is over, too
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
            cause = f"it could not be started: {error}"
            self._later(0.0, lambda: self._perform(self.machine.rank_lost(rank_id, cause)))

    def _plan_slots(self, rank_id: str) -> None:
        """What a newcomer loads: what the membership it is launched for would give it."""
        operation = self.machine.operation
        if self.balance is None or self.balance.placement is None or operation is None:
            return
        stay = [rank for rank in self.machine.members if rank not in operation.leaving]
        members = (*stay, *operation.newcomers)
        plan = self.balance.plan(members)
        self._planned_slots[rank_id] = self.balance.slots_of(plan.placement, members.index(rank_id))

    def _begin_process(self, rank_id: str) -> tuple[RankProcess, Recorder]:
        # At the first start ranks together hold all experts if each has a position of its own.
        self._positions = {rank.rank_id: self._positions[rank.rank_id] for rank in self.ranks}
        position = next(number for number in itertools.count() if number not in self._positions.values())
        self._positions[rank_id] = position
        spec = RankSpec(
            rank_id=rank_id,
            place=Place(position=position, slots=self._planned_slots.pop(rank_id, None)),
            endpoint=self._backend.endpoint,
            engine=self._config,
            worker_timeout_s=self._options.rank_timeout_s,
            log_level=self._options.log_level,
            files=self._options.files,
        )
        return self._backend.launch(spec)

    def _prepare(self, action: membership.Prepare) -> None:
        if self.balance is None:
            self._soon("prepare", [partial(self.machine.rank_prepared, r, action.attempt) for r in action.members])
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
        if (running := self.operations.running) is not None and self.balance.placement is not None:
            running.bytes_moved = self._planning.bytes_to_read(self.machine.members, action.members, plan)
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
                fills=self.balance.fills_of(plan, rank_id),
                leave=action.leave,
                max_read_bytes_per_s=self._config.max_transfer_bytes_per_s if self.machine.lives else None,
            )
            self._client.send_to(rank_id, form)

    def _begin(self, action: membership.Begin) -> None:
        logger.info("epoch %d begins with %s", action.epoch, ", ".join(action.members))
        self._epoch_attempt = action.attempt
        self._draining = ()
        if self.balance is not None:
            self.balance.commit(self._plans.pop(action.attempt), action.members)
            self._tell(action.members, Begin(attempt=action.attempt))
            self._store_forgets(action.attempt)  # its groups stand
        else:
            self._soon("apply", [partial(self.machine.rank_applied, r, action.attempt) for r in action.members])
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
            self._report("drain", self.machine.drained)

    def _stop_rank(self, rank_id: str) -> None:
        self._planning.rank_is_gone(rank_id)
        if self.balance is not None:
            self.balance.rank_is_gone(rank_id)
        self._client.send_to(rank_id, Stop())
        self.ranks.end(rank_id)
        self._client.rank_leaves(rank_id)

    def _vacate(self) -> None:
        """An operation is done: its members forget what the epoch before had in slots that are empty now."""
        if self.balance is not None and self.machine.lives:
            self._tell(self.machine.members, Vacate(version=self.balance.version))

    def _store_forgets(self, attempt: int) -> None:
        """Nobody meets any more for this attempt or earlier ones."""
        self._client.send_to(STORE_IDENTITY.decode(), Forget(attempt=attempt))

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

    def _soon(self, point: Point, events: Iterable[Callable[[], list[Action]]]) -> None:
        """Enter events that follow at once, when the present ones are done with."""
        for event in events:
            self._later(0.0, partial(self._report, point, event))

    def _report(self, point: Point, event: Callable[[], list[Action]]) -> None:
        """Tell the machine what a phase has waited for, and do what it says."""
        self.holds.pass_on(point, lambda: self._perform(event()))

    def _give_up(self, cause: str) -> None:
        self.machine.give_up(cause)
        self.operations.note_phases()
        if self.failed is not None and not self.failed.done():
            self.failed.set_result(cause)
