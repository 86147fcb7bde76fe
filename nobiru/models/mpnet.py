"""MPNet: BERT's layers with RoBERTa's positions and one relative position bias for all layers.

Architecture: Song et al. 2020, https://arxiv.org/abs/2004.09297. The buckets of relative positions are T5's (Raffel et
al. 2019, https://arxiv.org/abs/1910.10683, section 2.1), with the constants that `transformers` fixes.

Shape legend: H heads, M the model's limit of tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from nobiru.folder.spec import ModelFolder
from nobiru.models.config import ConfigFields, read_stack
from nobiru.models.stack import LayerNames, StackEncoder, open_stack, read_layers
from nobiru.models.weights import Precision

_NAMES = LayerNames(
    query="attention.attn.q",
    key="attention.attn.k",
    value="attention.attn.v",
    attention_out="attention.attn.o",
    attention_norm="attention.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    output_norm="output.LayerNorm",
)
_PADDING_ID = 1  # whatever pad_token_id says
_NUM_BUCKETS = 32  # whatever relative_attention_num_buckets says
_MAX_DISTANCE = 128


def load_mpnet(folder: ModelFolder, precision: Precision, device: torch.device) -> StackEncoder:
    """The encoder of an MPNet folder; `ModelFolderError` names what cannot be honoured."""
    fields = ConfigFields(folder)
    config = read_stack(fields)
    num_rows = fields.size("relative_attention_num_buckets", _NUM_BUCKETS)
    if num_rows < _NUM_BUCKETS:
        fields.refuse("relative_attention_num_buckets", f"at least {_NUM_BUCKETS} are needed")
    weights, embeddings = open_stack(folder, fields, config, precision, device, layers="encoder")
    embeddings = replace(embeddings, first_position=_PADDING_ID + 1, padding_id=_PADDING_ID)
    biases_RH = weights.take("encoder.relative_attention_bias.weight", num_rows, config.num_heads)
    prefixes = [f"encoder.layer.{layer}." for layer in range(config.num_layers)]
    layers = read_layers(weights, prefixes, _NAMES, config, precision, device)
    weights.finish()
    buckets_MM = relative_buckets(folder.max_model_len).to(device)
    return StackEncoder(embeddings, layers, bias_HMM=biases_RH[buckets_MM].permute(2, 0, 1).contiguous())


def relative_buckets(length: int) -> Tensor:
    """The bucket of key j seen from query i, [M, M]: half of the buckets for each direction, exact for small distances,
    logarithmic up to `_MAX_DISTANCE`, the last one for all beyond."""
    places = torch.arange(length)
    offset_MM = places[None, :] - places[:, None]
    per_direction = _NUM_BUCKETS // 2
    num_exact = per_direction // 2
    distance_MM = offset_MM.abs()
    growth_MM = torch.log(distance_MM.clamp(min=1).float() / num_exact) / math.log(_MAX_DISTANCE / num_exact)
    coarse_MM = (num_exact + (growth_MM * (per_direction - num_exact)).long()).clamp(max=per_direction - 1)
    bucket_MM = torch.where(distance_MM < num_exact, distance_MM, coarse_MM)
    return bucket_MM + per_direction * (offset_MM > 0)
