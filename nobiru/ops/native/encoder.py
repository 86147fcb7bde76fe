"""Calls the kernels of `encoder_layers.h` and `encoder_attention.h` with torch tensors.

Owns which instructions they compute with, a pure choice from what the processor has, what the library was compiled for
and which sizes a model has; the arrangement of weights; and the cut of a batch into runs of sequences.

Shape legend: T tokens, C hidden size, I input values, O output values, P panels of W outputs, H heads, D values a head,
B sequences, M the model's limit of tokens, R tokens that are asked for.
"""

from __future__ import annotations

import ctypes
import enum
import functools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nobiru import machine
from nobiru.ops.native import threads
from nobiru.ops.native.library import Kernels, PackedWeight, load_kernels
from nobiru.ops.quantize import quantize_rows

ACTIVATIONS = ("none", "gelu", "gelu_tanh", "relu", "silu")
GRAIN = 32  # sizes of matrices have to be multiples of this
_TILE_BYTES = 64
# A run of about so many tokens keeps a small model's hidden states in a core's cache, and reads weights seldom enough:
# the kernels take no more of them at a time.
_RUN_TOKENS = 128
# One run may have this many times the mean work; sequences that cannot be cut as evenly go stage by stage.
_MAX_IMBALANCE = 1.5


class Arithmetic(enum.IntEnum):
    """What multiplies, by the numbers that the source has. Names are the processor flags that are needed."""

    FLOATS = 0
    HALVED = 1  # rows of float32 by weights that bfloat16 holds exactly
    AVX512_BF16 = 2
    AMX_BF16 = 3
    AVX512_VNNI = 4
    AMX_INT8 = 5
    AVX2 = 6

    @property
    def is_int8(self) -> bool:
        return self >= Arithmetic.AVX512_VNNI

    @property
    def largest_weight(self) -> int:
        """Of int8 weights: AVX2 adds two products of a byte with one in sixteen bits."""
        return 64 if self == Arithmetic.AVX2 else 127


def choose_arithmetic(
    dtype: torch.dtype, sizes: Iterable[int], instructions: frozenset[str], *, quantized: bool
) -> Arithmetic | None:
    """The fastest arithmetic for hidden states of `dtype` and matrices with these numbers of inputs; None: not here.

    `instructions` are those that may be used, as the processor's flags name them.
    """
    sizes = list(sizes)
    if any(size % GRAIN for size in sizes):
        return None
    if dtype == torch.bfloat16 and "avx512_bf16" not in instructions:
        return None
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    if quantized:
        if "amx_int8" in instructions and not any(size % _TILE_BYTES for size in sizes):
            return Arithmetic.AMX_INT8
        if "avx512_vnni" in instructions:
            return Arithmetic.AVX512_VNNI
        return Arithmetic.AVX2 if "avx2" in instructions else None
    if dtype == torch.float32:
        return Arithmetic.FLOATS
    return Arithmetic.AMX_BF16 if "amx_bf16" in instructions else Arithmetic.AVX512_BF16


def choose_product(stored: torch.dtype, *, in_pairs: bool, has_tiles: bool) -> Arithmetic:
    """For a decoder's weights in panels: of pairs for rows of bfloat16, else for rows of float32."""
    if in_pairs:
        return Arithmetic.AMX_BF16 if has_tiles else Arithmetic.AVX512_BF16
    return Arithmetic.HALVED if stored == torch.bfloat16 else Arithmetic.FLOATS


