"""BERT, and the families that differ from it in where positions start: RoBERTa, XLM-RoBERTa, CamemBERT.

Architecture: Devlin et al. 2018, https://arxiv.org/abs/1810.04805. The rest as `transformers` computes it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from nobiru.folder.spec import ModelFolder
from nobiru.models.config import ConfigFields, read_stack
from nobiru.models.stack import LayerNames, StackEncoder, open_stack, read_layers
from nobiru.models.weights import Precision

_NAMES = LayerNames(
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    attention_out="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    output_norm="output.LayerNorm",
)


def load_bert(folder: ModelFolder, precision: Precision, device: torch.device) -> StackEncoder:
    """Positions are 0, 1, 2, …; `pad_token_id` means nothing, because nothing is padded."""
    return _load(folder, precision, device, padding_id=None)


def load_roberta(folder: ModelFolder, precision: Precision, device: torch.device) -> StackEncoder:
    """Positions start behind the padding id, and padding tokens in a text do not count."""
    return _load(folder, precision, device, padding_id=ConfigFields(folder).index("pad_token_id", 1))


def _load(folder: ModelFolder, precision: Precision, device: torch.device, padding_id: int | None) -> StackEncoder:
    fields = ConfigFields(folder)
    config = read_stack(fields)
    weights, embeddings = open_stack(folder, fields, config, precision, device, layers="encoder")
    types = weights.take(
        "embeddings.token_type_embeddings.weight", fields.size("type_vocab_size", 2), config.hidden_size
    )
    embeddings.positions_PC.add_(types[0])  # every token of a single text has type 0
    prefixes = [f"encoder.layer.{layer}." for layer in range(config.num_layers)]
    encoder = StackEncoder(
        replace(embeddings, first_position=0 if padding_id is None else padding_id + 1, padding_id=padding_id),
        read_layers(weights, prefixes, _NAMES, config, precision, device),
    )
    weights.finish()
    return encoder
