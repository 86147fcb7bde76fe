"""What this machine gives the process: processor cores, instruction sets, memory.

Owns reading `/proc` and the control groups (cgroup v1 and v2) of Linux, and asking it for huge pages; on other systems,
or where a file is missing, the answers are those of the whole machine. Also names the process there. Knows nothing of
torch and of how many threads anyone starts.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

_Number = TypeVar("_Number", int, float)
ROOT = Path("/")
_HUGE_PAGE_BYTES = 2**21
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which Python has no name for
_SET_NAME = 15  # PR_SET_NAME of prctl(2)
_UNLIMITED_BYTES = 2**60  # cgroup v1 writes "no limit" as a number near 2**63


def name_process(name: str) -> None:
    """Have `top` and `ps -o comm` call this process so, on Linux; the first 15 bytes count."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_NAME, name.encode()[:15], 0, 0, 0)


def may_have_cuda() -> bool:
    """Whether there is the device file of NVIDIA's driver."""
    return Path("/dev/nvidiactl").exists()


def available_cores(root: Path = ROOT, cpus: frozenset[int] | None = None) -> float:
    """Logical processors that this process may use: its affinity, or the quota of its control groups if that is less.

    A fraction if the quota is one. `cpus` are the processors of the affinity mask (default: the process' own).
    """
    num_cpus = float(len(_affinity() if cpus is None else cpus))
    quota = _least(_cpu_quota(folder) for folder in _cgroup_folders(root, "cpu"))
    return num_cpus if quota is None else min(num_cpus, quota)


def default_num_threads(root: Path = ROOT, cpus: frozenset[int] | None = None) -> int:
    """Threads for arithmetic: one per physical core of the affinity mask, and no more than the quota, at least 1.

    Two hyperthreads share one core's arithmetic units, and threads above a quota only make the kernel stop all of them.
    """
    cpus = _affinity() if cpus is None else cpus
    num_cores = num_physical_cores(_read(root / "proc/cpuinfo"), cpus)
    return max(1, min(num_cores, int(available_cores(root, cpus))))


def memory_limit_bytes(root: Path = ROOT) -> int | None:
    """Memory that this process and its neighbours in the control group may use, None if nothing tells."""
    limits = [_memory_limit(folder) for folder in _cgroup_folders(root, "memory")]
    return _least([*limits, parse_mem_total(_read(root / "proc/meminfo"))])


def free_memory_bytes(root: Path = ROOT) -> int | None:
    """Memory that this process could still take without pushing anything out, None if nothing tells.

    What the whole machine has available, or what is left below the limits of the process' control groups if that is
    less. File pages that the kernel gives up on demand count as free.
    """
    left = [_memory_left(folder) for folder in _cgroup_folders(root, "memory")]
    return _least([*left, parse_mem_available(_read(root / "proc/meminfo"))])


def resident_memory_bytes(pid: int | None = None, root: Path = ROOT) -> int | None:
    """Memory of a process that is its own and lies in no file (default: this process), None if nothing tells."""
    return _meminfo_bytes(_read(root / f"proc/{'self' if pid is None else pid}/status"), "RssAnon")


def describe_bytes(num_bytes: int) -> str:
    """For people."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def prefer_huge_pages(address: int, num_bytes: int) -> None:
    """Ask for huge pages in this memory, which nobody has written yet; nothing happens where there are none.

    A weight matrix is read from end to end at every step, and looking up its small pages costs a third of the speed.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    first = -(-address // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    size = (address + num_bytes - first) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if advice is not None and size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), ctypes.c_int(advice))


def take_memory(address: int, num_bytes: int) -> None:
    """Have the system give these pages now, which otherwise it does, slowly, when they are first written.

    What they hold stays as it is. Nothing happens where the system (Linux before 5.14) cannot do that.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (address + num_bytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), ctypes.c_int(_POPULATE_WRITE))


def return_free_memory() -> None:
    """Give back to the system what the C library's allocator keeps of memory that was freed.

    Reading a model frees as much as it keeps; without this a process would hold some of it for good.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(ctypes.c_size_t(0))


def cpu_flags(root: Path = ROOT) -> frozenset[str]:
    """Instruction sets as `/proc/cpuinfo` names them (`avx2`, `avx512_bf16`, `amx_tile`); empty where it is missing."""
    return parse_cpu_flags(_read(root / "proc/cpuinfo"))


# ---- parsing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class CgroupMount:
    """Where a control group hierarchy can be read: the part below `root` appears at `mount_point`."""

    root: str
    mount_point: str
    controllers: frozenset[str]  # empty for cgroup v2, which has one hierarchy for all


def parse_cpu_flags(cpuinfo: str) -> frozenset[str]:
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):  # x86, Arm
            return frozenset(value.split())
    return frozenset()


