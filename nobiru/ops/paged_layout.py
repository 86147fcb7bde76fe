"""Where the tokens of one step lie: in the batch, one sequence after another, and in the blocks of the KV cache.

Owns the cache's arrangement in memory and the arithmetic of a step's places in it. Knows nothing of token ids, models
or requests, nor of who owns which block.

Shape legend: B sequences, T tokens of the step in all, t those of one sequence, N blocks of the cache, S slots (tokens)
of a block, K key heads, D values a head, M blocks of the sequence that has most.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.int64]
Derived = TypeVar("Derived")
_PLACES = ("positions_T", "slots_T", "last_B", "cu_lengths", "cu_contexts", "context_lengths", "block_table")
BlockIds = Sequence[int] | NDArray[np.integer]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCache:
    """Keys and values of one layer, both [N, S, K, D]. Token i of a sequence lies in slot i % S of its block i // S."""

    keys_NSKD: Tensor
    values_NSKD: Tensor

    @property
    def block_size(self) -> int:
        return self.keys_NSKD.shape[1]


class PagedLayout:
    """The places of one step's tokens; tensors are on `device`.

    Sequence i has `starts_B[i]` tokens in the cache already and `lengths_B[i]` in this step. Its blocks `block_ids[i]`
    are in order, enough for both together, which is its context, `contexts_B[i]`. Sequences keep the order they have.
    `table_width` makes block tables that wide, whatever the sequences' lengths.
    """

    def __init__(
        self,
        starts_B: Integers,
        lengths_B: Integers,
        block_ids: Sequence[BlockIds],
        *,
        block_size: int,
        device: torch.device | str = "cpu",
        table_width: int | None = None,
    ) -> None:
        assert lengths_B.size and (lengths_B > 0).all() and (starts_B >= 0).all(), "no sequence is empty"
        self.starts_B = starts_B
        self.lengths_B = lengths_B
        self.contexts_B = starts_B + lengths_B
        self.block_size = block_size
        self.device = torch.device(device)
        self._derived: dict[Hashable, Any] = {}
        self.ends_B = np.cumsum(lengths_B)
        self.num_blocks_B = -(-self.contexts_B // block_size)
        # Beyond a sequence's own blocks the table repeats block 0, which exists whenever any does.
        self._table_width = table_width
        width = table_width or int(self.num_blocks_B.max())
        self.block_table_BM = np.zeros((lengths_B.size, width), dtype=np.int64)
        for row, (ids, count) in enumerate(zip(block_ids, self.num_blocks_B.tolist(), strict=True)):
            assert len(ids) >= count, "enough blocks for all tokens"
            self.block_table_BM[row, :count] = ids[:count]

    @property
    def num_seqs(self) -> int:
        return self.lengths_B.size

    @property
    def num_tokens(self) -> int:
        return int(self.ends_B[-1])

    @property
    def max_length(self) -> int:
        """The most tokens that one sequence has in this step."""
        return int(self.lengths_B.max())

    @property
    def max_context(self) -> int:
        """The longest context, or with a fixed table the longest that fits."""
        return self._table_width * self.block_size if self._table_width else int(self.contexts_B.max())

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one token in this step."""
        return self.num_tokens == self.num_seqs

    @cached_property
    def positions(self) -> Integers:
        """[T]: each token's place in its sequence, from 0."""
        return np.arange(self.num_tokens) + np.repeat(self.contexts_B - self.ends_B, self.lengths_B)

    @cached_property
    def positions_T(self) -> Tensor:
        return self.to_device(self.positions)

    @cached_property
    def slots_T(self) -> Tensor:
        """[T] int64: each token's row in a layer's keys and values, seen as [N * S, K, D]."""
        return self.to_device(self.slots_of(np.repeat(np.arange(self.num_seqs), self.lengths_B), self.positions))

    def slots_of(self, seqs: Integers, positions: Integers) -> Integers:
        """The rows in the cache of tokens at `positions` of sequences number `seqs`; the two broadcast."""
        blocks = self.block_table_BM[seqs, positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    @cached_property
    def last_B(self) -> Tensor:
        """[B] int64: where in the batch each sequence's last token is."""
        return self.to_device(self.ends_B - 1)

    @cached_property
    def cu_lengths(self) -> Tensor:
        """[B + 1] int32: where sequences begin in the batch, and the end of the last."""
        return self.to_device(np.concatenate(([0], self.ends_B)).astype(np.int32))

    @cached_property
    def cu_contexts(self) -> Tensor:
        """[B + 1] int32: where contexts begin, laid one after another, and the end of the last."""
        return self.to_device(np.concatenate(([0], np.cumsum(self.contexts_B))).astype(np.int32))

    @cached_property
    def context_slots(self) -> Tensor:
        """int64: the rows in the cache of all contexts' tokens, one context after another."""
        seqs = np.repeat(np.arange(self.num_seqs), self.contexts_B)
        begins = np.repeat(np.cumsum(self.contexts_B) - self.contexts_B, self.contexts_B)
        return self.to_device(self.slots_of(seqs, np.arange(seqs.size) - begins))

    @cached_property
    def block_table(self) -> Tensor:
        """[B, M] int32: each sequence's blocks; block 0 behind its last."""
        return self.to_device(self.block_table_BM.astype(np.int32))

    @cached_property
    def context_lengths(self) -> Tensor:
        """[B] int32."""
        return self.to_device(self.contexts_B.astype(np.int32))

    def take_places_of(self, other: PagedLayout) -> None:
        """Puts the other's places into this layout's own tensors, whose addresses a CUDA graph knows.

        Both have the same shape. Only these tensors change; whoever reads them again finds the other's places.
        """
        for name in _PLACES:
            getattr(self, name).copy_(getattr(other, name), non_blocking=True)

    def derive(self, key: Hashable, make: Callable[[], Derived]) -> Derived:
        """What somebody works out from this layout once a step: made the first time, then found under `key`."""
        if key not in self._derived:
            self._derived[key] = make()
        found: Derived = self._derived[key]
        return found

    def to_device(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
