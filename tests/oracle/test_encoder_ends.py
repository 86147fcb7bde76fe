"""Embeddings and sums of tokens by the kernels, against torch."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from nobiru.ops.native.encoder_ends import ends_for

DTYPES = (torch.float32, torch.bfloat16)
ends = ends_for(torch.empty(1, 32))
pytestmark = pytest.mark.skipif(ends is None, reason="no kernels here")


@settings(max_examples=60, deadline=None)
@given(
    num_tokens=st.integers(1, 300),
    width=st.sampled_from([32, 96, 384, 768]),
    dtype=st.sampled_from(DTYPES),
    words_dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_embeddings(num_tokens: int, width: int, dtype: torch.dtype, words_dtype: torch.dtype, seed: int) -> None:
    assert ends is not None
    torch.manual_seed(seed)
    words_VC, positions_PC = torch.randn(50, width).to(words_dtype), torch.randn(40, width).to(dtype)
    weight_C, bias_C = torch.randn(width).to(dtype), torch.randn(width).to(dtype)
    ids_T, places_T = torch.randint(0, 50, (num_tokens,), dtype=torch.int32), torch.randint(0, 40, (num_tokens,))
    found_TC = ends.embed(ids_T, places_T, words_VC, positions_PC, (weight_C.float(), bias_C.float(), 1e-12))
    sums_TC = words_VC.double()[ids_T.long()] + positions_PC.double()[places_T]
    expected_TC = F.layer_norm(sums_TC, (width,), weight_C.double(), bias_C.double(), 1e-12)
    assert found_TC.dtype == dtype
    step = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(found_TC.double(), expected_TC, rtol=step, atol=step)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=30),
    width=st.sampled_from([32, 96, 384, 768]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_sums_of_tokens(lengths: list[int], width: int, dtype: torch.dtype, seed: int) -> None:
    assert ends is not None
    torch.manual_seed(seed)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    hidden_TC = torch.randn(int(starts[-1]), width).to(dtype)
    weights_T = torch.rand(int(starts[-1])).numpy()
    found_BC = ends.sum_tokens(hidden_TC, weights_T, starts)
    weighted_TC = hidden_TC.double() * torch.from_numpy(weights_T).double()[:, None]
    expected_BC = torch.stack([weighted_TC[a:b].sum(0) for a, b in pairwise(starts)])
    assert found_BC.dtype == torch.float32
    torch.testing.assert_close(found_BC.double(), expected_BC, rtol=1e-5, atol=1e-4)


def test_what_is_not_taken() -> None:
    assert ends_for(torch.empty(3, 40)) is None
    assert ends_for(torch.empty(3, 64), torch.empty(3, 64, dtype=torch.float16)) is None
    assert ends_for(torch.empty(3, 64, device="meta")) is None
