"""Qwen2 and Qwen3: Llama with a window in some layers (https://arxiv.org/abs/2407.10671, https://arxiv.org/abs/2505.09388).

Qwen2 has biases on queries, keys and values, Qwen3 normalizes the heads of queries and keys instead.
"""

from __future__ import annotations

import torch

from nobiru.folder.spec import ModelFolder
from nobiru.layers.sharding import TensorGroup
from nobiru.models.config import DECODER_LIMITS, ConfigFields
from nobiru.models.decoder import Decoder, load_decoder, read_decoder
from nobiru.models.weights import Precision

_DEFAULT_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28
_QWEN3_HEAD_SIZE = 128
_FULL, _SLIDING = "full_attention", "sliding_attention"


def load_qwen2(
    folder: ModelFolder, precision: Precision, device: torch.device, group: TensorGroup | None = None
) -> Decoder:
    """The decoder of a Qwen2 folder; `ModelFolderError` names what cannot be honoured."""
    config = read_decoder(folder, windows=_windows(folder), qkv_bias=True)
    return load_decoder(folder, config, precision, device, group=group)


def load_qwen3(
    folder: ModelFolder, precision: Precision, device: torch.device, group: TensorGroup | None = None
) -> Decoder:
    """The decoder of a Qwen3 folder; `ModelFolderError` names what cannot be honoured."""
    bias = ConfigFields(folder, DECODER_LIMITS).flag("attention_bias", False)
    config = read_decoder(
        folder,
        windows=_windows(folder),
        default_head_size=_QWEN3_HEAD_SIZE,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
    )
    return load_decoder(folder, config, precision, device, group=group)


def _windows(folder: ModelFolder) -> list[int | None]:
    """The window of each layer: those behind `max_window_layers` have one, or those that `layer_types` says."""
    fields = ConfigFields(folder, DECODER_LIMITS)
    num_layers = fields.size("num_hidden_layers")
    uses_window = fields.flag("use_sliding_window", False) and folder.config.get("sliding_window", 0) is not None
    window = fields.size("sliding_window", _DEFAULT_WINDOW) if uses_window else None
    kinds = folder.config.get("layer_types")
    if kinds is None:
        first = fields.index("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
        return [window if layer >= first else None for layer in range(num_layers)]
    if not isinstance(kinds, list) or not set(kinds) <= {_FULL, _SLIDING}:
        fields.refuse("layer_types", f"a list of {_FULL!r} and {_SLIDING!r} is expected")
    return [window if kind == _SLIDING else None for kind in kinds]
