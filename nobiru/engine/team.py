"""The leader's side of a rank with several workers: their processes, and what they are told.

Owns starting them, hearing that they have loaded, handing them each step, and noticing their death, which is the
rank's: whoever leads is told at once, and exchanges with the dead one fail. Workers end when the pipe from their leader
closes, which the kernel does when the leader dies however it dies. Knows nothing of what a step computes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import msgspec
import zmq
from torch._C._distributed_c10d import TCPStore

from nobiru import env
from nobiru.config import EngineConfig
from nobiru.elastic.launcher.local import LocalLauncher, LocalProcess
from nobiru.engine.messages import Formed, Moved
from nobiru.engine.rank_spec import Place
from nobiru.engine.recorder import FlightRecorder
from nobiru.engine.team_messages import (
    Allocate,
    FromWorker,
    Ready,
    ShareLoaded,
    ToWorker,
    WorkerFailed,
    WorkerSpec,
    decode_from_worker,
    encode,
    pack_step,
)
from nobiru.errors import ConfigError, GroupError
from nobiru.generation import CausalInput
from nobiru.layers.sharding import Shard
from nobiru.parallel.groups import Group, connect_store, form_group
from nobiru.parallel.tensor import WorkerGroup

logger = logging.getLogger(__name__)

WORKER_ENTRY = "nobiru.engine.worker:main"
GROUP_ATTEMPT = "start"
MEET_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 5.0
POLL_MS = 100
WATCH_INTERVAL_S = 0.5
SILENCE_S = 10.0

_Heard = TypeVar("_Heard", Ready, ShareLoaded)
_Taken = TypeVar("_Taken", Formed, Moved)


class Team:
    """Workers 1 to `tensor_parallel_size` - 1, whose leader, worker 0, is this process.

    `start`, load, `wait_loaded`, `allocate`, and then `step` for each step just before computing it; `tell` for what
    else the leader does and they must do too, `take` for what they say of it. Any of them raises `GroupError` when a
    worker is dead; one whose heart has not beaten for `silence_s` is killed. `on_death`, which may be set at any time,
    hears of a death from another thread. `close` ends the processes.
    """

    def __init__(self, config: EngineConfig, *, num_threads: int, place: Place, silence_s: float = SILENCE_S) -> None:
        self._config = config
        self._num_threads = num_threads
        self._place = place
        self._silence_s = silence_s
        self.group = WorkerGroup(Shard(0, config.tensor_parallel_size))
        self.on_death: Callable[[], None] = lambda: None
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._processes: list[LocalProcess] = []
        self._recorders: list[FlightRecorder] = []
        self._watcher = threading.Thread(target=self._watch, name="worker-watch", daemon=True)
        self._meeting: TCPStore | None = None
        self._failure: str | None = None
        self._is_closing = False
        self._said: list[Formed | Moved] = []

    @property
    def size(self) -> int:
        """Of all workers, the leader included."""
        return self.group.shard.size

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    # ---- beginning and end -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the processes and form the group; they load meanwhile what is theirs."""
        endpoint = f"ipc://@nobiru-{uuid.uuid4().hex}"
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
            self._socket.setsockopt(option, value)
        self._socket.bind(endpoint)
        meeting = self._meeting = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=MEET_TIMEOUT_S)
        )
        launcher = LocalLauncher(environment=env.rank_environment(num_threads=self._num_threads))
        for index in range(1, self.size):
            recorder = FlightRecorder.create(capacity=0)
            self._recorders.append(recorder)
            spec = WorkerSpec(
                index=index,
                place=self._place,
                endpoint=endpoint,
                recorder_fd=recorder.fd,
                store_port=meeting.port,
                engine=self._config,
                num_threads=self._num_threads,
                log_level=logging.getLevelName(logger.getEffectiveLevel()).lower(),
            )
            self._processes.append(launcher.launch(WORKER_ENTRY, msgspec.json.encode(spec), pass_fds=[recorder.fd]))
        self._watcher.start()
        self._hear_all(Ready, LOAD_TIMEOUT_S)
        self.group.join(meet(meeting.port, self.group.shard, self._config.step_timeout_s))

    def wait_loaded(self) -> None:
        """Until all have loaded; what keeps one from it is raised here."""
        self._hear_all(ShareLoaded, LOAD_TIMEOUT_S)
        self._meeting = None  # the group stands for all, and needs the store no more

    def close(self) -> None:
        """End the processes, by force if they do not end by themselves."""
        self._is_closing = True
        for process in self._processes:
            process.close()
        for process in self._processes:
            process.join(STOP_TIMEOUT_S)
        if self._watcher.is_alive():
            self._watcher.join(STOP_TIMEOUT_S)
        while self._recorders:
            self._recorders.pop().close()
        self.group.leave()
        if not self._socket.closed:
            self._socket.close()
            self._context.term()

    # ---- steps -------------------------------------------------------------------------------------------------------

    def allocate(self, num_blocks: int, block_size: int) -> None:
        self.tell(Allocate(num_blocks=num_blocks, block_size=block_size))

    @contextmanager
    def step(self, inputs: Sequence[CausalInput]) -> Iterator[None]:
        """The workers compute these inputs, as their leader does meanwhile.

        If the leader is interrupted, they are somewhere in the middle, and nothing can be computed together any more.
        """
        self.tell(pack_step(inputs))
        try:
            yield
        except GroupError:
            raise
        except BaseException as error:
            self._give_up(f"a step was interrupted by {type(error).__name__}, and the rank's workers are out of step")
            raise

    def tell(self, message: ToWorker) -> None:
        """To all workers, who hear messages in their order."""
        if self._failure is not None:
            raise GroupError(self._failure)
        payload = encode(message)
        for index in range(1, self.size):
            try:
                self._socket.send_multipart([worker_identity(index), payload])
            except zmq.ZMQError as error:  # the news of its death is on its way
                raise GroupError(f"worker {index} of the rank does not listen: {error}") from error

    def take(self, kind: type[_Taken]) -> list[_Taken]:
        """What workers have said of this kind since the last call."""
        while self._socket.poll(0):
            _, message = self._receive()
            if isinstance(message, Formed | Moved):
                self._said.append(message)
        taken = [each for each in self._said if isinstance(each, kind)]
        self._said = [each for each in self._said if not isinstance(each, kind)]
        return taken

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _hear_all(self, kind: type[_Heard], timeout_s: float) -> None:
        """Until every worker has said this."""
        end_s = time.monotonic() + timeout_s
        heard: set[bytes] = set()
        while len(heard) < self.size - 1:
            identity, message = self._hear(end_s, kind.__name__)
            if isinstance(message, kind):
                heard.add(identity)

    def _hear(self, end_s: float, what: str) -> tuple[bytes, FromWorker]:
        while not self._socket.poll(POLL_MS):
            if self._failure is not None and not self._socket.poll(POLL_MS):  # nothing it said is on its way
                raise GroupError(self._failure)
            if time.monotonic() > end_s:
                raise GroupError(f"a worker of the rank did not say {what} in time")
        return self._receive()

    def _receive(self) -> tuple[bytes, FromWorker]:
        identity, payload = self._socket.recv_multipart()
        message = decode_from_worker(payload)
        if isinstance(message, WorkerFailed):
            raise (ConfigError if message.permanent else GroupError)(message.message)
        return identity, message

    def _watch(self) -> None:
        index, how = asyncio.run(self._first_death())
        if self._is_closing:
            return
        self._give_up(f"worker {index} of the rank {how}")
        self.on_death()

    def _give_up(self, why: str) -> None:
        self._failure = why
        logger.error("%s", why)
        self.group.break_connections()

    async def _first_death(self) -> tuple[int, str]:
        """The number of the worker, and how it ended. Kills those that give no sign of life."""
        waits = [asyncio.create_task(process.wait_dead()) for process in self._processes]
        last_look_s = time.monotonic()
        while True:
            done, _ = await asyncio.wait(waits, timeout=WATCH_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
            if done:
                first = done.pop()
                return waits.index(first) + 1, first.result()
            now_s = time.monotonic()
            held_up_s, last_look_s = now_s - last_look_s - WATCH_INTERVAL_S, now_s
            if held_up_s > self._silence_s / 2:
                continue  # this machine, not a worker, stood still
            for process, recorder in zip(self._processes, self._recorders, strict=True):
                if recorder.heartbeat_s and now_s - recorder.heartbeat_s > self._silence_s:
                    logger.error("process %d, a worker, gives no sign of life", process.pid)
                    process.kill()


def worker_identity(index: int) -> bytes:
    return f"worker-{index}".encode()


def meet(port: int, shard: Shard, timeout_s: float) -> Group:
    """The group of a rank's workers, who all call this; `timeout_s` bounds each exchange."""
    store = connect_store("127.0.0.1", port, timeout_s=MEET_TIMEOUT_S)
    return form_group(
        store, attempt_id=GROUP_ATTEMPT, name="workers", rank=shard.index, size=shard.size, timeout_s=timeout_s
    )
