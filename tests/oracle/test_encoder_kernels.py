"""The encoder's kernels in C against torch in float64, and which of them a processor gets."""

from __future__ import annotations

import shutil
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from nobiru import machine
from nobiru.ops.native.encoder import (
    Arithmetic,
    ArrangedLayer,
    EncoderKernels,
    EncoderShape,
    choose_arithmetic,
    load_encoder_kernels,
    plan_runs,
)
from nobiru.ops.native.library import load_kernels
from nobiru.ops.quantize import quantize_rows, rounded_rows

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")

HEAD_SIZES = (32, 48, 64, 80, 96, 128)
ALL = frozenset({"avx512_bf16", "amx_bf16", "amx_int8", "avx512_vnni", "avx2"})
Pair = tuple[Tensor, Tensor]


@cache
def kernels_without(*flags: str) -> EncoderKernels:
    """The kernels as a processor without these instructions gets them."""
    kernels = load_kernels()
    assert kernels is not None, "there is a compiler, so there are kernels"
    return EncoderKernels(kernels, machine.cpu_flags() - set(flags))


def attended(q: Tensor, k: Tensor, v: Tensor, bounds: NDArray[np.int64], bias: Tensor | None) -> Tensor:
    out = torch.empty(q.shape, dtype=torch.float64)
    for start, end in pairwise(bounds.tolist()):
        q_HLD, k_HLD, v_HLD = (x[start:end].double().transpose(0, 1) for x in (q, k, v))
        scores = q_HLD @ k_HLD.mT * q.shape[-1] ** -0.5
        if bias is not None:
            scores += bias[:, : end - start, : end - start]
        out[start:end] = (scores.softmax(-1) @ v_HLD).transpose(0, 1)
    return out


def bounds_of(lengths: list[int]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(lengths)))


@pytest.mark.parametrize("kind", ["float32", "bfloat16 in vectors", "bfloat16 in tiles"])
@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(
        st.integers(1, 70) | st.sampled_from([1, 15, 16, 17, 31, 32, 33, 64, 512]), min_size=1, max_size=4
    ),
    head_size=st.sampled_from(HEAD_SIZES),
    heads=st.integers(1, 3),
    biased=st.booleans(),
    threads=st.integers(1, 2),
)
def test_attention(kind: str, lengths: list[int], head_size: int, heads: int, biased: bool, threads: int) -> None:
    kernels = kernels_without(*(() if "tiles" in kind else ("amx_tile",)))
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    if not kernels.attends(dtype, head_size) or ("tiles" in kind and "amx_bf16" not in kernels.instructions):
        pytest.skip("not on this processor")
    random = torch.Generator().manual_seed(sum(lengths))
    bounds, num_tokens = bounds_of(lengths), sum(lengths)
    q, k, v = torch.randn(num_tokens, 3, heads, head_size, generator=random).to(dtype).unbind(1)
    bias = torch.randn(heads, max(lengths), max(lengths) + 3, generator=random) if biased else None
    out = torch.full((num_tokens, heads, head_size), torch.nan, dtype=dtype)
    kernels.attend(q, k, v, bounds, out, scale=head_size**-0.5, bias_HMM=bias, num_threads=threads)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), attended(q, k, v, bounds, bias), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", ["float32", "bfloat16 in vectors", "bfloat16 in tiles"])
@pytest.mark.parametrize("size", [1e2, 1e10, 3e38, 1e-38, 0.0])
@pytest.mark.parametrize("length", [1, 17, 64])
def test_attention_of_extreme_values(kind: str, size: float, length: int) -> None:
    kernels = kernels_without(*(() if "tiles" in kind else ("amx_tile",)))
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    if not kernels.attends(dtype, 32) or ("tiles" in kind and "amx_bf16" not in kernels.instructions):
        pytest.skip("not on this processor")
    signs = torch.randint(0, 2, (length, 2, 2, 32), generator=torch.Generator().manual_seed(0)) * 2 - 1
    q, k = (signs * size).to(dtype).unbind(1)
    v = torch.randn(length, 4, 32, generator=torch.Generator().manual_seed(1)).to(dtype)[:, ::2]
    x = torch.stack((q, k, v), 1)  # one projection, as encoders have it
    out = torch.empty(length, 2, 32, dtype=dtype)
    kernels.attend(*x.unbind(1), bounds_of([length]), out, scale=32**-0.5)
    assert out.isfinite().all()
    assert out.float().abs().max() <= v.float().abs().max() * 1.01


