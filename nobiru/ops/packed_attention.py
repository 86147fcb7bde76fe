"""Attention within each sequence of a packed batch, for every device.

On CUDA in half precision a ragged kernel (`varlen_attn`) takes the batch as it is, and on CPUs one of our own, where
there is a C compiler and neither a window nor a bias. Elsewhere the batch runs in groups of similar lengths through
`scaled_dot_product_attention`: groups of equal lengths are views of the batch, others are gathered, padded and masked.
On an AVX2 CPU that kernel beat `baddbmm` + softmax + `bmm` for 12 heads of 64 values at every length from 8 to 512 (by
1.1 to 2), and for 12 heads of 32 values from 48 tokens on (1.2 to 3), because it reads the strided rows of a fused
projection without copying them; below 48 tokens the two were equal within a fifth or so.

Shape legend: T tokens, H query heads, K key heads, D values a head, n sequences of a group, L its length, M the
model's limit of tokens, Q queries of a block.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nobiru.ops.layout import Group, PackedLayout
from nobiru.ops.native.encoder import EncoderKernels, load_encoder_kernels
from nobiru.ops.scratch import Buffer

# Local attention runs in blocks of queries this long, each with the keys its window reaches.
_QUERY_BLOCK = 128
_MAX_RAGGED_HEAD_SIZE = 256


def packed_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    layout: PackedLayout,
    *,
    scale: float,
    window: int | None = None,
    bias_HMM: Tensor | None = None,
    buffer: Buffer | None = None,
) -> Tensor:
    """softmax(q @ k.T * scale + bias) @ v within each sequence: [T, H, D], perhaps in the buffer's memory.

    `window` w lets token i attend to j only if |i - j| <= w. `bias_HMM[:, i, j]` is added to the scores of token i and
    j of every sequence. Fewer key heads than query heads are shared by neighbouring query heads.
    """
    if ragged_kernel_serves(q_THD.device, q_THD.dtype, q_THD.shape[-1], has_bias=bias_HMM is not None):
        return _ragged(q_THD, k_TKD, v_TKD, layout, scale, window)
    if bias_HMM is None and (window is None or window >= layout.max_length - 1):
        kernels = _kernels_for(q_THD, k_TKD, v_TKD)
        if kernels is not None:
            out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
            kernels.attend(q_THD, k_TKD, v_TKD, layout.bounds, out_THD, scale=scale)
            return out_THD
    groups = layout.groups
    if len(groups) == 1:
        return _attend_group(q_THD, k_TKD, v_TKD, groups[0], scale, window, bias_HMM)
    if buffer is None:
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    else:
        out_THD = buffer.take(*q_THD.shape, dtype=q_THD.dtype)
    for group in groups:
        out_THD[group.tokens] = _attend_group(q_THD, k_TKD, v_TKD, group, scale, window, bias_HMM)
    return out_THD


def ragged_kernel_serves(device: torch.device, dtype: torch.dtype, head_size: int, *, has_bias: bool) -> bool:
    """Whether `varlen_attn` takes this attention; groups do the rest."""
    half = dtype in (torch.bfloat16, torch.float16)
    fits = head_size % 8 == 0 and head_size <= _MAX_RAGGED_HEAD_SIZE
    return device.type == "cuda" and half and fits and not has_bias


def attention_path(device: torch.device, dtype: torch.dtype, head_size: int, *, has_bias: bool = False) -> str:
    """The name of the way that attention runs, for people."""
    if ragged_kernel_serves(device, dtype, head_size, has_bias=has_bias):
        return "packed, varlen_attn"
    kernels = load_encoder_kernels() if device.type == "cpu" and not has_bias else None
    if kernels is not None and kernels.attends(dtype, head_size):
        return "packed, native"
    return "packed, groups of similar lengths"


def _kernels_for(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> EncoderKernels | None:
    """The native kernels, if they take this attention."""
    kernels = load_encoder_kernels() if q_THD.device.type == "cpu" else None
    if kernels is None or not kernels.attends(q_THD.dtype, q_THD.shape[-1]):
        return None
    alike = q_THD.stride() == k_TKD.stride() == v_TKD.stride() and q_THD.shape == k_TKD.shape
    return kernels if alike and q_THD.stride()[1:] == (q_THD.shape[-1], 1) else None


def _ragged(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layout: PackedLayout, scale: float, window: int | None
) -> Tensor:
    # Not imported at the top: it defines operators for CUDA, which a process on a CPU never needs.
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {} if window is None else {"window_size": (window, window)}
    if k_TKD.shape[1] != q_THD.shape[1]:
        options["enable_gqa"] = True
    cu_seqlens, longest = layout.cu_seqlens, layout.max_length
    out = varlen_attn(q_THD, k_TKD, v_TKD, cu_seqlens, cu_seqlens, longest, longest, scale=scale, **options)
    assert isinstance(out, Tensor)
    return out


def _attend_group(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    group: Group,
    scale: float,
    window: int | None,
    bias_HMM: Tensor | None,
) -> Tensor:
    """The group's part of the output, [t, H, D]."""
    q_nHLD, k_nKLD, v_nKLD = (_group_view(x, group) for x in (q_THD, k_TKD, v_TKD))
    bias_1HLL = None if bias_HMM is None else bias_HMM[None, :, : group.length, : group.length]
    if window is None or window >= group.length - 1:
        mask = _combined(bias_1HLL, group.key_mask_n11L, q_nHLD.dtype)
        out_nHLD = _sdpa(q_nHLD, k_nKLD, v_nKLD, mask, scale)
    else:
        out_nHLD = _local(q_nHLD, k_nKLD, v_nKLD, group, scale, window, bias_1HLL)
    out_tHD = out_nHLD.transpose(1, 2).flatten(0, 1)
    return out_tHD if group.real_t is None else out_tHD.index_select(0, group.real_t)


