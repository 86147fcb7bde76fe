"""One projection of many experts, rows sorted by slot times the weights of each slot, and the sum of their results.

Owns the arrangement of a slot's weights in memory, which is the one that the device multiplies fastest, and there is no
other copy of them:

* CPUs, float32 and, with instructions for it, bfloat16: panels, for kernels of our own (`nobiru.ops.native`). These
  read each weight once whether an expert has one row or a dozen, and take all experts in one call. float32 products
  may read bfloat16 weights.
* CUDA, bfloat16: torch's grouped product, one launch for all experts.
* Anything else: one product per slot that has rows.

Knows nothing of experts' other parts, of routing, or of who has which slot.

Shape legend: S slots, N rows of all slots, O output values, I input values, T tokens, K rows of a token, C values of a
result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nobiru.ops.native.experts import NativeExperts
from nobiru.ops.native.library import Kernels, kernels_for, load_kernels

# torch's grouped product wants rows of this many bytes.
_GROUPED_ALIGNMENT_BYTES = 16


class RowGroups:
    """Rows sorted by slot, `counts_S` of them for each.

    `slots` are those that have any; `starts` is where their rows begin, and the end of the last.
    """

    def __init__(self, counts_S: Sequence[int]) -> None:
        counts = np.asarray(counts_S, dtype=np.int64)
        self.counts_S = counts_S
        self.slots = counts.nonzero()[0]
        self.starts = np.zeros(len(self.slots) + 1, dtype=np.int64)
        counts[self.slots].cumsum(out=self.starts[1:])

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Slot, first row and end of each group."""
        return zip(self.slots.tolist(), self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True)


class Bank(Protocol):
    """The weights of one projection in all slots."""

    def write(self, slot: int, weight_OI: Tensor) -> None:
        """Put weights into a slot, rounded to the bank's dtype."""

    def read(self, slot: int) -> Tensor:
        """What was written, [O, I]."""

    def __call__(self, x_NI: Tensor, groups: RowGroups) -> Tensor:
        """Each row times the weights in its slot, [N, O]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BankLayout:
    """How one slot's weights lie in memory: `shape` of `dtype`. Slots of equal `name` and sizes hold equal bytes."""

    name: str
    num_out: int
    num_in: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    kernels: Kernels | None = None

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def make(self, memory_SB: Tensor) -> Bank:
        """The bank in `memory_SB`, `num_bytes` bytes for each slot."""
        weights = memory_SB.view(self.dtype).view(-1, *self.shape)
        if self.kernels is None:
            return PlainBank(weights)
        return PanelBank(self.kernels, weights, self)


def choose_layout(
    num_out: int, num_in: int, *, compute: torch.dtype, stored: torch.dtype, device: torch.device
) -> BankLayout:
    """The arrangement for arithmetic in `compute` with weights that `stored` holds exactly."""
    kernels = load_kernels() if device.type == "cpu" else None
    in_pairs = compute == torch.bfloat16
    if kernels is not None and (compute == torch.float32 or (in_pairs and kernels.multiplies_pairs and not num_in % 2)):
        dtype = torch.bfloat16 if in_pairs or stored == torch.bfloat16 else torch.float32
        sizes = torch.empty(num_out, num_in, dtype=dtype, device="meta")
        shape = tuple(kernels.pack(sizes, None, in_pairs=in_pairs).panels.shape)
        name = f"panels{shape[2]}{'-pairs' if in_pairs else ''}-{dtype}".replace("torch.", "")
        return BankLayout(name=name, num_out=num_out, num_in=num_in, shape=shape, dtype=dtype, kernels=kernels)
    name = f"rows-{compute}".replace("torch.", "")
    return BankLayout(name=name, num_out=num_out, num_in=num_in, shape=(num_out, num_in), dtype=compute)


