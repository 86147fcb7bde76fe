"""Llama 1 to 3 and what has their architecture, such as SmolLM2 (Touvron et al. 2023, https://arxiv.org/abs/2302.13971)."""

from __future__ import annotations

import torch

from nobiru.folder.spec import ModelFolder
from nobiru.layers.sharding import TensorGroup
from nobiru.models.config import DECODER_LIMITS, ConfigFields
from nobiru.models.decoder import Decoder, load_decoder, read_decoder
from nobiru.models.weights import Precision


def load_llama(
    folder: ModelFolder, precision: Precision, device: torch.device, group: TensorGroup | None = None
) -> Decoder:
    """The decoder of a Llama folder; `ModelFolderError` names what cannot be honoured."""
    fields = ConfigFields(folder, DECODER_LIMITS)
    attention_bias, mlp_bias = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    config = read_decoder(folder, qkv_bias=attention_bias, out_bias=attention_bias, mlp_bias=mlp_bias)
    return load_decoder(folder, config, precision, device, group=group)
