"""OLMoE (Muennighoff et al. 2024, https://arxiv.org/abs/2409.02060).

Queries and keys are normalized over all heads together, and may be clipped.
"""

from __future__ import annotations

import torch

from nobiru.folder.spec import ModelFolder
from nobiru.layers.routing import SoftmaxRouter
from nobiru.layers.sharding import TensorGroup
from nobiru.models.config import DECODER_LIMITS, ConfigFields
from nobiru.models.decoder import Decoder, load_decoder, read_decoder, read_linear
from nobiru.models.moe import MoeConfig, SlotChoice, read_num_experts, read_top_k
from nobiru.models.weights import ModelWeights, Precision


def load_olmoe(
    folder: ModelFolder,
    precision: Precision,
    device: torch.device,
    slots_LS: SlotChoice | None = None,
    group: TensorGroup | None = None,
) -> Decoder:
    """The decoder of an OLMoE folder; `ModelFolderError` names what cannot be honoured."""
    fields = ConfigFields(folder, DECODER_LIMITS)
    bias = fields.flag("attention_bias", False)
    clip = None if folder.config.get("clip_qkv") is None else fields.number("clip_qkv", 0.0)
    if clip is not None and clip <= 0:
        fields.refuse("clip_qkv", "it must be above 0")
    config = read_decoder(
        folder, qkv_bias=bias, out_bias=bias, qk_norm="projection", qkv_clip=clip, default_norm_eps=1e-5
    )
    num_experts = read_num_experts(folder, fields, default=64)
    top_k = read_top_k(fields, num_experts, default=8)
    normalizes = fields.flag("norm_topk_prob", False)

    def read_router(weights: ModelWeights, prefix: str) -> SoftmaxRouter:
        gate = read_linear(weights, f"{prefix}gate", num_experts, config.hidden_size, has_bias=False)
        return SoftmaxRouter(gate=gate, top_k=top_k, normalizes=normalizes, rounds=True)

    moe = MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        activation=config.activation,
        layers=tuple(range(config.num_layers)),
        read_router=read_router,
    )
    return load_decoder(folder, config, precision, device, moe=moe, slots_LS=slots_LS, group=group)
