"""Tokens to experts on several ranks and back: the same bits as a plain loop, wherever the experts are."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from rank_processes import Member, ranks, run_ranks
from torch import Tensor

from nobiru.errors import ConfigError, GroupError
from nobiru.layers.moe import Dispatched, Dispatcher, LocalDispatcher
from nobiru.parallel.dispatch import AllToAllDispatcher, ExpertTables
from nobiru.parallel.placement import EMPTY, Placement, initial_placement

NUM_LAYERS = 2


@dataclass(frozen=True)
class Case:
    """Experts that scale and shift rows, value by value, so that a row's result is the same bits in any company."""

    placement: Placement
    scale_LEC: Tensor
    shift_LEC: Tensor
    x_TC: Tensor
    expert_LTK: Tensor
    weight_TK: Tensor

    def compute(self, layer: int, dispatched: Dispatched, slots_S: np.ndarray) -> Tensor:
        """What the experts in a rank's slots make of their rows."""
        expert_N = torch.from_numpy(slots_S.copy()).repeat_interleave(torch.tensor(dispatched.counts_S))
        assert (expert_N != EMPTY).all(), "nothing is sent to an empty slot"
        assert len(expert_N) == len(dispatched.rows_NC)
        return dispatched.rows_NC * self.scale_LEC[layer, expert_N] + self.shift_LEC[layer, expert_N]

    def expected(self, layer: int, tokens: range) -> Tensor:
        """The slow way: token by token, expert by expert."""
        rows = []
        for t in tokens:
            total = torch.zeros(self.x_TC.shape[1])
            for k, e in enumerate(self.expert_LTK[layer, t].tolist()):
                y_C = self.x_TC[t] * self.scale_LEC[layer, e] + self.shift_LEC[layer, e]
                total = torch.addcmul(total, y_C.float(), self.weight_TK[t, k].float())
            rows.append(total.to(self.x_TC.dtype))
        return torch.stack(rows) if rows else self.x_TC[:0]


