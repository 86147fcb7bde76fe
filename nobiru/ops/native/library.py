"""Loads the kernels of `kernels.c` and calls them with torch tensors.

Owns the trial that decides whether they are used, and the calling convention. Without a C compiler, or when anything
about its result is odd, `load_kernels` gives None and says why in the log; callers then stay with torch.

Shape legend: R rows, I input values, O output values, P panels of W outputs, n sequences, H query heads, K key heads,
D values a head, N blocks of the cache, S slots of a block or of experts, M blocks of the sequence that has most, g
groups of rows, k terms of a sum.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import subprocess
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from nobiru import env, machine
from nobiru.ops.native import threads
from nobiru.ops.native.compiler import compiled

logger = logging.getLogger(__name__)

_MAX_HEAD_SIZE = 256
TILE_TOKENS = 32
# Fewer multiplications than this are not worth a second thread.
_MIN_PARALLEL_PRODUCTS = 100_000
_MIN_PARALLEL_VALUES = 30_000


class AttentionStruct(ctypes.Structure):
    """`struct attention` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "keys", "values", "out", "block_table", "contexts", "rows")),
        *(
            (name, ctypes.c_long)
            for name in ("sequences", "heads", "key_heads", "size", "block_size", "table_width", "q_stride", "window")
        ),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("threads", ctypes.c_int),
        ("failed", ctypes.c_int),
        ("keys_each", ctypes.c_long),
    )


