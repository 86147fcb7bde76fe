"""Root mean square normalization (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467).

Shape legend: T tokens, C hidden size, H heads, D values a head; "…" stands for any.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RmsNorm:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension; the mean is in float32 whatever the dtype."""

    weight_C: Tensor
    eps: float

    def __call__(self, x_TC: Tensor) -> Tensor:
        return F.rms_norm(x_TC, self.weight_C.shape, self.weight_C, self.eps)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadNorm:
    """The same over the values of each head, with a weight for each head's values."""

    weight_HD: Tensor
    eps: float

    def __call__(self, x_THD: Tensor) -> Tensor:
        return F.rms_norm(x_THD, self.weight_HD.shape[1:], None, self.eps).mul_(self.weight_HD)
