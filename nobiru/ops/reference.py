"""Slow, obvious versions of the fast operations, one sequence at a time in float64, for tests to compare with.

Shape legend: T tokens of all sequences, B sequences, t tokens of one, H heads, K key heads, D values a head, M the
model's limit of tokens, L tokens of a sequence's context, C values of a hidden state, k experts of a token, E experts,
I values between an expert's two layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    lengths: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
    bias_HMM: Tensor | None = None,
) -> Tensor:
    """Softmax attention within each sequence, [T, H, D]; arguments as in `packed_attention`."""
    outputs = []
    per_head = q_THD.shape[1] // k_TKD.shape[1]
    start = 0
    for length in lengths:
        tokens = slice(start, start + length)
        start += length
        q_HtD, k_HtD, v_HtD = (x[tokens].double().transpose(0, 1) for x in (q_THD, k_TKD, v_TKD))
        k_HtD, v_HtD = (x.repeat_interleave(per_head, dim=0) for x in (k_HtD, v_HtD))
        scores_Htt = q_HtD @ k_HtD.mT * scale
        if bias_HMM is not None:
            scores_Htt = scores_Htt + bias_HMM[:, :length, :length].double()
        if window is not None:
            places = torch.arange(length)
            outside = (places[:, None] - places[None, :]).abs() > window
            scores_Htt = scores_Htt.masked_fill(outside, float("-inf"))
        outputs.append((torch.softmax(scores_Htt, dim=-1) @ v_HtD).transpose(0, 1))
    return torch.cat(outputs)


def causal_attention(
    q_THD: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    lengths: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Each sequence's last tokens attend over its whole context, [T, H, D]; arguments as in `paged_attention`, but
    `keys` and `values` are every sequence's own, [L, K, D]."""
    outputs = []
    start = 0
    for length, k_LKD, v_LKD in zip(lengths, keys, values, strict=True):
        per_head = q_THD.shape[1] // k_LKD.shape[1]
        for token in range(length):
            position = len(k_LKD) - length + token
            seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
            k_HLD, v_HLD = (x[seen].double().repeat_interleave(per_head, dim=1).transpose(0, 1) for x in (k_LKD, v_LKD))
            scores_HL = (k_HLD @ q_THD[start + token].double()[:, :, None])[..., 0] * scale
            if softcap is not None:
                scores_HL = softcap * torch.tanh(scores_HL / softcap)
            outputs.append((torch.softmax(scores_HL, dim=-1)[:, None, :] @ v_HLD)[:, 0])
        start += length
    return torch.stack(outputs)


def pooling(hidden_TC: Tensor, lengths: Sequence[int], skipped: Sequence[int], mode: str) -> Tensor:
    """One vector per sequence, [B, C], of its tokens without the first `skipped`.

    Where those are all: "cls" takes the first token, "max" is -inf, every other mode gives zeros.
    """
    vectors = []
    start = 0
    for length, skip in zip(lengths, skipped, strict=True):
        tokens_tC = hidden_TC[start : start + length].double()
        start += length
        vectors.append(_pool_one(tokens_tC, min(skip, length), mode))
    return torch.stack(vectors)


def _pool_one(tokens_tC: Tensor, skip: int, mode: str) -> Tensor:
    kept = tokens_tC[skip:]
    zeros = torch.zeros_like(tokens_tC[0])
    if mode == "cls":
        return kept[0] if len(kept) else tokens_tC[0]
    if mode == "max":
        return kept.amax(dim=0) if len(kept) else torch.full_like(zeros, float("-inf"))
    if not len(kept):
        return zeros
    if mode == "lasttoken":
        return kept[-1]
    if mode == "mean":
        return kept.sum(dim=0) / len(kept)
    if mode == "mean_sqrt_len_tokens":
        return kept.sum(dim=0) / math.sqrt(len(kept))
    assert mode == "weightedmean", mode
    weights_t1 = torch.arange(skip + 1, len(tokens_tC) + 1).double()[:, None]
    return (kept * weights_t1).sum(dim=0) / weights_t1.sum()


def layer_norm(x_TC: Tensor, weight_C: Tensor, bias_C: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension."""
    x = x_TC.double()
    centred = x - x.mean(dim=-1, keepdim=True)
    variance = (centred**2).mean(dim=-1, keepdim=True)
    normalized: Tensor = centred / (variance + eps).sqrt() * weight_C.double() + bias_C.double()
    return normalized


def experts(
    x_TC: Tensor,
    expert_Tk: Tensor,
    weight_Tk: Tensor,
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """Σ_k weight[t, k] * expert[t, k](x[t]), [T, C], where an expert is down @ (activation(gate @ x) * (up @ x)).

    For each expert `gate_up` is [2 I, C], the rows of gate first, and `down` [C, I].
    """
    outputs = []
    for x_C, experts_k, weights_k in zip(x_TC.double(), expert_Tk.tolist(), weight_Tk.double(), strict=True):
        sum_C = torch.zeros_like(x_C)
        for expert, weight in zip(experts_k, weights_k, strict=True):
            gate_I, up_I = (gate_up[expert].double() @ x_C).chunk(2)
            sum_C = sum_C + weight * (down[expert].double() @ (activation(gate_I.clone()) * up_I))
        outputs.append(sum_C)
    return torch.stack(outputs)
