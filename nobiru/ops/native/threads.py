"""How many threads the kernels of this package use: as many as torch, unless the calling thread has them use others.

Both have threads of their own, and torch's (OpenMP) spin for milliseconds behind each operation. Beside kernels that
run on all cores they only take time away, so a forward pass of kernels leaves torch one thread. Decode steps of 32
sequences of a 135M model on 2 cores: 51 ms with torch's threads spinning, 44 without.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_of_thread = threading.local()


def num_threads() -> int:
    """Threads for a kernel that the calling thread calls."""
    count: int = getattr(_of_thread, "count", 0)
    return count or torch.get_num_threads()


@contextmanager
def kernels_only(count: int) -> Iterator[None]:
    """In the calling thread, kernels use `count` threads and torch one; for a while, since torch's is everybody's."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    _of_thread.count = count
    try:
        yield
    finally:
        _of_thread.count = 0
        torch.set_num_threads(before)