class Stack:
    """Random layers, computed in float64 beside the kernels."""

    def __init__(self, width: int, inner: int, heads: int, activation: str) -> None:
        self.width, self.inner, self.heads, self.activation = width, inner, heads, activation
        self.random = torch.Generator().manual_seed(width + inner)
        self.layers = [
            (
                self._pair(3 * width, width),
                self._pair(width, width),
                self._pair(inner, width),
                self._pair(width, inner),
                self._norm(),
                self._norm(),
            )
            for _ in range(2)
        ]

    def _pair(self, num_out: int, num_in: int) -> Pair:
        weight = torch.randn(num_out, num_in, generator=self.random) * num_in**-0.5
        return weight.bfloat16().float(), torch.randn(num_out, generator=self.random) * 0.1

    def _norm(self) -> Pair:
        noise = torch.randn(2, self.width, generator=self.random) * 0.1
        return 1 + noise[0], noise[1]

    def exact(self, hidden: Tensor, lengths: list[int], bias: Tensor | None) -> Tensor:
        functions = {
            "gelu": F.gelu,
            "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
            "relu": F.relu,
            "silu": F.silu,
        }
        functions["none"] = lambda x: x
        hidden, bounds = hidden.double(), bounds_of(lengths)
        for qkv, out, up, down, first, second in self.layers:
            q, k, v = linear(hidden, qkv).view(len(hidden), 3, self.heads, -1).unbind(1)
            hidden = hidden + linear(attended(q, k, v, bounds, bias).flatten(1), out)
            hidden = norm(hidden, first)
            hidden = norm(hidden + linear(functions[self.activation](linear(hidden, up)), down), second)
        return hidden

    def encoded(
        self,
        kernels: EncoderKernels,
        arithmetic: Arithmetic,
        hidden: Tensor,
        lengths: list[int],
        bias: Tensor | None,
        threads: int,
        rows: NDArray[np.int64] | None = None,
    ) -> Tensor:
        shape = EncoderShape(
            width=self.width,
            inner=self.inner,
            num_heads=self.heads,
            activation=self.activation,
            arithmetic=arithmetic,
            dtype=hidden.dtype,
        )
        layers = [
            ArrangedLayer(
                qkv=kernels.arrange(qkv[0].to(hidden.dtype), qkv[1], arithmetic),
                out=kernels.arrange(out[0].to(hidden.dtype), out[1], arithmetic),
                up=kernels.arrange(up[0].to(hidden.dtype), up[1], arithmetic),
                down=kernels.arrange(down[0].to(hidden.dtype), down[1], arithmetic),
                attention_norm=(*first, 1e-12),
                output_norm=(*second, 1e-12),
            )
            for qkv, out, up, down, first, second in self.layers
        ]
        bounds = bounds_of(lengths)
        return kernels.encode(shape, layers, hidden, bounds, bias_HMM=bias, num_threads=threads, rows_R=rows)


def linear(x: Tensor, pair: Pair) -> Tensor:
    return x @ pair[0].double().mT + pair[1].double()


def norm(x: Tensor, pair: Pair) -> Tensor:
    return F.layer_norm(x, x.shape[1:], pair[0].double(), pair[1].double(), 1e-12)


@cache
def stack(*shape: int | str) -> Stack:
    return Stack(*shape)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "quantized", "missing", "expected", "tolerance"),
    [
        (torch.float32, False, (), Arithmetic.FLOATS, 1e-5),
        (torch.bfloat16, False, (), Arithmetic.AMX_BF16, 0.05),
        (torch.bfloat16, False, ("amx_tile",), Arithmetic.AVX512_BF16, 0.05),
        (torch.bfloat16, True, (), Arithmetic.AMX_INT8, 0.12),
        (torch.bfloat16, True, ("amx_tile",), Arithmetic.AVX512_VNNI, 0.12),
        (torch.float32, True, (), Arithmetic.AMX_INT8, 0.12),
        (torch.float32, True, ("amx_tile",), Arithmetic.AVX512_VNNI, 0.12),
        (torch.bfloat16, True, ("amx_tile", "avx512_vnni"), Arithmetic.AVX2, 0.15),
        (torch.float32, True, ("amx_tile", "avx512_vnni"), Arithmetic.AVX2, 0.15),
    ],
)
@settings(deadline=None, max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 40) | st.integers(100, 150), min_size=1, max_size=12),
    shape=st.sampled_from(
        [(64, 128, 2, "gelu"), (192, 320, 4, "gelu_tanh"), (128, 64, 1, "relu"), (64, 192, 2, "silu")]
    ),
    biased=st.booleans(),
    threads=st.integers(1, 3),
    asked=st.sampled_from(["all", "first", "last", "both"]),
)
def test_layers(
    dtype: torch.dtype,
    quantized: bool,
    missing: tuple[str, ...],
    expected: Arithmetic,
    tolerance: float,
    lengths: list[int],
    shape: tuple[int, int, int, str],
    biased: bool,
    threads: int,
    asked: str,
) -> None:
    kernels, one = kernels_without(*missing), stack(*shape)
    arithmetic = choose_arithmetic(dtype, shape[:2], kernels.instructions, quantized=quantized)
    if arithmetic != expected:
        pytest.skip("not on this processor")
    assert arithmetic is not None
    lengths = sorted(lengths)
    hidden = torch.randn(sum(lengths), one.width, generator=torch.Generator().manual_seed(len(lengths))).to(dtype)
    bias = torch.randn(shape[2], 150, 160, generator=torch.Generator().manual_seed(3)) if biased else None
    before = hidden.clone()
    bounds = bounds_of(lengths)
    ends = {"all": [np.arange(sum(lengths))], "first": [bounds[:-1]], "last": [bounds[1:] - 1]}
    rows = np.unique(np.concatenate(ends.get(asked, ends["first"] + ends["last"])))
    found = one.encoded(kernels, arithmetic, hidden, lengths, bias, threads, None if asked == "all" else rows)
    assert torch.equal(hidden, before)
    assert found.dtype == dtype and found.shape == hidden.shape
    exact = one.exact(hidden, lengths, bias)[rows]
    torch.testing.assert_close(found[rows].double(), exact, atol=tolerance, rtol=tolerance)


