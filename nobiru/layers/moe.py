"""A Mixture-of-Experts layer: router → dispatch → experts → combine, and what every way of dispatching offers.

Owns the interface between a layer and whatever carries tokens to experts, the dispatcher of a single rank, and the
memory of a layer's experts. Knows nothing of files, process groups or placements.

Words: a layer has logical experts; a *slot* is a place for the weights of one on this rank, and may be empty. `layer`
counts MoE layers only, from 0.

Shape legend: L layers, T tokens of this rank, K experts of a token, E logical experts, C hidden size, I intermediate
size, S slots, N rows that this rank's experts get.
"""

from __future__ import annotations

import hashlib
import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from nobiru import machine
from nobiru.layers.activation import ACTIVATIONS, Activation, gated_product
from nobiru.layers.decoder_block import FeedForward
from nobiru.layers.routing import Router
from nobiru.ops.grouped_gemm import RowGroups, choose_layout, gathered_sum, join_gated
from nobiru.ops.scratch import Scratch

# Experts that take less leave their slots' pages small, so that an empty slot takes nothing of a neighbour's.
_LARGE_ROW_BYTES = 2**22


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatched:
    """Hidden states for this rank's experts: `rows_NC` sorted by slot, `counts_S` of them for each slot.

    `origin` is the dispatcher's own: what its `combine` needs to bring results back.
    """

    rows_NC: Tensor
    counts_S: list[int]
    origin: object


class Dispatcher(Protocol):
    """Carries tokens to the experts they are routed to, and results back; no token is dropped.

    All ranks of a group call the same methods in the same order. Several threads may use one at once if it
    `is_reentrant`.
    """

    @property
    def is_reentrant(self) -> bool: ...

    def dispatch(self, layer: int, x_TC: Tensor, expert_TK: Tensor) -> Dispatched:
        """Send each token to its K logical experts. T may be 0: such a rank still computes for others."""

    def combine(self, y_NC: Tensor, dispatched: Dispatched, weight_TK: Tensor) -> Tensor:
        """Results of `rows_NC`, in their order → [T, C] in their dtype: each token's weighted sum.

        Terms are added in the order k = 0, 1, … in float32, whatever the order in which they arrive.
        """


