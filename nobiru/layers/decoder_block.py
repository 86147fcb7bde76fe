"""The decoder layer that Llama has: normalize, attend, add; normalize, gated feed-forward, add.

Owns one layer's arithmetic on the packed tokens of a step, over the KV cache. Knows nothing of files or of the names
weights have there.

Shape legend: T tokens, C hidden size, H query heads, K key heads, D values a head, P pairs of them, G values of the
gate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nobiru.layers.activation import Activation
from nobiru.layers.linear import Linear
from nobiru.layers.rms_norm import HeadNorm, RmsNorm
from nobiru.layers.rotary import turn
from nobiru.ops.paged_attention import paged_attention
from nobiru.ops.paged_layout import LayerCache, PagedLayout
from nobiru.ops.scratch import Scratch


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderBlock:
    """One layer. `qkv` is the fused projection C → (H + 2 K) D, `gate_up` the one C → 2 G.

    `qk_norm` normalizes the heads of queries and keys. `window` is how many tokens a token sees, itself included.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None
    attention_norm: RmsNorm
    qkv: Linear
    qk_norm: HeadNorm | None
    attention_out: Linear
    mlp_norm: RmsNorm
    gate_up: Linear
    activation: Activation
    down: Linear

    def __call__(
        self, x_TC: Tensor, turns_T1P: Tensor, layout: PagedLayout, cache: LayerCache, scratch: Scratch | None
    ) -> None:
        """Adds the layer to x in place."""
        x_TC.add_(self._attend(self.attention_norm(x_TC), turns_T1P, layout, cache, scratch))
        x_TC.add_(self._feed_forward(self.mlp_norm(x_TC), scratch))

    def _attend(
        self, x_TC: Tensor, turns_T1P: Tensor, layout: PagedLayout, cache: LayerCache, scratch: Scratch | None
    ) -> Tensor:
        wide, attended, narrow = (scratch.wide, scratch.attended, scratch.narrow) if scratch else (None, None, None)
        qkv_THD = self.qkv(x_TC, wide).view(x_TC.shape[0], -1, self.head_size)
        qk_THD, v_TKD = qkv_THD.split_with_sizes((self.num_heads + self.num_kv_heads, self.num_kv_heads), 1)
        if self.qk_norm is not None:
            qk_THD = self.qk_norm(qk_THD)
        turn(qk_THD, turns_T1P)
        q_THD, k_TKD = qk_THD.split_with_sizes((self.num_heads, self.num_kv_heads), 1)
        attended_THD = paged_attention(
            q_THD, k_TKD, v_TKD, cache, layout, scale=self.head_size**-0.5, window=self.window, buffer=attended
        )
        return self.attention_out(attended_THD.flatten(1), narrow)

    def _feed_forward(self, x_TC: Tensor, scratch: Scratch | None) -> Tensor:
        wide, gated, narrow = (scratch.wide, scratch.attended, scratch.narrow) if scratch else (None, None, None)
        gate_TG, up_TG = self.gate_up(x_TC, wide).chunk(2, -1)
        gate_TG = self.activation.apply(gate_TG)
        if gated is None:
            return self.down(gate_TG * up_TG)
        return self.down(torch.mul(gate_TG, up_TG, out=gated.take(*up_TG.shape, dtype=up_TG.dtype)), narrow)
