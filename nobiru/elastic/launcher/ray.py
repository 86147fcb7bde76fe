"""Starts ranks as actors on a Ray cluster and notices their deaths.

Owns the connection to the cluster, and for each rank an actor and a placement group of its own. Knows nothing of
engines: an actor's process runs an entry point with a description in a thread of its own. The machine it runs on is a
node of the cluster. Nodes come and go: a rank is placed on any that is there and has room. Ray is imported when a
launcher is made.

What ends an actor: `kill`, the end of the entry point, the end of this process (actors are not detached), and whatever
the entry point itself watches. Ray restarts none of them and repeats no call; that is the supervisor's business.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from nobiru import env, machine
from nobiru.elastic.launcher.ended import Ended
from nobiru.elastic.launcher.local import describe_exit
from nobiru.errors import ConfigError

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
PLACE_TIMEOUT_S = 60.0
START_TIMEOUT_S = 60.0
POLL_S = 0.5
# How long a rank that was killed before it had a place still waits for one: Ray loses the CPUs of a place that is given
# back while it is being made, when this process then leaves the cluster.
MAKE_PLACE_S = 2.0
NODES_POLL_S = 1.0
# After a kill, how long to wait for Ray to say that the actor is gone. It cannot when the machine is.
KILL_TIMEOUT_S = 5.0


class RankHost:
    """What runs in the actor's process. No call takes long: the rank has a thread, and `ended` is awaited."""

    def __init__(self) -> None:
        self._exit_code: Future[int] = Future()

    def start(self, entry: str, spec: bytes, environment: Mapping[str, str], num_cpus: int) -> tuple[int, str]:
        """Run `entry(spec, host=..., num_cpus=...)`; the process id, and the address of this node."""
        import ray

        env.take_over(environment, num_threads=num_cpus)
        host = ray.util.get_node_ip_address()
        threading.Thread(target=self._run, args=(entry, spec, host, num_cpus), name="rank", daemon=True).start()
        return os.getpid(), host

    async def ended(self) -> int:
        """The exit code of the entry point, when it has ended."""
        return await asyncio.wrap_future(self._exit_code)

    def _run(self, entry: str, spec: bytes, host: str, num_cpus: int) -> None:
        module, _, function = entry.partition(":")
        try:
            main = getattr(importlib.import_module(module), function)
            self._exit_code.set_result(main(spec, host=host, num_cpus=num_cpus))
        except BaseException as error:
            self._exit_code.set_exception(error)


