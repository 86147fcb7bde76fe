"""Mixtral: Mistral with experts in every layer (Jiang et al. 2024, https://arxiv.org/abs/2401.04088)."""

from __future__ import annotations

import torch

from nobiru.folder.spec import ModelFolder
from nobiru.layers.sharding import TensorGroup
from nobiru.models.config import DECODER_LIMITS, ConfigFields
from nobiru.models.decoder import Decoder, load_decoder, read_decoder
from nobiru.models.experts import ExpertNames
from nobiru.models.moe import SlotChoice
from nobiru.models.softmax_moe import read_softmax_moe
from nobiru.models.weights import Precision


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
    moe = read_softmax_moe(
        folder,
        fields,
        config,
        num_experts=8,
        top_k=2,
        normalizes=True,
        rounds=False,
        parts=("block_sparse_moe.", "mlp."),
        names=ExpertNames(gate="w1", up="w3", down="w2"),
    )
    return load_decoder(folder, config, precision, device, moe=moe, slots_LS=slots_LS, group=group)
