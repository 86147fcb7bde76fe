"""Attention over the KV cache in blocks, against the slow version that has every sequence's keys and values at hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nobiru.ops.paged_attention import paged_attention
from tests.paged_cases import check, make_case

# (tokens in the cache, tokens of the step)
DECODING = st.tuples(st.integers(0, 90), st.just(1))
FRESH = st.tuples(st.just(0), st.integers(1, 60))
CHUNK = st.tuples(st.integers(1, 90), st.integers(1, 40))


@settings(deadline=None, max_examples=40)
@given(
    spans=st.lists(DECODING, min_size=1, max_size=9)
    | st.lists(FRESH, min_size=1, max_size=6)
    | st.lists(DECODING | FRESH | CHUNK, min_size=1, max_size=9),
    block_size=st.sampled_from([1, 4, 16]),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 2), (7, 1)]),
    head_size=st.sampled_from([8, 16, 48, 64]),
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
@pytest.mark.parametrize("head_size", [16, 64, 128, 256])
@pytest.mark.parametrize(("block_size", "key_heads"), [(4, 2), (16, 6), (16, 2), (16, 1), (32, 3)])
def test_bfloat16(head_size: int, window: int | None, block_size: int, key_heads: int) -> None:
    spans = [(70, 1), (3, 1), (200, 1), (0, 1), (0, 30), (17, 9), (0, 150), (90, 70)]
    case = make_case(
        spans, block_size=block_size, num_heads=6, key_heads=key_heads, head_size=head_size, dtype=torch.bfloat16
    )
    check(case, window=window, tolerance=3e-2)


def test_scores_far_apart_are_weighed_without_overflow() -> None:
    case = make_case([(150, 1), (90, 1)], head_size=16)
    case.q_THD.mul_(60)
    check(case)
