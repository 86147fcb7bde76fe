"""Carrying tokens to the ranks that hold their experts, and results back.

Owns the tables that say where experts are, and the exchange. Does not know what experts compute, how a token's experts
were chosen, or why a placement is as it is.

A dispatch is two exchanges, how many rows each slot gets and the rows; a combine is one, the results, on the same way
back. All members of the group call them in the same order, also those without tokens. Rows are never dropped, and a
token's result does not depend on where its experts are: terms are added in the order of its choices.

Legend: L layers, T tokens of this rank, K experts of a token, E logical experts, C hidden size, R ranks, S slots of a
layer and rank, P = R * S physical slots, M rows this rank sends (T * K), N rows it gets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nobiru.errors import ConfigError
from nobiru.layers.moe import Dispatched
from nobiru.ops.grouped_gemm import gathered_sum
from nobiru.parallel.groups import Group
from nobiru.parallel.placement import EMPTY, Placement


class ExpertTables:
    """A placement as tensors: in which physical slots (rank * S + slot) each expert is.

    They stay where they are when a layer is switched to another placement of the same shape.
    """

    def __init__(self, placement: Placement, device: torch.device | str = "cpu") -> None:
        shape = (placement.num_layers, placement.num_experts)
        self.num_layers = placement.num_layers
        self.num_ranks = placement.num_ranks
        self.slot_capacity = placement.slot_capacity
        # Of an expert with n replicas, the first n columns count.
        self._slots_LER = torch.zeros(*shape, self.num_ranks, dtype=torch.int64, device=device)
        self._counts_LE = torch.ones(shape, dtype=torch.int64, device=device)
        self._has_replicas = [False] * self.num_layers
        for layer in range(self.num_layers):
            self._rewrite(layer, placement)

    def switch(self, layer: int, placement: Placement) -> None:
        """From now on the layer's experts are where `placement` says; `ConfigError` if one is nowhere, or in
        more places than there are ranks.

        All ranks switch before the same dispatch, and weights lie in the slots already.
        """
        shape = (self.num_layers, self.num_ranks, self.slot_capacity)
        assert placement.slots.shape == shape and placement.num_experts == self._counts_LE.shape[1]
        self._rewrite(layer, placement)

    def choose(self, layer: int, expert_TK: Tensor, turn: int) -> Tensor:
        """The physical slot for each token and expert, [T * K]; token t takes an expert's replica number `turn` + t."""
        expert_M = expert_TK.flatten()
        if not self._has_replicas[layer]:
            return self._slots_LER[layer, :, 0].index_select(0, expert_M)
        num_tokens, top_k = expert_TK.shape
        turn_M = torch.arange(turn, turn + num_tokens, device=expert_M.device).repeat_interleave(top_k)
        return self._slots_LER[layer][expert_M, turn_M % self._counts_LE[layer].index_select(0, expert_M)]

    def _rewrite(self, layer: int, placement: Placement) -> None:
        slots_P = placement.slots[layer].reshape(-1)
        used = np.flatnonzero(slots_P != EMPTY)
        by_expert = used[np.argsort(slots_P[used], kind="stable")]
        counts_E = np.bincount(slots_P[used], minlength=placement.num_experts)
        if counts_E.min() < 1 or counts_E.max() > self.num_ranks:
            raise ConfigError(
                f"experts of MoE layer {layer} have {counts_E.min()} to {counts_E.max()} replicas; 1 to"
                f" {self.num_ranks} are possible"
            )
        number = np.arange(len(used)) - np.repeat(np.cumsum(counts_E) - counts_E, counts_E)
        slots_ER = np.zeros((placement.num_experts, self.num_ranks), dtype=np.int64)
        slots_ER[slots_P[by_expert], number] = by_expert
        self._slots_LER[layer].copy_(torch.from_numpy(slots_ER))
        self._counts_LE[layer].copy_(torch.from_numpy(counts_E))
        self._has_replicas[layer] = bool((counts_E > 1).any())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Way:
    """What a combine needs of its dispatch.

    Row m that was sent is number `sent_order_M`[m] of this rank's T * K; row n for the experts was number
    `received_order_N`[n] of those that came. `num_sent` and `num_received` count rows to and from each rank.
    """

    sent_order_M: Tensor
    received_order_N: Tensor
    num_sent: list[int]
    num_received: list[int]


class AllToAllDispatcher:
    """The dispatcher of one of several ranks, which are the members of `group` in the order of the placement.

    Raises `GroupError` when a member is gone; the step is lost then, and the group too. An expert's replicas take
    turns, beginning on each rank with another one.
    """

    is_reentrant = False

    def __init__(self, group: Group, tables: ExpertTables) -> None:
        assert group.size == tables.num_ranks
        self._group = group
        self._tables = tables
        self._turns = [group.rank] * tables.num_layers

    def dispatch(self, layer: int, x_TC: Tensor, expert_TK: Tensor) -> Dispatched:
        """Send each token to its K logical experts, and get what other ranks send to the experts of this one."""
        num_ranks, num_slots = self._tables.num_ranks, self._tables.slot_capacity
        slot_M = self._tables.choose(layer, expert_TK, self._turns[layer])
        self._turns[layer] += len(expert_TK)
        sent_order_M = slot_M.argsort(stable=True)
        sent_P = slot_M.bincount(minlength=num_ranks * num_slots)
        received_P = self._group.all_to_all(sent_P, [num_slots] * num_ranks, [num_slots] * num_ranks)
        num_sent: list[int] = sent_P.view(num_ranks, num_slots).sum(1).tolist()
        num_received: list[int] = received_P.view(num_ranks, num_slots).sum(1).tolist()
        rows_MC = x_TC.index_select(0, sent_order_M // expert_TK.shape[1])
        rows_NC = self._group.all_to_all(rows_MC, num_sent, num_received)
        # They came sorted by rank, then slot.
        slot_P = torch.arange(num_slots, device=slot_M.device).repeat(num_ranks)
        received_order_N = slot_P.repeat_interleave(received_P).argsort(stable=True)
        return Dispatched(
            rows_NC=rows_NC.index_select(0, received_order_N),
            counts_S=received_P.view(num_ranks, num_slots).sum(0).tolist(),
            origin=_Way(
                sent_order_M=sent_order_M,
                received_order_N=received_order_N,
                num_sent=num_sent,
                num_received=num_received,
            ),
        )

    def combine(self, y_NC: Tensor, dispatched: Dispatched, weight_TK: Tensor) -> Tensor:
        """Send results back where their rows came from; the weighted sum of each token's own, [T, C]."""
        way = dispatched.origin
        assert isinstance(way, _Way)
        y_MC = self._group.all_to_all(
            y_NC.index_select(0, _inverse(way.received_order_N)), way.num_received, way.num_sent
        )
        return gathered_sum(y_MC, _inverse(way.sent_order_M).view(weight_TK.shape), weight_TK)


def _inverse(order_N: Tensor) -> Tensor:
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    return inverse_N
