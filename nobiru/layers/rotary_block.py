"""BERT's encoder layer with rotary positions: attention, add, normalize; feed forward, add, normalize.

Owns one layer's arithmetic on packed hidden states. Knows nothing of files or of what the feed-forward is made of.

Shape legend: T tokens, C hidden size, H heads, D values a head (C = H * D), P pairs of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nobiru.layers.block import Norm
from nobiru.layers.decoder_block import FeedForward
from nobiru.layers.linear import Linear
from nobiru.layers.rotary import turn
from nobiru.ops.layout import PackedLayout
from nobiru.ops.packed_attention import packed_attention
from nobiru.ops.scratch import Scratch


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryBlock:
    """One layer. `qkv` is the fused projection C → 3 C, with pairs of queries and keys side by side."""

    num_heads: int
    qkv: Linear
    attention_out: Linear
    attention_norm: Norm
    mlp: FeedForward
    output_norm: Norm

    def __call__(self, x_TC: Tensor, turns_T1P: Tensor, layout: PackedLayout, scratch: Scratch | None) -> Tensor:
        wide, attended, narrow = (scratch.wide, scratch.attended, scratch.narrow) if scratch else (None, None, None)
        num_tokens, hidden_size = x_TC.shape
        head_size = hidden_size // self.num_heads
        qkv_THD = self.qkv(x_TC, wide).view(num_tokens, 3 * self.num_heads, head_size)
        turn(qkv_THD[:, : 2 * self.num_heads], turns_T1P)
        q_THD, k_THD, v_THD = qkv_THD.chunk(3, 1)
        attended_THD = packed_attention(q_THD, k_THD, v_THD, layout, scale=head_size**-0.5, buffer=attended)
        x_TC = self.attention_norm(self.attention_out(attended_THD.flatten(1), narrow).add_(x_TC))
        return self.output_norm(self.mlp(x_TC, scratch).add_(x_TC))