def make_case(seed: int, num_ranks: int, dtype: torch.dtype) -> Case:
    """Any sizes; replicas and empty slots anywhere."""
    random = np.random.default_rng([seed, num_ranks])
    torch.manual_seed(seed)
    num_experts, num_tokens, width = (int(random.integers(low, high)) for low, high in ((1, 9), (0, 14), (1, 20)))
    top_k = int(random.integers(1, min(num_experts, 4) + 1))
    capacity = -(-num_experts // num_ranks) + int(random.integers(0, 3))
    slots = np.full((NUM_LAYERS, num_ranks, capacity), EMPTY)
    for layer in range(NUM_LAYERS):
        places = [divmod(place, capacity) for place in random.permutation(num_ranks * capacity).tolist()]
        wanted = [*range(num_experts), *random.integers(num_experts, size=3).tolist()]
        for expert, (rank, slot) in zip(wanted, places, strict=False):
            if (slots[layer] == expert).sum() < num_ranks:  # not more replicas than ranks; two on one are allowed
                slots[layer, rank, slot] = expert
    return Case(
        placement=Placement(slots=slots, num_experts=num_experts),
        scale_LEC=torch.randn(NUM_LAYERS, num_experts, width, dtype=dtype),
        shift_LEC=torch.randn(NUM_LAYERS, num_experts, width, dtype=dtype),
        x_TC=torch.randn(num_tokens, width, dtype=dtype),
        expert_LTK=torch.rand(NUM_LAYERS, num_tokens, num_experts).argsort(-1)[..., :top_k],
        weight_TK=torch.rand(num_tokens, top_k),
    )


def share_of(rank: int, num_ranks: int, num_tokens: int, seed: int) -> range:
    """Tokens of a rank: neighbouring ones, uneven, often none."""
    cuts = np.sort(np.random.default_rng(seed).integers(0, num_tokens + 1, size=num_ranks - 1)).tolist()
    edges = [0, *cuts, num_tokens]
    return range(edges[rank], edges[rank + 1])


def run_layer(case: Case, dispatcher: Dispatcher, layer: int, slots_S: np.ndarray, tokens: range) -> Tensor:
    part = slice(tokens.start, tokens.stop)
    sent = dispatcher.dispatch(layer, case.x_TC[part], case.expert_LTK[layer, part])
    return dispatcher.combine(case.compute(layer, sent, slots_S), sent, case.weight_TK[part])


def compare_with_the_slow_way(member: Member, num_cases: int) -> int:
    group = member.group()
    num_equal = 0
    for seed in range(num_cases):
        case = make_case(seed, member.size, [torch.float32, torch.bfloat16][seed % 2])
        dispatcher = AllToAllDispatcher(group, ExpertTables(case.placement))
        tokens = share_of(member.rank, member.size, len(case.x_TC), seed)
        for layer in (0, 1, 0):
            y_TC = run_layer(case, dispatcher, layer, case.placement.slots[layer, member.rank], tokens)
            assert y_TC.dtype == case.x_TC.dtype
            assert torch.equal(y_TC, case.expected(layer, tokens)), (seed, layer)
            num_equal += len(tokens)
    return num_equal


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_results_have_the_bits_of_a_plain_loop(size: int) -> None:
    assert sum(run_ranks(compare_with_the_slow_way, size, 40)) > 300


def test_a_single_rank_gives_the_same_bits() -> None:
    for seed in range(20):
        case = make_case(seed, 1, torch.float32)
        dispatcher = LocalDispatcher(case.placement.slots[:, 0], case.placement.num_experts)
        tokens = range(len(case.x_TC))
        for layer in range(NUM_LAYERS):
            y_TC = run_layer(case, dispatcher, layer, case.placement.slots[layer, 0], tokens)
            assert torch.equal(y_TC, case.expected(layer, tokens))


def count_rows(member: Member, placement: Placement, num_tokens: int, num_steps: int) -> list[int]:
    """Rows that each slot of this rank gets when every token goes to expert 0."""
    dispatcher = AllToAllDispatcher(member.group(), ExpertTables(placement))
    counts = np.zeros(placement.slot_capacity, dtype=np.int64)
    for _ in range(num_steps):
        expert_TK = torch.zeros(num_tokens, 1, dtype=torch.int64)
        sent = dispatcher.dispatch(0, torch.randn(num_tokens, 4), expert_TK)
        counts += sent.counts_S
        dispatcher.combine(sent.rows_NC, sent, torch.ones(num_tokens, 1))
    return counts.tolist()


@pytest.mark.parametrize(("num_tokens", "num_steps"), [(1, 12), (12, 1), (5, 12)])
def test_replicas_share_the_load(num_tokens: int, num_steps: int) -> None:
    placement = Placement(slots=np.array([[[1, 0], [0, EMPTY], [2, 0]]]), num_experts=3)
    each = num_tokens * num_steps
    assert run_ranks(count_rows, 3, placement, num_tokens, num_steps) == [[0, each], [each, 0], [0, each]]


def switch_layers(member: Member) -> None:
    """A layer's experts move between two steps; results stay the same bits, and so do the tables' addresses."""
    group = member.group()
    first = initial_placement(num_layers=2, num_experts=4, num_ranks=2, slot_capacity=3)
    second = Placement(slots=np.array([first.slots[0], [[3, EMPTY, 0], [1, 2, 3]]]), num_experts=4)
    generator = torch.Generator().manual_seed(0)
    case = Case(
        placement=first,
        scale_LEC=torch.randn(2, 4, 6, generator=generator),
        shift_LEC=torch.randn(2, 4, 6, generator=generator),
        x_TC=torch.randn(9, 6, generator=generator),
        expert_LTK=torch.rand(2, 9, 4, generator=generator).argsort(-1)[..., :2],
        weight_TK=torch.rand(9, 2, generator=generator),
    )
    tables = ExpertTables(first)
    addresses = [tensor.data_ptr() for tensor in vars(tables).values() if isinstance(tensor, Tensor)]
    dispatcher = AllToAllDispatcher(group, tables)
    tokens = share_of(member.rank, 2, 9, 1)
    for placement in (first, second, first):
        tables.switch(1, placement)
        for layer in range(2):
            y_TC = run_layer(case, dispatcher, layer, placement.slots[layer, member.rank], tokens)
            assert torch.equal(y_TC, case.expected(layer, tokens))
    assert addresses == [tensor.data_ptr() for tensor in vars(tables).values() if isinstance(tensor, Tensor)]


def test_a_switched_layer() -> None:
    run_ranks(switch_layers, 2)


def dispatch_until_it_fails(member: Member) -> int:
    placement = initial_placement(num_layers=1, num_experts=3, num_ranks=3, slot_capacity=1)
    group = member.group(timeout_s=30.0)
    dispatcher = AllToAllDispatcher(group, ExpertTables(placement))
    member.say("formed")
    num_steps = 0
    while True:
        try:
            sent = dispatcher.dispatch(0, torch.randn(4, 8), torch.randint(3, (4, 1)))
            dispatcher.combine(sent.rows_NC, sent, torch.ones(4, 1))
        except GroupError:
            group.destroy()
            return num_steps
        num_steps += 1


def test_a_member_dies() -> None:
    with ranks(dispatch_until_it_fails, 3) as running:
        for rank in range(3):
            running.hear(rank)
        os.kill(running.pid(2), signal.SIGKILL)
        for rank in range(2):
            assert running.hear(rank) >= 0


def test_tables_need_every_expert() -> None:
    placement = Placement(slots=np.array([[[0, EMPTY], [2, EMPTY]]]), num_experts=3)
    with pytest.raises(ConfigError, match="experts of MoE layer 0 have 0 to 1 replicas; 1 to 2 are possible"):
        ExpertTables(placement)
