"""Which experts a token goes to, and with what weights: the routers of MoE families, as their authors have them.

Owns the arithmetic from hidden states to experts and weights. Knows nothing of where an expert is, or of what it does.

Shape legend: T tokens, C hidden size, E experts, K experts of a token, G groups of experts, e experts of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# What DeepSeek-V3 adds to the sum of weights before it divides by it.
_TINY = 1e-20


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Each token's experts (int64), from the best down, and the weights of their results in the sum."""

    expert_TK: Tensor
    weight_TK: Tensor


class Router(Protocol):
    def __call__(self, x_TC: Tensor) -> Routing:
        """The experts of each token; the same for a token whatever else is in the batch, but for rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftmaxRouter:
    """Softmax over all experts in float32, then the best `top_k`, as Mixtral (https://arxiv.org/abs/2401.04088) has it.

    `normalizes` divides the weights by their sum; `rounds` rounds them to the dtype of hidden states.
    """

    weight_EC: Tensor
    top_k: int
    normalizes: bool
    rounds: bool

    def __call__(self, x_TC: Tensor) -> Routing:
        scores_TE = torch.softmax(F.linear(x_TC, self.weight_EC), -1, dtype=torch.float32)
        weight_TK, expert_TK = scores_TE.topk(self.top_k, -1)
        if self.normalizes:
            weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
        if self.rounds:
            weight_TK = weight_TK.to(x_TC.dtype)
        return Routing(expert_TK=expert_TK, weight_TK=weight_TK)
