"""Pools of threads that do not grow."""

from __future__ import annotations

import threading

from nobiru.pools import fixed_pool


def test_all_threads_are_there_and_no_more_come() -> None:
    with fixed_pool(3, "some") as pool:
        names = {each.name for each in threading.enumerate() if each.name.startswith("some")}
        assert len(names) == 3
        assert list(pool.map(lambda each: each + 1, range(50))) == list(range(1, 51))
        assert {each.name for each in threading.enumerate() if each.name.startswith("some")} == names
