"""Shares of tensor parallelism: everything is somewhere, once, and queries lie beside their keys."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from nobiru.errors import ConfigError
from nobiru.layers.sharding import Shard
from nobiru.models import safetensors_file
from nobiru.models.safetensors_file import SafetensorsFile

SIZES = st.integers(1, 9)


@given(size=SIZES, num_kv_heads=st.integers(1, 16), heads_per_key=st.integers(1, 8))
def test_queries_are_with_their_keys(size: int, num_kv_heads: int, heads_per_key: int) -> None:
    num_heads = num_kv_heads * heads_per_key
    if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
        for index in range(size):
            with pytest.raises(ConfigError, match=f"tensor_parallel_size is {size}"):
                Shard(index, size).heads(num_heads, num_kv_heads)
        return
    shares = [Shard(index, size).heads(num_heads, num_kv_heads) for index in range(size)]
    assert [head for share in shares for head in share.queries] == list(range(num_heads))
    copies = [head for share in shares for head in share.keys]
    for share in shares:
        per_key = len(share.queries) // len(share.keys)
        assert [share.keys[number // per_key] for number in range(len(share.queries))] == [
            query // heads_per_key for query in share.queries
        ]
        assert all(copies.count(key) == share.num_copies for key in range(num_kv_heads))


@given(size=SIZES, total=st.integers(0, 200))
def test_parts_and_blocks_cover_everything_once(size: int, total: int) -> None:
    shards = [Shard(index, size) for index in range(size)]
    blocks = [shard.block(total) for shard in shards]
    assert [number for rows, _ in blocks for number in rows] == list(range(total))
    assert all(len(rows) <= num_rows for rows, num_rows in blocks)
    if total < size:
        with pytest.raises(ConfigError, match=f"has {total} columns only"):
            shards[0].part(total, "columns")
        return
    parts = [shard.part(total, "columns") for shard in shards]
    assert [number for part in parts for number in part] == list(range(total))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("passing_bytes", [1, 64, 1000])
def test_columns_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passing_bytes: int) -> None:
    monkeypatch.setattr(safetensors_file, "_MAX_PASSING_BYTES", passing_bytes)
    tensors = {"a": torch.randn(13, 7), "b": torch.randn(5, 4, 3).bfloat16()}
    save_file(tensors, tmp_path / "model.safetensors")
    file = SafetensorsFile(tmp_path / "model.safetensors")
    for name, whole in tensors.items():
        for begin, end in ((0, 1), (1, 4), (2, 2), (0, 4)):
            assert torch.equal(file.columns(name, begin, end), whole[:, begin:end])
            assert torch.equal(file.rows(name, begin, end), whole[begin:end])
