"""A Mixture-of-Experts layer: router → dispatch → experts → combine, and what every way of dispatching offers.

Owns the interface between a layer and whatever carries tokens to experts, and the dispatcher of a single rank. Knows
nothing of files, process groups or placements.

Words: a layer has logical experts; a *slot* is a place for the weights of one on this rank, and may be empty. `layer`
counts MoE layers only, from 0.

Shape legend: T tokens of this rank, K experts of a token, E logical experts, C hidden size, S slots, N rows that this
rank's experts get.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatched:
    """Hidden states for this rank's experts: `rows_NC` sorted by slot, `counts_S` of them for each slot.

    `origin` is the dispatcher's own: what its `combine` needs to bring results back.
    """

    rows_NC: Tensor
    counts_S: list[int]
    origin: object


class Dispatcher(Protocol):
    """Carries tokens to the experts they are routed to, and results back; no token is dropped.

    All ranks of a group call the same methods in the same order. Several threads may use one at once if it
    `is_reentrant`.
    """

    @property
    def is_reentrant(self) -> bool: ...

    def dispatch(self, layer: int, x_TC: Tensor, expert_TK: Tensor) -> Dispatched:
        """Send each token to its K logical experts. T may be 0: such a rank still computes for others."""

    def combine(self, y_NC: Tensor, dispatched: Dispatched, weight_TK: Tensor) -> Tensor:
        """Results of `rows_NC`, in their order → [T, C] in their dtype: each token's weighted sum.

        Terms are added in the order k = 0, 1, … in float32, whatever the order in which they arrive.
        """


class LocalDispatcher:
    """The dispatcher of a rank that holds every expert."""

    is_reentrant = True

    def __init__(self, slots_LS: NDArray[np.integer], num_experts: int, device: torch.device | str = "cpu") -> None:
        """`slots_LS` says which logical expert is in which slot of each MoE layer, -1 for none. Of several copies of an
        expert the first is used; ValueError if one has none."""
        self._num_slots = slots_LS.shape[1]
        self._slots: list[Tensor] = []
        for layer, slots_S in enumerate(slots_LS):
            slot_E = np.full(num_experts, -1, dtype=np.int64)
            for slot in reversed(range(self._num_slots)):
                if slots_S[slot] >= 0:
                    slot_E[slots_S[slot]] = slot
            if missing := np.flatnonzero(slot_E < 0).tolist():
                raise ValueError(f"a single rank must hold every expert; layer {layer} lacks {missing}")
            self._slots.append(torch.from_numpy(slot_E).to(device))

    def dispatch(self, layer: int, x_TC: Tensor, expert_TK: Tensor) -> Dispatched:
        slot_N = self._slots[layer][expert_TK.flatten()]
        order_N = slot_N.argsort(stable=True)
        counts_S: list[int] = slot_N.bincount(minlength=self._num_slots).tolist()
        rows_NC = x_TC.index_select(0, order_N // expert_TK.shape[1])
        return Dispatched(rows_NC=rows_NC, counts_S=counts_S, origin=order_N)

    def combine(self, y_NC: Tensor, dispatched: Dispatched, weight_TK: Tensor) -> Tensor:
        order_N = dispatched.origin
        assert isinstance(order_N, Tensor)
        back_N = torch.empty_like(order_N)
        back_N[order_N] = torch.arange(len(order_N), device=order_N.device)
        return weighted_sum(
            [y_NC.index_select(0, rows_T) for rows_T in back_N.view(weight_TK.shape).unbind(1)], weight_TK
        )


def weighted_sum(y_KTC: Sequence[Tensor], weight_TK: Tensor) -> Tensor:
    """Σ_k weight[:, k] y[k], added in float32 in the order of k; [T, C] in the dtype of y."""
    weight_TK = weight_TK.float()
    sum_TC = torch.zeros_like(y_KTC[0], dtype=torch.float32)
    for k, y_TC in enumerate(y_KTC):
        sum_TC.addcmul_(y_TC.float(), weight_TK[:, k, None])
    return sum_TC.to(y_KTC[0].dtype)
