"""Puts an engine together: folder, runner, executor, scheduler, core. Used by `LLM` and by a rank process.

The one module above the runner that needs torch, so the HTTP process never imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import torch

from nobiru import env, machine
from nobiru.config import EngineConfig, SchedulerConfig
from nobiru.engine.core import EngineCore
from nobiru.engine.expert_member import ExpertMember
from nobiru.engine.limits import default_token_budget, scheduler_config, timed_token_budget
from nobiru.engine.messages import Inventory, MemoryUse
from nobiru.engine.rank_spec import Place
from nobiru.engine.shares import check_team, inventory, load_share, make_expert_worker
from nobiru.engine.team import SILENCE_S, Team
from nobiru.errors import ConfigError
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
    """A loaded model and its step loop. `info` is what the start line says.

    `memory` is None where it is not the machine's. `member` and `inventory` are those of an expert-parallel rank,
    `team` are the other workers of a rank that has some; whoever built the engine ends them with `close`.
    """

    core: EngineCore
    runner: PoolingRunner | CausalRunner
    folder: ModelFolder
    info: Info
    member: ExpertMember | None = None
    inventory: Inventory | None = None
    memory: MemoryUse | None = None
    team: Team | None = None

    def close(self) -> None:
        """End the other workers."""
        if self.team is not None:
            self.team.close()


def build_engine(
    config: EngineConfig,
    *,
    default_budget: int,
    step_s: float | None = None,
    on_plan: Callable[[Plan], None] = lambda plan: None,
    place: Place | None = None,
    worker_timeout_s: float = SILENCE_S,
) -> Engine:
    """Load the model of `config`; raises `ConfigError` or `ModelFolderError`.

    `default_budget` is the number of tokens an encoder's step takes on a CPU when `config` does not say; with `step_s`
    more, if they take no longer than that. `place` is a rank's among others. A worker that gives no sign of life for
    `worker_timeout_s` is killed.
    """
    num_threads = config.num_threads or max(1, machine.default_num_threads() // config.tensor_parallel_size)
    torch.set_num_threads(num_threads)
    folder = read_folder(Path(config.model), max_model_len=config.max_model_len)
    place = place or Place()
    if config.tensor_parallel_size == 1:
        return _assemble(config, folder, place, None, num_threads, default_budget, on_plan, step_s)
    check_team(config, folder)
    team = Team(config, num_threads=num_threads, place=place, silence_s=worker_timeout_s)
    try:
        return _assemble(config, folder, place, team, num_threads, default_budget, on_plan)
    except BaseException:
        team.close()
        raise


def _load(config: EngineConfig, folder: ModelFolder, place: Place, team: Team | None) -> PoolingRunner | CausalRunner:
    """The runner; the workers of `team` have loaded their shares too when it is there."""
    if not folder.is_causal:
        limit = folder.max_model_len
        return PoolingRunner.load(
            folder,
            dtype=config.dtype,
            device=config.device,
            max_model_len=limit,
            quantization=config.quantization,
        )
    if config.quantization is not None:
        raise ConfigError(
            f"quantization is {config.quantization!r}, which is for encoders; {folder.name!r} is a causal model",
            param="quantization",
        )
    if team is None:
        return load_share(config, folder, place, None)
    team.start()
    runner = load_share(config, folder, place, team.group)
    team.wait_loaded()
    runner.followers = team
    return runner


def _assemble(
    config: EngineConfig,
    folder: ModelFolder,
    place: Place,
    team: Team | None,
    num_threads: int,
    default_budget: int,
    on_plan: Callable[[Plan], None],
    step_s: float | None = None,
) -> Engine:
    runner = _load(config, folder, place, team)
    pool = _make_cache(runner, config, folder, team) if isinstance(runner, CausalRunner) else None
    member, inventory = _join(runner, config, place, team)
    runner.warm_up()
    on_cuda = runner.device_type == "cuda"
    budget = default_token_budget(folder, default=default_budget, on_cuda=on_cuda)
    limits = scheduler_config(config, folder, default_budget=budget)
    if step_s is not None and config.max_num_batched_tokens is None and isinstance(runner, PoolingRunner):
        limits = _timed_limits(runner, limits, step_s)
    plans_ahead = on_cuda if config.async_scheduling is None else config.async_scheduling
    plans_ahead = plans_ahead and member is None  # members plan after they have agreed to step
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
        _make_executor(runner, retries=member is None and team is None),
        on_plan=on_plan,
        worker=_make_worker(num_threads) if plans_ahead else None,
    )
    return Engine(
        core=core,
        runner=runner,
        folder=folder,
        info=info,
        member=member,
        inventory=inventory,
        memory=None if on_cuda else _memory_use(runner, pool, config, folder.max_model_len),
        team=team,
    )


def _memory_use(
    runner: PoolingRunner | CausalRunner, pool: BlockPool | None, config: EngineConfig, max_model_len: int
) -> MemoryUse | None:
    """Measured, so it holds for every arrangement of weights; the workers of a rank take about as much as the leader.
    None where the system does not tell."""
    resident = machine.resident_memory_bytes()
    if resident is None:
        return None
    num_workers = config.tensor_parallel_size
    held = block_bytes = num_blocks = least = 0
    share = None
    if isinstance(runner, CausalRunner) and pool is not None:
        block_bytes = runner.cache_shape(pool.block_size).block_bytes * num_workers
        num_blocks, least = pool.num_blocks, -(-max_model_len // pool.block_size)
        budget = _cache_budget(runner, config)
        share = budget.share if budget.memory_bytes is None else None
        if (moe := runner.moe) is not None:
            held = int((moe.slots_LS >= 0).sum()) * moe.expert_bytes
    return MemoryUse(
        base_bytes=max(0, resident - held) * num_workers,
        kv_cache_bytes=num_blocks * block_bytes,
        kv_cache_share=share,
        least_kv_cache_bytes=least * block_bytes,
        free_bytes=machine.free_memory_bytes(),
    )


def _cache_budget(runner: CausalRunner, config: EngineConfig) -> cache.CacheBudget:
    memory = cache.default_budget(
        runner.device, memory_bytes=config.kv_cache_memory_bytes, share=config.kv_cache_memory_share
    )
    if config.data_parallel_backend == "local":  # the ranks of one machine share what is free
        memory = replace(memory, share=memory.share / config.data_parallel_size)
    return memory


def _make_cache(runner: CausalRunner, config: EngineConfig, folder: ModelFolder, team: Team | None) -> BlockPool:
    """Give the runner its KV cache, and the workers of `team` theirs; the pool of its blocks."""
    memory = _cache_budget(runner, config)
    block_size = runner.fitting_block_size(config.block_size)
    own = runner.cache_shape(block_size)
    num_blocks = cache.choose_num_blocks(
        replace(own, num_kv_heads=own.num_kv_heads * config.tensor_parallel_size),
        memory,
        max_model_len=folder.max_model_len,
        max_num_seqs=config.max_num_seqs,
    )
    if team is not None:
        team.allocate(num_blocks, block_size)
    # A size that somebody chose is meant to be used; a share of what is free may never be.
    runner.allocate_cache(num_blocks, block_size, takes_memory=config.kv_cache_memory_bytes is not None)
    return BlockPool(num_blocks, block_size)


def _join(
    runner: PoolingRunner | CausalRunner, config: EngineConfig, place: Place, team: Team | None
) -> tuple[ExpertMember | None, Inventory | None]:
    """What an expert-parallel rank has beside; (None, None) for others."""
    if not config.enable_expert_parallel:
        return None, None
    moe = runner.moe if isinstance(runner, CausalRunner) else None
    own = make_expert_worker(config, moe, place, None if team is None else team.group)
    assert moe is not None
    return ExpertMember(own, team), inventory(config, place, moe)


def _make_executor(runner: RunnerLike, *, retries: bool) -> Executor:
    """Without `retries` a failed forward pass ends the rank: the others would not take part in a second one."""
    faults = env.fault_injection()
    return Executor(
        FaultyRunner(runner, parse_faults(faults)) if faults else runner,
        is_fatal=device_errors.is_fatal if retries else lambda error: True,
        is_out_of_memory=device_errors.is_out_of_memory,
        free_memory=device_errors.free_memory,
    )


def _timed_limits(runner: PoolingRunner, limits: SchedulerConfig, step_s: float) -> SchedulerConfig:
    """With more tokens a step where they take no longer than `step_s`, unless somebody is in a hurry.

    Timed only where a quarter of the least step promises that more could fit, so that slow models start no later.
    """
    least = limits.max_num_batched_tokens
    if runner.device_type == "cuda" or runner.tokens_per_s(least // 4) * step_s < least:
        return limits
    budget = timed_token_budget(runner.tokens_per_s(least), step_s, least=least)
    return msgspec.structs.replace(limits, max_num_batched_tokens=budget, hurried_step_tokens=least)


def _make_worker(num_threads: int) -> ThreadPoolExecutor:
    """The thread that executes steps while the next is planned. torch's number of threads is each thread's own."""
    return ThreadPoolExecutor(1, "executor", initializer=partial(torch.set_num_threads, num_threads))
