"""Pools of threads that exist from the start.

A `ThreadPoolExecutor` starts a thread whenever none of its own is idle, so that a process that has served for hours may
still grow by one. A service counts its threads at the start and keeps that number.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def fixed_pool(num_threads: int, name: str) -> ThreadPoolExecutor:
    """A pool whose `num_threads` threads, called `name` and a number, have all been started."""
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
    # None of them is free for a second wait before all of them have come to their first.
    together = threading.Barrier(num_threads)
    for _ in range(num_threads):
        pool.submit(together.wait)
    return pool
