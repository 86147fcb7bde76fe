"""What one process of a rank loads of a causal model: all of it, or a worker's share.

Owns which experts a worker gets and who carries tokens to the others as long as there is no epoch. The leader of a rank
and its other workers come here alike.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nobiru.config import EngineConfig
from nobiru.engine.expert_worker import ExpertWorker, StandInDispatcher
from nobiru.engine.messages import Inventory
from nobiru.engine.rank_spec import Place
from nobiru.errors import ConfigError
from nobiru.folder.spec import ModelFolder
from nobiru.models.moe import MoeParts
from nobiru.models.registry import SPREAD_MOE
from nobiru.parallel.dispatch import AllToAllDispatcher, ExpertTables
from nobiru.parallel.placement import Placement, initial_placement, slot_capacity_for
from nobiru.parallel.tensor import WorkerGroup
from nobiru.runner.causal import CausalRunner
from nobiru.runner.dtype import gather_facts, resolve_device


def load_share(config: EngineConfig, folder: ModelFolder, place: Place, group: WorkerGroup | None) -> CausalRunner:
    """The model of `config`, or the share that `group` says of it, on the rank at `place`.

    Without expert parallelism between ranks, the workers of a rank spread the experts among themselves.
    """
    is_spread = config.enable_expert_parallel or (group is not None and folder.model_type in SPREAD_MOE)
    index = 0 if group is None else group.shard.index
    runner = CausalRunner.load(
        folder,
        dtype=config.dtype,
        device=config.device,
        max_model_len=folder.max_model_len,
        slots=choose_slots(config, place, index) if is_spread else None,
        group=group,
    )
    moe = runner.moe
    if moe is not None and config.enable_expert_parallel:
        moe.dispatcher = StandInDispatcher(moe)  # until an epoch begins
    elif moe is not None and group is not None:
        tables = ExpertTables(first_placement(config, moe.num_layers, moe.num_experts))
        moe.dispatcher = AllToAllDispatcher(group.group, tables)
    return runner


def choose_slots(config: EngineConfig, place: Place, index: int) -> Callable[[int, int], NDArray[np.integer]]:
    """For the numbers of MoE layers and of experts: which expert goes into which slot of worker `index` of the rank at
    `place`, [layers, slots]."""

    def choose(num_layers: int, num_experts: int) -> NDArray[np.integer]:
        return _slots_of_workers(config, place, num_layers, num_experts)[:, index]

    return choose


def inventory(config: EngineConfig, place: Place, moe: MoeParts) -> Inventory:
    """What a rank holds as it begins, all its workers together."""
    slots_LWS = _slots_of_workers(config, place, moe.num_layers, moe.num_experts)
    return Inventory(
        num_experts=moe.num_experts,
        expert_bytes=moe.expert_bytes,
        stored_expert_bytes=moe.stored_expert_bytes,
        shape=(moe.num_layers, config.tensor_parallel_size, moe.slot_capacity),
        slots=slots_LWS.astype("<i4").tobytes(),
    )


def _slots_of_workers(config: EngineConfig, place: Place, num_layers: int, num_experts: int) -> NDArray[np.integer]:
    """Of the rank at `place`: those it was given, or those of the first placement."""
    num_workers = config.tensor_parallel_size
    if place.slots is not None:
        return np.array(place.slots, dtype=np.int64).reshape(num_layers, num_workers, -1)
    first = place.position * num_workers if config.enable_expert_parallel else 0
    return first_placement(config, num_layers, num_experts).slots[:, first : first + num_workers]


def first_placement(config: EngineConfig, num_layers: int, num_experts: int) -> Placement:
    """Of experts on the workers of all ranks; of one rank without expert parallelism.

    With load balancing there is a spare slot, into which an expert can be copied before it is used there.
    """
    size, redundant = config.tensor_parallel_size, config.num_redundant_experts
    if config.enable_expert_parallel:
        size *= config.data_parallel_size
    # So few ranks can hold all experts; slots that nobody fills take no memory on a CPU.
    least = config.min_survivable_size * config.tensor_parallel_size
    capacity = slot_capacity_for(num_experts=num_experts, num_redundant=redundant, min_ranks=min(least, size))
    return initial_placement(
        num_layers=num_layers,
        num_experts=num_experts,
        num_ranks=size,
        slot_capacity=capacity + config.enable_eplb,
        num_redundant=redundant,
    )


def make_expert_worker(
    config: EngineConfig, moe: MoeParts | None, place: Place, group: WorkerGroup | None
) -> ExpertWorker:
    """This process' part in epochs of expert-parallel ranks; `ConfigError` for a model without experts."""
    if moe is None:
        raise ConfigError(
            "enable_expert_parallel is set, but the model has no experts; leave it out, and ranks hold the whole model",
            param="enable_expert_parallel",
        )
    return ExpertWorker(
        moe,
        step_timeout_s=config.step_timeout_s,
        max_transfer_bytes_per_s=config.max_transfer_bytes_per_s,
        host=place.host,
        workers=group,
    )


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
