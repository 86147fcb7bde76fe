"""Which experts a token goes to, and with what weights: the routers of MoE families, as their authors have them.

Owns the arithmetic from hidden states to experts and weights. Knows nothing of where an expert is, or of what it does.

Shape legend: T tokens, C hidden size, E experts, K experts of a token, G groups of experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nobiru.layers.linear import Linear

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


# In all of them `gate` is C → E; where arithmetic is float32 whatever the model's, so are its weights.


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftmaxRouter:
    """Softmax over all experts in float32, then the best `top_k`, as Mixtral (https://arxiv.org/abs/2401.04088) has it.

    `normalizes` divides the weights by their sum; `rounds` rounds them to the dtype of hidden states.
    """

    gate: Linear
    top_k: int
    normalizes: bool
    rounds: bool

    def __call__(self, x_TC: Tensor) -> Routing:
        scores_TE = torch.softmax(self.gate(x_TC), -1, dtype=torch.float32)
        weight_TK, expert_TK = scores_TE.topk(self.top_k, -1)
        if self.normalizes:
            weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
        if self.rounds:
            weight_TK = weight_TK.to(x_TC.dtype)
        return Routing(expert_TK=expert_TK, weight_TK=weight_TK)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedSigmoidRouter:
    """Sigmoid scores, the best `top_k` of the best `top_groups` groups (DeepSeek-V3, https://arxiv.org/abs/2412.19437).

    `bias_E` decides with the scores who is best, but is no part of weights. A group is as good as its best two. All in
    float32; weights are multiplied with `factor`.
    """

    gate: Linear
    bias_E: Tensor
    top_k: int
    num_groups: int
    top_groups: int
    normalizes: bool
    factor: float

    def __call__(self, x_TC: Tensor) -> Routing:
        scores_TE = self.gate(x_TC.float()).sigmoid()
        choice_TE = scores_TE + self.bias_E
        group_TG = _in_groups(choice_TE, self.num_groups).topk(2, -1).values.sum(-1)
        choice_TE = _within_groups(choice_TE, group_TG, self.top_groups, float("-inf"))
        expert_TK = choice_TE.topk(self.top_k, -1).indices
        weight_TK = scores_TE.gather(1, expert_TK)
        if self.normalizes:
            weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + _TINY)
        return Routing(expert_TK=expert_TK, weight_TK=weight_TK * self.factor)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedSoftmaxRouter:
    """Softmax, the best `top_k` of the best `top_groups` groups (DeepSeek-V2, https://arxiv.org/abs/2405.04434).

    A group is as good as its best expert. All in float32; weights are multiplied with `factor`.
    """

    gate: Linear
    top_k: int
    num_groups: int
    top_groups: int
    factor: float

    def __call__(self, x_TC: Tensor) -> Routing:
        scores_TE = self.gate(x_TC.float()).softmax(-1)
        if self.top_groups < self.num_groups:
            group_TG = _in_groups(scores_TE, self.num_groups).amax(-1)
            scores_TE = _within_groups(scores_TE, group_TG, self.top_groups, 0.0)
        weight_TK, expert_TK = scores_TE.topk(self.top_k, -1)
        return Routing(expert_TK=expert_TK, weight_TK=weight_TK * self.factor)


def _in_groups(scores_TE: Tensor, num_groups: int) -> Tensor:
    """[T, G, E / G]; there may be no tokens."""
    num_tokens, num_experts = scores_TE.shape
    return scores_TE.view(num_tokens, num_groups, num_experts // num_groups)


def _within_groups(scores_TE: Tensor, group_TG: Tensor, top_groups: int, otherwise: float) -> Tensor:
    """Scores of experts in the best groups, and `otherwise` for all others."""
    is_out_TG = torch.ones_like(group_TG, dtype=torch.bool)
    is_out_TG.scatter_(1, group_TG.topk(top_groups, -1).indices, False)
    return scores_TE.masked_fill(is_out_TG.repeat_interleave(scores_TE.shape[1] // group_TG.shape[1], 1), otherwise)
