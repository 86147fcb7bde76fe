"""The MoE layers of a model: their assembly from a folder, and what others do with them while the model serves.

Owns which layers have experts, where each expert's tensors are, and the slots of this rank. Knows nothing of other
ranks: a dispatcher, which can be exchanged, carries tokens to them.

Shape legend: L MoE layers, S slots of a layer, E experts, T tokens, C hidden size, I intermediate size, A = 2 I rows of
gate and up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nobiru.folder.spec import ModelFolder
from nobiru.layers.activation import Activation
from nobiru.layers.moe import (
    Dispatcher,
    ExpertLoads,
    Experts,
    LocalDispatcher,
    MoeFeedForward,
    MoeMlp,
    SharedExpert,
)
from nobiru.layers.routing import Router
from nobiru.models.config import ConfigFields
from nobiru.models.experts import ExpertNames, StoredExperts
from nobiru.models.pace import Pace
from nobiru.models.weights import ModelWeights, Precision

Slots = NDArray[np.integer]
# Slots themselves, or what they are for the numbers of MoE layers and of experts.
SlotChoice = Slots | Callable[[int, int], Slots]

# An expert with this many rows computes for longer than its weights take to read.
_BUSY_ROWS = 32
_NUM_EXPERTS_NAMES = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig:
    """What a family's MoE layers are made of.

    `layers` are the numbers of the decoder's layers that have experts. A layer's tensors are those behind the first of
    `parts` ("mlp.") that there are. `read_router` and `read_shared` get the prefix of the layer's tensors.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: Activation
    layers: tuple[int, ...]
    read_router: Callable[[ModelWeights, str], Router]
    read_shared: Callable[[ModelWeights, str], SharedExpert] | None = None
    parts: tuple[str, ...] = ("mlp.",)
    names: ExpertNames = field(default_factory=ExpertNames)


def read_num_experts(folder: ModelFolder, fields: ConfigFields, *, default: int) -> int:
    """How many experts a layer has; transformers 5 writes another name than the families' authors."""
    names = [name for name in _NUM_EXPERTS_NAMES if folder.config.get(name) is not None]
    return fields.size(names[0] if names else _NUM_EXPERTS_NAMES[0], default)


def read_top_k(fields: ConfigFields, num_experts: int, *, default: int) -> int:
    """How many experts a token goes to."""
    top_k = fields.size("num_experts_per_tok", default)
    if top_k > num_experts:
        fields.refuse("num_experts_per_tok", f"there are {num_experts} experts")
    return top_k