@given(
    bfloat16=st.booleans(),
    quantized=st.booleans(),
    sizes=st.lists(st.sampled_from([32, 48, 64, 96, 384, 1536]), min_size=1, max_size=3),
    instructions=st.frozensets(st.sampled_from(sorted(ALL))),
)
def test_chosen_arithmetic_is_possible(
    bfloat16: bool, quantized: bool, sizes: list[int], instructions: frozenset[str]
) -> None:
    chosen = choose_arithmetic(torch.bfloat16 if bfloat16 else torch.float32, sizes, instructions, quantized=quantized)
    if chosen is None:
        no_halves = bfloat16 and "avx512_bf16" not in instructions
        no_bytes = quantized and not instructions & {"avx512_vnni", "avx2"}
        assert 48 in sizes or no_halves or no_bytes
        return
    assert chosen.is_int8 == quantized
    assert chosen == Arithmetic.FLOATS or chosen.name.lower() in instructions
    assert not bfloat16 or "avx512_bf16" in instructions
    if chosen == Arithmetic.AMX_INT8:
        assert all(size % 64 == 0 for size in sizes)
    if chosen == Arithmetic.AVX512_VNNI:
        assert "amx_int8" not in instructions or any(size % 64 for size in sizes)
    if chosen == Arithmetic.AVX2:
        assert "avx512_vnni" not in instructions
    if chosen == Arithmetic.AVX512_BF16:
        assert "amx_bf16" not in instructions


def test_no_kernels_for_float16() -> None:
    assert choose_arithmetic(torch.float16, [64], ALL, quantized=False) is None


@given(
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=300),
    threads=st.integers(1, 16),
    width=st.sampled_from([64, 384, 1024]),
)
def test_runs_are_all_sequences_and_even(lengths: list[int], threads: int, width: int) -> None:
    sizes = np.array(lengths)
    runs = plan_runs(sizes, threads, width)
    firsts, ends = runs[runs[:, 0].argsort()].T
    assert firsts[0] == 0 and ends[-1] == len(lengths) and (firsts < ends).all() and (firsts[1:] == ends[:-1]).all()
    if len(runs) > 1:
        work = [(part * (6 * width + part)).sum() for part in (sizes[first:end] for first, end in runs)]
        assert max(work) * threads <= 1.5 * sum(work) and work == sorted(work, reverse=True)


@given(rows=st.integers(1, 9), columns=st.integers(1, 40), scale=st.floats(1e-20, 1e20), zero=st.booleans())
def test_quantized_rows(rows: int, columns: int, scale: float, zero: bool) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * scale
    if zero:
        weight[0] = 0
    quantized, scales = quantize_rows(weight)
    assert quantized.dtype == torch.int8 and quantized.abs().max() <= 127
    assert ((rounded_rows(weight) - weight).abs() <= scales[:, None] * 0.5001).all()
    assert torch.equal(rounded_rows(weight), quantized.float() * scales[:, None])
    small, wider = quantize_rows(weight, 64)
    assert small.abs().max() <= 64 and ((small * wider[:, None] - weight).abs() <= wider[:, None] * 0.5001).all()


def test_kernels_of_this_process() -> None:
    kernels = load_encoder_kernels()
    assert kernels is not None and kernels.instructions <= machine.cpu_flags() & ALL
