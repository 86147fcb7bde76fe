"""Attention over the KV cache in blocks, against the slow version that has every sequence's keys and values at hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nobiru.ops import reference
from nobiru.ops.paged_attention import paged_attention
from nobiru.ops.paged_layout import LayerCache, PagedLayout

# (tokens in the cache, tokens of the step)
DECODING = st.tuples(st.integers(0, 90), st.just(1))
FRESH = st.tuples(st.just(0), st.integers(1, 60))
CHUNK = st.tuples(st.integers(1, 90), st.integers(1, 40))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step's inputs, a cache that holds what came before, and every sequence's own keys and values."""

    q_THD: Tensor
    k_TKD: Tensor
    v_TKD: Tensor
    cache: LayerCache
    layout: PagedLayout
    keys: list[Tensor]
    values: list[Tensor]


def make_case(
    spans: list[tuple[int, int]],
    *,
    block_size: int = 4,
    num_heads: int = 4,
    key_heads: int = 2,
    head_size: int = 8,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    in_order: bool = False,
    seed: int = 0,
) -> Case:
    """Blocks are handed out at random, or `in_order`; every slot that nobody owns is not a number."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-(start + length) // block_size) for start, length in spans]
    num_blocks = sum(counts) + 2
    ids = (torch.arange(num_blocks) if in_order else torch.randperm(num_blocks, generator=generator)).numpy()
    shape = (num_blocks, block_size, key_heads, head_size)
    cache = LayerCache(
        keys_NSKD=torch.full(shape, float("nan"), dtype=dtype), values_NSKD=torch.full(shape, float("nan"), dtype=dtype)
    )
    keys, values, blocks = [], [], []
    for (start, length), stop in zip(spans, np.cumsum(counts), strict=True):
        own = ids[stop - -(-(start + length) // block_size) : stop]
        k, v = torch.randn(2, start + length, key_heads, head_size, generator=generator).to(dtype).unbind(0)
        for i in range(start):
            cache.keys_NSKD[own[i // block_size], i % block_size] = k[i]
            cache.values_NSKD[own[i // block_size], i % block_size] = v[i]
        keys.append(k)
        values.append(v)
        blocks.append(own)
    starts, lengths = np.array(spans, dtype=np.int64).T
    num_tokens = int(lengths.sum())
    return Case(
        q_THD=torch.randn(num_tokens, num_heads, head_size, generator=generator).to(device, dtype),
        k_TKD=torch.cat([k[start:] for k, start in zip(keys, starts, strict=True)]).to(device),
        v_TKD=torch.cat([v[start:] for v, start in zip(values, starts, strict=True)]).to(device),
        cache=LayerCache(keys_NSKD=cache.keys_NSKD.to(device), values_NSKD=cache.values_NSKD.to(device)),
        layout=PagedLayout(starts, lengths, blocks, block_size=block_size, device=device),
        keys=keys,
        values=values,
    )


def check(case: Case, *, tolerance: float = 2e-5, window: int | None = None, softcap: float | None = None) -> None:
    """The step's output is the reference's, twice in a row, and the cache holds keys and values as they are."""
    layout = case.layout
    expected = reference.causal_attention(
        case.q_THD.cpu(), case.keys, case.values, layout.lengths_B.tolist(), scale=0.5, window=window, softcap=softcap
    )
    for _ in range(2):
        found = paged_attention(
            case.q_THD, case.k_TKD, case.v_TKD, case.cache, layout, scale=0.5, window=window, softcap=softcap
        )
        assert found.shape == case.q_THD.shape and found.dtype == case.q_THD.dtype
        torch.testing.assert_close(found.cpu().double(), expected, atol=tolerance, rtol=tolerance)
    for rows, stored in ((case.keys, case.cache.keys_NSKD), (case.values, case.cache.values_NSKD)):
        for index, row in enumerate(rows):
            blocks = layout.block_table_BM[index, : layout.num_blocks_B[index]]
            assert torch.equal(stored.cpu()[blocks].flatten(0, 1)[: len(row)], row)


@settings(deadline=None, max_examples=40)
@given(
    spans=st.lists(DECODING, min_size=1, max_size=9)
    | st.lists(FRESH, min_size=1, max_size=6)
    | st.lists(DECODING | FRESH | CHUNK, min_size=1, max_size=9),
    block_size=st.sampled_from([1, 4, 16]),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 2), (7, 1)]),
    head_size=st.sampled_from([8, 16, 48]),
    window=st.none() | st.integers(1, 70),
    softcap=st.none() | st.sampled_from([1.5, 30.0]),
    in_order=st.booleans(),
    seed=st.integers(0, 9),
)
def test_paged_attention_equals_one_token_at_a_time(
    spans: list[tuple[int, int]],
    block_size: int,
    heads: tuple[int, int],
    head_size: int,
    window: int | None,
    softcap: float | None,
    in_order: bool,
    seed: int,
) -> None:
    case = make_case(spans, block_size=block_size, num_heads=heads[0], key_heads=heads[1], in_order=in_order, seed=seed)
    check(case, window=window, softcap=softcap)


def test_queries_may_lie_anywhere_in_memory() -> None:
    case = make_case([(20, 1), (3, 1), (0, 1)], head_size=16)
    q_HTD = case.q_THD.transpose(0, 1).contiguous()
    wide = torch.randn(3, 4, 40)
    wide[..., 5:21] = case.q_THD
    expected = paged_attention(case.q_THD, case.k_TKD, case.v_TKD, case.cache, case.layout, scale=0.5)
    for q_THD in (q_HTD.transpose(0, 1), wide[..., 5:21]):
        found = paged_attention(q_THD, case.k_TKD, case.v_TKD, case.cache, case.layout, scale=0.5)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("head_size", [16, 64, 128])
def test_bfloat16(head_size: int, window: int | None) -> None:
    spans = [(70, 1), (3, 1), (200, 1), (0, 1), (0, 30), (17, 9)]
    case = make_case(spans, num_heads=6, head_size=head_size, dtype=torch.bfloat16)
    check(case, window=window, tolerance=3e-2)


def test_scores_far_apart_are_weighed_without_overflow() -> None:
    case = make_case([(150, 1), (90, 1)], head_size=16)
    case.q_THD.mul_(60)
    check(case)
