"""Mistral: Llama with a sliding window (Jiang et al. 2023, https://arxiv.org/abs/2310.06825)."""

from __future__ import annotations

import torch

from nobiru.folder.spec import ModelFolder
from nobiru.layers.sharding import TensorGroup
from nobiru.models.config import DECODER_LIMITS, ConfigFields
from nobiru.models.decoder import Decoder, load_decoder, read_decoder
from nobiru.models.weights import Precision

_DEFAULT_WINDOW = 4096  # of a config that does not mention one; null is none


def load_mistral(
    folder: ModelFolder, precision: Precision, device: torch.device, group: TensorGroup | None = None
) -> Decoder:
    """The decoder of a Mistral folder; `ModelFolderError` names what cannot be honoured."""
    fields = ConfigFields(folder, DECODER_LIMITS)
    window: int | None = None
    if folder.config.get("sliding_window", _DEFAULT_WINDOW) is not None:
        window = fields.size("sliding_window", _DEFAULT_WINDOW)
    config = read_decoder(folder, windows=(window,) * fields.size("num_hidden_layers"))
    return load_decoder(folder, config, precision, device, group=group)
