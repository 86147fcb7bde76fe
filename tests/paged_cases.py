"""Steps over a KV cache in blocks, with every sequence's own keys and values at hand; needs torch and numpy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nobiru.ops import reference
from nobiru.ops.paged_attention import paged_attention
from nobiru.ops.paged_layout import LayerCache, PagedLayout


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
