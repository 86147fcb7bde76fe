"""Mixtral: Mistral with experts in every layer (Jiang et al. 2024, https://arxiv.org/abs/2401.04088)."""

from __future__ import annotations

import torch

from nobiru.folder.spec import ModelFolder
from nobiru.layers.routing import SoftmaxRouter
from nobiru.layers.sharding import TensorGroup
from nobiru.models.config import DECODER_LIMITS, ConfigFields
from nobiru.models.decoder import Decoder, load_decoder, read_decoder, read_linear
from nobiru.models.experts import ExpertNames
from nobiru.models.moe import MoeConfig, SlotChoice, read_num_experts, read_top_k
from nobiru.models.weights import ModelWeights, Precision


def load_mixtral(
    folder: ModelFolder,
    precision: Precision,
    device: torch.device,
    slots_LS: SlotChoice | None = None,
    group: TensorGroup | None = None,
) -> Decoder:
    """The decoder of a Mixtral folder; `ModelFolderError` names what cannot be honoured."""
    fields = ConfigFields(folder, DECODER_LIMITS)
    window = None if folder.config.get("sliding_window") is None else fields.size("sliding_window")
    config = read_decoder(folder, windows=(window,) * fields.size("num_hidden_layers"), default_norm_eps=1e-5)
    num_experts = read_num_experts(folder, fields, default=8)
    top_k = read_top_k(fields, num_experts, default=2)

    def read_router(weights: ModelWeights, prefix: str) -> SoftmaxRouter:
        gate = read_linear(weights, f"{prefix}gate", num_experts, config.hidden_size, has_bias=False)
        return SoftmaxRouter(gate=gate, top_k=top_k, normalizes=True, rounds=False)

    moe = MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        activation=config.activation,
        layers=tuple(range(config.num_layers)),
        read_router=read_router,
        parts=("block_sparse_moe.", "mlp."),
        names=ExpertNames(gate="w1", up="w3", down="w2"),
    )
    return load_decoder(folder, config, precision, device, moe=moe, slots_LS=slots_LS, group=group)
