"""Calls the kernels of `decoder_layers.h` with torch tensors: all layers of a decoder on one step's tokens.

Owns the description of layers that the kernels read, and which sizes they take.

Shape legend: T tokens, R of them that are asked for, C hidden size, H query heads, K key heads, D values a head, P
pairs of them, N blocks of the cache, S slots of a block, L layers with experts, E experts of one.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nobiru.ops.native import threads
from nobiru.ops.native.encoder import GRAIN, MatrixStruct, matrix_of
from nobiru.ops.native.experts import PackedMoe
from nobiru.ops.native.library import AttentionStruct, Kernels, PackedWeight, PrefillStruct
from nobiru.ops.paged_groups import decode_rows, prefill_tiles
from nobiru.ops.paged_layout import LayerCache, PagedLayout
from nobiru.ops.scratch import Buffer


class _Layer(ctypes.Structure):
    """`struct decoder_layer` of the source."""

    _fields_ = (
        *((name, MatrixStruct) for name in ("qkv", "out", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("moe", "attention_norm", "mlp_norm", "qk_norm", "keys", "values")),
        *((name, ctypes.c_float) for name in ("attention_eps", "mlp_eps", "qk_eps")),
        ("window", ctypes.c_long),
    )


class _Decoder(ctypes.Structure):
    """`struct decoder` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "hidden", "out", "norm", "turns", "slots")),
        *((name, ctypes.c_void_p) for name in ("expert_slots", "loads", "wanted")),
        ("decode", AttentionStruct),
        ("prefill", PrefillStruct),
        *((name, ctypes.c_long) for name in ("num_layers", "tokens", "width", "num_wanted")),
        ("eps", ctypes.c_float),
        *(
            (name, ctypes.c_int)
            for name in ("is_half", "uses_tiles", "attends_only", "drops_others", "threads", "failed")
        ),
    )