class MoeParts:
    """The MoE layers of one rank.

    `slots_LS` is which logical expert each slot got when the model was loaded, -1 for none. `dispatcher` may be set
    between steps; there is none at first where this rank lacks experts.
    """

    def __init__(
        self,
        config: MoeConfig,
        precision: Precision,
        *,
        mlps: list[MoeMlp],
        stored: list[StoredExperts],
        loads: ExpertLoads,
        slots_LS: Slots,
    ) -> None:
        self.num_experts = config.num_experts
        self.slots_LS = slots_LS
        self.banks = [mlp.experts for mlp in mlps]
        self.dispatcher: Dispatcher | None = None
        if all(set(range(config.num_experts)) <= set(slots_S.tolist()) for slots_S in slots_LS):
            self.dispatcher = LocalDispatcher(slots_LS, config.num_experts)
        self._layers = config.layers
        self._rounding = precision.weights
        self._mlps = mlps
        self._stored = stored
        self._loads = loads

    @property
    def num_layers(self) -> int:
        return len(self._mlps)

    @property
    def slot_capacity(self) -> int:
        """Slots of each layer on this rank."""
        return int(self.slots_LS.shape[1])

    @property
    def expert_bytes(self) -> int:
        """Memory of one expert of one layer, which is what has to be copied to move it."""
        return self.banks[0].slot_bytes

    @property
    def stored_expert_bytes(self) -> int:
        """What one expert of one layer takes in the folder."""
        return self._stored[0].stored_bytes

    @property
    def min_share_tokens(self) -> int:
        """How many tokens a thread should have if each of several computes some tokens, and all read the experts."""
        return -(-_BUSY_ROWS * self.num_experts // self._mlps[0].top_k)

    @property
    def is_reentrant(self) -> bool:
        return self.dispatcher is not None and self.dispatcher.is_reentrant

    def feed_forward(self, layer: int) -> MoeFeedForward | None:
        """That of the decoder's layer, if it has experts."""
        if layer not in self._layers:
            return None
        return MoeFeedForward(mlp=self._mlps[self._layers.index(layer)], parts=self)

    def run_idle(self) -> None:
        """Take part in a forward pass of other ranks, without tokens."""
        assert self.dispatcher is not None
        with torch.inference_mode():
            for mlp in self._mlps:
                mlp.run_idle(self.dispatcher)

    def take_loads(self) -> Tensor:
        """Tokens that this rank routed to each logical expert since the last call, int64 [L, E] on the CPU."""
        return self._loads.take()

    def read_expert(self, layer: int, expert: int, slot: int, *, pace: Pace | None = None) -> None:
        """Read an expert of MoE layer number `layer` from the folder into a slot. Nobody may be using the slot."""
        gate_up_AC, down_CI = self._stored[layer].read(expert, pace=pace)
        self.banks[layer].write(slot, gate_up_AC.to(self._rounding), down_CI.to(self._rounding))

    def fill(self) -> None:
        """Read the experts of `slots_LS`."""
        for layer, slots_S in enumerate(self.slots_LS.tolist()):
            for slot, expert in enumerate(slots_S):
                if expert >= 0:
                    self.read_expert(layer, expert, slot)


def load_moe(
    weights: ModelWeights, config: MoeConfig, precision: Precision, device: torch.device, slots_LS: SlotChoice | None
) -> MoeParts:
    """The MoE layers, with everything but experts read; `fill` reads those, when nothing is missing in `weights`.

    `slots_LS` None is every expert in the slot of its number. ValueError for slots that do not suit the model.
    """
    if slots_LS is None:
        slots_LS = np.tile(np.arange(config.num_experts), (len(config.layers), 1))
    elif callable(slots_LS):
        slots_LS = slots_LS(len(config.layers), config.num_experts)
    _check_slots(slots_LS, config)
    loads = ExpertLoads(len(config.layers), config.num_experts, device)
    mlps, stored = [], []
    for number, layer in enumerate(config.layers):
        prefixes = [f"layers.{layer}.{part}" for part in config.parts]
        prefix = next((each for each in prefixes if weights.has(f"{each}gate.weight")), prefixes[0])
        source = StoredExperts(
            weights,
            prefix,
            config.names,
            num_experts=config.num_experts,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
        )
        halved = torch.bfloat16 in (precision.weights, source.dtype)
        stored.append(source)
        mlps.append(
            MoeMlp(
                layer=number,
                top_k=config.top_k,
                router=config.read_router(weights, prefix),
                experts=Experts(
                    num_slots=slots_LS.shape[1],
                    hidden_size=config.hidden_size,
                    intermediate_size=config.intermediate_size,
                    activation=config.activation,
                    compute=precision.compute,
                    stored=torch.bfloat16 if halved else torch.float32,
                    device=device,
                ),
                shared=None if config.read_shared is None else config.read_shared(weights, prefix),
                loads=loads,
            )
        )
    return MoeParts(config, precision, mlps=mlps, stored=stored, loads=loads, slots_LS=slots_LS)


def _check_slots(slots_LS: Slots, config: MoeConfig) -> None:
    if slots_LS.ndim != 2 or slots_LS.shape[0] != len(config.layers) or not slots_LS.shape[1]:
        raise ValueError(
            f"slots have shape {slots_LS.shape}; one row for each of {len(config.layers)} layers is expected"
        )
    if slots_LS.min() < -1 or slots_LS.max() >= config.num_experts:
        raise ValueError(f"slots must hold experts 0 to {config.num_experts - 1}, or -1")
