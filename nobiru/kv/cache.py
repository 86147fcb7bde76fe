"""How many blocks the KV cache has, and its memory.

Owns the size of a block in bytes, the decision how many there are, which is pure, and the allocation. Knows nothing of
which sequence holds which block: that is `nobiru.kv.blocks`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from nobiru import machine
from nobiru.errors import ConfigError
from nobiru.ops.paged_layout import LayerCache

# Shares of the free memory that the cache takes when nobody says otherwise. On a CPU the memory belongs to other
# processes too, and to the intermediate results of steps; a CUDA device is the engine's own.
DEFAULT_CPU_SHARE = 0.3
DEFAULT_CUDA_SHARE = 0.85
_UNKNOWN_FREE_BYTES = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheShape:
    """What a block consists of: keys and values of `block_size` tokens in every layer."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    block_size: int

    @property
    def block_bytes(self) -> int:
        values = self.num_layers * self.block_size * self.num_kv_heads * self.head_size
        return 2 * values * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheBudget:
    """Memory for the cache: `memory_bytes` if somebody asked for that much, else `share` of `free_bytes`.

    `is_bounded` keeps a share from taking more than `max_num_seqs` sequences of the greatest length could fill.
    `num_spare_blocks` beyond those that sequences get are the runner's.
    """

    free_bytes: int
    share: float
    memory_bytes: int | None = None
    is_bounded: bool = False
    num_spare_blocks: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(
                f"kv_cache_memory_share is {self.share}; it must be above 0 and at most 1",
                param="kv_cache_memory_share",
            )


def choose_num_blocks(shape: CacheShape, budget: CacheBudget, *, max_model_len: int, max_num_seqs: int) -> int:
    """The blocks that sequences get.

    `ConfigError` when not even one sequence of `max_model_len` tokens fits; it says what would.
    """
    per_sequence = -(-max_model_len // shape.block_size)
    is_explicit = budget.memory_bytes is not None
    allowed = int(budget.free_bytes * budget.share) if budget.memory_bytes is None else budget.memory_bytes
    num_blocks = allowed // shape.block_bytes - budget.num_spare_blocks
    if num_blocks < per_sequence:
        raise _too_small(shape, budget, allowed, max(num_blocks, 0), max_model_len)
    if budget.is_bounded and not is_explicit:
        num_blocks = min(num_blocks, per_sequence * max_num_seqs)
    return num_blocks


def free_memory_bytes(device: torch.device) -> int:
    """What could be allocated on the device now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Memory that torch keeps for later allocations is free too.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free_here = machine.free_memory_bytes()
    return _UNKNOWN_FREE_BYTES if free_here is None else free_here


def default_budget(device: torch.device, *, memory_bytes: int | None = None, share: float | None = None) -> CacheBudget:
    """The budget on a device, measured now; the model should be loaded."""
    on_cpu = device.type == "cpu"
    return CacheBudget(
        free_bytes=free_memory_bytes(device),
        share=share if share is not None else DEFAULT_CPU_SHARE if on_cpu else DEFAULT_CUDA_SHARE,
        memory_bytes=memory_bytes,
        is_bounded=on_cpu,
        num_spare_blocks=0 if on_cpu else 1,
    )


def allocate_cache(
    shape: CacheShape, num_blocks: int, device: torch.device, *, takes_memory: bool = False
) -> list[LayerCache]:
    """One `LayerCache` per layer, of `num_blocks` blocks of zeros.

    On a CPU pages take memory when they are first written, which slows that step down, or, with `takes_memory`, now.
    """
    per_layer = (2, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_size)
    caches = []
    for _ in range(shape.num_layers):
        if device.type == "cpu":
            # NumPy takes zeros from the operating system; torch would write, and so occupy, every page.
            num_bytes = int(np.prod(per_layer)) * shape.dtype.itemsize
            zeros = np.zeros(num_bytes, dtype=np.uint8)
            machine.prefer_huge_pages(zeros.ctypes.data, num_bytes)
            if takes_memory:
                machine.take_memory(zeros.ctypes.data, num_bytes)
            memory = torch.from_numpy(zeros).view(shape.dtype).view(per_layer)
        else:
            memory = torch.zeros(per_layer, dtype=shape.dtype, device=device)
        caches.append(LayerCache(keys_NSKD=memory[0], values_NSKD=memory[1]))
    return caches


def _too_small(
    shape: CacheShape, budget: CacheBudget, allowed: int, num_blocks: int, max_model_len: int
) -> ConfigError:
    needed = (-(-max_model_len // shape.block_size) + budget.num_spare_blocks) * shape.block_bytes
    has = (
        f"{machine.describe_bytes(budget.free_bytes)} are free, of which the KV cache may take {budget.share:.0%}, "
        f"{machine.describe_bytes(allowed)}"
        if budget.memory_bytes is None
        else f"kv_cache_memory_bytes is {allowed} ({machine.describe_bytes(allowed)})"
    )
    remedy = f"set kv_cache_memory_bytes to at least {needed} ({machine.describe_bytes(needed)})"
    if num_blocks:
        remedy += f", or max_model_len to {num_blocks * shape.block_size} at most"
    return ConfigError(
        f"{has}: enough for {num_blocks * shape.block_size} tokens, and one sequence of "
        f"max_model_len = {max_model_len} tokens does not fit; {remedy}",
        param="kv_cache_memory_bytes",
    )
