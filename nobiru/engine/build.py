"""Puts an engine together: folder, runner, executor, scheduler, core. Used by `LLM` and by a rank process.

The one module above the runner that needs torch, so the HTTP process never imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from nobiru import env, machine
from nobiru.config import EngineConfig
from nobiru.engine.core import EngineCore
from nobiru.engine.limits import CUDA_TOKEN_BUDGET, scheduler_config
from nobiru.folder.read import read_folder
from nobiru.folder.spec import ModelFolder
from nobiru.runner import device_errors
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
    runner: PoolingRunner
    folder: ModelFolder
    info: Info


def build_engine(
    config: EngineConfig, *, default_budget: int, on_plan: Callable[[Plan], None] = lambda plan: None
) -> Engine:
    """Load the model of `config`; raises `ConfigError` or `ModelFolderError`.

    `default_budget` is the number of tokens a step takes on a CPU when `config` does not say.
    """
    num_threads = config.num_threads or machine.default_num_threads()
    torch.set_num_threads(num_threads)
    folder = read_folder(Path(config.model), max_model_len=config.max_model_len)
    runner = PoolingRunner.load(folder, dtype=config.dtype, device=config.device, max_model_len=folder.max_model_len)
    runner.warm_up()
    limits = scheduler_config(
        config, folder, default_budget=CUDA_TOKEN_BUDGET if runner.device_type == "cuda" else default_budget
    )
    info: Info = {
        "model": folder.name,
        **runner.describe(),
        "num_threads": num_threads,
        "max_model_len": folder.max_model_len,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_num_seqs": limits.max_num_seqs,
        "embedding_dim": folder.embedding_dim,
    }
    faults = env.fault_injection()
    executed: RunnerLike = FaultyRunner(runner, parse_faults(faults)) if faults else runner
    executor = Executor(
        executed,
        is_fatal=device_errors.is_fatal,
        is_out_of_memory=device_errors.is_out_of_memory,
        free_memory=device_errors.free_memory,
    )
    core = EngineCore(Scheduler(limits), executor, on_plan=on_plan)
    return Engine(core=core, runner=runner, folder=folder, info=info)
