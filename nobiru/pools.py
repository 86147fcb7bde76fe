"""Pools of threads that exist from the start.

A `ThreadPoolExecutor` starts a thread whenever none of its own is idle, so that a process that has served for hours may
still grow by one. A service counts its threads at the start and keeps that number.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait


def fixed_pool(num_threads: int, name: str, initializer: Callable[[], None] | None = None) -> ThreadPoolExecutor:
    """A pool whose `num_threads` threads, called `name` and a number, have started and called `initializer`."""
    pool = ThreadPoolExecutor(num_threads, name, initializer)
    # None of them is free for a second wait before all of them have come to their first.
    together = threading.Barrier(num_threads)
    wait([pool.submit(together.wait) for _ in range(num_threads)])
    return pool
