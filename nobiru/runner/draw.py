"""Draws tokens from filtered distributions, many rows at once, each row as if it were alone.

Owns the arithmetic of min-p, top-k, top-p and of the draw. Knows nothing of requests.

Why a row's token depends on that row only, to the last bit: the results of sums depend on the order of additions, which
differs between batches and devices, so probabilities are summed as integers. A token's weight is exp((score - best) /
temperature) in float64, times 2^s, cut to an integer, with s such that the weights of a whole vocabulary do not
overflow. Everything else is done value by value, or is a comparison.

Shape legend: B rows, b some of them, V vocabulary, K best tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# So many best tokens are found without sorting the vocabulary. Most nuclei are smaller; others take more attempts.
NUM_BEST = 1024
# Rows are taken in groups of at most so many scores: there are several 8-byte values of each at a time.
_MAX_SCORES = 2**24


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawOptions:
    """One value per row [B]: `top_k` from 1 to V, `uniform` the row's random number in [0, 1)."""

    temperature: NDArray[np.float64]
    min_p: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    uniform: NDArray[np.float64]

    def of(self, rows_b: NDArray[np.int64]) -> DrawOptions:
        return DrawOptions(**{each.name: getattr(self, each.name)[rows_b] for each in fields(self)})


def draw(scores_BV: Tensor, options: DrawOptions, *, num_best: int = NUM_BEST) -> Tensor:
    """One token id [B] for each row of float32 scores, of which at least one is finite and none is NaN or +inf.

    A token stays if its probability is at least `min_p` times the best one's, if it is among the `top_k` best of
    those, and if the better ones among these have a share of less than `top_p`. Of equal scores, the lower id is the
    better one. The tokens that stay are laid out in the order of their ids, each as long as its probability, and the
    one at `uniform` is taken. `num_best` changes speed only.
    """
    num_rows, vocab_size = scores_BV.shape
    ids_B = torch.zeros(num_rows, dtype=torch.int64, device=scores_BV.device)
    is_plain = (options.top_k >= vocab_size) & (options.top_p >= 1.0)
    is_narrow = ~is_plain & (options.top_k <= num_best)
    is_nucleus = (options.top_k >= vocab_size) & (options.top_p < 1.0) & ~is_narrow
    is_wide = ~is_plain & ~is_narrow & ~is_nucleus

    for rows_b in _groups(is_plain, vocab_size):
        chosen = options.of(rows_b)
        ids_B[_on(rows_b, ids_B)] = _draw_from_all(_rows(scores_BV, rows_b), chosen)
    for rows_b in _groups(is_narrow, vocab_size):
        chosen = options.of(rows_b)
        ids_b, _ = _draw_from_best(_rows(scores_BV, rows_b), chosen, int(chosen.top_k.max()))
        ids_B[_on(rows_b, ids_B)] = ids_b
    k = num_best
    while is_nucleus.any():
        k = min(k, vocab_size)
        for rows_b in _groups(is_nucleus, vocab_size):
            ids_b, holds_all_b = _draw_from_best(_rows(scores_BV, rows_b), options.of(rows_b), k)
            ids_B[_on(rows_b, ids_B)] = ids_b
            # With the whole vocabulary nothing is missing, also where scores are not finite.
            is_nucleus[rows_b] = ~holds_all_b.cpu().numpy() & (k < vocab_size)
        k *= 16
    for rows_b in _groups(is_wide, vocab_size):
        ids_b, _ = _draw_from_best(_rows(scores_BV, rows_b), options.of(rows_b), vocab_size)
        ids_B[_on(rows_b, ids_B)] = ids_b
    return ids_B


def best_tokens(scores_bV: Tensor, k: int) -> Tensor:
    """The ids [b, k] of the highest float32 scores, best first; of equal scores, the lower id first."""
    vocab_size = scores_bV.shape[1]
    # Adding zero makes -0 to +0. The bits of floats are in the order of floats, after turning round the negative ones.
    bits_bV = (scores_bV + 0.0).view(torch.int32).to(torch.int64)
    bits_bV = torch.where(bits_bV < 0, bits_bV ^ 0x7FFFFFFF, bits_bV)
    ranks_V = torch.arange(vocab_size - 1, -1, -1, device=scores_bV.device)
    keys_bK = torch.topk((bits_bV << 32) | ranks_V, k, dim=1).values
    return vocab_size - 1 - (keys_bK & 0xFFFFFFFF)


def log_total(scores_bV: Tensor) -> Tensor:
    """log(sum(exp(scores))) [b, 1] in float64, by integer sums as above."""
    best_b1 = scores_bV.amax(1, keepdim=True).double()
    total_b1 = _weights((scores_bV.double() - best_b1).exp_(), scores_bV.shape[1]).sum(1, keepdim=True)
    return best_b1 + total_b1.double().log() - _num_bits(scores_bV.shape[1]) * math.log(2.0)


def _draw_from_all(scores_bV: Tensor, options: DrawOptions) -> Tensor:
    best_b1 = scores_bV.amax(1, keepdim=True)
    weights_bV = _min_p_weights(scores_bV, best_b1, options, scores_bV.shape[1])
    return _pick(weights_bV, options).squeeze(1)


def _draw_from_best(scores_bV: Tensor, options: DrawOptions, k: int) -> tuple[Tensor, Tensor]:
    """Token ids [b], and where the K best held all tokens that stay [b]: where they did not, the id means nothing."""
    vocab_size = scores_bV.shape[1]
    ids_bK = best_tokens(scores_bV, k)
    scores_bK = scores_bV.gather(1, ids_bK)
    top_k_b1, top_p_b1 = _column(options.top_k, scores_bV), _column(options.top_p, scores_bV)
    weights_bK = _min_p_weights(scores_bK, scores_bK[:, :1], options, vocab_size)
    weights_bK *= torch.arange(k, device=scores_bV.device) < top_k_b1
    sums_bK = weights_bK.cumsum(1)
    total_b1 = sums_bK[:, -1:]
    if (options.top_k > k).any():
        all_b1 = _min_p_weights(scores_bV, scores_bK[:, :1], options, vocab_size).sum(1, keepdim=True)
        total_b1 = torch.where(top_k_b1 > k, all_b1, total_b1)
    limit_b1 = top_p_b1 * total_b1.double()
    weights_bK *= (sums_bK - weights_bK).double() < limit_b1
    holds_all_b = (sums_bK[:, -1:].double() >= limit_b1).squeeze(1)
    ids_bK, order_bK = ids_bK.sort(1)
    index_b1 = _pick(weights_bK.gather(1, order_bK), options)
    return ids_bK.gather(1, index_b1).squeeze(1), holds_all_b


def _min_p_weights(scores_bK: Tensor, best_b1: Tensor, options: DrawOptions, vocab_size: int) -> Tensor:
    """Integer weights [b, K] relative to the best token's; 0 for tokens under `min_p` of it."""
    ratios_bK = scores_bK.double().sub_(best_b1.double()).div_(_column(options.temperature, scores_bK)).exp_()
    if options.min_p.any():
        ratios_bK *= ratios_bK >= _column(options.min_p, scores_bK)
    return _weights(ratios_bK, vocab_size)


def _weights(ratios_bK: Tensor, vocab_size: int) -> Tensor:
    return ratios_bK.mul_(2.0 ** _num_bits(vocab_size)).long()


def _num_bits(vocab_size: int) -> int:
    """Bits of a weight, so that `vocab_size` of them stay below 2^63; no more than float64 has."""
    return min(52, 62 - vocab_size.bit_length())


def _pick(weights_bK: Tensor, options: DrawOptions) -> Tensor:
    """The first index [b, 1] at which the sum of weights exceeds `uniform` of their total."""
    sums_bK = weights_bK.cumsum(1)
    total_b1 = sums_bK[:, -1:]
    # Rounding can give the total itself, which is no token's place.
    place_b1 = torch.minimum((_column(options.uniform, weights_bK) * total_b1.double()).long(), total_b1 - 1)
    index_b1 = torch.searchsorted(sums_bK, place_b1, right=True)
    return index_b1.clamp_(max=weights_bK.shape[1] - 1)


def _groups(chosen_B: NDArray[np.bool_], vocab_size: int) -> Iterator[NDArray[np.int64]]:
    """The chosen rows, in groups that are not too large."""
    rows = np.flatnonzero(chosen_B)
    size = max(1, _MAX_SCORES // vocab_size)
    for start in range(0, rows.size, size):
        yield rows[start : start + size]


def _rows(scores_BV: Tensor, rows_b: NDArray[np.int64]) -> Tensor:
    return scores_BV if rows_b.size == scores_BV.shape[0] else scores_BV[_on(rows_b, scores_BV)]


def _on(rows_b: NDArray[np.int64], like: Tensor) -> Tensor:
    return torch.from_numpy(rows_b).to(like.device)


def _column(values_b: NDArray[np.float64] | NDArray[np.int64], like: Tensor) -> Tensor:
    return torch.from_numpy(values_b).to(like.device)[:, None]
