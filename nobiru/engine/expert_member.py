"""This rank's part in an epoch of expert-parallel ranks, which step together.

Owns the epoch's groups and the number of the next step. Every step begins with one small all-gather, which says who has
work; whoever has none computes for the others with an idle step. When nobody has work all sleep, until one of them is
given some. Knows nothing of requests.

Where ranks have several workers, experts are spread over the workers of all ranks, in the order of ranks, then workers.
The all-gather is the leaders'; their workers follow them. All leave the epoch when one meets an error.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from nobiru.engine.expert_moves import ExpertMoves
from nobiru.engine.messages import ExpertLoads, Form, Formed
from nobiru.engine.team import Team
from nobiru.engine.team_messages import CollectLoads, IdleStep
from nobiru.engine.team_moves import TeamMoves
from nobiru.errors import GroupError, NobiruError
from nobiru.layers.moe import Dispatched
from nobiru.layers.sharding import WHOLE
from nobiru.models.moe import MoeParts
from nobiru.models.pace import Pace
from nobiru.ops.grouped_gemm import gathered_sum
from nobiru.parallel.dispatch import AllToAllDispatcher, ExpertTables
from nobiru.parallel.groups import Group, break_connections_to, connect_store, form_group
from nobiru.parallel.placement import Placement
from nobiru.parallel.tensor import WorkerGroup
from nobiru.scheduler import Plan

FORM_TIMEOUT_S = 10.0

# The fields of the record that every step begins with.
RECORD = ("attempt", "epoch", "seq", "num_tokens", "has_work", "armed", "placement_version", "graph_bucket")
_HAS_WORK = RECORD.index("has_work")
_ARMED = RECORD.index("armed")
_VERSION = RECORD.index("placement_version")
# Steps between two reports of where tokens went.
LOADS_INTERVAL = 16


@dataclass(slots=True, kw_only=True)
class _Epoch:
    """The groups of one attempt: `control` of the ranks' leaders for the records, `experts` for tokens, one for `moves`
    of experts, and one of a rank's workers."""

    attempt: int
    number: int
    moves: ExpertMoves | TeamMoves
    groups: dict[str, Group]
    dispatcher: AllToAllDispatcher
    has_begun: bool = False

    def destroy(self) -> None:
        for group in self.groups.values():
            group.destroy()


