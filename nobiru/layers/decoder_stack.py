"""A stack of Llama's layers, by the fastest means there are: all of them in one native call, or each in parts.

Owns the choice. Native stacks read the weights of the layers they stand for. They take attention over heads, normalized
head by head or not at all, on a CPU, not spread over workers, and feed-forwards and experts that are gated by silu. A
layer with another feed-forward, or with experts on other ranks too, has a call for its attention alone.

Shape legend: T tokens, R of them that are asked for, C hidden size, P pairs of a head's values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from nobiru.layers.activation import ACTIVATIONS
from nobiru.layers.decoder_block import DecoderBlock, FeedForward, GatedMlp, SelfAttention
from nobiru.layers.linear import Linear, NativeLinear
from nobiru.layers.moe import LocalDispatcher, MoeFeedForward
from nobiru.layers.rms_norm import HeadNorm, RmsNorm
from nobiru.layers.routing import SoftmaxRouter
from nobiru.ops.native.decoder import DecoderShape, NormWeight, PackedDecoder, PackedLayer, fits
from nobiru.ops.native.encoder import GRAIN
from nobiru.ops.native.experts import PackedMoe
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
        rows_R: Tensor | None = None,
    ) -> Tensor:
        """Hidden states behind the last norm, [T, C], in memory of their own; those given may be overwritten.

        With `rows_R`, int64 and ascending, those of these tokens, [R, C]: others end at the last layer's attention.
        """


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
        rows_R: Tensor | None = None,
    ) -> Tensor:
        last = len(self.blocks) - 1
        for number, (block, layer_cache) in enumerate(zip(self.blocks, cache, strict=True)):
            rows = rows_R if number == last else None
            hidden_TC = block(hidden_TC, turns_T1P, layout, layer_cache, scratch, rows)
        return self.norm(hidden_TC)


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeStack:
    """The kernels of `nobiru.ops.native`: all of a layer, or its attention and the norms around it.

    `plain` has the layers whose feed-forward the kernels do not take, and `spread` also those whose experts they take
    only where this rank has all of them; `moe` is one of these.
    """

    has_own_threads: ClassVar[bool] = True
    decoder: PackedDecoder
    plain: Mapping[int, FeedForward]
    spread: Mapping[int, FeedForward]
    moe: MoeFeedForward | None

    def __call__(
        self,
        hidden_TC: Tensor,
        turns_T1P: Tensor,
        layout: PagedLayout,
        cache: Sequence[LayerCache],
        scratch: Scratch | None,
        rows_R: Tensor | None = None,
    ) -> Tensor:
        # Looked at in each step, since ranks come and go.
        dispatcher = None if self.moe is None else self.moe.parts.dispatcher
        slots_LE = dispatcher.slots_LE if isinstance(dispatcher, LocalDispatcher) else None
        sums = scratch.sums if scratch else None
        step = self.decoder.begin(hidden_TC, turns_T1P, layout, cache, sums, slots_LE, rows_R)
        next_layer = 0
        for layer, feed_forward in (self.spread if slots_LE is None else self.plain).items():
            if layer > next_layer:
                step.run(next_layer, layer)
            rows_TC = step.attend(layer)
            step.sums_TC[: rows_TC.shape[0]].add_(feed_forward(rows_TC, scratch))
            next_layer = layer + 1
        out_TC = step.run(next_layer)
        if self.moe is not None and step.loads_LE is not None:
            self.moe.mlp.loads.add(step.loads_LE)
        return out_TC


def _native_stack(blocks: Sequence[DecoderBlock], norm: RmsNorm) -> NativeStack | None:
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
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_size=attention.head_size,
        dtype=norm.weight_C.dtype,
    )
    if not fits(kernels, shape):
        return None
    kinds = [(layer.feed_forward, block.mlp) for layer, block in zip(packed, blocks, strict=True)]
    return NativeStack(
        decoder=PackedDecoder(kernels, shape, packed, _norm_weight(norm)),
        plain={number: mlp for number, (native, mlp) in enumerate(kinds) if native is None},
        spread={number: mlp for number, (native, mlp) in enumerate(kinds) if not isinstance(native, tuple)},
        moe=next((mlp for native, mlp in kinds if native is not None and isinstance(mlp, MoeFeedForward)), None),
    )


def _packed_layer(block: DecoderBlock) -> PackedLayer | None:
    attention = block.attention
    if not isinstance(attention, SelfAttention) or attention.clip is not None:
        return None
    if not isinstance(attention.qk_norm, HeadNorm | None):
        return None
    qkv, out = _packed(attention.qkv), _packed(attention.out)
    if qkv is None or out is None:
        return None
    head_norm = attention.qk_norm
    return PackedLayer(
        qkv=qkv,
        out=out,
        feed_forward=_packed_moe(block.mlp) or _packed_mlp(block.mlp),
        attention_norm=_norm_weight(block.attention_norm),
        mlp_norm=_norm_weight(block.mlp_norm),
        qk_norm=None if head_norm is None else NormWeight(weight=head_norm.weight_HD, eps=head_norm.eps),
        window=attention.window,
    )


def _packed_mlp(mlp: FeedForward) -> tuple[PackedWeight, PackedWeight] | None:
    if not isinstance(mlp, GatedMlp) or mlp.activation is not ACTIVATIONS["silu"]:
        return None
    gate_up, down = _packed(mlp.gate_up), _packed(mlp.down)
    return None if gate_up is None or down is None or down.num_in % GRAIN else (gate_up, down)


def _packed_moe(mlp: FeedForward) -> PackedMoe | None:
    if not isinstance(mlp, MoeFeedForward) or mlp.mlp.shared is not None:
        return None
    experts, router = mlp.mlp.experts.joined, mlp.mlp.router
    if experts is None or not isinstance(router, SoftmaxRouter):
        return None
    gate = _packed(router.gate)
    if gate is None or gate.bias_O is not None:
        return None
    return PackedMoe(
        gate=gate,
        experts=experts,
        layer=mlp.mlp.layer,
        top_k=router.top_k,
        normalizes=router.normalizes,
        rounds=router.rounds,
    )


def _packed(linear: Linear) -> PackedWeight | None:
    return linear.weight if isinstance(linear, NativeLinear) else None


def _norm_weight(norm: RmsNorm) -> NormWeight:
    return NormWeight(weight=norm.weight_C, eps=norm.eps)
