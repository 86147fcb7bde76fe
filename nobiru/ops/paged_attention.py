"""Causal attention over a KV cache in blocks, for every device.

On CUDA in half precision a kernel (`varlen_attn`) follows the block table itself, or, where it cannot, takes contexts
gathered one after another. On CPUs, kernels of our own read the blocks where they are, if there is a compiler and heads
have a size that fits. Otherwise sequences run in groups of similar shape through `scaled_dot_product_attention`, on
rows gathered from the cache, each once per layer; prompts from their start attend among the step's own tokens and
gather nothing. With one token per sequence, the query heads that share a key head are that kernel's queries, so nothing
is repeated for them.

Shape legend: T tokens of the step, H query heads, K key heads, G query heads per key head, D values a head, t tokens of
one sequence, n sequences of a group, L its longest context, N blocks of the cache, S slots of a block.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nobiru.ops.native.library import Kernels, kernels_for, load_kernels
from nobiru.ops.paged_groups import (
    Chunk,
    DecodeGroup,
    FreshGroup,
    decode_rows,
    plan_decoding,
    plan_prefill,
    prefill_tiles,
)
from nobiru.ops.paged_layout import LayerCache, PagedLayout
from nobiru.ops.scratch import Buffer

logger = logging.getLogger(__name__)

_MAX_RAGGED_HEAD_SIZE = 256
_TRIAL_TOLERANCE = 0.05


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
    buffer: Buffer | None = None,
) -> Tensor:
    """Put keys and values into the cache, then attend over each sequence's whole context: [T, H, D], perhaps in the
    buffer's memory.

    A token sees itself and what is before it, with `window` w the w - 1 tokens before it at most. `softcap` c maps
    scores x to c * tanh(x / c). Fewer key heads than query heads are shared by neighbouring query heads.
    """
    kernels = kernels_for(q_THD)
    if kernels is None or not kernels.put(k_TKD, v_TKD, layout.slots_T, cache.keys_NSKD, cache.values_NSKD):
        cache.keys_NSKD.flatten(0, 1).index_copy_(0, layout.slots_T, k_TKD)
        cache.values_NSKD.flatten(0, 1).index_copy_(0, layout.slots_T, v_TKD)
    place, dtype, head_size = q_THD.device, q_THD.dtype, q_THD.shape[-1]
    if softcap is None and ragged_kernel_serves(place, dtype, head_size):
        follows_table = block_table_serves(place, dtype, head_size, cache.block_size)
        return (_with_block_table if follows_table else _gathered_ragged)(q_THD, cache, layout, scale, window)
    if buffer is None:
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    else:
        out_THD = buffer.take(*q_THD.shape, dtype=q_THD.dtype)
    attend = _Attend(scale, softcap)
    if kernels is not None and kernels.attends(dtype, head_size):
        _decode_natively(kernels, q_THD, cache, layout, out_THD, scale, window, softcap)
    else:
        for decoding in plan_decoding(layout, window, dtype):
            out_THD[decoding.tokens_n] = _decode(q_THD, cache, decoding, attend)
    if layout.is_decode:
        return out_THD
    if kernels is not None and kernels.prefills(dtype, head_size):
        _prefill_natively(kernels, q_THD, cache, layout, out_THD, scale, window, softcap)
        return out_THD
    prefill = plan_prefill(layout, window, dtype)
    for fresh in prefill.fresh:
        out_THD[fresh.places_t] = _fresh(q_THD, k_TKD, v_TKD, fresh, attend)
    for chunk in prefill.chunks:
        out_THD[chunk.tokens] = _chunk(q_THD, cache, chunk, attend)
    return out_THD


def _decode_natively(
    kernels: Kernels,
    q_THD: Tensor,
    cache: LayerCache,
    layout: PagedLayout,
    out_THD: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    rows = decode_rows(layout)
    if rows is None:
        return
    if q_THD.stride()[1:] != (q_THD.shape[2], 1):
        q_THD = q_THD.contiguous()
    kernels.attend(
        q_THD,
        cache.keys_NSKD,
        cache.values_NSKD,
        rows.block_table_nM,
        rows.contexts_n,
        out_THD,
        scale=scale,
        window=window,
        softcap=softcap,
        tokens_n=rows.tokens_n,
    )


def paged_attention_path(device: torch.device, dtype: torch.dtype, head_size: int) -> str:
    """The name of the way that attention runs, for people."""
    if ragged_kernel_serves(device, dtype, head_size):
        return "paged, varlen_attn"
    kernels = load_kernels() if device.type == "cpu" else None
    if kernels is not None and kernels.attends(dtype, head_size):
        return "paged, native kernels"
    return "paged, groups of similar shape"


def ragged_kernel_serves(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether `varlen_attn` takes this attention; groups do the rest."""
    half = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and half and head_size % 8 == 0 and head_size <= _MAX_RAGGED_HEAD_SIZE