class ExpertMember:
    """`prepare`, `begin`, then each step `gather` and, without work of its own, `run_idle`; `leave` at a `GroupError`.

    An attempt is prepared in a thread, beside the steps of the epoch that lives; `take_prepared` says how that ended.
    Once `armed` like all other members, a gather parks this one instead of opening a step, until `begin` or `forget`.
    `break_out` may be called from another thread. Of a rank with several `workers` the leader has a `team` to tell what
    it does; the others only `form`, `run_idle`, `collect_loads` and `leave`, and obey in what concerns `moves`.
    """

    def __init__(
        self,
        moe: MoeParts,
        *,
        step_timeout_s: float,
        max_transfer_bytes_per_s: int | None = None,
        host: str = "127.0.0.1",
        workers: WorkerGroup | None = None,
        team: Team | None = None,
    ) -> None:
        self._moe = moe
        self._workers = workers
        self._team = team
        self._shard = WHOLE if workers is None else workers.shard
        self._collected_LE: Tensor | None = None
        self._max_transfer_bytes_per_s = max_transfer_bytes_per_s
        self._step_timeout_s = step_timeout_s
        self._host = host  # the address at which other members reach this one
        self._epoch: _Epoch | None = None
        self._standby: _Epoch | None = None
        self._preparing = 0  # the attempt, while its thread runs
        self._store_port = 0
        self._filling = threading.Lock()
        self._prepared: queue.SimpleQueue[tuple[Formed, _Epoch | None]] = queue.SimpleQueue()
        self.armed = 0  # for this attempt
        self.is_parked = False
        self.has_applied = False  # the epoch's first gather has completed
        self.seq = 0
        self.is_asleep = False
        self.has_switched = False  # to another placement, with the last gather
        self.num_unreported = 0  # steps whose loads were not taken
        self.is_before_step = True  # the step that failed had only begun: its plan was not executed

    @property
    def epoch(self) -> int | None:
        """The epoch in which this rank steps with others."""
        return self._epoch.number if self._epoch is not None and self._epoch.has_begun else None

    @property
    def attempt(self) -> int | None:
        """That which led to the epoch."""
        return self._epoch.attempt if self._epoch is not None and self._epoch.has_begun else None

    @property
    def is_preparing(self) -> bool:
        return self._preparing != 0

    def prepare(self, form: Form) -> None:
        """Fill slots and build the groups of an attempt, with all its members at once."""
        self.forget(form.attempt - 1)
        if form.leave:
            self.leave()
        self._preparing = form.attempt
        if self._team is not None:  # workers are told by this thread alone
            self.leave()
            self._prepare(form)
        else:
            threading.Thread(target=self._prepare, args=(form,), name="prepare", daemon=True).start()

    def take_prepared(self) -> Formed | None:
        """How preparing has ended, once it has; attempts that were forgotten meanwhile are passed over."""
        while not self._prepared.empty():
            outcome, standby = self._prepared.get()
            if outcome.attempt == self._preparing:
                self._preparing, self._standby = 0, standby
                return outcome
            if standby is not None:
                standby.destroy()
        return None

    def form(self, form: Form) -> None:
        """What `prepare` does, at once and for good. `GroupError` if a member does not come."""
        self.leave()
        self._epoch = self._form(form)
        self._use(self._epoch)
        self._epoch.has_begun = True

    def _prepare(self, form: Form) -> None:
        try:
            with self._filling, torch.inference_mode():
                pace = Pace(form.max_read_bytes_per_s) if form.max_read_bytes_per_s else None
                for layer, expert, slot in form.fills:
                    if self._preparing == form.attempt:  # a later attempt may want something else there
                        self._moe.read_expert(layer, expert, slot, pace=pace)
            standby = self._form(form)
        except (NobiruError, OSError) as error:
            missed_others = isinstance(error, GroupError)
            self._prepared.put((Formed(attempt=form.attempt, error=str(error), missed_others=missed_others), None))
        else:
            self._prepared.put((Formed(attempt=form.attempt), standby))

    def _form(self, form: Form) -> _Epoch:
        if self._team is not None:
            self._team.tell(form)
        placement = Placement(
            slots=np.frombuffer(form.slots, dtype="<i4").reshape(form.shape), num_experts=self._moe.num_experts
        )
        self._store_port = form.store_port
        store = connect_store(form.store_host, form.store_port, timeout_s=FORM_TIMEOUT_S)
        groups: dict[str, Group] = {}
        try:
            for name, (rank, size, timeout_s) in self._places(form).items():
                groups[name] = form_group(
                    store,
                    attempt_id=str(form.attempt),
                    name=f"{name}-{form.position}" if name == "workers" else name,
                    rank=rank,
                    size=size,
                    timeout_s=timeout_s,
                    host=self._host,
                )
            if self._team is not None:
                self._team.wait_formed(form.attempt)
        except NobiruError:
            for group in groups.values():
                group.destroy()
            raise
        tables = ExpertTables(placement)
        moves = ExpertMoves(
            self._moe,
            groups["transfer"],
            tables,
            placement,
            version=form.version,
            max_bytes_per_s=self._max_transfer_bytes_per_s,
        )
        return _Epoch(
            attempt=form.attempt,
            number=form.epoch,
            moves=moves if self._team is None else TeamMoves(moves, self._team),
            groups=groups,
            dispatcher=AllToAllDispatcher(groups["experts"], tables),
        )

    def _use(self, epoch: _Epoch) -> None:
        if self._workers is not None:
            self._workers.join(epoch.groups["workers"])
        self._moe.dispatcher = epoch.dispatcher

    def _places(self, form: Form) -> dict[str, tuple[int, int, float]]:
        """This process' place in each group, the group's size and time limit. A slot may take long to copy."""
        rate, step_s = self._max_transfer_bytes_per_s, self._step_timeout_s
        transfer_s = step_s + (self._moe.expert_bytes / rate if rate else 0.0)
        place, size = form.position * self._shard.size + self._shard.index, form.size * self._shard.size
        places = {"experts": (place, size, step_s), "transfer": (place, size, transfer_s)}
        if self._shard.index == 0:
            places["control"] = (form.position, form.size, step_s)
        if self._shard.size > 1:
            places["workers"] = (self._shard.index, self._shard.size, step_s)
        return places

    def begin(self, attempt: int) -> None:
        """Switch to the attempt's epoch: its members are prepared, and those of the epoch before have parked."""
        if self._standby is None or self._standby.attempt != attempt:
            return
        standby, self._standby = self._standby, None
        self.leave()
        self._epoch = standby
        self._use(standby)
        standby.has_begun = True
        self.seq = 0
        self.is_asleep = self.has_applied = False

    def arm(self, attempt: int) -> None:
        """Be ready for the attempt at the next gather, which others may be waiting in."""
        self.armed = attempt
        self.is_asleep = False

    def forget(self, attempt: int) -> None:
        """Whatever belongs to this attempt or earlier ones never was; who has parked for it goes on."""
        if self._standby is not None and self._standby.attempt <= attempt:
            self._standby.destroy()
            self._standby = None
        if 0 < self._preparing <= attempt:
            self._preparing = 0
            break_connections_to(self._store_port)  # its thread may wait there for members that do not come
        if self.armed <= attempt:
            self.armed, self.is_parked = 0, False

    def gather(self, plan: Plan | None) -> Literal["step", "sleep", "park"]:
        """Begin a step with the others. When nobody has work all sleep from now on; when all are armed all park."""
        epoch = self._epoch
        assert epoch is not None and epoch.has_begun
        self.is_before_step = True
        record = torch.tensor(
            [
                epoch.attempt,
                epoch.number,
                self.seq,
                0 if plan is None else plan.num_tokens,
                plan is not None,
                self.armed,
                epoch.moves.ready_version,
                0,
            ],
            dtype=torch.int64,
        )
        records_Rn = epoch.groups["control"].all_gather_record(record)
        assert bool((records_Rn[:, :3] == record[:3]).all()), "members are in the same step of the same epoch"
        self.seq += 1
        self.num_unreported += 1
        self.is_asleep = not bool(records_Rn[:, _HAS_WORK].any())
        self.has_switched = int(records_Rn[:, _VERSION].min()) > epoch.moves.version
        if self.has_switched:
            epoch.moves.switch()
        if self._team is not None and self._loads_are_due:
            self._team.tell(CollectLoads())
            self._collected_LE = self.collect_loads()
        if self.armed and bool((records_Rn[:, _ARMED] == self.armed).all()):
            self.is_parked = True
            return "park"
        self.is_before_step = False
        return "sleep" if self.is_asleep else "step"

    @property
    def moves(self) -> ExpertMoves | TeamMoves | None:
        """The experts' moves of the epoch that has begun."""
        return self._epoch.moves if self.epoch is not None and self._epoch is not None else None

    def take_loads(self) -> ExpertLoads | None:
        """Tokens routed by this rank since the last call, after every `LOADS_INTERVAL` steps and before sleep."""
        if self._team is not None:
            counts_LE, self._collected_LE = self._collected_LE, None
        else:
            counts_LE = self.collect_loads() if self._loads_are_due else None
        if counts_LE is None:
            return None
        loads = ExpertLoads(
            num_steps=self.num_unreported,
            shape=(counts_LE.shape[0], counts_LE.shape[1]),
            counts=counts_LE.numpy().tobytes(),
        )
        self.num_unreported = 0
        return loads

    @property
    def _loads_are_due(self) -> bool:
        return self.num_unreported > 0 and (self.num_unreported >= LOADS_INTERVAL or self.is_asleep)

    def collect_loads(self) -> Tensor:
        """Tokens that the rank routed to each logical expert since the last call, int64 [L, E]; all its workers call
        this at once, because each routes some of the tokens."""
        with torch.inference_mode():
            counts_LE = self._moe.take_loads()
            if self._workers is not None:
                self._workers.all_reduce(counts_LE)
        return counts_LE

    def run_idle(self) -> None:
        """Take part in a step without tokens of one's own."""
        if self._team is not None:
            self._team.tell(IdleStep())
        with torch.inference_mode():
            self._moe.run_idle()

    def wake(self, epoch: int, seq: int) -> None:
        """Another member waits in step `seq`; a call for any other step is late."""
        if epoch == self.epoch and seq == self.seq:
            self.is_asleep = False

    def leave(self) -> None:
        """Leave the epoch; whoever is still in one of its exchanges gets a `GroupError`."""
        epoch, self._epoch = self._epoch, None
        self.armed, self.is_parked = 0, False
        if epoch is not None:
            self._moe.dispatcher = None
            with torch.inference_mode():
                self._moe.take_loads()  # an abandoned step's do not count
            self.num_unreported = 0
            self._collected_LE = None
            epoch.destroy()

    def break_out(self, attempt: int) -> None:
        """End the exchanges of an attempt that is over, in which this rank may be stuck."""
        epoch = self._epoch
        if epoch is not None and epoch.attempt <= attempt:
            for group in epoch.groups.values():
                group.break_connections()


class StandInDispatcher:
    """For warming up before there is a group: all tokens go to experts that this rank holds; results mean nothing."""

    is_reentrant = False

    def __init__(self, moe: MoeParts) -> None:
        self._first_slots = [int(np.flatnonzero(slots_S >= 0)[0]) for slots_S in moe.slots_LS]
        self._num_slots = moe.slot_capacity

    def dispatch(self, layer: int, x_TC: Tensor, expert_TK: Tensor) -> Dispatched:
        counts_S = [0] * self._num_slots
        counts_S[self._first_slots[layer]] = expert_TK.numel()
        rows_NC = x_TC.repeat_interleave(expert_TK.shape[1], 0)
        return Dispatched(rows_NC=rows_NC, counts_S=counts_S, origin=None)

    def combine(self, y_NC: Tensor, dispatched: Dispatched, weight_TK: Tensor) -> Tensor:
        return gathered_sum(y_NC, torch.arange(len(y_NC)).view(weight_TK.shape), weight_TK)
