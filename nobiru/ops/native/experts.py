"""Calls the kernels of `expert_layers.h` with torch tensors: all experts of a layer on rows sorted by slot.

Shape legend: S slots, N rows, C hidden size, g groups of rows.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nobiru.ops.native import threads
from nobiru.ops.native.encoder import GRAIN, MatrixStruct, choose_product
from nobiru.ops.native.library import Kernels


class _Experts(ctypes.Structure):
    """`struct experts` of the source."""

    _fields_ = (
        *((name, MatrixStruct) for name in ("gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("slots", "starts", "rows", "out")),
        *((name, ctypes.c_long) for name in ("groups", "slot_bytes", "threads")),
        *((name, ctypes.c_int) for name in ("is_half", "uses_tiles", "failed")),
        *((name, ctypes.c_void_p) for name in ("inner", "inputs")),
        *((name, ctypes.c_long) for name in ("parts_each", "rows_each")),
    )


class NativeExperts:
    """Experts gated by silu, whose weights lie in panels, [S, …] as `Kernels.pack` makes them."""

    def __init__(self, kernels: Kernels, gate_up_S: Tensor, down_S: Tensor, *, width: int, inner: int) -> None:
        """`width` is the hidden size, `inner` the number of gates. Slots of both are equally far apart."""
        self._kernels = kernels
        self._in_pairs = gate_up_S.ndim == 5
        self._width = width
        self._slot_bytes = gate_up_S.stride(0) * gate_up_S.itemsize
        assert self._slot_bytes == down_S.stride(0) * down_S.itemsize
        self._weights = gate_up_S, down_S  # kept, since the kernels have their addresses only
        by = choose_product(gate_up_S.dtype, in_pairs=self._in_pairs, has_tiles=kernels.has_tiles)
        self._gate_up = MatrixStruct(panels=gate_up_S.data_ptr(), inputs=width, outputs=2 * inner, by=by)
        self._down = MatrixStruct(panels=down_S.data_ptr(), inputs=inner, outputs=width, by=by)

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
            gate_up=self._gate_up,
            down=self._down,
            slots=slots_g.ctypes.data,
            starts=starts.ctypes.data,
            rows=rows_NC.data_ptr(),
            out=out_NC.data_ptr(),
            groups=len(slots_g),
            slot_bytes=self._slot_bytes,
            threads=threads.num_threads(),
            is_half=self._in_pairs,
            uses_tiles=self._in_pairs and self._kernels.has_tiles,
        )
        self._kernels.library.compute_experts(ctypes.addressof(arguments))
        if arguments.failed:
            raise MemoryError(f"no memory for experts of {rows_NC.shape[0]} rows")
        return out_NC