def num_physical_cores(cpuinfo: str, cpus: frozenset[int]) -> int:
    """Cores that the logical processors `cpus` belong to; each its own core where `/proc/cpuinfo` does not tell."""
    cores = set()
    told = set()
    for block in cpuinfo.split("\n\n"):
        pairs = (line.partition(":") for line in block.splitlines())
        fields = {name.strip(): value.strip() for name, _, value in pairs}
        if fields.get("processor", "").isdigit() and "core id" in fields and int(fields["processor"]) in cpus:
            told.add(int(fields["processor"]))
            cores.add((fields.get("physical id", ""), fields["core id"]))
    return len(cores) + len(cpus - told)


def parse_cpu_max(text: str) -> float | None:
    """cgroup v2 `cpu.max`, "QUOTA PERIOD" in microseconds or "max PERIOD": cores, None for no limit."""
    quota, _, period = text.strip().partition(" ")
    return _cores(quota, period or "100000")


def parse_cfs_quota(quota: str, period: str) -> float | None:
    """cgroup v1 `cpu.cfs_quota_us` (-1: no limit) and `cpu.cfs_period_us`: cores, None for no limit."""
    return _cores(quota.strip(), period.strip())


def parse_memory_limit(text: str) -> int | None:
    """`memory.max` (v2) or `memory.limit_in_bytes` (v1): bytes, None for no limit."""
    text = text.strip()
    return int(text) if text.isdigit() and int(text) < _UNLIMITED_BYTES else None


def parse_mem_total(meminfo: str) -> int | None:
    return _meminfo_bytes(meminfo, "MemTotal")


def parse_mem_available(meminfo: str) -> int | None:
    return _meminfo_bytes(meminfo, "MemAvailable")


def parse_inactive_file(memory_stat: str) -> int:
    """`memory.stat` of both versions: bytes of file pages that nobody has used lately."""
    fields = dict(line.split(maxsplit=1) for line in memory_stat.splitlines() if " " in line)
    text = fields.get("total_inactive_file", fields.get("inactive_file", "0"))
    return int(text) if text.isdigit() else 0


def _meminfo_bytes(meminfo: str, name: str) -> int | None:
    for line in meminfo.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def parse_cgroup_paths(text: str) -> dict[str, str]:
    """`/proc/self/cgroup`: the process' group by controller; under "" that of cgroup v2."""
    paths = {}
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def parse_cgroup_mounts(mountinfo: str) -> list[CgroupMount]:
    """The control group hierarchies in `/proc/self/mountinfo`."""
    mounts = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if len(fields) < 5 or len(tail) < 3 or tail[0] not in ("cgroup", "cgroup2"):
            continue
        controllers = frozenset(tail[2].split(",")) if tail[0] == "cgroup" else frozenset()
        mounts.append(CgroupMount(root=fields[3], mount_point=fields[4], controllers=controllers))
    return mounts


# ---- reading --------------------------------------------------------------------------------------------------------


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the process' control groups for one controller and of their parents, whose limits hold too."""
    paths = parse_cgroup_paths(_read(root / "proc/self/cgroup"))
    for mount in parse_cgroup_mounts(_read(root / "proc/self/mountinfo")):
        path = paths.get(controller if controller in mount.controllers else "")
        if path is None or (mount.controllers and controller not in mount.controllers):
            continue
        mount_point = root / mount.mount_point.lstrip("/")
        inside = path.removeprefix(mount.root if mount.root != "/" else "").strip("/")
        if ".." in inside.split("/") or not (mount_point / inside).is_dir():
            inside = ""  # the group lies outside of what a container can see; its mount shows the container's own
        yield mount_point
        for depth in range(len(Path(inside).parts)):
            yield mount_point.joinpath(*Path(inside).parts[: depth + 1])


def _cpu_quota(folder: Path) -> float | None:
    v1 = parse_cfs_quota(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))
    return _least([parse_cpu_max(_read(folder / "cpu.max")), v1])


def _memory_limit(folder: Path) -> int | None:
    return _least(parse_memory_limit(_read(folder / name)) for name in ("memory.max", "memory.limit_in_bytes"))


def _memory_left(folder: Path) -> int | None:
    limit = _memory_limit(folder)
    used = _least(parse_memory_limit(_read(folder / name)) for name in ("memory.current", "memory.usage_in_bytes"))
    if limit is None or used is None:
        return limit
    return max(0, limit - max(0, used - parse_inactive_file(_read(folder / "memory.stat"))))


def _cores(quota: str, period: str) -> float | None:
    if not quota.isdigit() or not period.isdigit() or int(quota) == 0 or int(period) == 0:
        return None
    return int(quota) / int(period)


def _least(values: Iterable[_Number | None]) -> _Number | None:
    return min((value for value in values if value is not None), default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not on this system, or not for this user
        return ""
