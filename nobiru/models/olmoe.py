"""OLMoE (Muennighoff et al. 2024, https://arxiv.org/abs/2409.02060).

Queries and keys are normalized over all heads together, and may be clipped.
"""

from __future__ import annotations

import torch

from nobiru.folder.spec import ModelFolder
from nobiru.layers.sharding import TensorGroup
from nobiru.models.config import DECODER_LIMITS, ConfigFields
from nobiru.models.decoder import Decoder, load_decoder, read_decoder
from nobiru.models.moe import SlotChoice
from nobiru.models.softmax_moe import read_softmax_moe
from nobiru.models.weights import Precision


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
    normalizes = fields.flag("norm_topk_prob", False)
    moe = read_softmax_moe(folder, fields, config, num_experts=64, top_k=8, normalizes=normalizes)
    return load_decoder(folder, config, precision, device, moe=moe, slots_LS=slots_LS, group=group)
