"""Qwen2-MoE and Qwen3-MoE: Qwen with experts in some layers, or in all (https://arxiv.org/abs/2407.10671,
https://arxiv.org/abs/2505.09388).

Qwen2-MoE also has a shared expert, whose share a gate decides.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from nobiru.folder.spec import ModelFolder
from nobiru.layers.moe import SharedExpert
from nobiru.layers.sharding import TensorGroup
from nobiru.models.config import DECODER_LIMITS, ConfigFields
from nobiru.models.decoder import Decoder, DecoderConfig, load_decoder, read_decoder, read_mlp
from nobiru.models.moe import MoeConfig, SlotChoice
from nobiru.models.softmax_moe import read_softmax_moe
from nobiru.models.weights import ModelWeights, Precision

_DEFAULT_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28
_FULL, _SLIDING = "full_attention", "sliding_attention"


def load_qwen2_moe(
    folder: ModelFolder,
    precision: Precision,
    device: torch.device,
    slots_LS: SlotChoice | None = None,
    group: TensorGroup | None = None,
) -> Decoder:
    """The decoder of a Qwen2-MoE folder; `ModelFolderError` names what cannot be honoured."""
    fields = ConfigFields(folder, DECODER_LIMITS)
    config = read_decoder(folder, windows=_qwen2_windows(folder, fields), qkv_bias=fields.flag("qkv_bias", True))
    size = fields.size("shared_expert_intermediate_size", 5632)

    def read_shared(weights: ModelWeights, prefix: str) -> SharedExpert:
        # Whole on each worker, which computes it for some of the tokens, as everything in a MoE layer.
        mlp = read_mlp(weights, f"{prefix}shared_expert.", config, size)
        gate_1C = weights.take(f"{prefix}shared_expert_gate.weight", 1, config.hidden_size)
        return SharedExpert(mlp=mlp, gate_1C=gate_1C)

    moe = _read_moe(fields, config, folder, read_shared, num_experts=60, top_k=4, intermediate_size=1408)
    return load_decoder(folder, config, precision, device, moe=moe, slots_LS=slots_LS, group=group)


def load_qwen3_moe(
    folder: ModelFolder,
    precision: Precision,
    device: torch.device,
    slots_LS: SlotChoice | None = None,
    group: TensorGroup | None = None,
) -> Decoder:
    """The decoder of a Qwen3-MoE folder; `ModelFolderError` names what cannot be honoured."""
    fields = ConfigFields(folder, DECODER_LIMITS)
    bias = fields.flag("attention_bias", False)
    window = _window(folder, fields)
    config = read_decoder(
        folder,
        windows=(window,) * fields.size("num_hidden_layers"),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
    )
    moe = _read_moe(fields, config, folder, None, num_experts=128, top_k=8, intermediate_size=768)
    return load_decoder(folder, config, precision, device, moe=moe, slots_LS=slots_LS, group=group)


def _read_moe(
    fields: ConfigFields,
    config: DecoderConfig,
    folder: ModelFolder,
    read_shared: Callable[[ModelWeights, str], SharedExpert] | None,
    *,
    num_experts: int,
    top_k: int,
    intermediate_size: int,
) -> MoeConfig:
    """What both have in common; the numbers are the family's defaults."""
    step, dense = fields.size("decoder_sparse_step", 1), folder.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        fields.refuse("mlp_only_layers", "a list of layers' numbers is expected")
    layers = tuple(layer for layer in range(config.num_layers) if layer not in dense and not (layer + 1) % step)
    if not layers:
        fields.refuse("decoder_sparse_step", "no layer has experts")
    return read_softmax_moe(
        folder,
        fields,
        config,
        num_experts=num_experts,
        top_k=top_k,
        normalizes=fields.flag("norm_topk_prob", False),
        intermediate_size=fields.size("moe_intermediate_size", intermediate_size),
        layers=layers,
        read_shared=read_shared,
    )


def _window(folder: ModelFolder, fields: ConfigFields) -> int | None:
    if not fields.flag("use_sliding_window", False) or folder.config.get("sliding_window", 0) is None:
        return None
    return fields.size("sliding_window", _DEFAULT_WINDOW)


def _qwen2_windows(folder: ModelFolder, fields: ConfigFields) -> list[int | None]:
    """The window of each layer: every other one of the first `max_window_layers`, or those that `layer_types` says."""
    num_layers, window = fields.size("num_hidden_layers"), _window(folder, fields)
    kinds = folder.config.get("layer_types")
    if kinds is None:
        end = fields.index("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
        return [None if layer % 2 or layer >= end else window for layer in range(num_layers)]
    if not isinstance(kinds, list) or not set(kinds) <= {_FULL, _SLIDING}:
        fields.refuse("layer_types", f"a list of {_FULL!r} and {_SLIDING!r} is expected")
    return [window if kind == _SLIDING else None for kind in kinds]
