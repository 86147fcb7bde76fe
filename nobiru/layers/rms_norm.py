"""Root mean square normalization (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467).

Shape legend: T tokens, C hidden size, H heads of queries and keys, D values a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nobiru.ops.native.library import kernels_for


@dataclass(frozen=True, kw_only=True, slots=True)
class RmsNorm:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension; the mean is in float32 whatever the dtype."""

    weight_C: Tensor
    eps: float

    def __call__(self, x_TC: Tensor) -> Tensor:
        kernels = kernels_for(x_TC)
        normed_TC = None if kernels is None else kernels.rms_norm(x_TC, self.weight_C, self.eps)
        return F.rms_norm(x_TC, self.weight_C.shape, self.weight_C, self.eps) if normed_TC is None else normed_TC


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadNorm:
    """The same over the values of each head, with a weight for each head's values."""

    weight_HD: Tensor
    eps: float

    def __call__(self, x_THD: Tensor) -> Tensor:
        return F.rms_norm(x_THD, self.weight_HD.shape[1:], None, self.eps).mul_(self.weight_HD)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectionNorm:
    """The same over all values of the queries, and over all values of the keys; the first `num_heads` are queries."""

    weight_HD: Tensor
    num_heads: int
    eps: float

    def __call__(self, x_THD: Tensor) -> Tensor:
        parts = x_THD.split_with_sizes((self.num_heads, x_THD.shape[1] - self.num_heads), 1)
        normalized = [F.rms_norm(part, part.shape[1:], None, self.eps) for part in parts]
        return torch.cat(normalized, 1).mul_(self.weight_HD)