class RayRank:
    """One rank and its place. `pid` and `node` are None until it has one.

    `kill` and `close` may be called at any time, more than once. A thread waits for all that takes time.
    `has_room()` says whether all ranks fit onto the nodes, as far as is known.
    """

    def __init__(
        self,
        entry: str,
        spec: bytes,
        *,
        environment: Mapping[str, str],
        num_cpus: int,
        has_room: Callable[[], bool],
    ) -> None:
        self._entry = entry
        self._has_room = has_room
        self._spec = spec
        self._environment = environment
        self._num_cpus = num_cpus
        self._ended = Ended()
        self._killed_s = math.inf
        self._why = ""
        self._lock = threading.Lock()
        self._place: Any = None
        self._actor: Any = None
        self.pid: int | None = None
        self.node: str | None = None

    def begin(self) -> None:
        """Look for a place, and start there."""
        threading.Thread(target=self._run, name="ray-rank", daemon=True).start()

    @property
    def has_ended(self) -> bool:
        return bool(self._ended)

    async def wait_dead(self) -> str:
        """Until the actor is gone and its place is given back; how it ended, in words."""
        return await self._ended.heard()

    def kill(self, why: str = "was killed") -> None:
        """End it now, also when it stands still. When Ray cannot say that it is gone, it soon counts as gone.

        `why` is how it ended, unless it ended before.
        """
        with self._lock:
            if self._killed_s == math.inf:
                self._killed_s, self._why = time.monotonic(), why
                self._kill_actor()

    def close(self) -> None:
        """Nothing is asked of it any more."""
        self.kill()

    def join(self, timeout_s: float) -> bool:
        """Wait for its end; kill it when it takes longer. Whether it ended by itself."""
        if self._ended.wait(timeout_s):
            return True
        self.kill()
        self._ended.wait(2 * KILL_TIMEOUT_S)
        return False

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            how = self._live()
        except Exception as error:  # whatever Ray reports of an actor's end, and what the entry point raised
            how = self._why or _in_words(error)
        try:
            self._release()
        except Exception:
            logger.warning("a rank's place on the Ray cluster was not given back", exc_info=True)
        self._ended.tell(how)

    def _release(self) -> None:
        import ray

        self.kill()
        if self._place is not None and ray.is_initialized():  # else Ray would connect anew, to any cluster it finds
            ray.util.remove_placement_group(self._place)

    def _live(self) -> str:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = self._place = ray.util.placement_group([{"CPU": self._num_cpus}], strategy="STRICT_PACK")
        end_s, had_room = time.monotonic() + PLACE_TIMEOUT_S, self._has_room()
        while not place.wait(POLL_S):
            if time.monotonic() > self._killed_s + MAKE_PLACE_S:
                return "was ended before it had a place"
            if had_room and not self._has_room():
                return f"found no node of the Ray cluster with {self._num_cpus} free CPUs: a node has gone meanwhile"
            if time.monotonic() > end_s:
                return f"found no node of the Ray cluster with {self._num_cpus} free CPUs in {PLACE_TIMEOUT_S:.0f} s"
        host = ray.remote(RankHost).options(
            num_cpus=self._num_cpus,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(place, placement_group_bundle_index=0),
        )
        with self._lock:
            if self._killed_s < math.inf:
                return "was ended before it began"
            self._actor = host.remote()
        started = self._actor.start.remote(self._entry, self._spec, self._environment, self._num_cpus)
        if not self._wait(started, START_TIMEOUT_S):
            return self._unanswered()
        self.pid, self.node = ray.get(started)
        ended = self._actor.ended.remote()
        return describe_exit(ray.get(ended)) if self._wait(ended, math.inf) else self._unanswered()

    def _wait(self, answer: Any, timeout_s: float) -> bool:
        """Whether the actor answers within that time, and soon after it was killed."""
        import ray

        end_s = time.monotonic() + timeout_s
        while not ray.wait([answer], timeout=POLL_S)[0]:
            if time.monotonic() > min(end_s, self._killed_s + KILL_TIMEOUT_S):
                return False
        return True

    def _unanswered(self) -> str:
        return f"{self._why or f'did not start in {START_TIMEOUT_S:.0f} s'}, and its node does not answer"

    def _kill_actor(self) -> None:
        import ray

        if self._actor is not None and ray.is_initialized():
            ray.kill(self._actor, no_restart=True)