@functools.cache
def block_table_serves(device: torch.device, dtype: torch.dtype, head_size: int, block_size: int) -> bool:
    """Whether `varlen_attn` follows block tables here, found out by a trial.

    Versions of torch before 2.12 have no such argument, and the kernels behind it differ: FlashAttention 2 takes blocks
    of a multiple of 256 tokens or refuses tables altogether, FlashAttention 3, where it is installed, takes any.
    """
    if not ragged_kernel_serves(device, dtype, head_size):
        return False
    generator = torch.Generator().manual_seed(0)
    length = block_size + 3
    cache = LayerCache(
        keys_NSKD=torch.randn(3, block_size, 1, head_size, generator=generator).to(device, dtype),
        values_NSKD=torch.randn(3, block_size, 1, head_size, generator=generator).to(device, dtype),
    )
    q_THD = torch.randn(2, 2, head_size, generator=generator).to(device, dtype)
    layout = PagedLayout(
        np.array([length - 2]), np.array([2]), [np.array([2, 0])], block_size=block_size, device=device
    )
    try:
        found = _with_block_table(q_THD, cache, layout, head_size**-0.5, None)
    except (RuntimeError, TypeError) as error:
        logger.info(
            "varlen_attn takes no block table of %d-token blocks here: %s", block_size, str(error).split("\n")[0]
        )
        return False
    expected = _gathered_ragged(q_THD, cache, layout, head_size**-0.5, None)
    return bool((found - expected).abs().max() < _TRIAL_TOLERANCE)


def _with_block_table(
    q_THD: Tensor, cache: LayerCache, layout: PagedLayout, scale: float, window: int | None
) -> Tensor:
    return _ragged(
        q_THD,
        cache.keys_NSKD,
        cache.values_NSKD,
        layout,
        scale,
        window,
        seqused_k=layout.context_lengths,
        block_table=layout.block_table,
    )


def _gathered_ragged(q_THD: Tensor, cache: LayerCache, layout: PagedLayout, scale: float, window: int | None) -> Tensor:
    k_LKD, v_LKD = (_gathered(x, layout.context_slots) for x in (cache.keys_NSKD, cache.values_NSKD))
    return _ragged(q_THD, k_LKD, v_LKD, layout, scale, window)


def _ragged(
    q_THD: Tensor, k: Tensor, v: Tensor, layout: PagedLayout, scale: float, window: int | None, **options: Any
) -> Tensor:
    # Not imported at the top: it defines operators for CUDA, which a process on a CPU never needs.
    from torch.nn.attention.varlen import varlen_attn

    if k.shape[-2] != q_THD.shape[1]:
        options["enable_gqa"] = True
    # Each sequence's queries are its last tokens: the kernel aligns the causal mask with the end of the context.
    out = varlen_attn(
        q_THD.contiguous(),
        k,
        v,
        layout.cu_lengths,
        layout.cu_contexts,
        layout.max_length,
        layout.max_context,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **options,
    )
    assert isinstance(out, Tensor)
    return out


