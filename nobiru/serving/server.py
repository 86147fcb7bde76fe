"""The life of the server process: listen, serve, drain, end.

Owns signals and the exit code. uvicorn moves the bytes; when to stop is decided here: the first SIGTERM or SIGINT lets
accepted requests finish, the second one does not wait, and an engine that cannot be kept running ends the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from nobiru.config import SchedulingPolicy, ServerConfig
from nobiru.folder.spec import ModelFolder
from nobiru.metrics import Metrics
from nobiru.serving.app import NobiruApp, create_app
from nobiru.serving.connections import BACKLOG, KEEP_ALIVE_S, IdleConnections, http_protocol
from nobiru.serving.protocols import Engine, Pool

EXIT_OK = 0
EXIT_FAILED = 1
TICK_S = 1.0
DRAIN_POLL_S = 0.02
# For answers already written to reach their clients once everything else has ended.
FLUSH_S = 2.0
STOP_ENGINE_S = 10.0
FORCED_STOP_S = 3.0

log = logging.getLogger("nobiru.server")


class HttpServer(uvicorn.Server):
    """uvicorn with our own end. `exit_code` is valid once `serve` has returned."""

    def __init__(self, config: uvicorn.Config, app: NobiruApp, client: Engine, shutdown_timeout_s: float) -> None:
        super().__init__(config)
        self.exit_code = EXIT_OK
        self._app = app
        self._client = client
        self._shutdown_timeout_s = shutdown_timeout_s
        self._idle_connections = IdleConnections()
        self._wake = asyncio.Event()
        self._drain_deadline_s: float | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets=sockets)
        except SystemExit:  # uvicorn's way to say that the application did not start
            raise self._app.state.start_error from None
        gc.freeze()  # what imports made stays: looking through it again and again takes a sixth of this process' time
        self._client.failed.add_done_callback(self._on_engine_failed)

    async def main_loop(self) -> None:
        """Until there is a reason to stop, and then until accepted requests have their answers."""
        while not (self.force_exit or self._drained()):
            await self.on_tick(0)  # the Date header
            self._idle_connections.sweep(self.server_state.connections, time.monotonic())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), TICK_S if self._drain_deadline_s is None else DRAIN_POLL_S)
            self._wake.clear()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the listener, answer what is left with 503, let bytes flow out, stop the engine."""
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        self._app.admission.draining = self._app.gate.closing = True
        for connection in list(self.server_state.connections):
            connection.shutdown()
        for task in list(self.server_state.tasks):
            task.cancel()
        await self._connections_closed(0.1 if self.force_exit else FLUSH_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        try:
            await asyncio.wait_for(self.lifespan.shutdown(), FORCED_STOP_S if self.force_exit else STOP_ENGINE_S)
        except TimeoutError:
            log.error("the engine did not stop in time")
            self.exit_code = self.exit_code or EXIT_FAILED

    def _drained(self) -> bool:
        if self._drain_deadline_s is None:
            return False
        num_left = self._app.admission.num_accepted
        if num_left and time.monotonic() >= self._drain_deadline_s:
            log.warning("%d requests are not done after %g s and end now", num_left, self._shutdown_timeout_s)
            return True
        return num_left == 0

    async def _connections_closed(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while self.server_state.connections and time.monotonic() < deadline_s:
            await asyncio.sleep(DRAIN_POLL_S)

    def _on_signal(self, number: int) -> None:
        self._wake.set()
        name = signal.Signals(number).name
        if self._drain_deadline_s is not None:
            log.warning("%s again: stopping at once", name)
            self.force_exit = True
            self.exit_code = 128 + number
            return
        num_accepted = self._app.admission.num_accepted
        log.info(
            "%s: finishing %d accepted requests, at most %g s; again to stop at once",
            *(name, num_accepted, self._shutdown_timeout_s),
        )
        self._app.admission.draining = True
        self._drain_deadline_s = time.monotonic() + self._shutdown_timeout_s

    def _on_engine_failed(self, failed: asyncio.Future[Any]) -> None:
        if failed.cancelled() or self._drain_deadline_s is not None:
            return
        log.error("the engine cannot be kept running: %s", failed.exception() or failed.result())
        self.exit_code = EXIT_FAILED
        self._drain_deadline_s = time.monotonic()
        self._wake.set()


async def serve(
    config: ServerConfig,
    listener: socket.socket,
    load_pool: Callable[[], Pool],
    folder: ModelFolder,
    client: Engine,
    metrics: Metrics,
    scheduling_policy: SchedulingPolicy,
    launched_s: float,
) -> int:
    """Answer what arrives at `listener` until told to stop; the exit code.

    `client` was launched at `launched_s`; the tokenizer is loaded while it loads its model.
    """
    try:
        pool = load_pool()
    except BaseException:
        await client.stop()
        raise
    with contextlib.closing(pool):
        app = create_app(config, folder, pool, client, metrics, scheduling_policy=scheduling_policy)
        server = HttpServer(_uvicorn_config(app), app, client, config.shutdown_timeout_s)
        announcer = asyncio.create_task(_announce(config, folder, client, launched_s))
        try:
            await server.serve(sockets=[listener])
        finally:
            announcer.cancel()
        log.info("ended with exit code %d", server.exit_code)
        return server.exit_code


async def _announce(config: ServerConfig, folder: ModelFolder, client: Engine, launched_s: float) -> None:
    """The start line, when the model is loaded."""
    while client.model_info is None:
        await asyncio.sleep(0.05)
    facts: dict[str, Any] = {
        **client.model_info,
        "model": config.model_names(folder.name)[0],
        "max_model_len": folder.max_model_len,
        "max_queued_tokens": config.max_queued_tokens,
        "max_body_bytes": config.max_body_bytes,
    }
    log.info(
        "ready after %.1f s: %s",
        time.monotonic() - launched_s,
        ", ".join(f"{name} {value}" for name, value in facts.items()),
        extra={"fields": facts},
    )


def _uvicorn_config(app: NobiruApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=http_protocol(),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
