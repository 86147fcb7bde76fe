"""A worker's part in the epochs of expert-parallel ranks: the groups of an attempt, prepared beside steps, then used.

Owns the groups of the present epoch and of the one that is prepared. Experts are spread over the workers of all ranks,
in the order of ranks, then workers; a rank has at least one. Knows nothing of when to step, which the leaders of the
ranks agree upon (`nobiru.engine.expert_member`), nor of requests.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nobiru.engine.expert_moves import ExpertMoves
from nobiru.engine.messages import Form, Formed
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

FORM_TIMEOUT_S = 10.0


@dataclass(slots=True, kw_only=True)
class Epoch:
    """The groups of one attempt: `control` of the ranks' leaders for the records, `experts` of all workers for tokens,
    `transfer` for moves of experts, and `workers` of one rank."""

    attempt: int
    number: int
    moves: ExpertMoves
    groups: dict[str, Group]
    dispatcher: AllToAllDispatcher

    def destroy(self) -> None:
        for group in self.groups.values():
            group.destroy()


class ExpertWorker:
    """`prepare` an attempt, `begin` it when all members are prepared, and `leave` the epoch at a `GroupError`.

    Preparing goes on in a thread, beside the steps of the epoch that lives; `take_prepared` says how it ended.
    `workers` is the rank's group, if it has several. `break_out` may be called from another thread.
    """

    def __init__(
        self,
        moe: MoeParts,
        *,
        step_timeout_s: float,
        max_transfer_bytes_per_s: int | None = None,
        host: str = "127.0.0.1",
        workers: WorkerGroup | None = None,
    ) -> None:
        self._moe = moe
        self._workers = workers
        self._shard = WHOLE if workers is None else workers.shard
        self._max_transfer_bytes_per_s = max_transfer_bytes_per_s
        self._step_timeout_s = step_timeout_s
        self._host = host  # the address at which other members reach this one
        self._standby: Epoch | None = None
        self._preparing = 0  # the attempt, until its outcome is taken or it is forgotten
        self._store_port = 0
        self._num_untaken = 0  # threads whose outcome was not taken
        self._filling = threading.Lock()
        self._prepared: queue.SimpleQueue[tuple[Formed, Epoch | None]] = queue.SimpleQueue()
        self.epoch: Epoch | None = None

    # ---- attempts ----------------------------------------------------------------------------------------------------

    @property
    def is_preparing(self) -> bool:
        """Whether there will be something to take, be it forgotten groups that have to be destroyed."""
        return self._num_untaken > 0

    def prepare(self, form: Form) -> None:
        """Fill slots and build the groups of an attempt, with all workers of its members at once."""
        self.forget(form.attempt - 1)
        self._preparing = form.attempt
        self._num_untaken += 1
        threading.Thread(target=self._prepare, args=(form,), name="prepare", daemon=True).start()

    def take_prepared(self) -> Formed | None:
        """How preparing has ended, once it has; attempts that were forgotten meanwhile are passed over."""
        while not self._prepared.empty():
            outcome, standby = self._prepared.get()
            self._num_untaken -= 1
            if outcome.attempt == self._preparing:
                self._preparing, self._standby = 0, standby
                return outcome
            if standby is not None:
                standby.destroy()
        return None

    def forget(self, attempt: int) -> None:
        """Whatever was prepared for this attempt or earlier ones never was."""
        if self._standby is not None and self._standby.attempt <= attempt:
            self._standby.destroy()
            self._standby = None
        if 0 < self._preparing <= attempt:
            self._preparing = 0
            break_connections_to(self._store_port)  # its thread may wait there for members that do not come

    def is_prepared(self, attempt: int) -> bool:
        return self._standby is not None and self._standby.attempt == attempt

    def begin(self, attempt: int) -> None:
        """Switch to the attempt's epoch, if it is prepared."""
        if self._standby is None or self._standby.attempt != attempt:
            return
        standby, self._standby = self._standby, None
        self.leave()
        self.epoch = standby
        if self._workers is not None:
            self._workers.join(standby.groups["workers"])
        self._moe.dispatcher = standby.dispatcher

    def leave(self) -> None:
        """Leave the epoch; whoever is still in one of its exchanges gets a `GroupError`."""
        epoch, self.epoch = self.epoch, None
        if epoch is not None:
            self._moe.dispatcher = None
            with torch.inference_mode():
                self._moe.take_loads()  # an abandoned step's do not count
            epoch.destroy()

    def break_out(self, attempt: int) -> None:
        """End the exchanges of an attempt that is over, in which this worker may be stuck."""
        epoch = self.epoch
        if epoch is not None and epoch.attempt <= attempt:
            for group in epoch.groups.values():
                group.break_connections()

    # ---- steps -------------------------------------------------------------------------------------------------------

    @property
    def present(self) -> Epoch:
        """The epoch; `GroupError` if it was left."""
        if self.epoch is None:
            raise GroupError("this worker has left the epoch")
        return self.epoch

    @property
    def moves(self) -> ExpertMoves | None:
        """The experts' moves of the epoch."""
        return None if self.epoch is None else self.epoch.moves

    def run_idle(self) -> None:
        """Take part in a step without tokens of one's own."""
        assert self.present.dispatcher is self._moe.dispatcher
        with torch.inference_mode():
            self._moe.run_idle()

    def collect_loads(self) -> Tensor:
        """Tokens that the rank routed to each logical expert since the last call, int64 [L, E]; all its workers call
        this at once, because each routes some of the tokens."""
        with torch.inference_mode():
            counts_LE = self._moe.take_loads()
            if self._workers is not None:
                self._workers.all_reduce(counts_LE)
        return counts_LE

    # ---- in the thread -----------------------------------------------------------------------------------------------

    def _prepare(self, form: Form) -> None:
        try:
            with self._filling, torch.inference_mode():
                pace = Pace(form.max_read_bytes_per_s) if form.max_read_bytes_per_s else None
                for layer, expert, slot in form.fills[self._shard.index] if form.fills else ():
                    if self._preparing == form.attempt:  # a later attempt may want something else there
                        self._moe.read_expert(layer, expert, slot, pace=pace)
            standby = self._form(form)
        except (NobiruError, OSError) as error:
            missed_others = isinstance(error, GroupError)
            self._prepared.put((Formed(attempt=form.attempt, error=str(error), missed_others=missed_others), None))
        else:
            self._prepared.put((Formed(attempt=form.attempt), standby))

    def _form(self, form: Form) -> Epoch:
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
            tables = ExpertTables(placement)
        except NobiruError:
            for group in groups.values():
                group.destroy()
            raise
        moves = ExpertMoves(
            self._moe,
            groups["transfer"],
            tables,
            placement,
            version=form.version,
            max_bytes_per_s=self._max_transfer_bytes_per_s,
        )
        return Epoch(
            attempt=form.attempt,
            number=form.epoch,
            moves=moves,
            groups=groups,
            dispatcher=AllToAllDispatcher(groups["experts"], tables),
        )

    def _places(self, form: Form) -> dict[str, tuple[int, int, float]]:
        """This worker's place in each group, the group's size and time limit. A slot may take long to copy."""
        rate, step_s = self._max_transfer_bytes_per_s, self._step_timeout_s
        transfer_s = step_s + (self._moe.expert_bytes / rate if rate else 0.0)
        place, size = form.position * self._shard.size + self._shard.index, form.size * self._shard.size
        places = {"experts": (place, size, step_s), "transfer": (place, size, transfer_s)}
        if self._shard.index == 0:
            places["control"] = (form.position, form.size, step_s)
        if self._shard.size > 1:
            places["workers"] = (self._shard.index, self._shard.size, step_s)
        return places


class StandInDispatcher:
    """For warming up before there is a group: all tokens go to one slot of this worker; results mean nothing."""

    is_reentrant = False

    def __init__(self, moe: MoeParts) -> None:
        # Where there are more workers than experts, a slot may be empty: zeros.
        self._first_slots = [int(np.argmax(slots_S >= 0)) for slots_S in moe.slots_LS]
        self._num_slots = moe.slot_capacity

    def dispatch(self, layer: int, x_TC: Tensor, expert_TK: Tensor) -> Dispatched:
        counts_S = [0] * self._num_slots
        counts_S[self._first_slots[layer]] = expert_TK.numel()
        rows_NC = x_TC.repeat_interleave(expert_TK.shape[1], 0)
        return Dispatched(rows_NC=rows_NC, counts_S=counts_S, origin=None)

    def combine(self, y_NC: Tensor, dispatched: Dispatched, weight_TK: Tensor) -> Tensor:
        return gathered_sum(y_NC, torch.arange(len(y_NC)).view(weight_TK.shape), weight_TK)
