"""The decoder layer that Llama has: normalize, attend, add; normalize, feed forward, add.

Owns one layer's arithmetic on the packed tokens of a step, over the KV cache, with the attention and the gated
feed-forward that most families have. Others put their own in. Knows nothing of files or of the names weights have
there.

Shape legend: T tokens, R of them that are asked for, C hidden size, H query heads, K key heads, D values a head, P
pairs of them, G values of the gate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from nobiru.layers.activation import Activation, gated_product
from nobiru.layers.linear import Linear
from nobiru.layers.rms_norm import RmsNorm
from nobiru.layers.rotary import turn
from nobiru.ops.paged_attention import paged_attention
from nobiru.ops.paged_layout import LayerCache, PagedLayout
from nobiru.ops.scratch import Scratch


class Attention(Protocol):
    def __call__(
        self, x_TC: Tensor, turns_T1P: Tensor, layout: PagedLayout, cache: LayerCache, scratch: Scratch | None
    ) -> Tensor:
        """Normalized x → what attention adds to x, [T, C], perhaps in the scratch's memory."""


class FeedForward(Protocol):
    def __call__(self, x_TC: Tensor, scratch: Scratch | None) -> Tensor:
        """Normalized x → what the feed-forward adds to x, [T, C], perhaps in the scratch's memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderBlock:
    """One layer."""

    attention_norm: RmsNorm
    attention: Attention
    mlp_norm: RmsNorm
    mlp: FeedForward

    def __call__(
        self,
        x_TC: Tensor,
        turns_T1P: Tensor,
        layout: PagedLayout,
        cache: LayerCache,
        scratch: Scratch | None,
        rows_R: Tensor | None = None,
    ) -> Tensor:
        """Adds the layer to x in place; x, or the rows of it that are asked for, [R, C], and no others get through."""
        x_TC.add_(self.attention(self.attention_norm(x_TC), turns_T1P, layout, cache, scratch))
        x_RC = x_TC if rows_R is None else x_TC.index_select(0, rows_R)
        return x_RC.add_(self.mlp(self.mlp_norm(x_RC), scratch))


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfAttention:
    """`qkv` is the fused projection C → (H + 2 K) D.

    `qk_norm` normalizes queries and keys [T, H + K, D]; `clip` then bounds their numbers, and those of values, in size.
    `window` is how many tokens a token sees, itself included.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None
    qkv: Linear
    qk_norm: Callable[[Tensor], Tensor] | None
    out: Linear
    clip: float | None = None

    def __call__(
        self, x_TC: Tensor, turns_T1P: Tensor, layout: PagedLayout, cache: LayerCache, scratch: Scratch | None
    ) -> Tensor:
        wide, attended, narrow = (scratch.wide, scratch.attended, scratch.narrow) if scratch else (None, None, None)
        qkv_THD = self.qkv(x_TC, wide).view(x_TC.shape[0], -1, self.head_size)
        qk_THD, v_TKD = qkv_THD.split_with_sizes((self.num_heads + self.num_kv_heads, self.num_kv_heads), 1)
        if self.qk_norm is not None:
            qk_THD = self.qk_norm(qk_THD)
        if self.clip is not None:
            qk_THD.clamp_(-self.clip, self.clip)
            v_TKD.clamp_(-self.clip, self.clip)
        turn(qk_THD, turns_T1P)
        q_THD, k_TKD = qk_THD.split_with_sizes((self.num_heads, self.num_kv_heads), 1)
        attended_THD = paged_attention(
            q_THD, k_TKD, v_TKD, cache, layout, scale=self.head_size**-0.5, window=self.window, buffer=attended
        )
        return self.out(attended_THD.flatten(1), narrow)


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedMlp:
    """`gate_up` is the fused projection C → 2 G."""

    gate_up: Linear
    activation: Activation
    down: Linear

    def __call__(self, x_TC: Tensor, scratch: Scratch | None) -> Tensor:
        wide, gated, narrow = (scratch.wide, scratch.attended, scratch.narrow) if scratch else (None, None, None)
        return self.down(gated_product(self.gate_up(x_TC, wide), self.activation, gated), narrow)
