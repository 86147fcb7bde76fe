"""Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1).

Keys and values of all heads are projections of one short vector, the latent, beside which a token has a few values that
are turned by its position. Owns this arithmetic over a KV cache that holds latents only, one "head" of them: the
projection of keys is applied to queries instead, and that of values to what attention mixed, which is the same product
in another order. Knows nothing of files.

Shape legend: T tokens, C hidden size, H heads, Q values of compressed queries, N values of a head that are not turned,
R values that are, L values of the latent, E = L + R, V values of a head's result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nobiru.layers.linear import Linear
from nobiru.layers.rms_norm import RmsNorm
from nobiru.layers.rotary import turn
from nobiru.ops.paged_attention import paged_attention
from nobiru.ops.paged_layout import LayerCache, PagedLayout
from nobiru.ops.scratch import Scratch


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """`compress` is the fused projection C → Q + L + R, or, without `query_norm` and `queries`, C → H (N + R) + L + R.

    `queries` is Q → H (N + R).
    """

    num_heads: int
    unturned_size: int
    turned_size: int
    scale: float
    compress: Linear
    query_norm: RmsNorm | None
    queries: Linear | None
    latent_norm: RmsNorm
    key_HNL: Tensor
    value_HLV: Tensor
    out: Linear

    def __call__(
        self, x_TC: Tensor, turns_T1P: Tensor, layout: PagedLayout, cache: LayerCache, scratch: Scratch | None
    ) -> Tensor:
        num_tokens, latent_size, turned_size = x_TC.shape[0], self.key_HNL.shape[2], self.turned_size
        compressed = self.compress(x_TC)
        num_before = compressed.shape[1] - latent_size - turned_size
        before_TQ, latent_TL, key_TR = compressed.split_with_sizes((num_before, latent_size, turned_size), 1)
        if self.queries is not None:
            assert self.query_norm is not None
            before_TQ = self.queries(self.query_norm(before_TQ))
        q_THD = before_TQ.unflatten(1, (self.num_heads, -1))  # type: ignore[no-untyped-call]
        q_THN, q_THR = q_THD.split_with_sizes((self.unturned_size, turned_size), 2)

        q_THE = x_TC.new_empty(num_tokens, self.num_heads, latent_size + turned_size)
        q_THE[..., :latent_size] = torch.bmm(q_THN.transpose(0, 1), self.key_HNL).transpose(0, 1)
        q_THE[..., latent_size:] = q_THR
        k_T1E = torch.cat((self.latent_norm(latent_TL), key_TR), 1)[:, None]
        turn(q_THE[..., latent_size:], turns_T1P)
        turn(k_T1E[..., latent_size:], turns_T1P)
        mixed_THE = paged_attention(
            q_THE, k_T1E, k_T1E, cache, layout, scale=self.scale, buffer=scratch.attended if scratch else None
        )
        mixed_HTL = mixed_THE[..., :latent_size].transpose(0, 1)
        y_THV = torch.bmm(mixed_HTL, self.value_HLV).transpose(0, 1)
        return self.out(y_THV.flatten(1), scratch.narrow if scratch else None)