def _group_view(x_THD: Tensor, group: Group) -> Tensor:
    """[n, H, L, D], a view where lengths are equal."""
    rows = x_THD[group.tokens] if group.padded_nL is None else x_THD.index_select(0, group.padded_nL)
    return rows.view(group.num_seqs, group.length, *rows.shape[1:]).transpose(1, 2)


def _local(
    q_nHLD: Tensor,
    k_nKLD: Tensor,
    v_nKLD: Tensor,
    group: Group,
    scale: float,
    window: int,
    bias_1HLL: Tensor | None,
) -> Tensor:
    """Sliding-window attention in blocks of queries: time and memory grow with L * window, not L * L."""
    places_L = torch.arange(group.length, device=q_nHLD.device)
    blocks = []
    for start in range(0, group.length, _QUERY_BLOCK):
        queries = slice(start, min(start + _QUERY_BLOCK, group.length))
        keys = slice(max(0, queries.start - window), min(group.length, queries.stop + window))
        allowed = (places_L[queries, None] - places_L[None, keys]).abs() <= window
        if group.key_mask_n11L is not None:
            # Queries that are padding keep their whole window: a row without any key would be 0 / 0.
            allowed = allowed & (group.key_mask_n11L[..., keys] | ~group.key_mask_n11L[..., queries].mT)
        bias = None if bias_1HLL is None else bias_1HLL[..., queries, keys]
        mask = _combined(bias, allowed, q_nHLD.dtype)
        blocks.append(_sdpa(q_nHLD[:, :, queries], k_nKLD[:, :, keys], v_nKLD[:, :, keys], mask, scale))
    return torch.cat(blocks, dim=2)


def _combined(bias: Tensor | None, allowed: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if bias is None or allowed is None:
        return bias if allowed is None else allowed
    return bias.masked_fill(~allowed, float("-inf")).to(dtype)


def _sdpa(q_nHLD: Tensor, k_nKLD: Tensor, v_nKLD: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    if mask is not None and mask.ndim < 4:
        mask = mask[None, None]
    shared = q_nHLD.shape[1] != k_nKLD.shape[1]
    return F.scaled_dot_product_attention(q_nHLD, k_nKLD, v_nKLD, attn_mask=mask, scale=scale, enable_gqa=shared)
