"""Where ranks run: Ray is needed only by those who ask for it, and its CPUs are shared evenly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nobiru import machine
from nobiru.config import EngineConfig
from nobiru.elastic.launcher.forkserver import ForkServer
from nobiru.elastic.launcher.local import LocalLauncher
from nobiru.elastic.launcher.ray import RayLauncher, share_cpus
from nobiru.engine import backends
from nobiru.engine.backends import LocalBackend, make_backend
from nobiru.errors import ConfigError


def config(backend: str, **options: object) -> EngineConfig:
    return EngineConfig(model="-", data_parallel_backend=backend, **options)  # type: ignore[arg-type]


def test_without_ray_its_backend_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'nobiru\[ray\]'") as raised:
        make_backend(config("ray"), environment={}, recorder_capacity=1)
    assert raised.value.param == "data_parallel_backend"


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="data_parallel_backend is 'slurm'; choose from local, ray"):
        config("slurm")


@pytest.mark.parametrize("address", ["ray://head:10001", "127.0.0.1:1", "nowhere"])
def test_an_address_that_cannot_be_used_is_refused_at_once(address: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(ConfigError, match=address) as raised:
        RayLauncher("no:entry", address=address, environment={}, num_ranks=1)
    assert raised.value.param == "ray_address"


def test_the_local_backend_does_not_import_ray() -> None:
    code = """
import sys
from nobiru.config import EngineConfig
from nobiru.engine.backends import make_backend
import nobiru.engine.client
make_backend(EngineConfig(model="-"), environment={}, recorder_capacity=1)
assert not {"ray", "torch"} & set(sys.modules), "imported"
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    assert isinstance(make_backend(config("local"), environment={}, recorder_capacity=1), LocalBackend)


@pytest.mark.parametrize(
    ("device", "has_cuda", "forks", "launcher"),
    [
        ("auto", False, True, ForkServer),
        ("cpu", True, True, ForkServer),
        ("auto", True, True, LocalLauncher),
        ("cpu", False, False, LocalLauncher),
    ],
)
def test_ranks_are_forks_where_that_is_safe(
    monkeypatch: pytest.MonkeyPatch, device: str, has_cuda: bool, forks: bool, launcher: type
) -> None:
    monkeypatch.setattr(backends, "can_fork", lambda: forks)
    monkeypatch.setattr(machine, "may_have_cuda", lambda: has_cuda)
    assert type(backends.make_launcher(config("local", device=device), {})) is launcher


@pytest.mark.parametrize(
    ("nodes", "num_ranks", "share"),
    [
        ([0, 4, 4], 2, 4),
        ([3, 3], 3, 1),
        ([16, 4], 5, 4),
        ([8], 3, 2),
        ([2], 4, 1),  # there is no place for all of them; Ray says so
        ([], 1, 1),
    ],
)
def test_cpus_are_shared_so_that_every_rank_finds_a_node(nodes: list[int], num_ranks: int, share: int) -> None:
    assert share_cpus(nodes, num_ranks) == share


@pytest.mark.parametrize(("options", "least"), [({}, 8), ({"data_parallel_size": 30}, 30)])
def test_this_machine_has_room_for_what_was_asked_for(options: dict[str, int], least: int) -> None:
    assert make_backend(config("local", **options), environment={}, recorder_capacity=1).num_places >= least
