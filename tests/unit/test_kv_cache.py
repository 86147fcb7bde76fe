"""How many blocks the KV cache gets, what is refused, and that untouched blocks take no memory."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nobiru.errors import ConfigError
from nobiru.kv.cache import CacheBudget, CacheShape, allocate_cache, choose_num_blocks, default_budget

CPU = torch.device("cpu")
SHAPE = CacheShape(num_layers=3, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, block_size=16)
BLOCK_BYTES = 2 * 3 * 16 * 2 * 8 * 2


def budget(
    memory_bytes: int | None = None, *, free: int = 0, bounded: bool = False, spare: int = 0, share: float = 0.5
) -> CacheBudget:
    return CacheBudget(
        free_bytes=free, share=share, memory_bytes=memory_bytes, is_bounded=bounded, num_spare_blocks=spare
    )


def choose(chosen: CacheBudget, max_model_len: int = 64, max_num_seqs: int = 4) -> int:
    return choose_num_blocks(SHAPE, chosen, max_model_len=max_model_len, max_num_seqs=max_num_seqs)


def test_a_block_is_keys_and_values_of_all_layers() -> None:
    assert SHAPE.block_bytes == BLOCK_BYTES


def test_explicit_bytes_are_used_to_the_full() -> None:
    assert choose(budget(100 * BLOCK_BYTES + 5)) == 100
    assert choose(budget(100 * BLOCK_BYTES, bounded=True)) == 100
    assert choose(budget(100 * BLOCK_BYTES, spare=1)) == 99


def test_a_share_is_bounded_by_what_sequences_could_fill() -> None:
    assert choose(budget(free=200 * BLOCK_BYTES)) == 100
    assert choose(budget(free=200 * BLOCK_BYTES, bounded=True)) == 4 * 4
    assert choose(budget(free=200 * BLOCK_BYTES, bounded=True), max_model_len=65) == 5 * 4


@given(
    blocks=st.integers(0, 40),
    max_model_len=st.integers(1, 800),
    spare=st.sampled_from([0, 1]),
    explicit=st.booleans(),
)
def test_what_a_refusal_advises_works(blocks: int, max_model_len: int, spare: int, explicit: bool) -> None:
    sized = blocks * BLOCK_BYTES
    chosen = budget(sized if explicit else None, free=2 * sized, spare=spare)
    per_sequence = -(-max_model_len // 16)
    if blocks - spare >= per_sequence:
        assert choose(chosen, max_model_len) == blocks - spare
        return
    with pytest.raises(ConfigError, match=f"max_model_len = {max_model_len} tokens does not fit") as refused:
        choose(chosen, max_model_len)
    advised = re.search(r"kv_cache_memory_bytes to at least (\d+)", refused.value.message)
    assert advised and refused.value.param == "kv_cache_memory_bytes"
    assert choose(budget(int(advised[1]), spare=spare), max_model_len) == per_sequence
    shorter = re.search(r"max_model_len to (\d+) at most", refused.value.message)
    assert (shorter is not None) == (blocks > spare)
    if shorter:
        assert choose(chosen, int(shorter[1])) == blocks - spare
        with pytest.raises(ConfigError):
            choose(chosen, int(shorter[1]) + 1)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory_share"):
        budget(share=share)


def test_the_default_on_a_cpu_is_a_part_of_what_is_free() -> None:
    chosen = default_budget(CPU)
    assert chosen.free_bytes > 0 and chosen.is_bounded and chosen.num_spare_blocks == 0 and chosen.share == 0.3
    assert default_budget(CPU, share=0.7).share == 0.7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_allocated_layers_are_apart_and_zero(dtype: torch.dtype) -> None:
    shape = CacheShape(num_layers=2, num_kv_heads=2, head_size=4, dtype=dtype, block_size=8)
    caches = allocate_cache(shape, 5, CPU)
    assert len(caches) == 2 and caches[0].block_size == 8
    tensors = [each for cache in caches for each in (cache.keys_NSKD, cache.values_NSKD)]
    assert all(each.shape == (5, 8, 2, 4) and each.dtype == dtype and not each.any() for each in tensors)
    tensors[0].fill_(1)
    assert not any(each.any() for each in tensors[1:])
    assert sum(each.nbytes for each in tensors) == 5 * shape.block_bytes


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_blocks_take_memory_at_once_when_asked_to() -> None:
    shape = CacheShape(num_layers=2, num_kv_heads=8, head_size=64, dtype=torch.float32, block_size=16)
    before = resident_bytes()
    caches = allocate_cache(shape, 2**27 // shape.block_bytes, CPU, takes_memory=True)
    assert resident_bytes() - before > 0.9 * 2**27
    assert not any(cache.keys_NSKD.any() or cache.values_NSKD.any() for cache in caches)


def test_blocks_take_memory_when_they_are_written() -> None:
    shape = CacheShape(num_layers=1, num_kv_heads=8, head_size=64, dtype=torch.float32, block_size=16)
    before = resident_bytes()
    (cache,) = allocate_cache(shape, 2**30 // shape.block_bytes, CPU)
    assert resident_bytes() - before < 2**27
    cache.keys_NSKD[:16].fill_(1)
