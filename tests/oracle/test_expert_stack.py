"""Decoders with experts in one native call against their layers one after the other, with a router by sorting."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nobiru.layers.activation import ACTIVATIONS
from nobiru.layers.decoder_block import DecoderBlock
from nobiru.layers.decoder_stack import BlockStack, NativeStack, make_stack
from nobiru.layers.linear import Linear, PlainLinear, make_linear
from nobiru.layers.moe import Dispatched, Dispatcher, ExpertLoads, Experts, LocalDispatcher, MoeFeedForward, MoeMlp
from nobiru.layers.rms_norm import RmsNorm
from nobiru.layers.rotary import Rotary
from nobiru.layers.routing import Router, Routing, SoftmaxRouter
from nobiru.ops.native.library import load_kernels
from tests.random_decoders import NUM_LAYERS, ROWS, Sizes, layers, outputs

KERNELS = load_kernels()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="there is no C compiler")
HALF = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(KERNELS is None or not KERNELS.multiplies_pairs, reason="no products of bfloat16 pairs"),
)
CPU = torch.device("cpu")
SIZES = Sizes(inner=64)


@dataclass(kw_only=True, slots=True)
class SortingRouter:
    """`SoftmaxRouter` that takes the first of equally good experts.

    `margin` is the least by which a row's last expert was better than the next, where it was better.
    """

    gate: Linear
    top_k: int
    normalizes: bool
    rounds: bool
    margin: float = float("inf")

    def __call__(self, x_TC: Tensor) -> Routing:
        scores_TE = self.gate(x_TC).float()
        sorted_TE, expert_TE = scores_TE.sort(dim=-1, descending=True, stable=True)
        for gap in (sorted_TE[:, :-1] - sorted_TE[:, 1:])[:, self.top_k - 1 : self.top_k].flatten().tolist():
            self.margin = min(self.margin, gap or self.margin)
        expert_TK = expert_TE[:, : self.top_k]
        weight_TK = scores_TE.softmax(-1).gather(1, expert_TK)
        if self.normalizes:
            weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
        return Routing(expert_TK=expert_TK, weight_TK=weight_TK.to(x_TC.dtype) if self.rounds else weight_TK)


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeCase:
    """`has_twins`: of two experts with equal scores one follows the other. `layers` are those with experts."""

    num_experts: int = 5
    top_k: int = 2
    normalizes: bool = True
    rounds: bool = True
    has_twins: bool = False
    layers: tuple[int, ...] = tuple(range(NUM_LAYERS))
    inner: int = 96
    stored: torch.dtype = torch.bfloat16
    num_slots: int = 8


@dataclass(slots=True)
class Parts:
    dispatcher: Dispatcher | None


@dataclass(kw_only=True, slots=True)
class Decoder:
    """One set of weights: `blocks` one after the other, `sorted_blocks` with routers that sort."""

    blocks: list[DecoderBlock]
    sorted_blocks: list[DecoderBlock]
    norm: RmsNorm
    rotary: Rotary
    parts: Parts
    loads: ExpertLoads
    sorted_loads: ExpertLoads
    routers: list[SortingRouter] = field(default_factory=list)


def random_slots(case: MoeCase, generator: torch.Generator) -> np.ndarray:  # type: ignore[type-arg]
    """Every expert in some slot, some again, and empty ones between them."""
    slots_LS = np.full((len(case.layers), case.num_slots), -1)
    for slots_S in slots_LS:
        own = list(range(case.num_experts)) + [0, -1] * case.num_slots
        order = torch.randperm(case.num_slots, generator=generator)
        slots_S[order] = own[: case.num_slots]
    return slots_LS


def decoder(case: MoeCase, dtype: torch.dtype = torch.float32, *, attends: bool = True) -> Decoder:
    """Without `attends` attention adds nothing, so that both stacks route the very same rows in the first layer."""
    blocks, norm, rotary = layers(SIZES, dtype)
    generator = torch.Generator().manual_seed(1)
    slots_LS = random_slots(case, generator)
    parts = Parts(LocalDispatcher(slots_LS, case.num_experts))
    loads, sorted_loads = (ExpertLoads(len(case.layers), case.num_experts, CPU) for _ in range(2))
    made = Decoder(
        blocks=blocks,
        sorted_blocks=list(blocks),
        norm=norm,
        rotary=rotary,
        parts=parts,
        loads=loads,
        sorted_loads=sorted_loads,
    )
    for number, layer in enumerate(case.layers):
        experts = random_experts(case, slots_LS[number].tolist(), dtype, generator)
        gate_EC = torch.randn(case.num_experts, SIZES.width, generator=generator).bfloat16().to(dtype) * 0.125
        if case.has_twins:
            gate_EC[1::2] = gate_EC[: case.num_experts // 2 * 2 : 2].clone()
        options = {"top_k": case.top_k, "normalizes": case.normalizes, "rounds": case.rounds}
        gate = make_linear(gate_EC, None, natively=True)
        made.routers.append(SortingRouter(gate=gate, **options))  # type: ignore[arg-type]
        routers: tuple[Router, Router] = SoftmaxRouter(gate=gate, **options), made.routers[-1]  # type: ignore[arg-type]
        for own, router, counts in zip((made.blocks, made.sorted_blocks), routers, (loads, sorted_loads), strict=True):
            mlp = MoeMlp(layer=number, top_k=case.top_k, router=router, experts=experts, shared=None, loads=counts)
            own[layer] = replace(own[layer], mlp=MoeFeedForward(mlp=mlp, parts=parts))
    if not attends:
        nothing = make_linear(torch.zeros(SIZES.width, 128, dtype=dtype), None, natively=True)
        for own in (made.blocks, made.sorted_blocks):
            own[:] = [replace(block, attention=replace(block.attention, out=nothing)) for block in own]  # type: ignore[type-var]
    return made


def random_experts(case: MoeCase, slots_S: list[int], dtype: torch.dtype, generator: torch.Generator) -> Experts:
    experts = Experts(
        num_slots=case.num_slots,
        hidden_size=SIZES.width,
        intermediate_size=case.inner,
        activation=ACTIVATIONS["silu"],
        compute=dtype,
        stored=torch.bfloat16 if dtype == torch.bfloat16 else case.stored,
        device=CPU,
    )
    gate_up = torch.randn(case.num_experts, 2 * case.inner, SIZES.width, generator=generator) * SIZES.width**-0.5
    down = torch.randn(case.num_experts, SIZES.width, case.inner, generator=generator) * case.inner**-0.5
    for slot, expert in enumerate(slots_S):
        if expert >= 0:
            experts.write(slot, gate_up[expert].bfloat16().to(dtype), down[expert].bfloat16().to(dtype))
    return experts


def native(made: Decoder) -> NativeStack:
    stack = make_stack(made.blocks, made.norm)
    assert isinstance(stack, NativeStack) and not stack.plain
    return stack


def by_hand(made: Decoder) -> BlockStack:
    return BlockStack(blocks=made.sorted_blocks, norm=made.norm)


cases = st.integers(2, 16).flatmap(
    lambda num_experts: st.builds(
        MoeCase,
        num_experts=st.just(num_experts),
        top_k=st.integers(1, min(4, num_experts)),
        normalizes=st.booleans(),
        rounds=st.booleans(),
        has_twins=st.booleans(),
        layers=st.sampled_from([each for n in (1, 2, 3) for each in itertools.combinations(range(NUM_LAYERS), n)]),
        inner=st.sampled_from([32, 96]),
        stored=st.sampled_from([torch.float32, torch.bfloat16]),
        num_slots=st.integers(num_experts, num_experts + 4),
    )
)
lengths = st.lists(st.integers(1, 12), min_size=1, max_size=8) | st.lists(st.integers(1, 100), min_size=1, max_size=2)


@settings(deadline=None, max_examples=60)
@given(case=cases, first=lengths, second=st.integers(1, 5), num_threads=st.integers(1, 2))
def test_one_call_gives_what_layers_give(case: MoeCase, first: list[int], second: int, num_threads: int) -> None:
    made = decoder(case)
    steps = [([0] * len(first), first), (first, [second] + [1] * (len(first) - 1))]
    expected = outputs(by_hand(made), SIZES, torch.float32, made.rotary, steps, 1)
    # A row whose experts are almost equally good may go to either.
    assume(all(router.margin > 1e-5 for router in made.routers))
    found = outputs(native(made), SIZES, torch.float32, made.rotary, steps, num_threads)
    for found_TC, expected_TC in zip(found, expected, strict=True):
        assert float((found_TC - expected_TC).abs().max()) < 2e-5
    counts_LE = made.loads.take()
    assert torch.equal(counts_LE, made.sorted_loads.take())
    assert int(counts_LE.sum()) == sum(map(sum, (each for _, each in steps))) * case.top_k * len(case.layers)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("has_twins", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 7, 95, 200])
@pytest.mark.parametrize(("normalizes", "rounds"), [(False, False), (True, True)])
def test_rows_go_to_the_experts_that_scores_say(
    dtype: torch.dtype, has_twins: bool, num_tokens: int, normalizes: bool, rounds: bool
) -> None:
    case = MoeCase(
        num_experts=40, num_slots=41, top_k=3, normalizes=normalizes, rounds=rounds, has_twins=has_twins, layers=(0,)
    )
    made = decoder(case, dtype, attends=False)
    steps = [([0], [num_tokens])]
    expected_TC = outputs(by_hand(made), SIZES, dtype, made.rotary, steps, 1)[0]
    found_TC = outputs(native(made), SIZES, dtype, made.rotary, steps, 2)[0]
    assert float((found_TC - expected_TC).abs().max()) < (2e-5 if dtype == torch.float32 else 0.06)
    assert torch.equal(made.loads.take(), made.sorted_loads.take())


class Elsewhere:
    """A dispatcher that is not local, so that layers have to ask it."""

    is_reentrant = True

    def __init__(self, local: Dispatcher) -> None:
        self._local = local
        self.num_calls = 0

    def dispatch(self, layer: int, x_TC: Tensor, expert_TK: Tensor) -> Dispatched:
        self.num_calls += 1
        return self._local.dispatch(layer, x_TC, expert_TK)

    def combine(self, y_NC: Tensor, dispatched: Dispatched, weight_TK: Tensor) -> Tensor:
        return self._local.combine(y_NC, dispatched, weight_TK)


@pytest.mark.parametrize("layers_with_experts", [(0, 1, 2), (1,), (0, 2)])
def test_dispatchers_may_be_exchanged(layers_with_experts: tuple[int, ...]) -> None:
    made = decoder(MoeCase(layers=layers_with_experts))
    stack, steps, local = native(made), [([0, 0], [30, 70]), ([30, 70], [1, 1])], made.parts.dispatcher
    assert local is not None
    elsewhere = Elsewhere(local)
    results, counts = [], []
    for dispatcher in (local, elsewhere, local):
        made.parts.dispatcher = dispatcher
        results.append(outputs(stack, SIZES, torch.float32, made.rotary, steps, 2))
        counts.append(made.loads.take())
    assert elsewhere.num_calls == len(steps) * len(layers_with_experts)
    for ours, others, again in zip(*results, strict=True):
        assert torch.allclose(ours, others, atol=2e-5) and torch.equal(ours, again)
    assert torch.equal(counts[0], counts[1]) and torch.equal(counts[0], counts[2])


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize("layers_with_experts", [(0, 2), (1,)])
def test_some_tokens_are_asked_for(
    rows: Callable[[int], Tensor], is_local: bool, layers_with_experts: tuple[int, ...]
) -> None:
    case = MoeCase(layers=layers_with_experts)
    made = decoder(case)
    if not is_local:
        assert made.parts.dispatcher is not None
        made.parts.dispatcher = Elsewhere(made.parts.dispatcher)
    steps = [([0, 0], [30, 70]), ([30, 70], [40, 1]), ([70, 71], [1, 1])]
    for stack in (native(made), BlockStack(blocks=made.blocks, norm=made.norm)):
        all_rows = outputs(stack, SIZES, torch.float32, made.rotary, steps, 2)
        made.loads.take()
        found = outputs(stack, SIZES, torch.float32, made.rotary, steps, 2, rows)
        for found_RC, all_TC in zip(found, all_rows, strict=True):
            assert torch.allclose(found_RC, all_TC[rows(all_TC.shape[0])], atol=2e-5)
        num_tokens = [sum(lengths) for _, lengths in steps]
        num_asked = sum(len(rows(number)) for number in num_tokens)
        for layer, counts_E in zip(layers_with_experts, made.loads.take(), strict=True):
            assert int(counts_E.sum()) == case.top_k * (num_asked if layer == NUM_LAYERS - 1 else sum(num_tokens))


def test_several_threads_at_once() -> None:
    made = decoder(MoeCase(layers=(0, 2)))
    stack, steps = native(made), [([0, 0], [20, 90]), ([20, 90], [1, 1])]
    expected = outputs(stack, SIZES, torch.float32, made.rotary, steps, 2)
    once_LE = made.loads.take()
    with ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(outputs, stack, SIZES, torch.float32, made.rotary, steps, 2) for _ in range(12)]
        for task in tasks:
            for found_TC, expected_TC in zip(task.result(60), expected, strict=True):
                assert torch.equal(found_TC, expected_TC)
    assert torch.equal(made.loads.take(), 12 * once_LE)


def test_a_gate_of_torch_is_the_layers_own() -> None:
    made = decoder(MoeCase(layers=(1,)))
    plain = PlainLinear(torch.randn(5, SIZES.width), None, None)
    own = made.blocks[1].mlp
    assert isinstance(own, MoeFeedForward) and isinstance(own.mlp.router, SoftmaxRouter)
    router = replace(own.mlp.router, gate=plain)
    made.blocks[1] = replace(made.blocks[1], mlp=replace(own, mlp=replace(own.mlp, router=router)))
    stack, steps = make_stack(made.blocks, made.norm), [([0], [9])]
    assert isinstance(stack, NativeStack) and list(stack.plain) == [1]
    expected = outputs(BlockStack(blocks=made.blocks, norm=made.norm), SIZES, torch.float32, made.rotary, steps, 1)
    found = outputs(stack, SIZES, torch.float32, made.rotary, steps, 2)
    assert torch.allclose(found[0], expected[0], atol=2e-5)
