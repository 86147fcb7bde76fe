"""Causal attention over a KV cache in blocks.

Shape legend: T tokens of the step, H query heads, K key heads, D values a head, t tokens of one sequence, L its
context, N blocks of the cache, S slots of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nobiru.ops.paged_layout import LayerCache, PagedLayout


def paged_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cache: LayerCache,
    layout: PagedLayout,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Put keys and values into the cache, then attend over each sequence's whole context: [T, H, D].

    A token sees itself and what is before it, with `window` w the w - 1 tokens before it at most. `softcap` c maps
    scores x to c * tanh(x / c). Fewer key heads than query heads are shared by neighbouring query heads.
    """
    cache.keys_NSKD.flatten(0, 1).index_copy_(0, layout.slots_T, k_TKD.to(cache.keys_NSKD.dtype))
    cache.values_NSKD.flatten(0, 1).index_copy_(0, layout.slots_T, v_TKD.to(cache.values_NSKD.dtype))
    out_THD = torch.empty_like(q_THD)
    for index, (end, length) in enumerate(zip(layout.ends_B.tolist(), layout.lengths_B.tolist(), strict=True)):
        context = int(layout.contexts_B[index])
        blocks = layout.block_table[index, : int(layout.num_blocks_B[index])]
        keys_LKD, values_LKD = (
            x.index_select(0, blocks).flatten(0, 1)[:context] for x in (cache.keys_NSKD, cache.values_NSKD)
        )
        tokens = slice(end - length, end)
        out_THD[tokens] = _attend(q_THD[tokens], keys_LKD, values_LKD, scale, window, softcap)
    return out_THD


def _attend(
    q_tHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    per_head = q_tHD.shape[1] // k_LKD.shape[1]
    q_HtD, k_KLD, v_KLD = (x.transpose(0, 1) for x in (q_tHD, k_LKD, v_LKD))
    scores_HtL = (q_HtD @ k_KLD.repeat_interleave(per_head, dim=0).mT).float() * scale
    if softcap is not None:
        scores_HtL = softcap * torch.tanh(scores_HtL / softcap)
    places_L = torch.arange(k_LKD.shape[0], device=k_LKD.device)
    distances_tL = places_L[-q_tHD.shape[0] :, None] - places_L
    hidden_tL = distances_tL < 0
    if window is not None:
        hidden_tL |= distances_tL >= window
    weights_HtL = scores_HtL.masked_fill(hidden_tL, float("-inf")).softmax(-1).to(v_KLD.dtype)
    return (weights_HtL @ v_KLD.repeat_interleave(per_head, dim=0)).transpose(0, 1).to(q_tHD.dtype)


def paged_attention_path(device: torch.device, dtype: torch.dtype, head_size: int) -> str:
    """The name of the way that attention runs, for people."""
    return "paged, one sequence at a time"