class RayLauncher:
    """Launches `entry` ("package.module:function") in actors. `host` is this machine's address in the cluster.

    Connects to the cluster at `address`; None: the one that runs here, or a new one that ends with this process and has
    room for `max_ranks` (None: for the first ones), however few CPUs this machine has. Each rank gets `cpus_per_rank`
    CPUs; None: as many as `num_ranks` ranks can have of this cluster.
    `ConfigError` when Ray is not installed or no cluster answers.
    """

    def __init__(
        self,
        entry: str,
        *,
        address: str | None,
        environment: Mapping[str, str],
        num_ranks: int,
        cpus_per_rank: int | None = None,
        max_ranks: int | None = None,
    ) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError(
                "data_parallel_backend is 'ray', which is not installed: pip install 'nobiru[ray]'",
                param="data_parallel_backend",
            ) from error
        self._entry = entry
        self._environment = dict(environment)
        self._has_connected = not ray.is_initialized()
        if self._has_connected and not _connect(address):
            cpus_per_rank = cpus_per_rank or share_cpus([machine.default_num_threads()], num_ranks)
            _start_cluster(cpus_per_rank * (max_ranks or num_ranks))
        self.host: str = ray.util.get_node_ip_address()
        self._cpus_of_nodes = _cpus_of_nodes()
        self.cpus_per_rank = cpus_per_rank or share_cpus(self._cpus_of_nodes, num_ranks)
        self._ranks: list[RayRank] = []
        self._is_closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch_nodes, name="ray-nodes", daemon=True)
        self._watcher.start()

    @property
    def num_places(self) -> int:
        """How many ranks the nodes that are there have room for, as of about a second ago."""
        return count_places(self._cpus_of_nodes, self.cpus_per_rank)

    def launch(self, spec: bytes) -> RayRank:
        """Begin to place and start a rank."""
        rank = RayRank(
            self._entry,
            spec,
            environment=self._environment,
            num_cpus=self.cpus_per_rank,
            has_room=self._has_room,
        )
        self._ranks = [*(each for each in self._ranks if not each.has_ended), rank]
        rank.begin()
        return rank

    def close(self) -> None:
        """End all ranks and leave the cluster, at which a new one ends."""
        import ray

        self._is_closed.set()
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:  # what its thread asked of Ray later would connect it anew, to any cluster it finds
            rank.join(0)
        self._watcher.join(CONNECT_TIMEOUT_S)
        if self._has_connected:
            ray.shutdown()

    def _has_room(self) -> bool:
        return sum(not each.has_ended for each in self._ranks) <= self.num_places

    def _watch_nodes(self) -> None:
        """Asking the cluster takes time, so it is done beside whoever wants to know."""
        while not self._is_closed.wait(NODES_POLL_S):
            try:
                self._cpus_of_nodes = _cpus_of_nodes()
            except Exception as error:  # the head node is busy or gone; Ray has no type for it
                logger.warning("the nodes of the Ray cluster are not known: %s", error)


def _cpus_of_nodes() -> list[int]:
    import ray

    return [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]


def count_places(cpus_of_nodes: Sequence[int], cpus_per_rank: int) -> int:
    """How many ranks of so many CPUs fit onto the nodes."""
    return sum(cpus // cpus_per_rank for cpus in cpus_of_nodes)


def share_cpus(cpus_of_nodes: Sequence[int], num_ranks: int) -> int:
    """The most CPUs that each rank can have if every rank has as many, at least 1."""
    for share in range(max(cpus_of_nodes, default=1), 1, -1):
        if count_places(cpus_of_nodes, share) >= num_ranks:
            return share
    return 1


_OPTIONS = {"include_dashboard": False, "logging_level": logging.WARNING}


def _connect(address: str | None) -> bool:
    """To the cluster that is there. False when none was named and none runs here."""
    import ray

    if address is not None and address.startswith("ray://"):
        raise ConfigError(
            f"ray_address is {address!r}: the server has to be on a node of the cluster, and not a client of it",
            param="ray_address",
        )
    if address is not None:
        _look_for(address)
    with _same_sigterm_handler():
        try:
            ray.init(address=address or "auto", **_OPTIONS)
        except (ConnectionError, RuntimeError, ValueError) as error:
            if address is not None or not isinstance(error, ConnectionError):
                raise ConfigError(f"no Ray cluster can be used: {error}", param="ray_address") from error
            return False
    return True


def _start_cluster(num_cpus: int) -> None:
    """One of our own, whose only node has so many CPUs to give away, whatever the machine has."""
    import ray

    logger.warning("there is no Ray cluster here: starting one that ends with this process")
    env.report_no_ray_usage()
    with _same_sigterm_handler():
        ray.init(num_cpus=num_cpus, **_OPTIONS)


def _look_for(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise ConfigError(f"no Ray cluster answers at ray_address {address!r}: {error}", param="ray_address") from error


@contextmanager
def _same_sigterm_handler() -> Iterator[None]:
    """Ray puts a handler of its own in place of the process'."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def _in_words(error: Exception) -> str:
    """Of Ray's pages about an actor's end, the sentence that says why."""
    import ray

    text = str(error)
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return "cannot be reached any more"
    if isinstance(error, ray.exceptions.RayActorError):
        reason = text.partition("The actor is dead because ")[2] or text
        return f"was an actor that is dead because {reason.partition('. ')[0].strip()}"
    if isinstance(error, ray.exceptions.RayTaskError):
        return f"failed with {text.strip().splitlines()[-1]}"
    return f"could not be run: {type(error).__name__}: {text}"