class LocalDispatcher:
    """The dispatcher of a rank that holds every expert."""

    is_reentrant = True

    def __init__(self, slots_LS: NDArray[np.integer], num_experts: int) -> None:
        """`slots_LS` says which logical expert is in which slot of each MoE layer, -1 for none. Of several copies of an
        expert the first is used, and `slots_LE` is where those are; ValueError if one has none."""
        self._num_slots = slots_LS.shape[1]
        self.slots_LE = np.full((len(slots_LS), num_experts), -1, np.int64)
        for layer, (slots_S, slot_E) in enumerate(zip(slots_LS, self.slots_LE, strict=True)):
            for slot in reversed(range(self._num_slots)):
                if slots_S[slot] >= 0:
                    slot_E[slots_S[slot]] = slot
            if missing := np.flatnonzero(slot_E == -1).tolist():
                raise ValueError(f"a single rank must hold every expert; layer {layer} lacks {missing}")
        # Small numbers are sorted in one pass.
        self._sorted_by_LE = self.slots_LE.astype(np.int16 if self._num_slots < 2**15 else np.int64)

    def dispatch(self, layer: int, x_TC: Tensor, expert_TK: Tensor) -> Dispatched:
        # NumPy takes a microsecond for each of these; a step of one token has them in every layer.
        slot_N = self._sorted_by_LE[layer][expert_TK.flatten().cpu().numpy()]
        order_N = slot_N.argsort(kind="stable")
        row_N = np.empty_like(order_N)
        row_N[order_N] = np.arange(len(order_N))
        token_N = torch.from_numpy(order_N // expert_TK.shape[1]).to(x_TC.device)
        return Dispatched(
            rows_NC=x_TC.index_select(0, token_N),
            counts_S=np.bincount(slot_N, minlength=self._num_slots).tolist(),
            origin=torch.from_numpy(row_N).to(x_TC.device).view(expert_TK.shape),
        )

    def combine(self, y_NC: Tensor, dispatched: Dispatched, weight_TK: Tensor) -> Tensor:
        row_TK = dispatched.origin
        assert isinstance(row_TK, Tensor)
        return gathered_sum(y_NC, row_TK, weight_TK)


class Experts:
    """The experts of one layer, in slots at fixed addresses.

    An expert is down(activation(gate x) * up x), with gate and up fused. A slot's memory is one run of bytes in an
    arrangement that `layout_id` names: ranks where it is equal can copy slots from one another byte for byte. On CPUs
    a slot that nobody wrote takes no memory.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        hidden_size: int,
        intermediate_size: int,
        activation: Activation,
        compute: torch.dtype,
        stored: torch.dtype,
        device: torch.device,
        is_gated: bool = True,
    ) -> None:
        """Arithmetic in `compute`, with weights that `stored` holds exactly.

        Experts that are not `is_gated` are down(activation(up x)); what is said of A = 2 I rows is of I then.
        """
        num_wide = (1 + is_gated) * intermediate_size
        wide = choose_layout(num_wide, hidden_size, compute=compute, stored=stored, device=device)
        narrow = choose_layout(hidden_size, intermediate_size, compute=compute, stored=stored, device=device)
        self.num_slots = num_slots
        self.hidden_size = hidden_size
        self.dtype = compute
        self.layout_id = f"{wide.name}-{hidden_size}x{num_wide}x{intermediate_size}"
        # What of a slot's memory holds weights; the rest fills up its last page.
        self.slot_bytes = wide.num_bytes + narrow.num_bytes
        self._activation = activation
        self._is_gated = is_gated
        self._memory = _PagedMemory(num_slots, self.slot_bytes, device)
        self._gate_up = wide.make(self._memory.rows[:, : wide.num_bytes])
        self._down = narrow.make(self._memory.rows[:, wide.num_bytes : self.slot_bytes])
        joins = is_gated and activation is ACTIVATIONS["silu"]
        sizes = {"width": hidden_size, "inner": intermediate_size}
        # Both products and what is between them in one call, where kernels do that.
        self.joined = join_gated(self._gate_up, self._down, **sizes) if joins else None

    def compute(self, rows_NC: Tensor, counts_S: Sequence[int]) -> Tensor:
        """Each row through its slot's expert, [N, C]; rows are sorted by slot, `counts_S` of them for each."""
        if not rows_NC.shape[0]:
            return rows_NC
        groups = RowGroups(counts_S)
        if self.joined is not None:
            return self.joined(rows_NC, groups.slots, groups.starts)
        wide_NA = self._gate_up(rows_NC, groups)
        narrow_NI = gated_product(wide_NA, self._activation) if self._is_gated else self._activation.apply(wide_NA)
        return self._down(narrow_NI, groups)

    def write(self, slot: int, gate_up_AC: Tensor, down_CI: Tensor) -> None:
        """Put an expert's weights, A = 2 I rows of gate and up and those of down, into a slot."""
        self._gate_up.write(slot, gate_up_AC)
        self._down.write(slot, down_CI)

    def read(self, slot: int) -> tuple[Tensor, Tensor]:
        """What was written."""
        return self._gate_up.read(slot), self._down.read(slot)

    def memory(self, slot: int) -> Tensor:
        """The slot's bytes, uint8 [slot_bytes], always at the same address: to send, or to receive into."""
        return self._memory.rows[slot, : self.slot_bytes]

    def checksum(self, slot: int) -> str:
        """Of the slot's bytes; equal wherever `layout_id` and weights are."""
        return hashlib.blake2b(self.memory(slot).cpu().numpy().data, digest_size=16).hexdigest()

    def vacate(self, slot: int) -> None:
        """Forget a slot's weights; on CPUs its memory goes back to the system."""
        self._memory.release(slot)


class _PagedMemory:
    """Rows of bytes that begin at pages; zeros at first, and on CPUs no row takes memory before it is written."""

    def __init__(self, num_rows: int, num_bytes: int, device: torch.device) -> None:
        self._row_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        size = num_rows * self._row_bytes
        self._pages: mmap.mmap | None = None
        if device.type == "cpu":
            self._pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory = torch.frombuffer(self._pages, dtype=torch.uint8)
            if self._row_bytes >= _LARGE_ROW_BYTES:
                machine.prefer_huge_pages(memory.data_ptr(), size)
        else:
            memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self.rows = memory.view(num_rows, self._row_bytes)

    def release(self, row: int) -> None:
        if self._pages is None:
            self.rows[row].zero_()
        else:
            self._pages.madvise(mmap.MADV_DONTNEED, row * self._row_bytes, self._row_bytes)


class ExpertLoads:
    """How many tokens were routed to each expert. Several threads may count at once."""

    def __init__(self, num_layers: int, num_experts: int, device: torch.device) -> None:
        self._lock = threading.Lock()
        self._counts_LE = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        # The same memory.
        self._in_numpy = self._counts_LE.numpy() if device.type == "cpu" else None

    def count(self, layer: int, expert_TK: Tensor) -> None:
        experts = expert_TK.flatten()
        if self._in_numpy is not None:
            counts_E = np.bincount(experts.numpy(), minlength=self._in_numpy.shape[1])
            with self._lock:
                self._in_numpy[layer] += counts_E
            return
        with self._lock:
            self._counts_LE[layer].scatter_add_(0, experts, self._one.expand(len(experts)))

    def add(self, counts_LE: NDArray[np.int64]) -> None:
        """What was counted elsewhere; for loads on the CPU."""
        assert self._in_numpy is not None
        with self._lock:
            self._in_numpy += counts_LE

    def take(self) -> Tensor:
        """Counts since the last call, int64 [L, E] on the CPU."""
        with self._lock:
            counts_LE = self._counts_LE.cpu().clone()
            self._counts_LE.zero_()
        return counts_LE


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedExpert:
    """An expert that every token goes to; `gate`, C → 1, scales its result by a sigmoid."""

    mlp: FeedForward
    gate_1C: Tensor | None = None

    def __call__(self, x_TC: Tensor, scratch: Scratch | None) -> Tensor:
        y_TC = self.mlp(x_TC, scratch)
        return y_TC if self.gate_1C is None else y_TC * F.linear(x_TC, self.gate_1C).sigmoid()


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeMlp:
    """The feed-forward of MoE layer number `layer`."""

    layer: int
    top_k: int
    router: Router
    experts: Experts
    shared: SharedExpert | None
    loads: ExpertLoads

    def __call__(self, x_TC: Tensor, dispatcher: Dispatcher, scratch: Scratch | None = None) -> Tensor:
        """What the layer adds to x, [T, C]."""
        routing = self.router(x_TC)
        self.loads.count(self.layer, routing.expert_TK)
        sent = dispatcher.dispatch(self.layer, x_TC, routing.expert_TK)
        y_TC = dispatcher.combine(self.experts.compute(sent.rows_NC, sent.counts_S), sent, routing.weight_TK)
        return y_TC if self.shared is None else y_TC.add_(self.shared(x_TC, scratch))

    def run_idle(self, dispatcher: Dispatcher) -> None:
        """Compute what other ranks send, with no token of this one."""
        experts, device = self.experts, self.experts.memory(0).device
        x_TC = torch.empty(0, experts.hidden_size, dtype=experts.dtype, device=device)
        sent = dispatcher.dispatch(self.layer, x_TC, torch.empty(0, self.top_k, dtype=torch.int64, device=device))
        no_weights_TK = torch.empty(0, self.top_k, device=device)
        dispatcher.combine(experts.compute(sent.rows_NC, sent.counts_S), sent, no_weights_TK)


class DispatcherHolder(Protocol):
    """Whoever says what carries tokens to experts; between steps it may be another, and there may be none."""

    dispatcher: Dispatcher | None


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeFeedForward:
    """A MoE layer as a decoder sees it. All those of a decoder have the same `parts`."""

    mlp: MoeMlp
    parts: DispatcherHolder

    def __call__(self, x_TC: Tensor, scratch: Scratch | None) -> Tensor:
        assert self.parts.dispatcher is not None, "this rank lacks experts, so it needs a dispatcher to others"
        return self.mlp(x_TC, self.parts.dispatcher, scratch)
