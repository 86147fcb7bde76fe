"""Calls the kernels of `expert_layers.h` with torch tensors: all experts of a layer on rows sorted by slot.

Owns the description of experts that these kernels read, and those of `expert_routes.h`, which are part of a decoder's.

Shape legend: S slots, N rows, C hidden size, g groups of rows.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nobiru.ops.native import threads
from nobiru.ops.native.encoder import GRAIN, MatrixStruct, choose_product, matrix_of
from nobiru.ops.native.library import Kernels, PackedWeight


class _Experts(ctypes.Structure):
    """`struct experts` of the source."""

    _fields_ = (
        *((name, MatrixStruct) for name in ("gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("slots", "starts", "rows", "out")),
        *((name, ctypes.c_long) for name in ("groups", "slot_bytes", "threads")),
        *((name, ctypes.c_int) for name in ("is_half", "uses_tiles", "failed")),
        *((name, ctypes.c_void_p) for name in ("then", "inner", "inputs")),
        *((name, ctypes.c_long) for name in ("parts_each", "rows_each")),
    )


class _Moe(ctypes.Structure):
    """`struct moe` of the source."""

    _fields_ = (
        *((name, MatrixStruct) for name in ("gate", "gate_up", "down")),
        *((name, ctypes.c_long) for name in ("layer", "experts", "slot_bytes", "top_k")),
        *((name, ctypes.c_int) for name in ("normalizes", "rounds")),
    )


class NativeExperts:
    """Experts gated by silu, whose weights lie in panels, [S, …] as `Kernels.pack` makes them."""

    def __init__(self, kernels: Kernels, gate_up_S: Tensor, down_S: Tensor, *, width: int, inner: int) -> None:
        """`width` is the hidden size, `inner` the number of gates. Slots of both are equally far apart."""
        self.kernels = kernels
        self._in_pairs = gate_up_S.ndim == 5
        self._width = width
        self.slot_bytes = gate_up_S.stride(0) * gate_up_S.itemsize
        assert self.slot_bytes == down_S.stride(0) * down_S.itemsize
        self._weights = gate_up_S, down_S  # kept, since the kernels have their addresses only
        by = choose_product(gate_up_S.dtype, in_pairs=self._in_pairs, has_tiles=kernels.has_tiles)
        self.gate_up = MatrixStruct(panels=gate_up_S.data_ptr(), inputs=width, outputs=2 * inner, by=by)
        self.down = MatrixStruct(panels=down_S.data_ptr(), inputs=inner, outputs=width, by=by)

    @staticmethod
    def fits(width: int, inner: int) -> bool:
        """Whether the kernels take matrices of these sizes."""
        return width % GRAIN == 0 and inner % GRAIN == 0

    def __call__(self, rows_NC: Tensor, slots_g: NDArray[np.int64], starts: NDArray[np.int64]) -> Tensor:
        """Rows from `starts[i]` to `starts[i + 1]` through the expert in slot `slots_g[i]`, [N, C]."""
        rows_NC = rows_NC.contiguous()
        out_NC = torch.empty(rows_NC.shape, dtype=rows_NC.dtype)
        assert rows_NC.shape == (starts[-1], self._width) and slots_g.dtype == starts.dtype == np.int64
        arguments = _Experts(
            gate_up=self.gate_up,
            down=self.down,
            slots=slots_g.ctypes.data,
            starts=starts.ctypes.data,
            rows=rows_NC.data_ptr(),
            out=out_NC.data_ptr(),
            groups=len(slots_g),
            slot_bytes=self.slot_bytes,
            threads=threads.num_threads(),
            is_half=self._in_pairs,
            uses_tiles=self._in_pairs and self.kernels.has_tiles,
        )
        self.kernels.library.compute_experts(ctypes.addressof(arguments))
        if arguments.failed:
            raise MemoryError(f"no memory for experts of {rows_NC.shape[0]} rows")
        return out_NC


@dataclass(frozen=True, kw_only=True)
class PackedMoe:
    """The experts of MoE layer number `layer`, and the gate that scores them: a weight without bias.

    A row goes to the `top_k` best, of equal ones to the first; `normalizes` and `rounds` as in
    `nobiru.layers.routing.SoftmaxRouter`.
    """

    gate: PackedWeight
    experts: NativeExperts
    layer: int
    top_k: int
    normalizes: bool
    rounds: bool

    @functools.cached_property
    def struct(self) -> _Moe:
        """What the kernels read, made once; it points to the weights above."""
        return _Moe(
            gate=matrix_of(self.gate, has_tiles=self.experts.kernels.has_tiles),
            gate_up=self.experts.gate_up,
            down=self.experts.down,
            layer=self.layer,
            experts=self.gate.num_out,
            slot_bytes=self.experts.slot_bytes,
            top_k=self.top_k,
            normalizes=self.normalizes,
            rounds=self.rounds,
        )
