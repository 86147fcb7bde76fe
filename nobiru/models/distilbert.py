"""DistilBERT: BERT without token types, under other names (Sanh et al. 2019, https://arxiv.org/abs/1910.01108)."""

from __future__ import annotations

import torch

from nobiru.folder.spec import ModelFolder
from nobiru.models.config import ConfigFields, StackConfig
from nobiru.models.stack import LayerNames, StackEncoder, open_stack, read_layers
from nobiru.models.weights import Precision

_NAMES = LayerNames(
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    attention_out="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    output_norm="output_layer_norm",
)
_NORM_EPS = 1e-12  # not configurable


def load_distilbert(folder: ModelFolder, precision: Precision, device: torch.device) -> StackEncoder:
    """The encoder of a DistilBERT folder; `ModelFolderError` names what cannot be honoured."""
    fields = ConfigFields(folder)
    config = _read_config(fields)
    weights, embeddings = open_stack(folder, fields, config, precision, device, layers="transformer")
    prefixes = [f"transformer.layer.{layer}." for layer in range(config.num_layers)]
    layers = read_layers(weights, prefixes, _NAMES, config, precision, device)
    weights.finish()
    return StackEncoder(embeddings, layers)


def _read_config(fields: ConfigFields) -> StackConfig:
    hidden_size, num_heads = fields.size("dim"), fields.size("n_heads")
    if hidden_size % num_heads:
        fields.refuse("n_heads", f"it must divide dim, {hidden_size}")
    return StackConfig(
        hidden_size=hidden_size,
        intermediate_size=fields.size("hidden_dim"),
        num_layers=fields.size("n_layers"),
        num_heads=num_heads,
        activation=fields.activation("activation"),
        norm_eps=_NORM_EPS,
    )
