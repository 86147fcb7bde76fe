"""One projection of many experts: rows sorted by slot times the weights of each slot.

Owns the arrangement of a slot's weights in memory, which is the one that the device multiplies fastest, and there is no
other copy of them:

* CPUs, float32 and, with instructions for it, bfloat16: panels, for kernels of our own (`nobiru.ops.native`). These
  read each weight once whether an expert has one row or a dozen. float32 products may read bfloat16 weights.
* CUDA, bfloat16: torch's grouped product, one launch for all experts.
* Anything else: one product per slot that has rows.

Knows nothing of experts' other parts, of routing, or of who has which slot.

Shape legend: S slots, N rows of all slots, O output values, I input values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nobiru.ops.native.library import Kernels, PackedWeight, load_kernels

# torch's grouped product wants rows of this many bytes.
_GROUPED_ALIGNMENT_BYTES = 16


class Bank(Protocol):
    """The weights of one projection in all slots."""

    def write(self, slot: int, weight_OI: Tensor) -> None:
        """Put weights into a slot, rounded to the bank's dtype."""

    def read(self, slot: int) -> Tensor:
        """What was written, [O, I]."""

    def __call__(self, x_NI: Tensor, counts_S: Sequence[int]) -> Tensor:
        """The first `counts_S[0]` rows times the weights in slot 0, the next ones … → [N, O]."""


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
        self._kernels = kernels
        self._layout = layout
        self._in_pairs = panels_S.ndim == 5
        self._weights = [
            PackedWeight(
                panels=panels, bias_O=None, num_in=layout.num_in, num_out=layout.num_out, in_pairs=self._in_pairs
            )
            for panels in panels_S
        ]

    def write(self, slot: int, weight_OI: Tensor) -> None:
        packed = self._kernels.pack(weight_OI.to(self._layout.dtype), None, in_pairs=self._in_pairs)
        self._weights[slot].panels.copy_(packed.panels)

    def read(self, slot: int) -> Tensor:
        panels = self._weights[slot].panels
        columns = panels.transpose(1, 2)  # [panels, outputs of a panel, inputs], perhaps with pairs behind
        return columns.flatten(0, 1).flatten(1)[: self._layout.num_out, : self._layout.num_in]

    def __call__(self, x_NI: Tensor, counts_S: Sequence[int]) -> Tensor:
        out_NO = torch.empty(x_NI.shape[0], self._layout.num_out, dtype=x_NI.dtype)
        start = 0
        for weight, count in zip(self._weights, counts_S, strict=True):
            if count:
                end = start + count
                self._kernels.linear(x_NI[start:end], weight, out_NO[start:end])
                start = end
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

    def __call__(self, x_NI: Tensor, counts_S: Sequence[int]) -> Tensor:
        if self._grouped is not None:
            ends_S = torch.tensor(counts_S, dtype=torch.int32).cumsum(0, dtype=torch.int32)
            ends_S = ends_S.to(x_NI.device, non_blocking=True)
            grouped_NO: Tensor = self._grouped(x_NI, self._weights_SOI.mT, offs=ends_S)
            return grouped_NO
        out_NO = x_NI.new_empty(x_NI.shape[0], self._weights_SOI.shape[1])
        start = 0
        for slot, count in enumerate(counts_S):
            if count:
                end = start + count
                out_NO[start:end] = F.linear(x_NI[start:end], self._weights_SOI[slot])
                start = end
        return out_NO


def _grouped_product(weights_SOI: Tensor) -> Any:
    """torch's grouped product, if there is one for these weights."""
    is_aligned = all(size * weights_SOI.itemsize % _GROUPED_ALIGNMENT_BYTES == 0 for size in weights_SOI.shape[1:])
    if weights_SOI.device.type != "cuda" or weights_SOI.dtype != torch.bfloat16 or not is_aligned:
        return None
    return getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
