"""Cores and memory as containers give them, from files written here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nobiru import machine

FOUR = frozenset(range(4))
HYPERTHREADS = "\n\n".join(
    f"processor\t: {cpu}\nphysical id\t: 0\ncore id\t\t: {cpu % 2}\nflags\t\t: fpu avx2 avx512_bf16" for cpu in range(4)
)
V2 = {
    "proc/self/cgroup": "0::/\n",
    "proc/self/mountinfo": "31 23 0:27 / /sys/fs/cgroup ro,nosuid shared:9 - cgroup2 cgroup rw,nsdelegate\n",
}
V1 = {
    "proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n",
    "proc/self/mountinfo": (
        "30 29 0:24 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
        "33 30 0:30 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
        "36 30 0:31 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    ),
}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_control_groups_the_affinity_counts(tmp_path: Path) -> None:
    assert machine.available_cores(tmp_path, FOUR) == 4
    assert machine.default_num_threads(tmp_path, FOUR) == 4
    assert machine.memory_limit_bytes(tmp_path) is None
    assert machine.cpu_flags(tmp_path) == frozenset()


@pytest.mark.parametrize(
    ("quota", "cores", "threads"),
    [
        ("max 100000", 4, 4),
        ("150000 100000", 1.5, 1),
        ("50000 100000", 0.5, 1),
        ("800000 100000", 4, 4),
        ("nonsense", 4, 4),
    ],
)
def test_cgroup_v2_quota(tmp_path: Path, quota: str, cores: float, threads: int) -> None:
    root = write(tmp_path, {**V2, "sys/fs/cgroup/cpu.max": quota + "\n"})
    assert machine.available_cores(root, FOUR) == cores
    assert machine.default_num_threads(root, FOUR) == threads


def test_limits_of_parent_groups_hold_too(tmp_path: Path) -> None:
    files = {
        **V2,
        "proc/self/cgroup": "0::/system.slice/nobiru.service\n",
        "sys/fs/cgroup/system.slice/cpu.max": "200000 100000",
        "sys/fs/cgroup/system.slice/memory.max": "1000000",
        "sys/fs/cgroup/system.slice/nobiru.service/cpu.max": "300000 100000",
        "sys/fs/cgroup/system.slice/nobiru.service/memory.max": "max",
    }
    root = write(tmp_path, files)
    assert machine.available_cores(root, FOUR) == 2
    assert machine.memory_limit_bytes(root) == 1_000_000


def test_cgroup_v1_inside_a_container(tmp_path: Path) -> None:
    files = {
        **V1,
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "536870912\n",
        "proc/meminfo": "MemTotal:       16000000 kB\n",
    }
    root = write(tmp_path, files)
    assert machine.available_cores(root, FOUR) == 2.5
    assert machine.default_num_threads(root, FOUR) == 2
    assert machine.memory_limit_bytes(root) == 2**29


def test_cgroup_v1_without_limits(tmp_path: Path) -> None:
    files = {
        **V1,
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "proc/meminfo": "MemTotal:       16000000 kB\n",
    }
    root = write(tmp_path, files)
    assert machine.available_cores(root, FOUR) == 4
    assert machine.memory_limit_bytes(root) == 16_000_000 * 1024


def test_a_group_that_the_container_cannot_see(tmp_path: Path) -> None:
    files = {**V2, "proc/self/cgroup": "0::/../../kubepods/pod1\n", "sys/fs/cgroup/cpu.max": "100000 100000"}
    assert machine.available_cores(write(tmp_path, files), FOUR) == 1


@pytest.mark.parametrize(("cpus", "cores"), [({0, 1, 2, 3}, 2), ({0, 2}, 1), ({1}, 1), ({0, 9}, 2)])
def test_hyperthreads_share_a_core(cpus: set[int], cores: int) -> None:
    assert machine.num_physical_cores(HYPERTHREADS, frozenset(cpus)) == cores


def test_threads_are_one_per_core(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/cpuinfo": HYPERTHREADS})
    assert machine.available_cores(root, FOUR) == 4
    assert machine.default_num_threads(root, FOUR) == 2


def test_flags() -> None:
    assert machine.parse_cpu_flags(HYPERTHREADS) == {"fpu", "avx2", "avx512_bf16"}
    assert machine.parse_cpu_flags("processor : 0\nFeatures\t: fp asimd bf16\n") == {"fp", "asimd", "bf16"}
    assert machine.parse_cpu_flags("") == frozenset()


def test_this_machine() -> None:
    assert 0 < machine.available_cores() <= (os.cpu_count() or 1)
    assert 1 <= machine.default_num_threads() <= (os.cpu_count() or 1)
    limit = machine.memory_limit_bytes()
    assert limit is None or limit > 2**20


def test_free_memory_is_what_the_control_group_has_left(tmp_path: Path) -> None:
    files = {
        **V2,
        "sys/fs/cgroup/memory.max": "1000000\n",
        "sys/fs/cgroup/memory.current": "700000\n",
        "sys/fs/cgroup/memory.stat": "anon 500000\nfile 200000\ninactive_file 150000\nactive_file 50000\n",
        "proc/meminfo": "MemTotal: 16000 kB\nMemFree: 100 kB\nMemAvailable:   9000 kB\n",
    }
    assert machine.free_memory_bytes(write(tmp_path, files)) == 1_000_000 - (700_000 - 150_000)
    write(tmp_path, {"proc/meminfo": "MemAvailable: 100 kB\n"})
    assert machine.free_memory_bytes(tmp_path) == 102_400
    write(tmp_path, {"sys/fs/cgroup/memory.current": "9000000\n"})
    assert machine.free_memory_bytes(tmp_path) == 0


def test_free_memory_with_cgroup_v1_and_with_nothing(tmp_path: Path) -> None:
    assert machine.free_memory_bytes(tmp_path) is None
    files = {
        **V1,
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "400000\n",
        "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 100000\n",
    }
    assert machine.free_memory_bytes(write(tmp_path, files)) == 700_000
