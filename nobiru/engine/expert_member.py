"""This rank's part in an epoch of expert-parallel ranks, which step together.

Owns the epoch's groups and the number of the next step. Every step begins with one small all-gather, which says who has
work; whoever has none computes for the others with an idle step. When nobody has work all sleep, until one of them is
given some. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nobiru.config import EngineConfig
from nobiru.engine.expert_moves import ExpertMoves
from nobiru.engine.messages import ExpertLoads, Form
from nobiru.errors import GroupError
from nobiru.layers.moe import Dispatched
from nobiru.models.moe import MoeParts
from nobiru.ops.grouped_gemm import gathered_sum
from nobiru.parallel.dispatch import AllToAllDispatcher, ExpertTables
from nobiru.parallel.groups import Group, connect_store, form_group
from nobiru.parallel.placement import Placement, initial_placement, slot_capacity_for
from nobiru.scheduler import Plan

FORM_TIMEOUT_S = 10.0

# The fields of the record that every step begins with.
RECORD = ("attempt", "epoch", "seq", "num_tokens", "has_work", "ready_epoch", "placement_version", "graph_bucket")
_HAS_WORK = RECORD.index("has_work")
_VERSION = RECORD.index("placement_version")
# Steps between two reports of where tokens went.
LOADS_INTERVAL = 16


@dataclass(slots=True, kw_only=True)
class _Epoch:
    """The groups of one attempt: `control` for the records, `experts` for tokens, and one for `moves` of experts."""

    attempt: int
    number: int
    control: Group
    experts: Group
    moves: ExpertMoves
    groups: list[Group]
    has_begun: bool = False


class ExpertMember:
    """`form`, `begin`, then for each step `gather` and, without work of its own, `run_idle`; `leave` at a `GroupError`.

    `break_out` may be called from another thread.
    """

    def __init__(
        self,
        moe: MoeParts,
        *,
        step_timeout_s: float,
        max_transfer_bytes_per_s: int | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self._moe = moe
        self._max_transfer_bytes_per_s = max_transfer_bytes_per_s
        self._step_timeout_s = step_timeout_s
        self._host = host  # the address at which other members reach this one
        self._epoch: _Epoch | None = None
        self.seq = 0
        self.is_asleep = False
        self.has_switched = False  # to another placement, with the last gather
        self.num_unreported = 0  # steps whose loads were not taken
        self.is_before_step = True  # the step that failed had only begun: its plan was not executed

    @property
    def epoch(self) -> int | None:
        """The epoch in which this rank steps with others."""
        return self._epoch.number if self._epoch is not None and self._epoch.has_begun else None

    def form(self, form: Form) -> None:
        """Build the groups of an attempt, with all its members at once. `GroupError` if one does not come."""
        self.leave()
        placement = Placement(
            slots=np.frombuffer(form.slots, dtype="<i4").reshape(form.shape), num_experts=self._moe.num_experts
        )
        store = connect_store(form.store_host, form.store_port, timeout_s=FORM_TIMEOUT_S)
        groups: list[Group] = []
        try:
            for name, timeout_s in self._groups():
                group = form_group(
                    store,
                    attempt_id=str(form.attempt),
                    name=name,
                    rank=form.position,
                    size=form.size,
                    timeout_s=timeout_s,
                    host=self._host,
                )
                groups.append(group)
        except GroupError:
            for group in groups:
                group.destroy()
            raise
        control, experts, transfer = groups
        tables = ExpertTables(placement)
        self._moe.dispatcher = AllToAllDispatcher(experts, tables)
        moves = ExpertMoves(
            self._moe,
            transfer,
            tables,
            placement,
            version=form.version,
            max_bytes_per_s=self._max_transfer_bytes_per_s,
        )
        self._epoch = _Epoch(
            attempt=form.attempt,
            number=form.epoch,
            control=control,
            experts=experts,
            moves=moves,
            groups=groups,
        )

    def _groups(self) -> list[tuple[str, float]]:
        """Names and time limits. A slot may take long to copy, at a limited rate."""
        rate = self._max_transfer_bytes_per_s
        transfer_s = self._step_timeout_s + (self._moe.expert_bytes / rate if rate else 0.0)
        return [("control", self._step_timeout_s), ("experts", self._step_timeout_s), ("transfer", transfer_s)]

    def begin(self, attempt: int) -> None:
        """Every member has formed this attempt."""
        if self._epoch is not None and self._epoch.attempt == attempt:
            self._epoch.has_begun = True
            self.seq = 0
            self.is_asleep = False

    def gather(self, plan: Plan | None) -> bool:
        """Begin a step with the others; whether anybody has work. If not, all of them sleep from now on."""
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
                epoch.number,
                epoch.moves.ready_version,
                0,
            ],
            dtype=torch.int64,
        )
        records_Rn = epoch.control.all_gather_record(record)
        assert bool((records_Rn[:, :3] == record[:3]).all()), "members are in the same step of the same epoch"
        self.seq += 1
        self.num_unreported += 1
        self.is_before_step = False
        self.is_asleep = not bool(records_Rn[:, _HAS_WORK].any())
        self.has_switched = int(records_Rn[:, _VERSION].min()) > epoch.moves.version
        if self.has_switched:
            epoch.moves.switch()
        return not self.is_asleep

    @property
    def moves(self) -> ExpertMoves | None:
        """The experts' moves of the epoch that has begun."""
        return self._epoch.moves if self.epoch is not None and self._epoch is not None else None

    def take_loads(self) -> ExpertLoads | None:
        """Tokens routed by this rank since the last call, after every `LOADS_INTERVAL` steps and before sleep."""
        if not self.num_unreported or (self.num_unreported < LOADS_INTERVAL and not self.is_asleep):
            return None
        with torch.inference_mode():
            counts_LE = self._moe.take_loads()
        loads = ExpertLoads(
            num_steps=self.num_unreported,
            shape=(counts_LE.shape[0], counts_LE.shape[1]),
            counts=counts_LE.numpy().tobytes(),
        )
        self.num_unreported = 0
        return loads

    def run_idle(self) -> None:
        """Take part in a step without tokens of one's own."""
        with torch.inference_mode():
            self._moe.run_idle()

    def wake(self, epoch: int, seq: int) -> None:
        """Another member waits in step `seq`; a call for any other step is late."""
        if epoch == self.epoch and seq == self.seq:
            self.is_asleep = False

    def leave(self) -> None:
        """Leave the epoch; whoever is still in one of its exchanges gets a `GroupError`."""
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            self._moe.dispatcher = None
            with torch.inference_mode():
                self._moe.take_loads()  # an abandoned step's do not count
            self.num_unreported = 0
            for group in epoch.groups:
                group.destroy()

    def break_out(self, attempt: int) -> None:
        """End the exchanges of an attempt that is over, in which this rank may be stuck."""
        epoch = self._epoch
        if epoch is not None and epoch.attempt <= attempt:
            for group in epoch.groups:
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


