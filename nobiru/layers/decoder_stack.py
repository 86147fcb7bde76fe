"""A stack of Llama's layers, by the fastest means there are: all of them in one native call, or each in parts.

Owns the choice. Native stacks read the weights of the layers they stand for. They take attention over heads, normalized
head by head or not at all, on a CPU, not spread over workers; where every feed-forward is gated by silu, all is one
call, and where some have experts, each layer's attention is one.

Shape legend: T tokens, C hidden size, P pairs of a head's values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from torch import Tensor

from nobiru.layers.activation import ACTIVATIONS
from nobiru.layers.decoder_block import DecoderBlock, FeedForward, GatedMlp, SelfAttention
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
        step = self.decoder.begin(hidden_TC, turns_T1P, layout, cache, scratch.sums if scratch else None)
        return step.run()


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionStack:
    """Attention, and the norms around it, by the kernels of `nobiru.ops.native`; feed-forwards are the layers' own."""

    has_own_threads: ClassVar[bool] = True
    decoder: PackedDecoder
    feed_forwards: Sequence[FeedForward]

    def __call__(
        self,
        hidden_TC: Tensor,
        turns_T1P: Tensor,
        layout: PagedLayout,
        cache: Sequence[LayerCache],
        scratch: Scratch | None,
    ) -> Tensor:
        step = self.decoder.begin(hidden_TC, turns_T1P, layout, cache, scratch.sums if scratch else None)
        for layer, feed_forward in enumerate(self.feed_forwards):
            step.sums_TC.add_(feed_forward(step.attend(layer), scratch))
        return step.end()


def _native_stack(blocks: Sequence[DecoderBlock], norm: RmsNorm) -> NativeStack | AttentionStack | None:
    """None where a layer's attention is not one that the kernels take."""
    kernels = kernels_for(norm.weight_C)
    layers = [_packed_layer(block) for block in blocks]
    packed = [layer for layer in layers if layer is not None]
    if kernels is None or not blocks or len(packed) < len(layers):
        return None
    attention = blocks[0].attention
    assert isinstance(attention, SelfAttention)
    shape = DecoderShape(
        width=norm.weight_C.shape[0],
        inner=0,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_size=attention.head_size,
        dtype=norm.weight_C.dtype,
    )
    if not fits(kernels, shape):
        return None
    inners = {0 if layer.feed_forward is None else layer.feed_forward[1].num_in for layer in packed}
    whole = replace(shape, inner=min(inners))
    if len(inners) == 1 and whole.inner and fits(kernels, whole):
        return NativeStack(decoder=PackedDecoder(kernels, whole, packed, _norm_weight(norm)))
    decoder = PackedDecoder(kernels, shape, [replace(layer, feed_forward=None) for layer in packed], _norm_weight(norm))
    return AttentionStack(decoder=decoder, feed_forwards=[block.mlp for block in blocks])


def _packed_layer(block: DecoderBlock) -> PackedLayer | None:
    attention, mlp = block.attention, block.mlp
    if not isinstance(attention, SelfAttention) or attention.clip is not None:
        return None
    if not isinstance(attention.qk_norm, HeadNorm | None):
        return None
    qkv, out = _packed(attention.qkv), _packed(attention.out)
    if qkv is None or out is None:
        return None
    feed_forward = None
    if isinstance(mlp, GatedMlp) and mlp.activation is ACTIVATIONS["silu"]:
        gate_up, down = _packed(mlp.gate_up), _packed(mlp.down)
        feed_forward = None if gate_up is None or down is None else (gate_up, down)
    head_norm = attention.qk_norm
    return PackedLayer(
        qkv=qkv,
        out=out,
        feed_forward=feed_forward,
        attention_norm=_norm_weight(block.attention_norm),
        mlp_norm=_norm_weight(block.mlp_norm),
        qk_norm=None if head_norm is None else NormWeight(weight=head_norm.weight_HD, eps=head_norm.eps),
        window=attention.window,
    )


def _packed(linear: Linear) -> PackedWeight | None:
    return linear.weight if isinstance(linear, NativeLinear) else None


def _norm_weight(norm: RmsNorm) -> NormWeight:
    return NormWeight(weight=norm.weight_C, eps=norm.eps)
