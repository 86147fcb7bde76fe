"""Memory that a forward pass on a CPU uses again for each layer and each step.

The intermediate results of a layer are megabytes of a different size in every step. Taken from the allocator, they make
the heap grow for a minute (MiniLM, steps of 60 to 2048 tokens: from 334 to 579 MiB; with this module to 469) and cost
page faults. Devices with a caching allocator of their own need none of this.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Buffer:
    """One tensor's place; what was taken before is overwritten by what is taken next."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def take(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor; the memory grows when it has to, in steps of a quarter at least."""
        size = torch.Size(shape).numel()
        if self._memory.dtype != dtype or self._memory.numel() < size:
            self._memory = torch.empty(max(size, self._memory.numel() * 5 // 4), dtype=dtype)
        return self._memory[:size].view(shape)


class Scratch:
    """The places of one forward pass: `wide` for fused and intermediate projections, which never live at the same time,
    `attended` for the output of attention, `narrow` for projections back to the hidden size, `sums` for what passes
    through native layers, `scores` for those of the next token. For one thread."""

    def __init__(self) -> None:
        self.wide = Buffer()
        self.attended = Buffer()
        self.narrow = Buffer()
        self.sums = Buffer()
        self.scores = Buffer()
