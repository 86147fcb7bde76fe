"""The rendezvous store forgets attempts that are over."""

from __future__ import annotations

from torch._C._distributed_c10d import PrefixStore, TCPStore

from nobiru.engine.store import forget


def test_an_attempt_that_is_over_leaves_no_keys() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt in ("2", "9", "10", "11"):
        PrefixStore(f"{attempt}/control", store).set("listener/0", "address")
    forget(store, 10)
    assert store.list_keys() == ["11/control/listener/0"]
    forget(store, 10)
    assert store.num_keys() == 1
