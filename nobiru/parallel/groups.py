"""Groups of ranks that exchange tensors, formed beside each other and without a global world.

Owns the connections of a group and how its members get out of it. Does not know what is exchanged, who is to blame for
a failure, or where the store lives: a group is formed over a client of somebody's `TCPStore`, under a prefix that is
never used twice (`attempt_id`/name).

Failure. A collective that cannot be completed raises `GroupError`, which does not say who is gone. Only neighbours of a
dead member notice by themselves; the others would wait until the time limit. So whoever gets a `GroupError` calls
`destroy` on all groups of that epoch: its connections close, which is an error for the next member, and so on. A member
that stands still (stopped, unreachable) closes nothing: then a control thread calls `break_connections`, which ends the
calls that are blocked.

Ranks are positions in the group. Groups of other devices will be formed here too; what differs is `_gloo`.

Legend: R ranks, n numbers of a record.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, Store, TCPStore
from torch.distributed import ProcessGroupGloo

from nobiru.errors import GroupError

# Descriptors are the process': two threads that listen at once could not tell their sockets apart.
_listening = threading.Lock()


def connect_store(host: str, port: int, *, timeout_s: float) -> TCPStore:
    """A client of the store at `host`:`port`, for one thread: a call that waits holds up all other calls of the client.

    `timeout_s` bounds connecting and each later call. `GroupError` when nobody answers.
    """
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise GroupError(f"no store answered at {host}:{port} within {timeout_s} s: {error}") from error


@dataclass(frozen=True, slots=True)
class _Socket:
    """A TCP socket of this process. `inode` tells it from a later one with the same descriptor."""

    descriptor: int
    inode: int
    is_listening: bool
    address: tuple[str, int]
    peer: tuple[str, int] | None


class Group:
    """A member's end of a group of `size` ranks. `form_group` makes it.

    One thread at a time takes part in exchanges, and all members in the same order. `break_connections` may be called
    from any thread.
    """

    def __init__(self, backend: Any, sockets: Sequence[_Socket], *, name: str, timeout_s: float) -> None:
        self.name = name
        self.rank = int(backend.rank())
        self.size = int(backend.size())
        self.timeout_s = timeout_s
        self._backend: Any = backend  # torch's own; its type hints lack the exchanges
        self._sockets = sockets
        self._is_broken = threading.Event()

    @property
    def is_broken(self) -> bool:
        """Whether an exchange has failed, or the group was destroyed; it cannot be used again."""
        return self._is_broken.is_set()

    def all_gather_record(self, record_n: Tensor) -> Tensor:
        """Every rank's record of numbers, int64 [R, n], from this rank's [n]."""
        gathered = record_n.new_empty(self.size * len(record_n))
        with self._exchange("all-gather") as backend:
            backend._allgather_base(gathered, record_n).wait()
        return gathered.view(self.size, len(record_n))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Every rank's tensor [n, …] of the same shape, in order of the ranks: [R * n, …]. Any dtype."""
        gathered = tensor.new_empty(self.size * tensor.shape[0], *tensor.shape[1:])
        with self._exchange("all-gather") as backend:
            backend._allgather_base(gathered, tensor.contiguous()).wait()
        return gathered

    def all_reduce(self, tensor: Tensor) -> None:
        """Put the sum over all ranks into a contiguous tensor."""
        with self._exchange("all-reduce") as backend:
            backend.allreduce([tensor]).wait()

    def all_to_all(self, rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> Tensor:
        """Send `rows` [sum(num_sent), …] to the ranks in order; returns what comes from them, in order of the ranks.

        `num_sent` and `num_received` count rows, one number for each rank. Any dtype. Alone in the group, a rank gets
        `rows` themselves back.
        """
        with self._exchange("all-to-all") as backend:
            if self.size == 1:
                return rows
            received = rows.new_empty(sum(num_received), *rows.shape[1:])
            backend.alltoall_base(received, rows.contiguous(), list(num_received), list(num_sent)).wait()
        return received

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Fill `tensor` with that of rank `root`."""
        with self._exchange("broadcast") as backend:
            options = BroadcastOptions()
            options.rootRank = root
            backend.broadcast([tensor], options).wait()

    def send(self, tensor: Tensor, to_rank: int, tag: int = 0) -> None:
        """Hand a contiguous tensor to `to_rank`, which calls `receive` with the same tag."""
        with self._exchange(f"sending to rank {to_rank}") as backend:
            backend.send([tensor], to_rank, tag).wait()

    def receive(self, tensor: Tensor, from_rank: int, tag: int = 0) -> None:
        """Fill a contiguous tensor with what `from_rank` sends."""
        with self._exchange(f"receiving from rank {from_rank}") as backend:
            backend.recv([tensor], from_rank, tag).wait()

    def break_connections(self) -> None:
        """End this member's exchanges with a `GroupError`, also one that is blocked in another thread right now.

        Shuts down the connected sockets. The listening one stays: the library ends the process when that goes.
        """
        self._is_broken.set()
        for known in self._sockets:
            if (connection := _copy(known.descriptor)) is None:
                continue
            with connection:
                if os.fstat(connection.fileno()).st_ino == known.inode:
                    _shut_down(connection)

    def destroy(self) -> None:
        """Leave the group, which is an error for members that are still in an exchange.

        The library takes 10 ms to end a group's thread, for which nobody waits.
        """
        self.break_connections()
        last, self._backend = [self._backend], None
        threading.Thread(target=last.clear, name=f"close {self.name}", daemon=True).start()

    @contextmanager
    def _exchange(self, what: str) -> Iterator[Any]:
        if self._backend is None or self.is_broken:
            raise GroupError(f"{what} in group {self.name}: the group is broken")
        try:
            yield self._backend
        except RuntimeError as error:
            self._is_broken.set()
            raise GroupError(f"{what} in group {self.name} failed on rank {self.rank}: {error}") from error


def form_group(
    store: Store,
    *,
    attempt_id: str,
    name: str,
    rank: int,
    size: int,
    timeout_s: float,
    host: str = "127.0.0.1",
    interface: str = "",
) -> Group:
    """Join the group `name` of an attempt as `rank` of `size`; all members call this, and it returns when all have.

    `timeout_s` bounds each exchange; how long members wait for each other here is the store's own limit. The group
    listens on the address `host`, or that of the network `interface` if one is named. `GroupError` when a member does
    not come.
    """
    prefixed = PrefixStore(f"{attempt_id}/{name}", store)
    limit: timedelta = store.timeout  # type: ignore[attr-defined]
    try:
        with _listening:
            before = {found.inode for found in _sockets()}
            device = (
                ProcessGroupGloo.create_device(interface=interface)
                if interface
                else ProcessGroupGloo.create_device(hostname=host)
            )
            own = {found.address for found in _sockets() if found.is_listening and found.inode not in before}
        prefixed.set(f"listener/{rank}", " ".join(f"{address}|{port}" for address, port in own))
        backend = _gloo(prefixed, device, rank=rank, size=size, timeout=limit)
        others = {address for other in range(size) for address in _parse(prefixed.get(f"listener/{other}"))}
        backend.set_timeout(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        what = f"group {name} of {size} ranks did not form within {limit.total_seconds()} s"
        raise GroupError(f"{what}: {error}") from error
    # A pair of members has one connection, which the one of them opened to the other's listener.
    connections = [
        found for found in _sockets() if not found.is_listening and (found.address in own or found.peer in others)
    ]
    return Group(backend, connections, name=f"{attempt_id}/{name}", timeout_s=timeout_s)


def break_connections_to(port: int) -> None:
    """End all calls of store clients in this process that wait for the store at this port, with an error there."""
    for found in _sockets():
        if found.peer is not None and found.peer[1] == port and (connection := _copy(found.descriptor)) is not None:
            with connection:
                if os.fstat(connection.fileno()).st_ino == found.inode:
                    _shut_down(connection)


def _gloo(store: Store, device: ProcessGroupGloo.Device, *, rank: int, size: int, timeout: timedelta) -> Any:
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [device]
    options._threads = 1  # one exchange at a time
    options._timeout = timeout
    return gloo(store, rank, size, options)


def _parse(addresses: bytes) -> list[tuple[str, int]]:
    return [(host, int(port)) for host, port in (each.split("|") for each in addresses.decode().split())]


def _shut_down(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the other end was faster


def _copy(descriptor: int) -> socket.socket | None:
    """Another handle of the socket; None if the descriptor is closed, or something else."""
    try:
        copied = os.dup(descriptor)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copied)
    except OSError:
        os.close(copied)
        return None


def _sockets() -> list[_Socket]:
    """This process' own TCP sockets that listen or are connected."""
    found = []
    for entry in os.listdir("/dev/fd"):
        if (copy := _copy(int(entry))) is None:
            continue
        with copy:
            if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
                continue
            try:
                is_listening = bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
                peer = None if is_listening else copy.getpeername()[:2]
                inode = os.fstat(copy.fileno()).st_ino
                found.append(_Socket(int(entry), inode, is_listening, copy.getsockname()[:2], peer))
            except OSError:
                continue  # neither connected nor listening
    return found
