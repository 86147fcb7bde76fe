"""Experts in slots, the dispatcher of a single rank, and counted loads."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from nobiru.layers.activation import ACTIVATIONS
from nobiru.layers.linear import PlainLinear
from nobiru.layers.moe import ExpertLoads, Experts, LocalDispatcher
from nobiru.layers.routing import GroupedSigmoidRouter, GroupedSoftmaxRouter, Router, SoftmaxRouter
from nobiru.ops import grouped_gemm, reference
from nobiru.ops.grouped_gemm import gathered_sum
from nobiru.ops.native.library import load_kernels

CPU = torch.device("cpu")
HIDDEN, INTERMEDIATE, NUM_EXPERTS = 48, 40, 5
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def make_experts(
    num_slots: int,
    *,
    compute: torch.dtype = torch.float32,
    stored: torch.dtype = torch.float32,
    activation: str = "silu",
    hidden_size: int = HIDDEN,
    intermediate_size: int = INTERMEDIATE,
) -> Experts:
    return Experts(
        num_slots=num_slots,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        activation=ACTIVATIONS[activation],
        compute=compute,
        stored=stored,
        device=CPU,
    )


def make_weights(num_experts: int = NUM_EXPERTS, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """gate and up, and down, of each expert; bfloat16 holds them exactly."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / 6).bfloat16().float()

    gate_up = [draw(2 * INTERMEDIATE, HIDDEN) for _ in range(num_experts)]
    return gate_up, [draw(HIDDEN, INTERMEDIATE) for _ in range(num_experts)]


