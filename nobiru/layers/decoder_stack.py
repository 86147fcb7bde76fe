"""A stack of Llama's layers, by the fastest means there are: all of them in one native call, or layer by layer.

Owns the choice. The native stack reads the weights of the layers it stands for; it takes those whose parts are all
plain: attention over heads, normalized head by head or not at all, and a feed-forward gated by silu, on a CPU, not
spread over workers.

Shape legend: T tokens, C hidden size, P pairs of a head's values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from nobiru.layers.activation import ACTIVATIONS
from nobiru.layers.decoder_block import DecoderBlock, GatedMlp, SelfAttention
from nobiru.layers.linear import Linear, NativeLinear
from nobiru.layers.rms_norm import HeadNorm, RmsNorm
from nobiru.ops.native.decoder import DecoderShape, NormWeight, PackedDecoder, PackedLayer, fits
from nobiru.ops.native.library import PackedWeight, kernels_for
from nobiru.ops.paged_layout import LayerCache, PagedLayout
from nobiru.ops.scratch import Scratch


class DecoderStack(Protocol):
    """With `has_own_threads` a call spreads itself over the cores; else several threads may call at once."""

    has_own_threads: ClassVar[bool]

    def __call__(
        self,
        hidden_TC: Tensor,
        turns_T1P: Tensor,
        layout: PagedLayout,
        cache: Sequence[LayerCache],
        scratch: Scratch | None,
    ) -> Tensor:
        """Hidden states behind the last norm, [T, C], in memory of their own; those given may be overwritten."""


def make_stack(blocks: Sequence[DecoderBlock], norm: RmsNorm) -> DecoderStack:
    return _native_stack(blocks, norm) or BlockStack(blocks=blocks, norm=norm)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockStack:
    """The layers one after the other."""

    has_own_threads: ClassVar[bool] = False
    blocks: Sequence[DecoderBlock]
    norm: RmsNorm

    def __call__(
        self,
        hidden_TC: Tensor,
        turns_T1P: Tensor,
        layout: PagedLayout,
        cache: Sequence[LayerCache],
        scratch: Scratch | None,
    ) -> Tensor:
        for block, layer_cache in zip(self.blocks, cache, strict=True):
            block(hidden_TC, turns_T1P, layout, layer_cache, scratch)
        return self.norm(hidden_TC)


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeStack:
    """The kernels of `nobiru.ops.native`."""

    has_own_threads: ClassVar[bool] = True
    decoder: PackedDecoder

    def __call__(
        self,
        hidden_TC: Tensor,
        turns_T1P: Tensor,
        layout: PagedLayout,
        cache: Sequence[LayerCache],
        scratch: Scratch | None,
    ) -> Tensor:
        return self.decoder.forward(hidden_TC, turns_T1P, layout, cache, scratch.wide if scratch else None)


def _native_stack(blocks: Sequence[DecoderBlock], norm: RmsNorm) -> NativeStack | None:
    """None where a layer has a part that the kernels do not take."""
    kernels = kernels_for(norm.weight_C)
    layers = [_packed_layer(block) for block in blocks]
    packed = [layer for layer in layers if layer is not None]
    if kernels is None or not blocks or len(packed) < len(layers):
        return None
    attention = blocks[0].attention
    assert isinstance(attention, SelfAttention)
    shape = DecoderShape(
        width=norm.weight_C.shape[0],
        inner=packed[0].down.num_in,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_size=attention.head_size,
        dtype=norm.weight_C.dtype,
    )
    if not fits(kernels, shape):
        return None
    return NativeStack(decoder=PackedDecoder(kernels, shape, packed, _norm_weight(norm)))


def _packed_layer(block: DecoderBlock) -> PackedLayer | None:
    attention, mlp = block.attention, block.mlp
    if not isinstance(attention, SelfAttention) or attention.clip is not None:
        return None
    if not isinstance(mlp, GatedMlp) or mlp.activation is not ACTIVATIONS["silu"]:
        return None
    if not isinstance(attention.qk_norm, HeadNorm | None):
        return None
    qkv, out, gate_up, down = (_packed(each) for each in (attention.qkv, attention.out, mlp.gate_up, mlp.down))
    if qkv is None or out is None or gate_up is None or down is None:
        return None
    head_norm = attention.qk_norm
    return PackedLayer(
        qkv=qkv,
        out=out,
        gate_up=gate_up,
        down=down,
        attention_norm=_norm_weight(block.attention_norm),
        mlp_norm=_norm_weight(block.mlp_norm),
        qk_norm=None if head_norm is None else NormWeight(weight=head_norm.weight_HD, eps=head_norm.eps),
        window=attention.window,
    )


def _packed(linear: Linear) -> PackedWeight | None:
    return linear.weight if isinstance(linear, NativeLinear) else None


def _norm_weight(norm: RmsNorm) -> NormWeight:
    return NormWeight(weight=norm.weight_C, eps=norm.eps)
