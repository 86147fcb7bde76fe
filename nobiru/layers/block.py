"""The encoder layer that BERT introduced: attention, add, normalize; feed-forward, add, normalize.

Owns one layer's arithmetic on packed hidden states. Knows nothing of files or of the names weights have there.

Shape legend: T tokens, R of them that are asked for, C hidden size, H heads, D values a head (C = H * D), M the model's
limit of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from nobiru.layers.linear import Linear
from nobiru.ops.layout import PackedLayout
from nobiru.ops.packed_attention import packed_attention
from nobiru.ops.scratch import Scratch


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """Layer normalization over the last dimension; statistics are in float32 whatever the dtype."""

    weight_C: Tensor
    bias_C: Tensor
    eps: float

    def in_float32(self) -> tuple[Tensor, Tensor, float]:
        """Weight, bias and epsilon, as the kernels read them."""
        return self.weight_C.float().contiguous(), self.bias_C.float().contiguous(), self.eps

    def __call__(self, x_TC: Tensor) -> Tensor:
        return F.layer_norm(x_TC, self.weight_C.shape, self.weight_C, self.bias_C, self.eps)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockWeights:
    """The tensors of one layer as a file has them, with query, key and value below each other."""

    qkv: tuple[Tensor, Tensor]
    attention_out: tuple[Tensor, Tensor]
    attention_norm: Norm
    up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]
    output_norm: Norm


@dataclass(frozen=True, kw_only=True, slots=True)
class PostNormBlock:
    """One layer. `qkv` is the fused projection C → 3 C, `up` includes the activation.

    Sums are taken in place of a projection's output, and outputs that end inside the layer lie in `scratch`.
    """

    num_heads: int
    qkv: Linear
    attention_out: Linear
    attention_norm: Norm
    up: Linear
    down: Linear
    output_norm: Norm

    def __call__(
        self,
        x_TC: Tensor,
        layout: PackedLayout,
        scratch: Scratch | None,
        bias_HMM: Tensor | None = None,
        rows_R: Tensor | None = None,
    ) -> Tensor:
        """The layer's hidden states [T, C], or those of some tokens [R, C]."""
        wide, attended, narrow = (scratch.wide, scratch.attended, scratch.narrow) if scratch else (None, None, None)
        num_tokens, hidden_size = x_TC.shape
        head_size = hidden_size // self.num_heads
        q_THD, k_THD, v_THD = self.qkv(x_TC, wide).view(num_tokens, 3, self.num_heads, head_size).unbind(1)
        attended_THD = packed_attention(
            q_THD, k_THD, v_THD, layout, scale=head_size**-0.5, bias_HMM=bias_HMM, buffer=attended
        )
        attended_TC = attended_THD.flatten(1)
        if rows_R is not None:
            x_TC, attended_TC = x_TC.index_select(0, rows_R), attended_TC.index_select(0, rows_R)
        x_TC = self.attention_norm(self.attention_out(attended_TC, narrow).add_(x_TC))
        return self.output_norm(self.down(self.up(x_TC, wide), narrow).add_(x_TC))