def _prefill_natively(
    kernels: Kernels,
    q_THD: Tensor,
    cache: LayerCache,
    layout: PagedLayout,
    out_THD: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    tiles = prefill_tiles(layout)
    if tiles is None:
        return
    if q_THD.stride()[1:] != (q_THD.shape[2], 1):
        q_THD = q_THD.contiguous()
    kernels.prefill(
        q_THD,
        cache.keys_NSKD,
        cache.values_NSKD,
        layout.block_table,
        tiles,
        out_THD,
        scale=scale,
        window=window,
        softcap=softcap,
    )


class _Attend:
    """softmax(q @ k.T * scale, soft-capped, + mask) @ v on [n, H, t, D] and [n, K, L, D]."""

    def __init__(self, scale: float, softcap: float | None) -> None:
        self._scale = scale
        self._softcap = softcap

    def __call__(self, q_nHtD: Tensor, k_nKLD: Tensor, v_nKLD: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        shared = q_nHtD.shape[1] != k_nKLD.shape[1]
        if self._softcap is None:
            return F.scaled_dot_product_attention(
                q_nHtD, k_nKLD, v_nKLD, attn_mask=mask, is_causal=is_causal, scale=self._scale, enable_gqa=shared
            )
        if shared:
            per_head = q_nHtD.shape[1] // k_nKLD.shape[1]
            k_nKLD, v_nKLD = (x.repeat_interleave(per_head, dim=1) for x in (k_nKLD, v_nKLD))
        scores = (q_nHtD @ k_nKLD.mT).float() * self._scale
        scores = self._softcap * torch.tanh(scores / self._softcap)
        if is_causal:
            ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
            scores = scores.masked_fill(ones.triu(1), float("-inf"))
        elif mask is not None:
            scores = scores + mask
        return scores.softmax(-1).to(v_nKLD.dtype) @ v_nKLD


def _decode(q_THD: Tensor, cache: LayerCache, group: DecodeGroup, attend: _Attend) -> Tensor:
    """The group's part of the output, [n, H, D]."""
    num_key_heads = cache.keys_NSKD.shape[2]
    k_nKLD, v_nKLD = (
        _gathered(x, group.slots_nL).view(group.num_seqs, group.length, num_key_heads, -1).transpose(1, 2)
        for x in (cache.keys_NSKD, cache.values_NSKD)
    )
    q_nKGD = q_THD[group.tokens_n].view(group.num_seqs, num_key_heads, -1, q_THD.shape[2])
    return attend(q_nKGD, k_nKLD, v_nKLD, group.mask_n11L, False).flatten(1, 2)


def _fresh(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, group: FreshGroup, attend: _Attend) -> Tensor:
    """The group's part of the output, [t of all, H, D]. Causal attention never looks at the padding behind."""
    q, k, v = (
        rows.view(group.num_seqs, group.length, *rows.shape[1:]).transpose(1, 2)
        for rows in (x[group.tokens] for x in (q_THD, k_TKD, v_TKD))
    )
    out_tHD = attend(q, k, v, group.mask_LL, group.mask_LL is None).transpose(1, 2).flatten(0, 1)
    return out_tHD if group.real_t is None else out_tHD.index_select(0, group.real_t)


def _chunk(q_THD: Tensor, cache: LayerCache, chunk: Chunk, attend: _Attend) -> Tensor:
    k_1KLD, v_1KLD = (_gathered(x, chunk.slots_L).transpose(0, 1)[None] for x in (cache.keys_NSKD, cache.values_NSKD))
    return attend(q_THD[chunk.tokens].transpose(0, 1)[None], k_1KLD, v_1KLD, chunk.mask_tL, False)[0].transpose(0, 1)


def _gathered(x_NSKD: Tensor, slots: Tensor) -> Tensor:
    """[len(slots), K, D]"""
    return x_NSKD.flatten(0, 1).index_select(0, slots)