@pytest.fixture(params=["native", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(grouped_gemm, "load_kernels", lambda: None)
        monkeypatch.setattr(grouped_gemm, "kernels_for", lambda x: None)
    elif load_kernels() is None:
        pytest.skip("there is no C compiler")
    return str(request.param)


def sum_of_experts(x_TC: Tensor, expert_TK: Tensor, weight_TK: Tensor, experts: Experts, slots_S: list[int]) -> Tensor:
    dispatcher = LocalDispatcher(np.array([slots_S]), NUM_EXPERTS)
    sent = dispatcher.dispatch(0, x_TC, expert_TK)
    assert sum(sent.counts_S) == len(sent.rows_NC) == expert_TK.numel()
    return dispatcher.combine(experts.compute(sent.rows_NC, sent.counts_S), sent, weight_TK)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize(
    ("compute", "stored"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 3, 70])
def test_a_token_gets_the_weighted_sum_of_its_experts(
    way: str, activation: str, compute: torch.dtype, stored: torch.dtype, num_tokens: int
) -> None:
    gate_up, down = make_weights()
    slots_S = [3, -1, 0, 4, 2, 1, -1, 3]
    experts = make_experts(len(slots_S), compute=compute, stored=stored, activation=activation)
    for slot, expert in enumerate(slots_S):
        if expert >= 0:
            experts.write(slot, gate_up[expert], down[expert])
    generator = torch.Generator().manual_seed(num_tokens)
    x_TC = torch.randn(num_tokens, HIDDEN, generator=generator).to(compute)
    expert_TK = torch.stack([torch.randperm(NUM_EXPERTS, generator=generator)[:3] for _ in range(num_tokens)])
    weight_TK = torch.rand(num_tokens, 3, generator=generator)
    found_TC = sum_of_experts(x_TC, expert_TK, weight_TK, experts, slots_S)
    apply = ACTIVATIONS[activation].apply
    expected_TC = reference.experts(x_TC, expert_TK, weight_TK, gate_up, down, apply)
    assert (found_TC.dtype, found_TC.shape) == (compute, x_TC.shape)
    assert float((found_TC.double() - expected_TC).abs().max()) <= TOLERANCES[compute] * float(expected_TC.abs().max())


def test_all_rows_of_one_expert_and_none(way: str) -> None:
    gate_up, down = make_weights()
    experts = make_experts(NUM_EXPERTS)
    for slot in range(NUM_EXPERTS):
        experts.write(slot, gate_up[slot], down[slot])
    x_TC = torch.randn(33, HIDDEN)
    y_NC = experts.compute(x_TC, [0, 0, 33, 0, 0])
    ones = torch.ones(33, 1)
    expected = reference.experts(x_TC, 2 * ones.long(), ones, gate_up, down, ACTIVATIONS["silu"].apply)
    assert float((y_NC - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    assert experts.compute(x_TC[:0], [0] * NUM_EXPERTS).shape == (0, HIDDEN)


@pytest.mark.parametrize(("compute", "stored"), [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_a_slot_is_one_run_of_bytes_that_can_be_copied(way: str, compute: torch.dtype, stored: torch.dtype) -> None:
    gate_up, down = make_weights()
    first, second = (make_experts(3, compute=compute, stored=stored) for _ in range(2))
    assert first.layout_id == second.layout_id
    assert first.layout_id != make_experts(3, compute=torch.float16).layout_id
    address = first.memory(1).data_ptr()
    first.write(1, gate_up[0], down[0])
    assert first.memory(1).data_ptr() == address
    assert first.memory(1).shape == (first.slot_bytes,)
    found_gate_up, found_down = first.read(1)
    assert torch.equal(found_gate_up.float(), gate_up[0]) and torch.equal(found_down.float(), down[0])
    empty = second.checksum(2)
    second.memory(2).copy_(first.memory(1))
    assert second.checksum(2) == first.checksum(1) != empty
    rows_NC = torch.randn(4, HIDDEN).to(compute)
    assert torch.equal(second.compute(rows_NC, [0, 0, 4]), first.compute(rows_NC, [0, 4, 0]))
    second.write(2, gate_up[1], down[0])
    assert second.checksum(2) != first.checksum(1)
    second.vacate(2)
    assert second.checksum(2) == empty and second.memory(2).count_nonzero() == 0


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts_S", [[0, 1, 0, 2, 1], [300, 0, 13, 0, 0], [40, 41, 12, 100, 107]])
def test_threads_share_the_experts(compute: torch.dtype, counts_S: list[int]) -> None:
    """Sizes that fill no panel, and enough work for two threads."""
    hidden, intermediate, num_experts = 146, 333, 5
    experts = make_experts(
        num_experts, compute=compute, stored=compute, hidden_size=hidden, intermediate_size=intermediate
    )
    generator = torch.Generator().manual_seed(1)
    gate_up = [torch.randn(2 * intermediate, hidden, generator=generator) / 12 for _ in range(num_experts)]
    down = [torch.randn(hidden, intermediate, generator=generator) / 12 for _ in range(num_experts)]
    for slot in range(num_experts):
        experts.write(slot, gate_up[slot].to(compute), down[slot].to(compute))
    rows_NC = torch.randn(sum(counts_S), hidden, generator=generator).to(compute)
    results = []
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            results.append(experts.compute(rows_NC, counts_S))
    finally:
        torch.set_num_threads(before)
    kernels = load_kernels()
    is_native = kernels is not None and (compute == torch.float32 or kernels.multiplies_pairs)
    # torch's own products of bfloat16 may be cut otherwise for two threads.
    torch.testing.assert_close(*results, rtol=0, atol=0 if is_native else 0.02)
    expert_N1 = torch.arange(num_experts).repeat_interleave(torch.tensor(counts_S))[:, None]
    ones_N1 = torch.ones(len(rows_NC), 1)
    rounded = [[weight.to(compute) for weight in weights] for weights in (gate_up, down)]
    expected_NC = reference.experts(rows_NC, expert_N1, ones_N1, *rounded, ACTIVATIONS["silu"].apply)
    error = float((results[0].double() - expected_NC).abs().max())
    assert error <= TOLERANCES[compute] * float(expected_NC.abs().max())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells what is resident")
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_routers_take_any_number_of_tokens(num_tokens: int) -> None:
    gate, bias_E = PlainLinear(torch.randn(8, 16), None, None), torch.randn(8)
    routers: list[Router] = [
        SoftmaxRouter(gate=gate, top_k=3, normalizes=True, rounds=True),
        GroupedSigmoidRouter(
            gate=gate, bias_E=bias_E, top_k=3, num_groups=4, top_groups=2, normalizes=True, factor=1.5
        ),
        GroupedSoftmaxRouter(gate=gate, top_k=3, num_groups=4, top_groups=2, factor=1.5),
    ]
    for router in routers:
        routing = router(torch.randn(num_tokens, 16))
        assert routing.expert_TK.shape == routing.weight_TK.shape == (num_tokens, 3)
        assert all(len(set(row)) == 3 for row in routing.expert_TK.tolist())


def test_an_empty_slot_takes_no_memory() -> None:
    hidden, intermediate = 512, 2048
    before = resident_bytes()
    experts = make_experts(16, hidden_size=hidden, intermediate_size=intermediate)
    slack = experts.slot_bytes // 2
    assert experts.slot_bytes == 3 * hidden * intermediate * 4
    assert resident_bytes() - before < slack
    for slot in (0, 7, 9):
        experts.memory(slot).fill_(1)
    assert abs(resident_bytes() - before - 3 * experts.slot_bytes) < slack
    experts.vacate(7)
    assert abs(resident_bytes() - before - 2 * experts.slot_bytes) < slack
    assert experts.checksum(9) == experts.checksum(0)


def test_every_expert_must_be_somewhere() -> None:
    with pytest.raises(ValueError, match=r"layer 1 lacks \[2\]"):
        LocalDispatcher(np.array([[0, 1, 2], [1, 0, -1]]), 3)


@pytest.mark.parametrize("size", [1, 64])
def test_terms_are_added_in_the_order_of_choices(way: str, size: int) -> None:
    """In float32 from the first to the last: a large term first loses what small ones would have given together."""
    y_NC = torch.tensor([[2.0**-24], [1.0], [2.0**-24]]).expand(3, size).contiguous()
    rows_TK = torch.tensor([[1, 0, 2], [0, 2, 1]])
    assert gathered_sum(y_NC, rows_TK, torch.ones(2, 3))[:, -1].tolist() == [1.0, 1.0 + 2.0**-23]
    halves_NC = torch.tensor([[1.0], [2.0**-8]]).expand(2, size).bfloat16().contiguous()
    found_TC = gathered_sum(halves_NC, torch.tensor([[0, 1, 1]]), torch.ones(1, 3))
    assert found_TC.dtype == torch.bfloat16 and float(found_TC[0, 0]) == 1.0 + 2.0**-7
    assert gathered_sum(y_NC, rows_TK[:0], torch.ones(0, 3)).shape == (0, size)


def test_loads_are_counted_by_several_threads() -> None:
    loads = ExpertLoads(2, 4, CPU)
    expert_TK = torch.tensor([[0, 1], [3, 1], [1, 0]])

    def count() -> None:
        for _ in range(200):
            loads.count(1, expert_TK)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert loads.take().tolist() == [[0, 0, 0, 0], [1600, 2400, 0, 800]]
    assert loads.take().count_nonzero() == 0
