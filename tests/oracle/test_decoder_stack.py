"""All layers in one native call against the same layers one after the other, and against those in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nobiru.layers.activation import ACTIVATIONS
from nobiru.layers.decoder_stack import BlockStack, NativeStack, make_stack
from nobiru.layers.linear import NativeLinear, make_linear
from nobiru.layers.moe import Experts
from nobiru.ops.native import threads
from nobiru.ops.native.library import load_kernels
from nobiru.ops.scratch import Scratch
from tests.random_decoders import NUM_LAYERS, ROWS, Sizes, layers, outputs

KERNELS = load_kernels()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="there is no C compiler")
HALF = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(KERNELS is None or not KERNELS.multiplies_pairs, reason="no products of bfloat16 pairs"),
)
# Tokens in the cache and in the step, of each sequence; one step after the other.
STEPS = {
    "few": [([0, 0, 0], [5, 1, 17]), ([5, 1, 17], [1, 1, 1]), ([6, 2, 18], [1, 3, 1])],
    "many": [([0, 0], [70, 65]), ([70, 65], [1, 100]), ([71, 165, 0], [33, 1, 66])],
    "one": [([0], [1]), ([1], [1]), ([2], [200]), ([202], [1])],
    "batch": [([0] * 8, [90] * 8), ([90] * 8, [1] * 8)],
}
SIZES = {
    "plain": Sizes(),
    "bias, norms": Sizes(has_bias=True, has_norm=True),
    "window": Sizes(window=24),
    "wide heads": Sizes(width=128, head_size=128, num_heads=5, num_kv_heads=1),
    "many groups": Sizes(width=64, head_size=64, num_heads=6, num_kv_heads=6, inner=64),
}


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_one_call_gives_what_layers_give(
    dtype: torch.dtype, sizes: Sizes, steps: list[tuple[list[int], list[int]]], num_threads: int
) -> None:
    blocks, norm, rotary = layers(sizes, dtype)
    stack = make_stack(blocks, norm)
    assert isinstance(stack, NativeStack) and not stack.plain
    found = outputs(stack, sizes, dtype, rotary, steps, num_threads)
    exact_blocks, exact_norm, _ = layers(sizes, torch.float32)
    exact = outputs(BlockStack(blocks=exact_blocks, norm=exact_norm), sizes, torch.float32, rotary, steps, 1)
    for ours_TC, exact_TC in zip(found, exact, strict=True):
        error = (ours_TC - exact_TC).abs().max()
        assert error < (2e-5 if dtype == torch.float32 else 0.06), error
    if dtype == torch.bfloat16:
        # And not worse than the layers in bfloat16, which round more often.
        rounded = outputs(BlockStack(blocks=blocks, norm=norm), sizes, dtype, rotary, steps, 1)
        errors = [
            sum(float((each - own).square().sum()) for each, own in zip(given, exact, strict=True))
            for given in (found, rounded)
        ]
        assert errors[0] < 1.2 * errors[1]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("sizes", [Sizes(inner=48), Sizes(activation="gelu")], ids=["odd size", "gelu"])
@pytest.mark.parametrize("steps", [STEPS["few"], STEPS["many"]], ids=["few", "many"])
def test_feed_forwards_may_be_the_layers_own(
    dtype: torch.dtype, sizes: Sizes, steps: list[tuple[list[int], list[int]]]
) -> None:
    blocks, norm, rotary = layers(sizes, dtype)
    stack = make_stack(blocks, norm)
    assert isinstance(stack, NativeStack) and len(stack.plain) == NUM_LAYERS
    found = outputs(stack, sizes, dtype, rotary, steps, 2)
    exact_blocks, exact_norm, _ = layers(sizes, torch.float32)
    exact = outputs(BlockStack(blocks=exact_blocks, norm=exact_norm), sizes, torch.float32, rotary, steps, 1)
    for ours_TC, exact_TC in zip(found, exact, strict=True):
        error = (ours_TC - exact_TC).abs().max()
        assert error < (2e-5 if dtype == torch.float32 else 0.06), error


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("sizes", [Sizes(), Sizes(activation="gelu")], ids=["native", "own feed-forward"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("steps", [STEPS["few"], STEPS["many"]], ids=["few", "many"])
def test_some_tokens_are_asked_for(
    dtype: torch.dtype, sizes: Sizes, rows: Callable[[int], Tensor], steps: list[tuple[list[int], list[int]]]
) -> None:
    blocks, norm, rotary = layers(sizes, dtype)
    for stack in (make_stack(blocks, norm), BlockStack(blocks=blocks, norm=norm)):
        all_rows = outputs(stack, sizes, dtype, rotary, steps, 2)
        found = outputs(stack, sizes, dtype, rotary, steps, 2, rows)
        for found_RC, all_TC in zip(found, all_rows, strict=True):
            expected_RC = all_TC[rows(all_TC.shape[0])]
            assert found_RC.shape == expected_RC.shape
            # The number of rows decides how their products are cut, and so the order of sums.
            assert torch.allclose(found_RC, expected_RC, atol=2e-5 if dtype == torch.float32 else 0.03)


def test_layers_with_other_attention_go_one_after_the_other() -> None:
    for sizes in (Sizes(width=80), Sizes(head_size=16, num_heads=8, num_kv_heads=4)):
        blocks, norm, _ = layers(sizes, torch.float32)
        assert isinstance(make_stack(blocks, norm), BlockStack), sizes


# Rows of each slot: few and many, none, one after another and not.
COUNTS = {
    "one": [0, 1, 0, 0],
    "few": [3, 0, 1, 17],
    "none of some": [0, 40, 0, 33],
    "many": [130, 300, 0, 171],
    "uneven": [1, 700, 2, 90],
}


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_experts_in_one_call(dtype: torch.dtype, stored: torch.dtype, counts: list[int], num_threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    experts = Experts(
        num_slots=4,
        hidden_size=96,
        intermediate_size=160,
        activation=ACTIVATIONS["silu"],
        compute=dtype,
        stored=torch.bfloat16 if dtype == torch.bfloat16 else stored,
        device=torch.device("cpu"),
    )
    assert experts.joined is not None
    weights = []
    for slot in range(4):
        gate_up_AC = (torch.randn(320, 96, generator=generator) * 96**-0.5).bfloat16().to(dtype)
        down_CI = (torch.randn(96, 160, generator=generator) * 160**-0.5).bfloat16().to(dtype)
        experts.write(slot, gate_up_AC, down_CI)
        weights.append((gate_up_AC.float(), down_CI.float()))
    rows_NC = torch.randn(sum(counts), 96, generator=generator).to(dtype)
    with threads.kernels_only(num_threads):
        found_NC = experts.compute(rows_NC, counts).float()
    expected = []
    for rows, (gate_up_AC, down_CI) in zip(rows_NC.float().split(counts), weights, strict=True):
        gate, up = (rows @ gate_up_AC.mT).chunk(2, 1)
        expected.append((torch.nn.functional.silu(gate) * up) @ down_CI.mT)
    assert torch.allclose(found_NC, torch.cat(expected), atol=1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("rows", [1, 11, 40])
@HALF.marks[0]
def test_scores_are_not_rounded(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight_VC = torch.randn(320, 96, generator=generator).bfloat16()
    head = make_linear(weight_VC, None, natively=True)
    assert isinstance(head, NativeLinear)
    hidden_BC = torch.randn(rows, 96, generator=generator).bfloat16()
    expected_BV = hidden_BC.float() @ weight_VC.float().mT
    assert torch.allclose(head.in_float32(hidden_BC), expected_BV, atol=1e-4)
    assert torch.allclose(head.in_float32(hidden_BC, Scratch().scores), expected_BV, atol=1e-4)
