"""NomicBert with experts in every second layer, as nomic-embed-text-v2-moe has it (https://arxiv.org/abs/2502.07972).

`transformers` has NomicBert without experts only, and with other names. This is the layout of the model's own
repository, whose code is not needed here. An expert is w2ᵀ activation(w1 x); one bias stands behind the sum of all.

Shape legend: T tokens, C hidden size, E experts, F values between an expert's two layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from nobiru.folder.rope import RopeSpec
from nobiru.folder.spec import ModelFolder
from nobiru.layers.block import Norm
from nobiru.layers.linear import Linear, make_linear
from nobiru.layers.moe import ExpertLoads, Experts, LocalDispatcher, MoeMlp
from nobiru.layers.rotary import Rotary, side_by_side
from nobiru.layers.rotary_block import RotaryBlock
from nobiru.layers.routing import SoftmaxRouter
from nobiru.models.config import DECODER_LIMITS, ConfigFields, Limits, StackConfig
from nobiru.models.weights import ModelWeights, Precision
from nobiru.ops.layout import PackedLayout
from nobiru.ops.packed_attention import attention_path
from nobiru.ops.scratch import Scratch

_LIMITS: Limits = MappingProxyType(
    {
        **DECODER_LIMITS,
        "causal": (None, False),
        "expert_choice_router": (None, False),
        "ffn_div": (None, 1),
        "moe_normalize_expert_weights": (None, False),
        "num_shared_experts": (None, 0),
        "parallel_block": (None, False),
        "prenorm": (None, False),
        "rotary_emb_fraction": (None, 1.0),
        "rotary_emb_interleaved": (None, False),
        "rotary_emb_scale_base": (None,),
        "rotary_scaling_factor": (None,),
        "use_rms_norm": (None, False),
    }
)


def has_experts(config: Mapping[str, object]) -> bool:
    """Whether a NomicBert's `config.json` is of this kind."""
    return bool(config.get("moe_every_n_layers"))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Dense:
    """`up` includes the activation."""

    up: Linear
    down: Linear

    def __call__(self, x_TC: Tensor, scratch: Scratch | None) -> Tensor:
        wide, narrow = (scratch.wide, scratch.narrow) if scratch else (None, None)
        return self.down(self.up(x_TC, wide), narrow)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sparse:
    moe: MoeMlp
    dispatcher: LocalDispatcher
    bias_C: Tensor

    def __call__(self, x_TC: Tensor, scratch: Scratch | None) -> Tensor:
        return self.moe(x_TC, self.dispatcher, scratch).add_(self.bias_C)


class NomicMoeEncoder:
    """Maps a packed batch to hidden states."""

    is_reentrant = True
    has_own_threads = False
    arithmetic = "torch"

    def __init__(self, words_VC: Tensor, type_C: Tensor, norm: Norm, rotary: Rotary, blocks: list[RotaryBlock]) -> None:
        self._words_VC = words_VC
        self._type_C = type_C
        self._norm = norm
        self._rotary = rotary
        self._blocks = blocks
        head_size = type_C.shape[0] // blocks[0].num_heads
        self.attention = attention_path(type_C.device, type_C.dtype, head_size, has_bias=False)

    def forward(
        self,
        token_ids_T: Tensor,
        layout: PackedLayout,
        scratch: Scratch | None = None,
        rows_R: NDArray[np.int64] | None = None,
    ) -> Tensor:
        """Hidden states [T, C] of the last layer, in memory of their own, of all tokens."""
        words_TC = F.embedding(token_ids_T, self._words_VC).to(self._type_C.dtype)
        hidden_TC = self._norm(words_TC.add_(self._type_C))
        turns_T1P = self._rotary.turns_at(layout.positions_T)
        for block in self._blocks:
            hidden_TC = block(hidden_TC, turns_T1P, layout, scratch)
        return hidden_TC


def load_nomic_moe(folder: ModelFolder, precision: Precision, device: torch.device) -> NomicMoeEncoder:
    """The encoder of such a folder; `ModelFolderError` names what cannot be honoured."""
    fields = ConfigFields(folder, _LIMITS)
    config = _read_config(fields)
    hidden_size = config.hidden_size
    weights = ModelWeights(
        folder.transformer_path,
        anchor="embeddings.word_embeddings.weight",
        roots=("embeddings", "emb_ln", "encoder"),
        precision=precision,
        device=device,
    )
    words_VC = weights.take_table("embeddings.word_embeddings.weight", fields.size("vocab_size"), hidden_size)
    types = weights.take("embeddings.token_type_embeddings.weight", fields.size("type_vocab_size"), hidden_size)
    blocks = [_read_block(weights, layer, fields, config, precision, device) for layer in range(config.num_layers)]
    norm = _read_norm(weights, "emb_ln", config)
    weights.finish()
    rope = RopeSpec(kind="default", theta=fields.number("rotary_emb_base", 10_000.0))
    rotary = Rotary(rope, head_size=config.head_size, num_positions=folder.max_model_len, device=device)
    return NomicMoeEncoder(words_VC, types[0].clone(), norm, rotary, blocks)