def choose_slots(
    config: EngineConfig, position: int, slots: Sequence[Sequence[int]] | None, *, index: int = 0
) -> Callable[[int, int], NDArray[np.integer]]:
    """For the numbers of MoE layers and of experts: which expert goes into which slot of worker `index` of the rank at
    `position`, [layers, slots].

    Those among the rank's `slots` if they are given, else those of the first placement.
    """

    def choose(num_layers: int, num_experts: int) -> NDArray[np.integer]:
        num_workers = config.tensor_parallel_size
        if slots is not None:
            return np.array(slots, dtype=np.int64).reshape(num_layers, num_workers, -1)[:, index]
        first = position * num_workers if config.enable_expert_parallel else 0
        return first_placement(config, num_layers, num_experts).slots[:, first + index]

    return choose


def first_placement(config: EngineConfig, num_layers: int, num_experts: int) -> Placement:
    """Of experts on the workers of all ranks; of one rank without expert parallelism.

    With load balancing there is a spare slot, into which an expert can be copied before it is used there.
    """
    size, redundant = config.tensor_parallel_size, config.num_redundant_experts
    if config.enable_expert_parallel:
        size *= config.data_parallel_size
    capacity = slot_capacity_for(num_experts=num_experts, num_redundant=redundant, min_ranks=size)
    return initial_placement(
        num_layers=num_layers,
        num_experts=num_experts,
        num_ranks=size,
        slot_capacity=capacity + config.enable_eplb,
        num_redundant=redundant,
    )
