"""Which blocks of the KV cache hold what: ids, reference counts, and the contents that may be shared.

Owns block ids only; the tensors are `nobiru.kv.cache`'s. Pure Python, no torch.

A block is *held* while its count is above zero. Released blocks keep their contents and wait in a free list, least
recently used first, until they are allocated anew; until then a request with the same prefix can take them back.

A full block's contents are known by (contents of the block before, its own tokens). The first part is the number of
the entry that published the block before, not a hash, and the tokens are compared as they are: contents cannot be
mixed up by a collision. An entry number is never used again, so blocks behind an evicted one are simply not found.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nobiru.errors import NobiruError

Key = tuple[int, tuple[int, ...]]


class OutOfBlocksError(NobiruError):
    """Fewer free blocks than asked for; nothing was allocated."""


@dataclass(slots=True)
class _Block:
    """`entry` numbers its contents, 0 while they are not findable; `key` is set where this block is the one found."""

    ref_count: int = 0
    entry: int = 0
    key: Key | None = None


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks is {num_blocks} and block_size {block_size}; both must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._free: dict[int, None] = dict.fromkeys(range(num_blocks))  # insertion order: least recently used first
        self._published: dict[Key, int] = {}
        self._roots: dict[str, int] = {}
        self._num_entries = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks; what they held is forgotten. `OutOfBlocksError` when there are not as many."""
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} KV blocks are needed, {len(self._free)} are free")
        taken = [self._take_least_recent() for _ in range(count)]
        for block_id in taken:
            self._blocks[block_id].ref_count = 1
        return taken

    def release(self, block_ids: Sequence[int]) -> None:
        """Give a sequence's blocks back, in their order; the last ones are the first to be used again."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            if block.ref_count < 1:
                raise ValueError(f"KV block {block_id} is released more often than it was taken")
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free[block_id] = None

    def find_prefix(self, token_ids: Sequence[int], salt: str = "") -> list[int]:
        """The blocks that hold the longest known prefix of `token_ids`, in whole blocks; nothing is taken yet."""
        found: list[int] = []
        before = self._roots.get(salt, 0)
        for begin in range(0, len(token_ids) - self.block_size + 1 if before else 0, self.block_size):
            block_id = self._published.get((before, tuple(token_ids[begin : begin + self.block_size])))
            if block_id is None:
                break
            found.append(block_id)
            before = self._blocks[block_id].entry
        return found

    def share(self, block_ids: Iterable[int]) -> None:
        """Hold found blocks, beside whoever holds them already."""
        for block_id in block_ids:
            self._blocks[block_id].ref_count += 1
            self._free.pop(block_id, None)

    def num_free_beside(self, block_ids: Iterable[int]) -> int:
        """How many blocks could be allocated once these were shared."""
        return len(self._free) - sum(block_id in self._free for block_id in block_ids)

    def publish(self, block_ids: Sequence[int], token_ids: Sequence[int], first: int, salt: str = "") -> None:
        """Make blocks `first`, `first` + 1, … of a sequence findable, as far as `token_ids` fill them.

        `block_ids` are all of the sequence's blocks and `token_ids` the tokens whose keys and values are in the cache.
        Contents that are known already stay known by the block that had them first.
        """
        before = self._root(salt) if first == 0 else self._blocks[block_ids[first - 1]].entry
        for number in range(first, len(token_ids) // self.block_size):
            if before == 0:
                return  # the block before is not findable, so neither is this one
            key = (before, tuple(token_ids[number * self.block_size : (number + 1) * self.block_size]))
            block = self._blocks[block_ids[number]]
            known = self._published.get(key)
            if known is None and block.key is None:
                self._num_entries += 1
                block.entry, block.key = self._num_entries, key
                self._published[key] = block_ids[number]
            elif known is not None:
                block.entry = self._blocks[known].entry
            before = block.entry

    def _root(self, salt: str) -> int:
        if salt not in self._roots:
            self._num_entries += 1
            self._roots[salt] = self._num_entries
        return self._roots[salt]

    def _take_least_recent(self) -> int:
        block_id = next(iter(self._free))
        del self._free[block_id]
        block = self._blocks[block_id]
        if block.key is not None:
            del self._published[block.key]
        block.entry, block.key = 0, None
        return block_id
