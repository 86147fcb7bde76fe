"""What one process of a rank loads of a causal model: all of it, or a worker's share.

Owns which experts a worker gets and who carries tokens to the others as long as there is no epoch. The leader of a rank
and its other workers come here alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from nobiru.config import EngineConfig
from nobiru.engine.expert_member import StandInDispatcher, choose_slots, first_placement
from nobiru.errors import ConfigError
from nobiru.folder.spec import ModelFolder
from nobiru.models.registry import SPREAD_MOE
from nobiru.parallel.dispatch import AllToAllDispatcher, ExpertTables
from nobiru.parallel.tensor import WorkerGroup
from nobiru.runner.causal import CausalRunner
from nobiru.runner.dtype import gather_facts, resolve_device


def load_share(
    config: EngineConfig,
    folder: ModelFolder,
    group: WorkerGroup | None,
    *,
    position: int = 0,
    slots: Sequence[Sequence[int]] | None = None,
) -> CausalRunner:
    """The model of `config`, or the share that `group` says of it, on the rank at `position`.

    Without expert parallelism between ranks, the workers of a rank spread the experts among themselves.
    """
    is_spread = config.enable_expert_parallel or (group is not None and folder.model_type in SPREAD_MOE)
    index = 0 if group is None else group.shard.index
    runner = CausalRunner.load(
        folder,
        dtype=config.dtype,
        device=config.device,
        max_model_len=folder.max_model_len,
        slots=choose_slots(config, position, slots, index=index) if is_spread else None,
        group=group,
    )
    moe = runner.moe
    if moe is not None and config.enable_expert_parallel:
        moe.dispatcher = StandInDispatcher(moe)  # until an epoch begins
    elif moe is not None and group is not None:
        tables = ExpertTables(first_placement(config, moe.num_layers, moe.num_experts))
        moe.dispatcher = AllToAllDispatcher(group.group, tables)
    return runner


def check_team(config: EngineConfig, folder: ModelFolder) -> None:
    """`ConfigError` if there can be no workers for this model here, before any is started."""
    if not folder.is_causal:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, but only decoders can be spread over workers; "
            f"{folder.model_type!r} is an encoder",
            param="tensor_parallel_size",
        )
    if resolve_device(config.device, gather_facts()) != "cpu":
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}; in this version workers compute on CPUs only, so "
            "device must be cpu",
            param="tensor_parallel_size",
        )
    if config.enable_eplb:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}; in this version experts of ranks with several "
            "workers stay where they are, so enable_eplb must be off",
            param="enable_eplb",
        )
