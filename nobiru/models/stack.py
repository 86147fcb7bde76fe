"""What the native families share: a stack of BERT's encoder layers over a sum of embeddings.

Owns the assembly of layers from a file's tensors, given the family's names for them, and the forward pass.

Shape legend: T tokens, R of them that are asked for, C hidden size, I intermediate size, V vocabulary, P rows of the
position table, H heads, M the model's limit of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from nobiru.folder.spec import ModelFolder
from nobiru.layers.block import BlockWeights, Norm
from nobiru.layers.encoder import BlockShape, Layers, make_layers
from nobiru.models.config import ConfigFields, StackConfig
from nobiru.models.weights import ModelWeights, Precision
from nobiru.ops.layout import PackedLayout
from nobiru.ops.native.encoder_ends import ends_for
from nobiru.ops.scratch import Scratch


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerNames:
    """A family's names of the parts of one layer, behind the layer's own prefix."""

    query: str
    key: str
    value: str
    attention_out: str
    attention_norm: str
    up: str
    down: str
    output_norm: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Embeddings:
    """Word vectors plus position vectors, normalized.

    Positions start at `first_position`. With `padding_id`, tokens with that id stand at the row of that number and do
    not count for the positions of those behind them, as RoBERTa has it.
    """

    words_VC: Tensor
    positions_PC: Tensor
    norm: Norm
    first_position: int = 0
    padding_id: int | None = None

    def __call__(self, token_ids_T: Tensor, layout: PackedLayout) -> Tensor:
        places_T = self._places_T(token_ids_T, layout)
        if (ends := ends_for(self.words_VC, self.positions_PC)) is not None:
            return ends.embed(token_ids_T, places_T, self.words_VC, self.positions_PC, self.norm.in_float32())
        words_TC = F.embedding(token_ids_T, self.words_VC).to(self.positions_PC.dtype)
        return self.norm(words_TC.add_(F.embedding(places_T, self.positions_PC)))

    def _places_T(self, token_ids_T: Tensor, layout: PackedLayout) -> Tensor:
        places_T = layout.positions_T + self.first_position if self.first_position else layout.positions_T
        if self.padding_id is None:
            return places_T
        padding_T = token_ids_T == self.padding_id
        # How many padding tokens stand before each token, within its sequence.
        before_T = padding_T.cumsum(0) - padding_T.long()
        first_T = torch.arange(layout.num_tokens, device=token_ids_T.device) - layout.positions_T
        return torch.where(padding_T, self.padding_id, places_T - (before_T - before_T[first_T]))


class StackEncoder:
    """Embeddings, then layers. `forward` maps a packed batch to hidden states."""

    def __init__(self, embeddings: Embeddings, layers: Layers, bias_HMM: Tensor | None = None) -> None:
        self._embeddings = embeddings
        self._layers = layers
        self._layers.set_bias(bias_HMM)
        self.attention = layers.attention
        self.arithmetic = layers.arithmetic
        self.has_own_threads = layers.has_own_threads
        self.is_reentrant = not layers.has_own_threads

    def forward(
        self,
        token_ids_T: Tensor,
        layout: PackedLayout,
        scratch: Scratch | None = None,
        rows_R: NDArray[np.int64] | None = None,
    ) -> Tensor:
        """Hidden states [T, C] of the last layer, in memory of their own; with `rows_R` only these mean anything."""
        return self._layers(self._embeddings(token_ids_T, layout), layout, scratch, rows_R)


def open_stack(
    folder: ModelFolder,
    fields: ConfigFields,
    config: StackConfig,
    precision: Precision,
    device: torch.device,
    *,
    layers: str,
) -> tuple[ModelWeights, Embeddings]:
    """A folder's weights, with its layers behind the prefix `layers`, and the tables of words and positions in them."""
    weights = ModelWeights(
        folder.transformer_path,
        anchor="embeddings.word_embeddings.weight",
        roots=("embeddings", layers),
        precision=precision,
        device=device,
    )
    hidden_size, num_positions = config.hidden_size, fields.size("max_position_embeddings", 512)
    embeddings = Embeddings(
        words_VC=weights.take_table("embeddings.word_embeddings.weight", fields.size("vocab_size"), hidden_size),
        positions_PC=weights.take("embeddings.position_embeddings.weight", num_positions, hidden_size),
        norm=read_norm(weights, "embeddings.LayerNorm", config),
    )
    return weights, embeddings


def read_norm(weights: ModelWeights, name: str, config: StackConfig) -> Norm:
    return Norm(
        weight_C=weights.take(f"{name}.weight", config.hidden_size),
        bias_C=weights.take(f"{name}.bias", config.hidden_size),
        eps=config.norm_eps,
    )


def read_layers(
    weights: ModelWeights,
    prefixes: Iterable[str],
    names: LayerNames,
    config: StackConfig,
    precision: Precision,
    device: torch.device,
) -> Layers:
    """All layers, one after the other, with query, key and value fused into one projection."""
    layers = make_layers(
        BlockShape(
            width=config.hidden_size,
            inner=config.intermediate_size,
            num_heads=config.num_heads,
            activation=config.activation,
        ),
        dtype=precision.compute,
        device=device,
        in_int8=precision.quantization == "int8",
    )
    for prefix in prefixes:
        layers.append(_read_block(weights, prefix, names, config))
    return layers


def _read_block(weights: ModelWeights, prefix: str, names: LayerNames, config: StackConfig) -> BlockWeights:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    attended = [f"{prefix}{name}" for name in (names.query, names.key, names.value)]
    return BlockWeights(
        qkv=(
            weights.take_rows([f"{name}.weight" for name in attended], hidden, hidden),
            weights.take_rows([f"{name}.bias" for name in attended], hidden),
        ),
        attention_out=_linear(weights, f"{prefix}{names.attention_out}", hidden, hidden),
        attention_norm=read_norm(weights, f"{prefix}{names.attention_norm}", config),
        up=_linear(weights, f"{prefix}{names.up}", intermediate, hidden),
        down=_linear(weights, f"{prefix}{names.down}", hidden, intermediate),
        output_norm=read_norm(weights, f"{prefix}{names.output_norm}", config),
    )


def _linear(weights: ModelWeights, name: str, num_out: int, num_in: int) -> tuple[Tensor, Tensor]:
    return weights.take(f"{name}.weight", num_out, num_in), weights.take(f"{name}.bias", num_out)