def _read_config(fields: ConfigFields) -> StackConfig:
    hidden_size, num_heads = fields.size("n_embd"), fields.size("n_head")
    if hidden_size % (2 * num_heads):
        fields.refuse("n_head", f"heads of n_embd = {hidden_size} must have an even number of values")
    return StackConfig(
        hidden_size=hidden_size,
        intermediate_size=fields.size("n_inner"),
        num_layers=fields.size("n_layer"),
        num_heads=num_heads,
        activation=fields.activation("activation_function"),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
    )


def _read_block(
    weights: ModelWeights,
    layer: int,
    fields: ConfigFields,
    config: StackConfig,
    precision: Precision,
    device: torch.device,
) -> RotaryBlock:
    prefix, hidden_size = f"encoder.layers.{layer}.", config.hidden_size
    has_bias = fields.flag("qkv_proj_bias", True)
    weight, bias = f"{prefix}attn.Wqkv.weight", f"{prefix}attn.Wqkv.bias"
    is_sparse = layer % fields.size("moe_every_n_layers") == 1
    return RotaryBlock(
        num_heads=config.num_heads,
        qkv=make_linear(
            _in_pairs(weights.take(weight, 3 * hidden_size, hidden_size), config),
            _in_pairs(weights.take(bias, 3 * hidden_size), config) if has_bias else None,
        ),
        attention_out=_read_linear(weights, f"{prefix}attn.out_proj", hidden_size, hidden_size, has_bias=has_bias),
        attention_norm=_read_norm(weights, f"{prefix}norm1", config),
        mlp=_read_sparse(weights, f"{prefix}mlp.", fields, config, precision, device)
        if is_sparse
        else _read_dense(weights, f"{prefix}mlp.", fields, config),
        output_norm=_read_norm(weights, f"{prefix}norm2", config),
    )


def _read_dense(weights: ModelWeights, prefix: str, fields: ConfigFields, config: StackConfig) -> _Dense:
    hidden_size, size = config.hidden_size, config.intermediate_size
    bias = weights.take(f"{prefix}fc1.bias", size) if fields.flag("mlp_fc1_bias", True) else None
    return _Dense(
        up=make_linear(weights.take(f"{prefix}fc1.weight", size, hidden_size), bias, config.activation),
        down=_read_linear(weights, f"{prefix}fc2", hidden_size, size, has_bias=fields.flag("mlp_fc2_bias", True)),
    )


def _read_sparse(
    weights: ModelWeights,
    prefix: str,
    fields: ConfigFields,
    config: StackConfig,
    precision: Precision,
    device: torch.device,
) -> _Sparse:
    hidden_size, size = config.hidden_size, config.intermediate_size
    num_experts, top_k = fields.size("num_experts"), fields.size("moe_top_k")
    if top_k > num_experts:
        fields.refuse("moe_top_k", f"there are {num_experts} experts")
    gate = _read_linear(weights, f"{prefix}router.layer", num_experts, hidden_size, has_bias=False)
    experts = Experts(
        num_slots=num_experts,
        hidden_size=hidden_size,
        intermediate_size=size,
        activation=config.activation,
        compute=precision.compute,
        stored=precision.weights,
        device=device,
        is_gated=False,
    )
    first, second = (
        weights.claim(f"{prefix}experts.mlp.{name}", num_experts * size, hidden_size) for name in ("w1", "w2")
    )
    for expert in range(num_experts):
        if first is not None and second is not None:
            up_FC, down_FC = (each.rows(expert * size, (expert + 1) * size) for each in (first, second))
            experts.write(expert, up_FC.to(precision.weights), down_FC.mT.to(precision.weights))
    return _Sparse(
        moe=MoeMlp(
            layer=0,
            top_k=top_k,
            router=SoftmaxRouter(gate=gate, top_k=top_k, normalizes=False, rounds=True),
            experts=experts,
            shared=None,
            loads=ExpertLoads(1, num_experts, device),
        ),
        dispatcher=LocalDispatcher(np.arange(num_experts)[None], num_experts),
        bias_C=weights.take(f"{prefix}experts.bias", hidden_size),
    )


def _in_pairs(rows: Tensor, config: StackConfig) -> Tensor:
    """Queries, keys and values, one below the other, with pairs of the first two side by side."""
    turned, values = rows.split_with_sizes((2 * config.hidden_size, config.hidden_size))
    return torch.cat((side_by_side(turned, config.head_size), values))


def _read_norm(weights: ModelWeights, name: str, config: StackConfig) -> Norm:
    weight_C = weights.take(f"{name}.weight", config.hidden_size)
    return Norm(weight_C=weight_C, bias_C=weights.take(f"{name}.bias", config.hidden_size), eps=config.norm_eps)


def _read_linear(weights: ModelWeights, name: str, num_out: int, num_in: int, *, has_bias: bool) -> Linear:
    bias_O = weights.take(f"{name}.bias", num_out) if has_bias else None
    return make_linear(weights.take(f"{name}.weight", num_out, num_in), bias_O)
