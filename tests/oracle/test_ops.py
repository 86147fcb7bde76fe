"""The fast operations against their slow references, over random lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.activations import ACT2FN

from nobiru.folder.spec import POOLING_MODES, PoolingSpec
from nobiru.layers import linear
from nobiru.layers.activation import ACTIVATIONS
from nobiru.layers.block import BlockWeights, Norm
from nobiru.layers.encoder import BlockShape, TorchLayers
from nobiru.layers.linear import PackedLinear, PlainLinear, make_linear
from nobiru.layers.pooling import Pooler
from nobiru.models.mpnet import relative_buckets
from nobiru.ops import packed_attention as attention
from nobiru.ops import reference
from nobiru.ops.layout import PackedLayout
from nobiru.ops.packed_attention import packed_attention
from nobiru.ops.scratch import Buffer, Scratch

LENGTHS = st.lists(st.integers(1, 24) | st.integers(60, 150), min_size=1, max_size=12).map(sorted)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def layout_of(lengths: list[int]) -> PackedLayout:
    return PackedLayout(np.array(lengths, dtype=np.int64))


@settings(deadline=None, max_examples=80)
@given(
    lengths=LENGTHS,
    head_size=st.sampled_from([8, 32]),
    key_heads=st.sampled_from([1, 2, 4]),
    window=st.none() | st.integers(1, 100),
    biased=st.booleans(),
    fused=st.booleans(),
)
@pytest.mark.parametrize("natively", [True, False])
def test_packed_attention_equals_one_by_one(
    natively: bool, lengths: list[int], head_size: int, key_heads: int, window: int | None, biased: bool, fused: bool
) -> None:
    num_tokens, num_heads = sum(lengths), 4
    random = generator(num_tokens)
    q = torch.randn(num_tokens, num_heads, head_size, generator=random)
    k, v = torch.randn(2, num_tokens, key_heads, head_size, generator=random).unbind(0)
    if fused and key_heads == num_heads:  # rows of one projection, as the models hand them over
        q, k, v = torch.stack([q, k, v], dim=1).unbind(1)
    bias = torch.randn(num_heads, 160, 160, generator=random) if biased else None
    options = {"scale": 0.7, "window": window, "bias_HMM": bias}
    with pytest.MonkeyPatch.context() as patch:
        if not natively:
            patch.setattr(attention, "load_encoder_kernels", lambda: None)
        found = packed_attention(q, k, v, layout_of(lengths), **options)  # type: ignore[arg-type]
    expected = reference.attention(q, k, v, lengths, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-4)


def test_sequences_do_not_see_each_other() -> None:
    layout = layout_of([3, 4, 5, 90])
    x = torch.randn(layout.num_tokens, 2, 16, generator=generator())
    before = packed_attention(x, x, x, layout, scale=0.25)
    changed = x.clone()
    changed[3:7] += 10
    after = packed_attention(changed, changed, changed, layout, scale=0.25)
    assert torch.equal(before[:3], after[:3])
    assert torch.equal(before[7:], after[7:])
    assert not torch.allclose(before[3:7], after[3:7])


@settings(deadline=None, max_examples=60)
@given(
    lengths=LENGTHS,
    modes=st.lists(st.sampled_from(POOLING_MODES), min_size=1, max_size=3),
    include_prompt=st.booleans(),
    skips=st.lists(st.integers(0, 30), min_size=12, max_size=12),
)
def test_pooling_equals_one_by_one(
    lengths: list[int], modes: list[str], include_prompt: bool, skips: list[int]
) -> None:
    skipped = np.array(skips[: len(lengths)], dtype=np.int64)
    hidden = torch.randn(sum(lengths), 16, generator=generator(sum(lengths)))
    pooler = Pooler(PoolingSpec(modes=tuple(modes), include_prompt=include_prompt))
    rows = pooler.rows(layout_of(lengths), skipped)
    assert (rows is not None) == ({*modes} <= {"cls", "lasttoken"})
    given = hidden
    if rows is not None:
        assert (np.diff(rows) > 0).all()
        given = torch.full_like(hidden, torch.nan).index_copy_(0, torch.from_numpy(rows), hidden[rows])
    found = pooler(given, layout_of(lengths), skipped)
    expected_skips = [0] * len(lengths) if include_prompt else skipped.tolist()
    expected = torch.cat([reference.pooling(hidden, lengths, expected_skips, mode) for mode in modes], dim=-1)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("has_scratch", [False, True])
def test_layers_of_torch_may_end_early(num_layers: int, has_scratch: bool) -> None:
    random = generator(num_layers)

    def pair(num_out: int, num_in: int) -> tuple[Tensor, Tensor]:
        return torch.randn(num_out, num_in, generator=random) * num_in**-0.5, torch.randn(num_out, generator=random)

    norm = Norm(weight_C=torch.randn(24, generator=random), bias_C=torch.randn(24, generator=random), eps=1e-5)
    shape = BlockShape(width=24, inner=40, num_heads=2, activation=ACTIVATIONS["gelu"])
    layers = TorchLayers(shape, dtype=torch.float32, device=torch.device("cpu"), in_int8=False)
    for _ in range(num_layers):
        qkv, out, up, down = pair(72, 24), pair(24, 24), pair(40, 24), pair(24, 40)
        layers.append(BlockWeights(qkv=qkv, attention_out=out, attention_norm=norm, up=up, down=down, output_norm=norm))
    layout, rows = layout_of([1, 3, 9]), np.array([0, 2, 3, 4])
    hidden = torch.randn(13, 24, generator=random)
    scratch = Scratch() if has_scratch else None
    expected = layers(hidden.clone(), layout, scratch)
    found = layers(hidden.clone(), layout, scratch, rows)
    torch.testing.assert_close(found[rows], expected[rows], atol=1e-5, rtol=1e-5)


def test_layer_norm_equals_reference() -> None:
    x, weight, bias = (torch.randn(*shape, generator=generator()) for shape in ((20, 48), (48,), (48,)))
    found = Norm(weight_C=weight, bias_C=bias, eps=1e-5)(x)
    torch.testing.assert_close(found.double(), reference.layer_norm(x, weight, bias, 1e-5), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations_equal_those_of_transformers(name: str) -> None:
    if name not in ACT2FN:
        pytest.skip(f"this version of transformers has no activation {name}")
    x = torch.linspace(-12, 12, 4001)
    torch.testing.assert_close(ACTIVATIONS[name].apply(x.clone()), ACT2FN[name](x), atol=2e-6, rtol=1e-5)


def test_relative_buckets_of_mpnet() -> None:
    buckets = relative_buckets(400)
    assert buckets[5, 5] == 0
    assert [int(buckets[10, 10 - distance]) for distance in range(8)] == list(range(8))  # exact when near
    assert int(buckets[0, 1]) == 17  # the other direction has the other half
    assert int(buckets[399, 0]) == 15 and int(buckets[0, 399]) == 31  # far away is one bucket
    assert (buckets[200, :200].flip(0).diff() >= 0).all()


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "relu", "silu", "tanh", "linear"])
def test_packed_linear_equals_plain(name: str) -> None:
    dtype = torch.bfloat16
    if not linear.packing_is_supported(dtype):
        pytest.skip("this processor has no packed linear layers for bfloat16")
    weight, bias, x = (torch.randn(*s, generator=generator()).to(dtype) for s in ((96, 64), (96,), (33, 64)))
    found = PackedLinear(weight, bias, ACTIVATIONS[name])(x)
    expected = PlainLinear(weight.float(), bias.float(), ACTIVATIONS[name])(x.float())
    torch.testing.assert_close(found.float(), expected, atol=0.05, rtol=0.02)


def test_packing_that_goes_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(PlainLinear):
        def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
            return super().__call__(x_TI) * 2

    class Failing(PlainLinear):
        def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no such operator")

    weight = torch.randn(8, 4, generator=generator()).bfloat16()
    monkeypatch.setattr(linear, "packing_is_supported", lambda dtype: True)
    for bad in (Wrong, Failing):
        monkeypatch.setattr(linear, "PackedLinear", bad)
        made = make_linear(weight, None)
        assert type(made) is PlainLinear
        x = torch.ones(3, 4).bfloat16()
        assert torch.equal(made(x), F.linear(x, weight))
    monkeypatch.setattr(linear, "PackedLinear", type("Right", (PlainLinear,), {}))
    assert type(make_linear(weight, None)).__name__ == "Right"


def test_buffers_are_used_again_and_grow() -> None:
    buffer = Buffer()
    first = buffer.take(4, 6, dtype=torch.float32)
    assert first.shape == (4, 6)
    assert buffer.take(3, 5, dtype=torch.float32).data_ptr() == first.data_ptr()
    assert buffer.take(100, 6, dtype=torch.float32).shape == (100, 6)
    assert buffer.take(2, 2, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_results_in_buffers_are_the_same() -> None:
    weight, bias, x = (torch.randn(*s, generator=generator()) for s in ((48, 32), (48,), (9, 32)))
    layer = make_linear(weight, bias, ACTIVATIONS["gelu"])
    torch.testing.assert_close(layer(x, Buffer()), layer(x))
    layout = layout_of([2, 3, 20, 90])
    q = torch.randn(layout.num_tokens, 2, 16, generator=generator())
    assert torch.equal(
        packed_attention(q, q, q, layout, scale=1.0, buffer=Buffer()), packed_attention(q, q, q, layout, scale=1.0)
    )