def plan_runs(lengths_B: NDArray[np.int64], num_threads: int, width: int) -> NDArray[np.int64]:
    """First sequence and end of each run, [N, 2], most work first: threads then end at about one time.

    Runs are of similar work, but for the last ones of a short batch. One run where there are not enough sequences to
    occupy all threads. A token's work is that of its linear layers plus attention, which grows with the length of its
    sequence.
    """
    work_B = np.cumsum(lengths_B * (6 * width + lengths_B))
    num_tokens, num_seqs = int(lengths_B.sum()), lengths_B.size
    num_runs = -(-num_tokens // _RUN_TOKENS)
    num_runs = min(-(-num_runs // num_threads) * num_threads, num_seqs)
    shares = np.ones(num_runs)
    if 4 * num_threads <= num_runs < 8 * num_threads:
        # Waiting for the last run is a good part of such a batch, so the last ones are short.
        small = np.repeat((0.25, 0.5), (2 * num_threads, num_threads))
        shares = np.concatenate((small, shares[num_threads:]))
    cuts = np.searchsorted(work_B, work_B[-1] * np.cumsum(shares)[:-1] / shares.sum()) + 1
    bounds = np.unique(np.concatenate(([0], cuts, [num_seqs])))
    work = np.diff(np.concatenate(([0], work_B))[bounds])
    is_even = int(work.max()) * num_threads <= _MAX_IMBALANCE * int(work_B[-1])
    if not is_even or num_tokens < GRAIN * num_threads:
        return np.array([[0, num_seqs]])
    return np.ascontiguousarray(np.stack([bounds[:-1], bounds[1:]], axis=1)[np.argsort(-work, kind="stable")])


class MatrixStruct(ctypes.Structure):
    """`struct matrix` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "bias", "scales", "sums")),
        *((name, ctypes.c_long) for name in ("inputs", "outputs", "by")),
    )


def matrix_of(weight: PackedWeight, *, has_tiles: bool) -> MatrixStruct:
    """A decoder's weights, with outputs filled up to whole panels."""
    return MatrixStruct(
        panels=weight.panels.data_ptr(),
        bias=address(weight.bias_O),
        inputs=weight.num_in,
        outputs=weight.panels.shape[0] * weight.panels.shape[2],
        by=choose_product(weight.panels.dtype, in_pairs=weight.in_pairs, has_tiles=has_tiles),
    )


class NormStruct(ctypes.Structure):
    """`struct norm` of the source."""

    _fields_ = (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("eps", ctypes.c_float))


class _Layer(ctypes.Structure):
    """`struct layer` of the source."""

    _fields_ = (
        *((name, MatrixStruct) for name in ("qkv", "out", "up", "down")),
        *((name, NormStruct) for name in ("attention_norm", "output_norm")),
    )


class _Encoder(ctypes.Structure):
    """`struct encoder` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "hidden", "starts", "runs", "bias", "wanted")),
        *(
            (name, ctypes.c_long)
            for name in ("num_wanted", "num_layers", "num_runs", "width", "inner", "heads", "bias_rows", "bias_stride")
        ),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("by", "is_half", "uses_tiles", "activation", "threads", "failed")),
    )


class _Heads(ctypes.Structure):
    """`struct heads` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "keys", "values", "out", "bias", "starts")),
        *(
            (name, ctypes.c_long)
            for name in ("sequences", "heads", "size", "stride", "out_stride", "bias_rows", "bias_stride")
        ),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("is_half", "uses_tiles", "threads", "failed")),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrangedMatrix:
    """A weight matrix in panels; `scales_O` and `sums_O` belong to int8 weights. All but panels are float32."""

    panels: Tensor
    bias_O: Tensor | None
    scales_O: Tensor | None
    sums_O: Tensor | None
    num_in: int
    num_out: int
    arithmetic: Arithmetic

    def as_struct(self) -> MatrixStruct:
        pointers = (address(each) for each in (self.panels, self.bias_O, self.scales_O, self.sums_O))
        return MatrixStruct(*pointers, self.num_in, self.num_out, self.arithmetic)


@dataclass(frozen=True, kw_only=True)
class ArrangedLayer:
    """The matrices of one layer, and its two normalizations as float32 weight, bias and epsilon."""

    qkv: ArrangedMatrix
    out: ArrangedMatrix
    up: ArrangedMatrix
    down: ArrangedMatrix
    attention_norm: tuple[Tensor, Tensor, float]
    output_norm: tuple[Tensor, Tensor, float]

    @functools.cached_property
    def struct(self) -> _Layer:
        """What the kernels read, made once; it points to the tensors above."""
        matrices = (each.as_struct() for each in (self.qkv, self.out, self.up, self.down))
        norms = (NormStruct(address(w), address(b), eps) for w, b, eps in (self.attention_norm, self.output_norm))
        return _Layer(*matrices, *norms)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderShape:
    """What all layers have in common. `activation` is one of `ACTIVATIONS`."""

    width: int
    inner: int
    num_heads: int
    activation: str
    arithmetic: Arithmetic
    dtype: torch.dtype


