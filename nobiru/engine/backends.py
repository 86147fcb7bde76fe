"""Where the ranks of a server run, and how they and the server reach each other: on this machine, or on a Ray cluster.

Owns the choice of launcher, of addresses and of the recorder. Ray is imported with its backend only.
"""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import msgspec
import zmq

from nobiru import env, machine
from nobiru.config import EngineConfig
from nobiru.elastic.launcher.forkserver import ForkServer, can_fork
from nobiru.elastic.launcher.local import LocalLauncher
from nobiru.engine.heart import Hearts
from nobiru.engine.rank_spec import RankSpec, StoreSpec
from nobiru.engine.recorder import FlightRecorder, Recorder
from nobiru.engine.supervisor import RankProcess

RANK_ENTRY, STORE_ENTRY = "nobiru.engine.rank:main", "nobiru.engine.store:main"
# All that ranks and the store import.
_MODULES = ("torch", "nobiru.engine.build", "nobiru.engine.rank", "nobiru.engine.store")


class Backend(Protocol):
    """`endpoint` is where ranks connect to the server, `host` the server's address for them."""

    @property
    def host(self) -> str: ...

    @property
    def endpoint(self) -> str: ...

    @property
    def num_places(self) -> int:
        """How many ranks there is room for, now."""
        ...

    def launch(self, spec: RankSpec) -> tuple[RankProcess, Recorder]:
        """Begin a rank's process; `OSError` when the system cannot start one. Also before `open`."""
        ...

    def launch_store(self, spec: StoreSpec) -> RankProcess:
        """Begin the process of the rendezvous store, on this machine; `OSError` as above."""
        ...

    async def open(self, router: zmq.Socket[Any]) -> None:
        """Bind the server's socket, and whatever else it listens to."""
        ...

    async def close(self) -> None:
        """When all ranks have ended."""
        ...


class LocalBackend:
    """Processes of this machine, with a recorder of `recorder_capacity` sequences in memory they share with it.

    There is room for one rank on each core, and for `max_ranks`: they share cores, and memory is not looked at.
    """

    host = "127.0.0.1"

    def __init__(self, launcher: LocalLauncher | ForkServer, *, recorder_capacity: int, max_ranks: int) -> None:
        self.endpoint = f"ipc://@nobiru-{uuid.uuid4().hex}"
        self._launcher = launcher
        self._recorder_capacity = recorder_capacity
        self.num_places = max(max_ranks, machine.default_num_threads())

    def launch(self, spec: RankSpec) -> tuple[RankProcess, Recorder]:
        recorder = FlightRecorder.create(self._recorder_capacity)
        spec = msgspec.structs.replace(spec, recorder_fd=recorder.fd)
        try:
            process = self._launcher.launch(RANK_ENTRY, msgspec.json.encode(spec), pass_fds=[recorder.fd])
        except OSError:
            recorder.close()
            raise
        return process, recorder

    def launch_store(self, spec: StoreSpec) -> RankProcess:
        return self._launcher.launch(STORE_ENTRY, msgspec.json.encode(spec))

    async def open(self, router: zmq.Socket[Any]) -> None:
        router.bind(self.endpoint)

    async def close(self) -> None:
        await asyncio.to_thread(self._launcher.close)


class RayBackend:
    """Actors of a Ray cluster, of which this machine is a node. Connects to it; `ConfigError` when that fails."""

    def __init__(self, config: EngineConfig, *, environment: Mapping[str, str]) -> None:
        from nobiru.elastic.launcher.ray import RayLauncher

        self._local = LocalLauncher(environment=environment)
        threads, workers = config.num_threads, config.tensor_parallel_size
        self._launcher = RayLauncher(
            "nobiru.engine.remote_rank:main",
            address=config.ray_address,
            environment={name: environment[name] for name in env.REMOTE_RANK_VARIABLES if name in environment},
            num_ranks=config.data_parallel_size,
            cpus_per_rank=None if threads is None else threads * workers,
            max_ranks=config.max_size,
        )
        self.host = self._launcher.host
        # Both listen from now on: ranks are told the ports before the server's event loop runs.
        self._hearts = Hearts(self.host)
        self._listener = socket.create_server((self.host, 0))
        self.endpoint = f"tcp://{self.host}:{self._listener.getsockname()[1]}"

    @property
    def num_places(self) -> int:
        return self._launcher.num_places

    def launch(self, spec: RankSpec) -> tuple[RankProcess, Recorder]:
        spec = msgspec.structs.replace(spec, heart=self._hearts.address)
        process = self._launcher.launch(msgspec.json.encode(spec))
        lost = partial(process.kill, "has closed its connection")
        return process, self._hearts.expect(spec.rank_id, lost)

    def launch_store(self, spec: StoreSpec) -> RankProcess:
        return self._local.launch(STORE_ENTRY, msgspec.json.encode(spec))

    async def open(self, router: zmq.Socket[Any]) -> None:
        router.setsockopt(zmq.USE_FD, self._listener.detach())
        router.bind(self.endpoint)
        await self._hearts.start()

    async def close(self) -> None:
        self._listener.close()
        await self._hearts.close()
        await asyncio.to_thread(self._launcher.close)


def make_launcher(config: EngineConfig, environment: Mapping[str, str]) -> LocalLauncher | ForkServer:
    """The fastest one that this system allows.

    What a library does with CUDA while it is imported would keep forks from using it, so ranks that may do so do not
    begin as forks.
    """
    if can_fork() and (config.device == "cpu" or not machine.may_have_cuda()):
        return ForkServer(_MODULES, environment=environment)
    return LocalLauncher(environment=environment)


def make_backend(config: EngineConfig, *, environment: Mapping[str, str], recorder_capacity: int) -> Backend:
    if config.data_parallel_backend == "ray":
        return RayBackend(config, environment=environment)
    launcher = make_launcher(config, environment)
    return LocalBackend(launcher, recorder_capacity=recorder_capacity, max_ranks=config.max_size)