class PanelBank:
    """Panels for the kernels of `nobiru.ops.native`."""

    def __init__(self, kernels: Kernels, panels_S: Tensor, layout: BankLayout) -> None:
        self.kernels = kernels
        self.panels_S = panels_S
        self._layout = layout
        self._in_pairs = panels_S.ndim == 5

    def write(self, slot: int, weight_OI: Tensor) -> None:
        packed = self.kernels.pack(weight_OI.to(self._layout.dtype), None, in_pairs=self._in_pairs)
        self.panels_S[slot].copy_(packed.panels)

    def read(self, slot: int) -> Tensor:
        columns = self.panels_S[slot].transpose(1, 2)  # [panels, outputs of one, inputs], perhaps with pairs behind
        return columns.flatten(0, 1).flatten(1)[: self._layout.num_out, : self._layout.num_in]

    def __call__(self, x_NI: Tensor, groups: RowGroups) -> Tensor:
        out_NO = torch.empty(x_NI.shape[0], self._layout.num_out, dtype=x_NI.dtype)
        self.kernels.grouped_linear(x_NI, self.panels_S, groups.slots, groups.starts, out_NO, in_pairs=self._in_pairs)
        return out_NO


class PlainBank:
    """Weights as torch has them, [S, O, I]."""

    def __init__(self, weights_SOI: Tensor) -> None:
        self._weights_SOI = weights_SOI
        self._grouped = _grouped_product(weights_SOI)

    def write(self, slot: int, weight_OI: Tensor) -> None:
        self._weights_SOI[slot].copy_(weight_OI)

    def read(self, slot: int) -> Tensor:
        return self._weights_SOI[slot]

    def __call__(self, x_NI: Tensor, groups: RowGroups) -> Tensor:
        if self._grouped is not None:
            ends_S = torch.tensor(groups.counts_S, dtype=torch.int32).cumsum(0, dtype=torch.int32)
            ends_S = ends_S.to(x_NI.device, non_blocking=True)
            grouped_NO: Tensor = self._grouped(x_NI, self._weights_SOI.mT, offs=ends_S)
            return grouped_NO
        out_NO = x_NI.new_empty(x_NI.shape[0], self._weights_SOI.shape[1])
        for slot, start, end in groups:
            out_NO[start:end] = F.linear(x_NI[start:end], self._weights_SOI[slot])
        return out_NO


def join_gated(gate_up: Bank, down: Bank, *, width: int, inner: int) -> NativeExperts | None:
    """Both products of experts gated by silu, and what is between them, in one call; None where no kernel does that."""
    if not isinstance(gate_up, PanelBank) or not isinstance(down, PanelBank) or not NativeExperts.fits(width, inner):
        return None
    return NativeExperts(gate_up.kernels, gate_up.panels_S, down.panels_S, width=width, inner=inner)


def gathered_sum(y_NC: Tensor, row_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Σ_k weight[t, k] y[row[t, k]], added in float32 in the order of k; [T, C] in the dtype of y."""
    weight_TK = weight_TK.float()
    kernels = kernels_for(y_NC)
    if kernels is not None:
        out_TC = torch.empty(row_TK.shape[0], y_NC.shape[1], dtype=y_NC.dtype)
        if kernels.weighted_sum(y_NC, row_TK, weight_TK.contiguous(), out_TC):
            return out_TC
    sum_TC = torch.zeros(row_TK.shape[0], y_NC.shape[1], device=y_NC.device)
    for k, row_T in enumerate(row_TK.unbind(1)):
        sum_TC.addcmul_(y_NC.index_select(0, row_T).float(), weight_TK[:, k, None])
    return sum_TC.to(y_NC.dtype)


def _grouped_product(weights_SOI: Tensor) -> Any:
    """torch's grouped product, if there is one for these weights."""
    is_aligned = all(size * weights_SOI.itemsize % _GROUPED_ALIGNMENT_BYTES == 0 for size in weights_SOI.shape[1:])
    if weights_SOI.device.type != "cuda" or weights_SOI.dtype != torch.bfloat16 or not is_aligned:
        return None
    return getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
