"""What the processes of a server hold: descriptors, threads, memory, files in shared memory, keys of the store.

Reads /proc (Linux).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_LISTENS = "0A"


@dataclass(frozen=True, kw_only=True)
class Process:
    """`role` is server, store, rank or other; `descriptors` are counted by kind."""

    pid: int
    role: str
    descriptors: Mapping[str, int]
    num_threads: int
    rss_bytes: int


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Of all processes of a server. `shared` are names in /dev/shm that no foreign process uses."""

    processes: Sequence[Process]
    shared: frozenset[str]
    num_store_keys: int | None

    def of(self, role: str) -> list[Process]:
        return [process for process in self.processes if process.role == role]

    @property
    def rss_bytes(self) -> int:
        return sum(process.rss_bytes for process in self.processes)


def differences(before: Footprint, after: Footprint, *, max_growth: float) -> list[str]:
    """What is not as it was. Memory may have grown by a share of `max_growth`, all else must be the same."""
    found = []
    for role in ("server", "store", "rank", "other"):
        was, now = before.of(role), after.of(role)
        if len(was) != len(now):
            found.append(f"processes: {len(was)} of role {role}, then {len(now)}")
        for what in ("descriptors", "num_threads"):
            counts = [sorted(str(_plain(getattr(each, what))) for each in side) for side in (was, now)]
            if counts[0] != counts[1]:
                found.append(f"{what} of {role}: {', '.join(counts[0])}, then {', '.join(counts[1])}")
    if left := after.shared - before.shared:
        found.append(f"left in {SHARED_MEMORY}: {', '.join(sorted(left))}")
    if before.num_store_keys != after.num_store_keys:
        found.append(f"keys of the store: {before.num_store_keys}, then {after.num_store_keys}")
    if after.rss_bytes > before.rss_bytes * (1 + max_growth):
        found.append(f"resident memory: {before.rss_bytes / 2**20:.1f} MiB, then {after.rss_bytes / 2**20:.1f} MiB")
    return found


def measure(root: int) -> Footprint:
    """Of the process `root` and all that it has started."""
    processes = [each for pid in processes_of(root) if (each := _process(pid, root)) is not None]
    stores = [each.pid for each in processes if each.role == "store"]
    return Footprint(
        processes=processes,
        shared=frozenset(_shared_names() - _shared_names_of_others({each.pid for each in processes})),
        num_store_keys=sum(_num_keys(pid) for pid in stores) if stores else None,
    )


def processes_of(root: int) -> list[int]:
    """`root` and its living descendants."""
    parents = {pid: int(fields[1]) for pid in _all_pids() if (fields := _stat(pid)) and fields[0] not in "ZX"}
    found, pending = [], [root]
    while pending:
        pid = pending.pop()
        found.append(pid)
        pending.extend(child for child, parent in parents.items() if parent == pid)
    return found


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name: state, parent, …; none when the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _process(pid: int, root: int) -> Process | None:
    place = Path(f"/proc/{pid}")
    try:
        name = (place / "comm").read_text()
        role = next((each for each in ("store", "rank") if name.startswith(f"nobiru-{each}")), "other")
        return Process(
            pid=pid,
            role="server" if pid == root else role,
            descriptors=_descriptors(pid),
            num_threads=len(os.listdir(place / "task")),
            rss_bytes=int((place / "statm").read_text().split()[1]) * _PAGE_BYTES,
        )
    except OSError:
        return None  # it ended while we looked


def _descriptors(pid: int) -> Counter[str]:
    kinds: Counter[str] = Counter()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            kinds[_kind(os.readlink(f"/proc/{pid}/fd/{name}"))] += 1
        except OSError:
            continue  # closed meanwhile
    return kinds


def _kind(target: str) -> str:
    """Of what a descriptor's link names: socket, pipe, memfd, eventpoll, file, …"""
    if target.startswith("/"):
        return "memfd" if target.startswith("/memfd:") else "file"
    kind, _, rest = target.partition(":")
    return rest.strip("[]") if kind == "anon_inode" else kind


def _plain(value: int | Mapping[str, int]) -> int | dict[str, int]:
    return value if isinstance(value, int) else dict(sorted(value.items()))


def _shared_names() -> set[str]:
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()


def _shared_names_of_others(ours: set[int]) -> set[str]:
    """Names in /dev/shm that processes other than these have mapped."""
    names: set[str] = set()
    for pid in set(_all_pids()) - ours:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        names |= {Path(found).name for found in re.findall(rf"{SHARED_MEMORY}/\S+", maps)}
    return names


def _num_keys(store_pid: int) -> int:
    """Keys of the rendezvous store that a process holds."""
    from torch._C._distributed_c10d import TCPStore

    (port,) = _listening_ports(store_pid)
    return int(TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5)).num_keys())


def _listening_ports(pid: int) -> set[int]:
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        target = os.readlink(f"/proc/{pid}/fd/{name}")
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and fields[9] in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports
