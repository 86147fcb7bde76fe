"""Puts a server together: folder, rank client, tokenizer, HTTP. The one place that knows all of them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from nobiru import machine
from nobiru.config import EngineConfig, ServerConfig
from nobiru.engine.client import ZmqClient
from nobiru.engine.limits import SERVER_TOKEN_BUDGET, scheduler_config
from nobiru.env import rank_environment, tokenize_in_calling_thread
from nobiru.folder.read import read_folder
from nobiru.folder.spec import ModelFolder
from nobiru.frontend.frontend import Frontend
from nobiru.frontend.generation import GenerationFrontend
from nobiru.frontend.pool import TokenizerPool
from nobiru.metrics import Metrics
from nobiru.serving.server import run


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
        load_pool=lambda: TokenizerPool(make_frontend(folder, server)),
        metrics=metrics,
        scheduling_policy=engine.scheduling_policy,
    )


def make_frontend(folder: ModelFolder, server: ServerConfig) -> Frontend | GenerationFrontend:
    """What prepares requests for a model of this kind."""
    if folder.task == "generate":
        return GenerationFrontend(folder)
    return Frontend(folder, auto_truncate=server.auto_truncate)