class EncoderKernels:
    """The library's encoder. `instructions` are those it may use here, as the processor's flags name them."""

    def __init__(self, kernels: Kernels, flags: frozenset[str]) -> None:
        self._kernels = kernels
        library = kernels.library
        library.encoder_instructions.restype = ctypes.c_int32
        for function in (library.encode, library.attend_packed):
            function.argtypes, function.restype = (ctypes.c_void_p,), None
        made_for = int(library.encoder_instructions())
        found = {"avx512_bf16"} if made_for & 1 else set()
        if made_for & 2 and "amx_tile" in flags and kernels.has_tiles:
            found |= {"amx_bf16", "amx_int8"}
        if made_for & 4:
            found.add("avx512_vnni")
        if made_for & 8:
            found.add("avx2")
        self.instructions = flags & found

    def attends(self, dtype: torch.dtype, head_size: int) -> bool:
        """Whether `attend` takes such heads."""
        known = dtype == torch.float32 or (dtype == torch.bfloat16 and "avx512_bf16" in self.instructions)
        return known and head_size % 16 == 0

    def attend(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        starts: NDArray[np.int64],
        out_THD: Tensor,
        *,
        scale: float,
        bias_HMM: Tensor | None = None,
        num_threads: int | None = None,
    ) -> None:
        """softmax(q @ k.T * scale + bias) @ v within each sequence; `starts` [B + 1]: their first tokens, and the end.

        Queries, keys and values have the same strides, as parts of one projection have. The bias is float32.
        """
        num_heads, head_size = q_THD.shape[1:]
        strides = {each.stride() for each in (q_THD, k_THD, v_THD)}
        assert len(strides) == 1 and q_THD.stride()[1:] == (head_size, 1) and out_THD.is_contiguous()
        assert bias_HMM is None or (bias_HMM.is_contiguous() and bias_HMM.dtype == torch.float32)
        arguments = _Heads(
            q_THD.data_ptr(),
            k_THD.data_ptr(),
            v_THD.data_ptr(),
            out_THD.data_ptr(),
            address(bias_HMM),
            starts.ctypes.data,
            starts.size - 1,
            num_heads,
            head_size,
            q_THD.stride(0),
            num_heads * head_size,
            *((0, 0) if bias_HMM is None else bias_HMM.shape[1:]),
            scale,
            q_THD.dtype == torch.bfloat16,
            "amx_bf16" in self.instructions,
            num_threads or threads.num_threads(),
        )
        self._kernels.library.attend_packed(ctypes.addressof(arguments))
        if arguments.failed:
            raise MemoryError(f"no memory for attention of {q_THD.shape[0]} tokens")

    def arrange(self, weight_OI: Tensor, bias_O: Tensor | None, arithmetic: Arithmetic) -> ArrangedMatrix:
        """A weight matrix as the kernels read it; int8 weights are made of it here."""
        num_out, num_in = weight_OI.shape
        scales_O = sums_O = None
        if arithmetic.is_int8:
            quantized_OI, scales_O = quantize_rows(weight_OI, arithmetic.largest_weight)
            sums_O = quantized_OI.sum(1, dtype=torch.float32)
            panels = quantized_OI.view(-1, self._kernels.width, num_in // 4, 4).transpose(1, 2).contiguous()
        else:
            panels = self._kernels.pack(weight_OI, None, in_pairs=weight_OI.dtype == torch.bfloat16).panels
        return ArrangedMatrix(
            panels=panels,
            bias_O=None if bias_O is None else bias_O.float().contiguous(),
            scales_O=scales_O,
            sums_O=sums_O,
            num_in=num_in,
            num_out=num_out,
            arithmetic=arithmetic,
        )

    def encode(
        self,
        shape: EncoderShape,
        layers: list[ArrangedLayer],
        hidden_TC: Tensor,
        starts: NDArray[np.int64],
        *,
        bias_HMM: Tensor | None,
        num_threads: int,
        rows_R: NDArray[np.int64] | None = None,
    ) -> Tensor:
        """Hidden states behind all layers, [T, C], in memory of their own; those given are left as they are.

        `starts` [B + 1] are the sequences' first tokens, and the end. The bias, float32, is added to scores. With
        `rows_R`, ascending, only these of the results mean anything.
        """
        num_tokens, width = hidden_TC.shape
        assert width == shape.width and hidden_TC.dtype == shape.dtype
        assert bias_HMM is None or (bias_HMM.is_contiguous() and bias_HMM.dtype == torch.float32)
        states = hidden_TC.clone(memory_format=torch.contiguous_format)
        runs = plan_runs(np.diff(starts), num_threads, width)
        structs = (_Layer * len(layers))(*(layer.struct for layer in layers))
        arguments = _Encoder(
            ctypes.addressof(structs),
            states.data_ptr(),
            starts.ctypes.data,
            runs.ctypes.data,
            address(bias_HMM),
            None if rows_R is None else rows_R.ctypes.data,
            0 if rows_R is None else rows_R.size,
            len(layers),
            len(runs),
            width,
            shape.inner,
            shape.num_heads,
            *((0, 0) if bias_HMM is None else bias_HMM.shape[1:]),
            (width // shape.num_heads) ** -0.5,
            shape.arithmetic,
            shape.dtype == torch.bfloat16,
            bool(self.instructions & {"amx_bf16", "amx_int8"}),
            ACTIVATIONS.index(shape.activation),
            num_threads,
        )
        self._kernels.library.encode(ctypes.addressof(arguments))
        if arguments.failed:
            raise MemoryError(f"no memory for {num_tokens} tokens")
        return states


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@functools.cache
def load_encoder_kernels() -> EncoderKernels | None:
    """The kernels of this process; None where there are none."""
    kernels = load_kernels()
    return None if kernels is None else EncoderKernels(kernels, machine.cpu_flags())
