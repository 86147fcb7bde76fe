"""Puts a server together: folder, port, rank client, tokenizer, HTTP. The one place that knows all of them.

The first ranks are launched before the web framework is imported, so that their import of torch runs beside it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nobiru import __version__, machine
from nobiru.config import EngineConfig, SchedulingPolicy, ServerConfig
from nobiru.engine.client import ZmqClient
from nobiru.engine.limits import SERVER_TOKEN_BUDGET, scheduler_config
from nobiru.env import rank_environment, tokenize_in_calling_thread
from nobiru.errors import NobiruError
from nobiru.folder.read import read_folder
from nobiru.folder.spec import ModelFolder
from nobiru.metrics import Metrics
from nobiru.serving.connections import open_socket
from nobiru.serving.logs import configure_logging

if TYPE_CHECKING:
    from nobiru.frontend.frontend import Frontend
    from nobiru.frontend.generation import GenerationFrontend
    from nobiru.serving.protocols import Engine, Pool

EXIT_FAILED = 1

log = logging.getLogger("nobiru.server")


def start(server: ServerConfig, engine: EngineConfig) -> int:
    """Serve until told to stop; the exit code. Raises `ConfigError` or `ModelFolderError` before it listens."""
    tokenize_in_calling_thread()
    folder = read_folder(Path(engine.model), max_model_len=engine.max_model_len)
    metrics = Metrics()
    if engine.num_threads is None and engine.data_parallel_backend == "local":
        cores = machine.default_num_threads()
        num_ranks = engine.data_parallel_size if server.autoscaling is None else server.autoscaling.max_size
        num_processes = num_ranks * engine.tensor_parallel_size
        engine = msgspec.structs.replace(engine, num_threads=max(1, cores // num_processes))
    client = ZmqClient(
        engine,
        limits=scheduler_config(engine, folder, default_budget=SERVER_TOKEN_BUDGET),
        embedding_dim=folder.embedding_dim,
        environment=rank_environment(num_threads=engine.num_threads or 1),
        observer=metrics,
        rank_timeout_s=server.rank_timeout_s,
        max_start_failures=server.max_start_failures,
        log_level=server.log_level,
    )
    return run(
        server,
        folder=folder,
        client=client,
        load_pool=lambda: load_tokenizers(folder, server),
        metrics=metrics,
        scheduling_policy=engine.scheduling_policy,
    )


def run(
    config: ServerConfig,
    *,
    folder: ModelFolder,
    client: Engine,
    load_pool: Callable[[], Pool],
    metrics: Metrics,
    scheduling_policy: SchedulingPolicy = "priority",
) -> int:
    """Serve until told to stop; the process' exit code.

    The port is taken first, then the engine is launched, and the web framework is imported and the tokenizer loaded
    while the engine loads its model.
    """
    try:
        configure_logging(log_format=config.log_format, level=config.log_level)
        with open_socket(config.host, config.port) as listener:
            host, port = listener.getsockname()[:2]
            name = config.model_names(folder.name)[0]
            log.info("nobiru %s listens on http://%s:%d and loads %s", __version__, _in_url(host), port, name)
            started_s = time.monotonic()
            client.launch_now()
            from nobiru.serving.server import serve

            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                serving = serve(config, listener, load_pool, folder, client, metrics, scheduling_policy, started_s)
                return runner.run(serving)
    except NobiruError as error:
        log.error("%s", error.message)
    except KeyboardInterrupt:
        log.info("interrupted while starting")
        return 128 + signal.SIGINT
    except Exception:
        log.exception("the server could not be started")
    return EXIT_FAILED


def load_tokenizers(folder: ModelFolder, server: ServerConfig) -> Pool:
    from nobiru.frontend.pool import TokenizerPool

    return TokenizerPool(make_frontend(folder, server))


def make_frontend(folder: ModelFolder, server: ServerConfig) -> Frontend | GenerationFrontend:
    """What prepares requests for a model of this kind."""
    if folder.task == "generate":
        from nobiru.frontend.generation import GenerationFrontend

        return GenerationFrontend(folder)
    from nobiru.frontend.frontend import Frontend

    return Frontend(folder, auto_truncate=server.auto_truncate)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop  # not on every platform
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
