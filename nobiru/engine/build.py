"""Puts an engine together: folder, runner, executor, scheduler, core. Used by `LLM` and by a rank process.

The one module above the runner that needs torch, so the HTTP process never imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from nobiru import env, machine
from nobiru.config import EngineConfig
from nobiru.engine.core import EngineCore
from nobiru.engine.limits import default_token_budget, scheduler_config
from nobiru.folder.read import read_folder
from nobiru.folder.spec import ModelFolder
from nobiru.kv import cache
from nobiru.kv.blocks import BlockPool
from nobiru.runner import device_errors
from nobiru.runner.causal import CausalRunner
from nobiru.runner.executor import Executor
from nobiru.runner.executor import Runner as RunnerLike
from nobiru.runner.faults import FaultyRunner, parse_faults
from nobiru.runner.runner import PoolingRunner
from nobiru.scheduler import Plan, Scheduler

Info = dict[str, str | int | float | bool | None]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A loaded model and its step loop. `info` is what the start line says."""

    core: EngineCore
    runner: PoolingRunner | CausalRunner
    folder: ModelFolder
    info: Info


def build_engine(
    config: EngineConfig, *, default_budget: int, on_plan: Callable[[Plan], None] = lambda plan: None
) -> Engine:
    """Load the model of `config`; raises `ConfigError` or `ModelFolderError`.

    `default_budget` is the number of tokens an encoder's step takes on a CPU when `config` does not say.
    """
    num_threads = config.num_threads or machine.default_num_threads()
    torch.set_num_threads(num_threads)
    folder = read_folder(Path(config.model), max_model_len=config.max_model_len)
    load = CausalRunner.load if folder.is_causal else PoolingRunner.load
    runner = load(folder, dtype=config.dtype, device=config.device, max_model_len=folder.max_model_len)
    pool = _make_cache(runner, config, folder) if isinstance(runner, CausalRunner) else None
    runner.warm_up()
    on_cuda = runner.device_type == "cuda"
    budget = default_token_budget(folder, default=default_budget, on_cuda=on_cuda)
    limits = scheduler_config(config, folder, default_budget=budget)
    plans_ahead = on_cuda if config.async_scheduling is None else config.async_scheduling
    info: Info = {
        "model": folder.name,
        **runner.describe(),
        "num_threads": num_threads,
        "max_model_len": folder.max_model_len,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_num_seqs": limits.max_num_seqs,
    }
    if folder.task == "embed":
        info["embedding_dim"] = folder.embedding_dim
    if pool is not None:
        info |= {"kv_cache_tokens": pool.num_blocks * pool.block_size, "async_scheduling": plans_ahead}
    core = EngineCore(
        Scheduler(limits, pool),
        _make_executor(runner),
        on_plan=on_plan,
        worker=_make_worker(num_threads) if plans_ahead else None,
    )
    return Engine(core=core, runner=runner, folder=folder, info=info)


def _make_cache(runner: CausalRunner, config: EngineConfig, folder: ModelFolder) -> BlockPool:
    """Give the runner its KV cache; the pool of its blocks."""
    memory = cache.default_budget(
        runner.device, memory_bytes=config.kv_cache_memory_bytes, share=config.kv_cache_memory_share
    )
    num_blocks = cache.choose_num_blocks(
        runner.cache_shape(config.block_size),
        memory,
        max_model_len=folder.max_model_len,
        max_num_seqs=config.max_num_seqs,
    )
    runner.allocate_cache(num_blocks, config.block_size)
    return BlockPool(num_blocks, config.block_size)


def _make_executor(runner: RunnerLike) -> Executor:
    faults = env.fault_injection()
    return Executor(
        FaultyRunner(runner, parse_faults(faults)) if faults else runner,
        is_fatal=device_errors.is_fatal,
        is_out_of_memory=device_errors.is_out_of_memory,
        free_memory=device_errors.free_memory,
    )


def _make_worker(num_threads: int) -> ThreadPoolExecutor:
    """The thread that executes steps while the next is planned. torch's number of threads is each thread's own."""
    return ThreadPoolExecutor(1, "executor", initializer=partial(torch.set_num_threads, num_threads))