class _Scores(ctypes.Structure):
    """`struct scores` of the source."""

    _fields_ = (
        ("head", MatrixStruct),
        *((name, ctypes.c_void_p) for name in ("rows", "out")),
        ("count", ctypes.c_long),
        *((name, ctypes.c_int) for name in ("threads", "failed")),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class NormWeight:
    """Of a root mean square normalization; [C], or [H + K, D] for queries and keys head by head."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedLayer:
    """The weights of one layer, in the dtype of hidden states but for the matrices.

    `feed_forward` is gate with up, and down, or experts; without it somebody else computes the layer's.
    """

    qkv: PackedWeight
    out: PackedWeight
    feed_forward: tuple[PackedWeight, PackedWeight] | PackedMoe | None
    attention_norm: NormWeight
    mlp_norm: NormWeight
    qk_norm: NormWeight | None
    window: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderShape:
    """What all layers have in common."""

    width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype


class DecoderPass:
    """One step's tokens on their way through the layers. `sums_TC` are what has been added up so far, in float32.

    `loads_LE` is how many tokens went to each expert in the layers that were run whole. With `rows_R` only these tokens
    get behind the last layer's attention: the first R rows of sums and results are theirs from then on.
    """

    def __init__(
        self,
        kernels: Kernels,
        arguments: _Decoder,
        *,
        sums_TC: Tensor,
        out_TC: Tensor,
        loads_LE: NDArray[np.int64] | None,
        rows_R: Tensor | None,
        used: tuple[object, ...],
    ) -> None:
        """`used` is whatever else the arguments point into."""
        self._kernels = kernels
        self._arguments = arguments
        self._used = used
        self._first = arguments.layers
        self._num_layers = arguments.num_layers
        self.sums_TC = sums_TC
        self.loads_LE = loads_LE
        self._out_TC = out_TC
        self._rows_R = rows_R

    def run(self, first: int = 0, end: int | None = None) -> Tensor:
        """Layers `first` to `end`, all unless said, or none; hidden states [T, C] behind the norm that is the last.

        [R, C] behind the last layer, where only some are asked for.

        Keys and values go into the cache.
        """
        return self._run(first, self._num_layers if end is None else end, attends_only=False)

    def attend(self, layer: int) -> Tensor:
        """That layer's attention; what its feed-forward takes, [T, C], until the next call."""
        return self._run(layer, layer + 1, attends_only=True)

    def _run(self, first: int, end: int, *, attends_only: bool) -> Tensor:
        arguments = self._arguments
        arguments.layers, arguments.num_layers = self._first + first * ctypes.sizeof(_Layer), end - first
        arguments.attends_only = attends_only
        arguments.drops_others = self._rows_R is not None and first < end == self._num_layers
        self._kernels.library.decode(ctypes.addressof(arguments))
        if arguments.failed:
            raise MemoryError(f"no memory for {self._out_TC.shape[0]} tokens")
        return self._out_TC[: arguments.tokens]


class PackedDecoder:
    """Layers that the kernels compute, and the norm behind them; for several threads at once."""

    def __init__(self, kernels: Kernels, shape: DecoderShape, layers: Sequence[PackedLayer], norm: NormWeight) -> None:
        self._kernels = kernels
        self._shape = shape
        self._layers = layers
        self._norm = norm
        self._described: tuple[Sequence[LayerCache], ctypes.Array[_Layer]] | None = None

    def begin(
        self,
        hidden_TC: Tensor,
        turns_T1P: Tensor,
        layout: PagedLayout,
        cache: Sequence[LayerCache],
        buffer: Buffer | None = None,
        expert_slots_LE: NDArray[np.int64] | None = None,
        rows_R: Tensor | None = None,
    ) -> DecoderPass:
        """One step's tokens before the first layer. Their sums lie in the buffer, if there is one.

        `rows_R`, int64 and ascending, are the tokens whose hidden states are asked for; None: all.

        `expert_slots_LE` says in which slot each expert is; without it layers with experts can only `attend`.
        """
        num_threads = threads.num_threads()
        sums_TC = (buffer or Buffer()).take(*hidden_TC.shape, dtype=torch.float32).copy_(hidden_TC)
        out_TC = torch.empty(hidden_TC.shape, dtype=self._shape.dtype)
        decode, prefill, read = self._attention(layout, num_threads)
        layers = self._describe(cache)
        loads_LE = None if expert_slots_LE is None else np.zeros_like(expert_slots_LE)
        arguments = _Decoder(
            layers=ctypes.addressof(layers),
            hidden=sums_TC.data_ptr(),
            out=out_TC.data_ptr(),
            norm=self._norm.weight.data_ptr(),
            turns=turns_T1P.data_ptr(),
            slots=layout.slots_T.data_ptr(),
            expert_slots=None if expert_slots_LE is None else expert_slots_LE.ctypes.data,
            loads=None if loads_LE is None else loads_LE.ctypes.data,
            decode=decode,
            prefill=prefill,
            num_layers=len(self._layers),
            wanted=None if rows_R is None else rows_R.data_ptr(),
            num_wanted=0 if rows_R is None else rows_R.shape[0],
            tokens=hidden_TC.shape[0],
            width=self._shape.width,
            eps=self._norm.eps,
            is_half=self._shape.dtype == torch.bfloat16,
            uses_tiles=self._uses_tiles,
            threads=num_threads,
        )
        used = (*read, turns_T1P, layout, layers, expert_slots_LE)
        return DecoderPass(
            self._kernels, arguments, sums_TC=sums_TC, out_TC=out_TC, loads_LE=loads_LE, rows_R=rows_R, used=used
        )

    def _attention(
        self, layout: PagedLayout, num_threads: int
    ) -> tuple[AttentionStruct, PrefillStruct, tuple[object, ...]]:
        """Of sequences with one token and of the others, what is the same in all layers, and what that points into."""
        shape, rows, tiles = self._shape, decode_rows(layout), prefill_tiles(layout)
        common = {
            "heads": shape.num_heads,
            "key_heads": shape.num_kv_heads,
            "size": shape.head_size,
            "block_size": layout.block_size,
            "q_stride": (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size,
            "scale": shape.head_size**-0.5,
            "threads": num_threads,
        }
        decode, prefill = AttentionStruct(**common), PrefillStruct(**common)
        if rows is not None:
            decode.block_table, decode.table_width = rows.block_table_nM.data_ptr(), rows.block_table_nM.shape[1]
            decode.contexts, decode.sequences = rows.contexts_n.data_ptr(), rows.contexts_n.shape[0]
            decode.rows = rows.tokens_n.data_ptr()
        if tiles is not None:
            prefill.block_table, prefill.table_width = layout.block_table.data_ptr(), layout.block_table.shape[1]
            prefill.tiles, prefill.tiles_count = tiles.data_ptr(), tiles.shape[0]
        return decode, prefill, (rows, tiles)

    @property
    def _uses_tiles(self) -> bool:
        return self._shape.dtype == torch.bfloat16 and self._kernels.has_tiles

    def _describe(self, cache: Sequence[LayerCache]) -> ctypes.Array[_Layer]:
        """What the kernels read of all layers, made once for a cache."""
        described = self._described
        if described is None or described[0] is not cache:
            structs = [self._layer(layer, own) for layer, own in zip(self._layers, cache, strict=True)]
            # Another thread may put that of another cache here meanwhile.
            self._described = described = cache, (_Layer * len(structs))(*structs)
        return described[1]

    def _layer(self, layer: PackedLayer, cache: LayerCache) -> _Layer:
        assert cache.keys_NSKD.is_contiguous() and cache.values_NSKD.is_contiguous()
        matrix = functools.partial(matrix_of, has_tiles=self._kernels.has_tiles)
        gate_up, down, moe = MatrixStruct(), MatrixStruct(), None
        if isinstance(layer.feed_forward, PackedMoe):
            moe = ctypes.addressof(layer.feed_forward.struct)
        elif layer.feed_forward is not None:
            gate_up, down = (matrix(weight) for weight in layer.feed_forward)
        return _Layer(
            qkv=matrix(layer.qkv),
            out=matrix(layer.out),
            gate_up=gate_up,
            down=down,
            moe=moe,
            attention_norm=layer.attention_norm.weight.data_ptr(),
            mlp_norm=layer.mlp_norm.weight.data_ptr(),
            qk_norm=None if layer.qk_norm is None else layer.qk_norm.weight.data_ptr(),
            keys=cache.keys_NSKD.data_ptr(),
            values=cache.values_NSKD.data_ptr(),
            attention_eps=layer.attention_norm.eps,
            mlp_eps=layer.mlp_norm.eps,
            qk_eps=0.0 if layer.qk_norm is None else layer.qk_norm.eps,
            window=layer.window or 0,
        )


def fits(kernels: Kernels, shape: DecoderShape) -> bool:
    """Whether the kernels take layers of these sizes: whole panels of outputs, and heads that attention takes."""
    of_queries, of_keys = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    sizes = (shape.width, of_queries, of_queries + 2 * of_keys)
    if shape.dtype == torch.bfloat16 and not kernels.multiplies_pairs:
        return False
    return kernels.prefills(shape.dtype, shape.head_size) and not any(size % GRAIN for size in sizes)


def scores(kernels: Kernels, hidden_BC: Tensor, head: PackedWeight, buffer: Buffer | None) -> Tensor | None:
    """hidden @ head.T [B, V] in float32, in the buffer's memory if there is one.

    None for weights that are not of pairs, or not in whole panels.
    """
    if not head.in_pairs or head.num_out % GRAIN or head.num_in % GRAIN:
        return None
    rows_BC = hidden_BC.contiguous()
    shape = rows_BC.shape[0], head.num_out
    out_BV = torch.empty(shape) if buffer is None else buffer.take(*shape, dtype=torch.float32)
    arguments = _Scores(
        head=matrix_of(head, has_tiles=kernels.has_tiles),
        rows=rows_BC.data_ptr(),
        out=out_BV.data_ptr(),
        count=rows_BC.shape[0],
        threads=threads.num_threads(),
    )
    kernels.library.score(ctypes.addressof(arguments))
    if arguments.failed:
        raise MemoryError(f"no memory for scores of {rows_BC.shape[0]} tokens")
    return out_BV