class PrefillStruct(ctypes.Structure):
    """`struct prefill` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "keys", "values", "out", "block_table", "tiles")),
        *(
            (name, ctypes.c_long)
            for name in ("tiles_count", "heads", "key_heads", "size", "block_size", "table_width", "q_stride", "window")
        ),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("threads", ctypes.c_int),
        ("failed", ctypes.c_int),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedWeight:
    """A weight matrix in the arrangement of one kernel. `in_pairs` is for bfloat16 inputs, others are for float32."""

    panels: Tensor
    bias_O: Tensor | None  # float32
    num_in: int
    num_out: int
    in_pairs: bool


class Kernels:
    """The loaded library. Tensors are on the CPU; rows are contiguous, one row may begin anywhere."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.panel_width.restype = ctypes.c_int32
        library.multiplies_bf16_pairs.restype = ctypes.c_int32
        library.allow_tiles.restype = ctypes.c_int32
        self.width = int(library.panel_width())
        self._lanes = self.width // 2
        self.multiplies_pairs = bool(library.multiplies_bf16_pairs())
        self.has_tiles = bool(library.allow_tiles())
        self._linear_f32 = self._declare_linear("linear_f32")
        self._linear_bf16 = self._declare_linear("linear_bf16")
        self._linear_pairs = self._declare_linear("linear_pairs") if self.multiplies_pairs else None
        names = ("linear_f32", "linear_bf16", "linear_pairs")[: 3 if self.multiplies_pairs else 2]
        self._grouped = {name: self._declare_grouped(name) for name in names}
        pointer, number, flag, real = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
        self._attend = self._by_dtype("attend", pointer)
        self._prefill = self._by_dtype("prefill", pointer)
        self._rms_norm = self._by_dtype("rms_norm", pointer, number, pointer, pointer, number, number, real, flag)
        self._silu_product = self._by_dtype("silu_product", pointer, pointer, number, number, flag)
        self._turn = self._by_dtype("turn_pairs", pointer, number, pointer, number, number, number, flag)
        self._weighted_sum = self._by_dtype(
            "weighted_sum", pointer, pointer, pointer, pointer, number, number, number, flag
        )
        for function in (library.decode, library.score, library.compute_experts):
            function.argtypes, function.restype = (pointer,), None
        self._largest_places = library.largest_places
        self._largest_places.argtypes = (pointer, number, pointer, number, number, flag)
        self._largest_places.restype = None
        self._put = self._by_dtype(
            "put_rows", pointer, number, pointer, number, pointer, pointer, pointer, number, number
        )

    def pack(self, weight_OI: Tensor, bias_O: Tensor | None, *, in_pairs: bool = False) -> PackedWeight:
        """float32 or bfloat16 weights as panels; with `in_pairs` for bfloat16 inputs and outputs, else for float32."""
        num_out, num_in = weight_OI.shape
        padded = F.pad(weight_OI, (0, num_in % 2 if in_pairs else 0, 0, -num_out % self.width))
        panels_PWI = padded.view(-1, self.width, padded.shape[1])
        panels = panels_PWI.unflatten(2, (-1, 2)) if in_pairs else panels_PWI  # type: ignore[no-untyped-call]
        turned = panels.transpose(1, 2)
        packed = torch.empty(turned.shape, dtype=turned.dtype, device=turned.device)
        if packed.device.type == "cpu":  # not of a meta tensor, of which only the sizes are asked
            machine.prefer_huge_pages(packed.data_ptr(), packed.nbytes)
        return PackedWeight(
            panels=packed.copy_(turned),
            bias_O=None if bias_O is None else bias_O.float().contiguous(),
            num_in=num_in,
            num_out=num_out,
            in_pairs=in_pairs,
        )

    def linear(self, x_RI: Tensor, weight: PackedWeight, out_RO: Tensor) -> None:
        """x @ weight.T + bias, in float32 sums. x and out are bfloat16 for a weight `in_pairs`, else float32."""
        num_rows, num_in = x_RI.shape
        assert num_in == weight.num_in and x_RI.stride(1) == 1 and out_RO.is_contiguous()
        function = self._linear_f32 if weight.panels.dtype == torch.float32 else self._linear_bf16
        if weight.in_pairs:
            assert self._linear_pairs is not None and num_in % 2 == 0
            function = self._linear_pairs
        few = num_rows * num_in * weight.num_out < _MIN_PARALLEL_PRODUCTS
        function(
            weight.panels.data_ptr(),
            None if weight.bias_O is None else weight.bias_O.data_ptr(),
            x_RI.data_ptr(),
            x_RI.stride(0),
            out_RO.data_ptr(),
            num_rows,
            num_in,
            weight.num_out,
            1 if few else threads.num_threads(),
        )

    def grouped_linear(
        self,
        x_RI: Tensor,
        panels_S: Tensor,
        slots_g: NDArray[np.int64],
        starts: NDArray[np.int64],
        out_RO: Tensor,
        *,
        in_pairs: bool,
    ) -> None:
        """`linear` for groups of rows: those from `starts[i]` to `starts[i + 1]` by the panels of slot `slots_g[i]`.

        `panels_S` are panels as `pack` makes them, for each slot; slots may be further apart than they are large.
        """
        (num_rows, num_in), num_out = x_RI.shape, out_RO.shape[1]
        assert x_RI.stride(1) == 1 and out_RO.is_contiguous() and starts[-1] == num_rows == out_RO.shape[0]
        assert slots_g.flags.c_contiguous and starts.flags.c_contiguous and len(starts) == len(slots_g) + 1
        of_floats = "linear_f32" if panels_S.dtype == torch.float32 else "linear_bf16"
        few = num_rows * num_in * num_out < _MIN_PARALLEL_PRODUCTS
        self._grouped["linear_pairs" if in_pairs else of_floats](
            panels_S.data_ptr(),
            panels_S.stride(0),
            slots_g.ctypes.data,
            starts.ctypes.data,
            len(slots_g),
            x_RI.data_ptr(),
            x_RI.stride(0),
            out_RO.data_ptr(),
            num_in,
            num_out,
            1 if few else threads.num_threads(),
        )

    def attends(self, dtype: torch.dtype, head_size: int) -> bool:
        """Whether `attend` takes such heads."""
        return dtype in self._attend and head_size % self._lanes == 0 and head_size <= _MAX_HEAD_SIZE

    def attend(
        self,
        q_THD: Tensor,
        keys_NSKD: Tensor,
        values_NSKD: Tensor,
        block_table_nM: Tensor,
        contexts_n: Tensor,
        out_THD: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        tokens_n: Tensor | None = None,
    ) -> None:
        """One token per sequence over its context, whose last `window` tokens are seen.

        `tokens_n` (int64) are the tokens' rows in q and out; without it there are no others. Contexts and the block
        table are int32.
        """
        num_heads, head_size = q_THD.shape[1:]
        assert q_THD.stride()[1:] == (head_size, 1) and out_THD.is_contiguous()
        assert tokens_n is not None or q_THD.shape[0] == contexts_n.shape[0]
        assert keys_NSKD.is_contiguous() and values_NSKD.is_contiguous() and block_table_nM.is_contiguous()
        arguments = AttentionStruct(
            q_THD.data_ptr(),
            keys_NSKD.data_ptr(),
            values_NSKD.data_ptr(),
            out_THD.data_ptr(),
            block_table_nM.data_ptr(),
            contexts_n.data_ptr(),
            None if tokens_n is None else tokens_n.data_ptr(),
            contexts_n.shape[0],
            num_heads,
            keys_NSKD.shape[2],
            head_size,
            keys_NSKD.shape[1],
            block_table_nM.shape[1],
            q_THD.stride(0),
            window or 0,
            scale,
            softcap or 0.0,
            threads.num_threads(),
        )
        self._attend[q_THD.dtype](ctypes.addressof(arguments))
        if arguments.failed:
            raise MemoryError(f"no memory for attention of {contexts_n.shape[0]} sequences")

    def prefills(self, dtype: torch.dtype, head_size: int) -> bool:
        """Whether `prefill` takes such heads: whole spans of vectors."""
        return self.attends(dtype, head_size) and head_size % self.width == 0

    def prefill(
        self,
        q_THD: Tensor,
        keys_NSKD: Tensor,
        values_NSKD: Tensor,
        block_table_BM: Tensor,
        tiles_n4: Tensor,
        out_THD: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        """Tokens attend over their sequence's context up to themselves; those of no tile are left alone.

        A tile (int64) is up to `TILE_TOKENS` tokens: row of the block table (int32), first token in the batch, its
        position, number of tokens.
        """
        _, num_heads, head_size = q_THD.shape
        assert q_THD.stride()[1:] == (head_size, 1) and out_THD.is_contiguous() and tiles_n4.is_contiguous()
        assert keys_NSKD.is_contiguous() and values_NSKD.is_contiguous() and block_table_BM.is_contiguous()
        arguments = PrefillStruct(
            q_THD.data_ptr(),
            keys_NSKD.data_ptr(),
            values_NSKD.data_ptr(),
            out_THD.data_ptr(),
            block_table_BM.data_ptr(),
            tiles_n4.data_ptr(),
            tiles_n4.shape[0],
            num_heads,
            keys_NSKD.shape[2],
            head_size,
            keys_NSKD.shape[1],
            block_table_BM.shape[1],
            q_THD.stride(0),
            window or 0,
            scale,
            softcap or 0.0,
            threads.num_threads(),
        )
        self._prefill[q_THD.dtype](ctypes.addressof(arguments))
        if arguments.failed:
            raise MemoryError(f"no memory for attention of {q_THD.shape[0]} tokens")

    def rms_norm(self, x_RI: Tensor, weight_I: Tensor, eps: float) -> Tensor | None:
        """x / sqrt(mean(x²) + eps) * weight, [R, I]; None for shapes that the kernel does not take."""
        num_rows, size = x_RI.shape
        if size % self._lanes or x_RI.stride(1) != 1 or x_RI.dtype != weight_I.dtype:
            return None
        out_RI = torch.empty(num_rows, size, dtype=x_RI.dtype)
        self._rms_norm[x_RI.dtype](
            x_RI.data_ptr(),
            x_RI.stride(0),
            weight_I.data_ptr(),
            out_RI.data_ptr(),
            num_rows,
            size,
            eps,
            _num_threads(num_rows * size),
        )
        return out_RI

    def silu_product(self, gate_up_R2G: Tensor, out_RG: Tensor) -> bool:
        """out = silu(gate) * up; False for shapes that the kernel does not take."""
        num_rows, size = out_RG.shape
        if size % self._lanes or not gate_up_R2G.is_contiguous() or not out_RG.is_contiguous():
            return False
        self._silu_product[out_RG.dtype](
            gate_up_R2G.data_ptr(), out_RG.data_ptr(), num_rows, size, _num_threads(num_rows * size)
        )
        return True

    def weighted_sum(self, x_RI: Tensor, places_nk: Tensor, weight_nk: Tensor, out_nI: Tensor) -> bool:
        """out[n] = Σ_k weight[n, k] x[places[n, k]], in the order of k; False as above. Weights are float32."""
        num_rows, size = out_nI.shape
        if size % self._lanes or not (x_RI.is_contiguous() and places_nk.is_contiguous() and weight_nk.is_contiguous()):
            return False
        assert places_nk.shape == weight_nk.shape and weight_nk.dtype == torch.float32
        self._weighted_sum[x_RI.dtype](
            x_RI.data_ptr(),
            places_nk.data_ptr(),
            weight_nk.data_ptr(),
            out_nI.data_ptr(),
            num_rows,
            places_nk.shape[1],
            size,
            _num_threads(num_rows * size),
        )
        return True

    def argmax(self, x_RI: Tensor) -> Tensor:
        """The place of each row's largest float32 value, [R], as torch's: the first, or the first not-a-number."""
        num_rows, size = x_RI.shape
        assert x_RI.stride(1) == 1 and x_RI.dtype == torch.float32 and size > 0
        places_R = torch.empty(num_rows, dtype=torch.int64)
        self._largest_places(
            x_RI.data_ptr(), x_RI.stride(0), places_R.data_ptr(), num_rows, size, _num_threads(num_rows * size)
        )
        return places_R

    def turn(self, x_RHD: Tensor, turns_R1P: Tensor) -> bool:
        """Multiplies pairs of neighbours in x, as complex numbers, by turns (complex64); False as above."""
        num_rows, num_heads, size = x_RHD.shape
        if size % self._lanes or x_RHD.stride()[1:] != (size, 1) or not turns_R1P.is_contiguous():
            return False
        self._turn[x_RHD.dtype](
            x_RHD.data_ptr(),
            x_RHD.stride(0),
            turns_R1P.data_ptr(),
            num_rows,
            num_heads,
            size,
            _num_threads(num_rows * num_heads * size),
        )
        return True

    def put(self, k_RKD: Tensor, v_RKD: Tensor, slots_R: Tensor, keys_NSKD: Tensor, values_NSKD: Tensor) -> bool:
        """Keys and values into their slots of the cache; False as above."""
        num_rows, num_heads, size = k_RKD.shape
        row = (size, 1)
        if k_RKD.stride()[1:] != row or v_RKD.stride()[1:] != row or k_RKD.dtype != keys_NSKD.dtype:
            return False
        self._put[k_RKD.dtype](
            k_RKD.data_ptr(),
            k_RKD.stride(0),
            v_RKD.data_ptr(),
            v_RKD.stride(0),
            slots_R.data_ptr(),
            keys_NSKD.data_ptr(),
            values_NSKD.data_ptr(),
            num_rows,
            num_heads * size,
        )
        return True

    def _by_dtype(self, name: str, *kinds: type) -> dict[torch.dtype, ctypes._NamedFuncPointer]:
        functions = {torch.float32: self.library[f"{name}_f32"], torch.bfloat16: self.library[f"{name}_bf16"]}
        for function in functions.values():
            function.argtypes, function.restype = kinds, None
        return functions

    def _declare_linear(self, name: str) -> ctypes._NamedFuncPointer:
        function = self.library[name]
        pointer, number, flag = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
        function.argtypes = (pointer, pointer, pointer, number, pointer, number, number, number, flag)
        function.restype = None
        return function

    def _declare_grouped(self, name: str) -> ctypes._NamedFuncPointer:
        function = self.library[f"grouped_{name}"]
        pointer, number, flag = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
        rows = (pointer, number, pointer, number, number, flag)
        function.argtypes = (pointer, number, pointer, pointer, number, *rows)
        function.restype = None
        return function


def _num_threads(num_values: int) -> int:
    return 1 if num_values < _MIN_PARALLEL_VALUES else threads.num_threads()


def kernels_for(x: Tensor) -> Kernels | None:
    """The kernels, if they take tensors like this."""
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16):
        return None
    return load_kernels()


@functools.cache
def load_kernels() -> Kernels | None:
    """The kernels of this process, compiled if they have to be; None where there are none, which is said in the log."""
    if not env.native_kernels():
        return None
    begin_s = time.monotonic()
    try:
        kernels = Kernels(compiled())
        _try(kernels)
    except (OSError, subprocess.SubprocessError, ArithmeticError, AttributeError) as error:
        logger.info("native kernels are not used: %s", error)
        return None
    logger.info("native kernels are ready after %.1f s", time.monotonic() - begin_s)
    return kernels


def _try(kernels: Kernels) -> None:
    """ArithmeticError if a small product is not torch's: a compiler or processor that cannot be trusted."""
    generator = torch.Generator().manual_seed(0)
    x_RI = torch.randn(5, 70, generator=generator)
    weight_OI = torch.randn(67, 70, generator=generator)
    out_RO = torch.empty(5, 67)
    kernels.linear(x_RI, kernels.pack(weight_OI, None), out_RO)
    if not torch.allclose(out_RO, x_RI @ weight_OI.mT, atol=1e-4):
        raise ArithmeticError("a trial gave a wrong product")
