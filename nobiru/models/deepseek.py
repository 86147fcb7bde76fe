"""DeepSeek-V2 and V3: latent attention, experts beside shared ones (https://arxiv.org/abs/2405.04434,
https://arxiv.org/abs/2412.19437).

The first layers have no experts. Experts are in groups, of which a token may use some only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nobiru.folder.rope import RopeSpec
from nobiru.folder.spec import ModelFolder
from nobiru.layers.latent_attention import LatentAttention
from nobiru.layers.linear import Linear, make_linear
from nobiru.layers.moe import SharedExpert
from nobiru.layers.rms_norm import RmsNorm
from nobiru.layers.rotary import side_by_side
from nobiru.layers.routing import GroupedSigmoidRouter, GroupedSoftmaxRouter, Router
from nobiru.layers.sharding import TensorGroup
from nobiru.models.config import DECODER_LIMITS, ConfigFields, Limits
from nobiru.models.decoder import Decoder, DecoderConfig, load_decoder, own_heads, read_decoder, read_last, read_mlp
from nobiru.models.moe import MoeConfig, SlotChoice, read_num_experts, read_top_k
from nobiru.models.weights import ModelWeights, Precision

_V2_LIMITS: Limits = {
    **DECODER_LIMITS,
    "topk_method": (None, "greedy", "group_limited_greedy"),
    "scoring_func": (None, "softmax"),
    # `transformers` passes over it in this family; weights that need it would be computed without.
    "norm_topk_prob": (None, False),
    "moe_layer_freq": (None, 1),
}
_V3_LIMITS: Limits = {
    **DECODER_LIMITS,
    "topk_method": (None, "noaux_tc"),
    "scoring_func": (None, "sigmoid"),
    "moe_layer_freq": (None, 1),
}
# Of the two norms inside attention, whatever the config says of the others.
_LATENT_EPS = 1e-6

_DEFAULT_TURNED_SIZE = 64
_DEFAULT_EXPERT_SIZES = {"deepseek_v2": 1407, "deepseek_v3": 2048}
_DEFAULT_NUM_SHARED = {"deepseek_v2": 2, "deepseek_v3": 1}
_DEFAULT_NUM_DENSE = {"deepseek_v2": 0, "deepseek_v3": 3}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Routing:
    num_experts: int
    top_k: int
    read_router: Callable[[ModelWeights, str], Router]


def load_deepseek_v2(
    folder: ModelFolder,
    precision: Precision,
    device: torch.device,
    slots_LS: SlotChoice | None = None,
    group: TensorGroup | None = None,
) -> Decoder:
    """The decoder of a DeepSeek-V2 folder; `ModelFolderError` names what cannot be honoured."""
    fields = ConfigFields(folder, _V2_LIMITS)
    config = read_decoder(folder, default_head_size=_DEFAULT_TURNED_SIZE, mlp_bias=fields.flag("mlp_bias", False))
    num_experts = read_num_experts(folder, fields, default=64)
    top_k = read_top_k(fields, num_experts, default=6)
    factor = fields.number("routed_scaling_factor", 1.0)
    is_grouped = folder.config.get("topk_method") == "group_limited_greedy"
    num_groups, top_groups = _read_groups(fields, num_experts, top_k, defaults=(1, 1)) if is_grouped else (1, 1)

    def read_router(weights: ModelWeights, prefix: str) -> Router:
        return GroupedSoftmaxRouter(
            gate=_read_gate(weights, prefix, num_experts, config),
            top_k=top_k,
            num_groups=num_groups,
            top_groups=top_groups,
            factor=factor,
        )

    routing = _Routing(num_experts=num_experts, top_k=top_k, read_router=read_router)
    return _load(folder, fields, config, routing, precision, device, slots_LS, group)


def load_deepseek_v3(
    folder: ModelFolder,
    precision: Precision,
    device: torch.device,
    slots_LS: SlotChoice | None = None,
    group: TensorGroup | None = None,
) -> Decoder:
    """The decoder of a DeepSeek-V3 folder; `ModelFolderError` names what cannot be honoured."""
    fields = ConfigFields(folder, _V3_LIMITS)
    config = read_decoder(folder, default_head_size=_DEFAULT_TURNED_SIZE)
    num_experts = read_num_experts(folder, fields, default=256)
    top_k = read_top_k(fields, num_experts, default=8)
    num_groups, top_groups = _read_groups(fields, num_experts, top_k, defaults=(8, 4))
    if num_experts < 2 * num_groups:
        fields.refuse("n_group", f"a group has two experts at least, and there are {num_experts}")
    factor = fields.number("routed_scaling_factor", 2.5)
    normalizes = fields.flag("norm_topk_prob", True)

    def read_router(weights: ModelWeights, prefix: str) -> Router:
        return GroupedSigmoidRouter(
            gate=_read_gate(weights, prefix, num_experts, config),
            bias_E=weights.take_exact(f"{prefix}gate.e_score_correction_bias", num_experts),
            top_k=top_k,
            num_groups=num_groups,
            top_groups=top_groups,
            normalizes=normalizes,
            factor=factor,
        )

    routing = _Routing(num_experts=num_experts, top_k=top_k, read_router=read_router)
    return _load(folder, fields, config, routing, precision, device, slots_LS, group)


def _read_gate(weights: ModelWeights, prefix: str, num_experts: int, config: DecoderConfig) -> Linear:
    """In float32, whatever the precision of the model."""
    weight_EC = weights.take_exact(f"{prefix}gate.weight", num_experts, config.hidden_size)
    return make_linear(weight_EC, None, natively=True)


def _read_groups(fields: ConfigFields, num_experts: int, top_k: int, defaults: tuple[int, int]) -> tuple[int, int]:
    """How many groups experts are in, and how many of those a token may use."""
    num_groups, top_groups = fields.size("n_group", defaults[0]), fields.size("topk_group", defaults[1])
    if num_experts % num_groups:
        fields.refuse("n_group", f"it must divide the number of experts, {num_experts}")
    if top_groups > num_groups:
        fields.refuse("topk_group", f"there are {num_groups} groups")
    if top_k > top_groups * (num_experts // num_groups):
        fields.refuse("topk_group", f"so many groups have fewer than {top_k} experts")
    return num_groups, top_groups


def _load(
    folder: ModelFolder,
    fields: ConfigFields,
    config: DecoderConfig,
    routing: _Routing,
    precision: Precision,
    device: torch.device,
    slots_LS: SlotChoice | None,
    group: TensorGroup | None,
) -> Decoder:
    family = folder.model_type
    expert_size = fields.size("moe_intermediate_size", _DEFAULT_EXPERT_SIZES[family])
    shared_size = fields.index("n_shared_experts", _DEFAULT_NUM_SHARED[family]) * expert_size
    num_dense = fields.index("first_k_dense_replace", _DEFAULT_NUM_DENSE[family])
    if num_dense >= config.num_layers:
        fields.refuse("first_k_dense_replace", "no layer has experts")

    def read_shared(weights: ModelWeights, prefix: str) -> SharedExpert:
        return SharedExpert(mlp=read_mlp(weights, f"{prefix}shared_experts.", config, shared_size))

    moe = MoeConfig(
        num_experts=routing.num_experts,
        top_k=routing.top_k,
        hidden_size=config.hidden_size,
        intermediate_size=expert_size,
        activation=config.activation,
        layers=tuple(range(num_dense, config.num_layers)),
        read_router=routing.read_router,
        read_shared=read_shared if shared_size else None,
    )
    sizes = _read_sizes(folder, fields, config)
    cached_size = sizes.latent + sizes.turned
    config = replace(config, num_kv_heads=1, head_size=cached_size, turned_size=sizes.turned)
    # Layers that predict further tokens, in training, stand behind the last one.
    num_further = fields.index("num_nextn_predict_layers", 0)
    return load_decoder(
        folder,
        config,
        precision,
        device,
        moe=moe,
        slots_LS=slots_LS,
        group=group,
        read_attention=lambda weights, prefix: _read_attention(weights, prefix, config, sizes, group),
        passed_over=tuple(f"layers.{config.num_layers + number}." for number in range(num_further)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """Numbers of values: of compressed queries (None where they are not), the latent, what is turned of a head and what
    is not, a head's result. `pairs_apart` says that value i is turned with i + turned / 2, not with its neighbour."""

    query: int | None
    latent: int
    turned: int
    unturned: int
    value: int
    scale: float
    pairs_apart: bool
    bias: bool


def _read_sizes(folder: ModelFolder, fields: ConfigFields, config: DecoderConfig) -> _Sizes:
    turned, unturned = fields.size("qk_rope_head_dim", _DEFAULT_TURNED_SIZE), fields.size("qk_nope_head_dim", 128)
    latent = fields.size("kv_lora_rank", 512)
    for name, size in (("qk_rope_head_dim", turned), ("kv_lora_rank", latent)):
        if size % 2:
            fields.refuse(name, "an even number is expected")
    if config.num_kv_heads != config.num_heads:
        fields.refuse("num_key_value_heads", f"it must be num_attention_heads, {config.num_heads}")
    return _Sizes(
        # null says that queries are not compressed, while no field says that they are.
        query=None if folder.config.get("q_lora_rank", 0) is None else fields.size("q_lora_rank", 1536),
        latent=latent,
        turned=turned,
        unturned=unturned,
        value=fields.size("v_head_dim", 128),
        scale=(turned + unturned) ** -0.5 * _yarn_sharpness(config.rope),
        pairs_apart=folder.model_type == "deepseek_v3" and not fields.flag("rope_interleave", True),
        bias=fields.flag("attention_bias", False),
    )


def _yarn_sharpness(rope: RopeSpec) -> float:
    """What scores are multiplied with where positions are stretched."""
    multiplier, factor = rope.numbers.get("mscale_all_dim"), rope.numbers.get("factor", 1.0)
    if rope.kind == "default" or not multiplier or factor <= 1:
        return 1.0
    return float((0.1 * multiplier * math.log(factor) + 1.0) ** 2)


def _read_attention(
    weights: ModelWeights, prefix: str, config: DecoderConfig, sizes: _Sizes, group: TensorGroup | None
) -> LatentAttention:
    hidden_size, num_heads = config.hidden_size, config.num_heads
    own = own_heads(config, group).queries
    head_size = sizes.unturned + sizes.turned

    def of_heads(name: str, size: int, num_in: int) -> Tensor:
        """[H, size, I]: the rows of this worker's heads."""
        rows = range(own.start * size, own.stop * size)
        return weights.take(f"{prefix}{name}.weight", num_heads * size, num_in, rows=rows).view(len(own), size, num_in)

    def queries(name: str, num_in: int) -> Tensor:
        unturned, turned = of_heads(name, head_size, num_in).split_with_sizes((sizes.unturned, sizes.turned), 1)
        return torch.cat((unturned, _in_pairs(turned, sizes)), 1).flatten(0, 1)

    def compressed(name: str, num_out: int) -> tuple[Tensor, Tensor | None]:
        bias = weights.take(f"{prefix}{name}.bias", num_out) if sizes.bias else None
        return weights.take(f"{prefix}{name}.weight", num_out, hidden_size), bias

    def norm(name: str, size: int) -> RmsNorm:
        return RmsNorm(weight_C=weights.take(f"{prefix}{name}.weight", size), eps=_LATENT_EPS)

    keys, keys_bias = compressed("kv_a_proj_with_mqa", sizes.latent + sizes.turned)
    keys = torch.cat((keys[: sizes.latent], _in_pairs(keys[None, sizes.latent :], sizes)[0]))
    if keys_bias is not None:
        turned_bias = _in_pairs(keys_bias[None, sizes.latent :, None], sizes).flatten()
        keys_bias = torch.cat((keys_bias[: sizes.latent], turned_bias))
    if sizes.query is None:
        before, before_bias = queries("q_proj", hidden_size), None
        if keys_bias is not None:
            before_bias = torch.zeros_like(before[:, 0])
    else:
        before, before_bias = compressed("q_a_proj", sizes.query)
    bias = None if before_bias is None or keys_bias is None else torch.cat((before_bias, keys_bias))
    up_HOL = of_heads("kv_b_proj", sizes.unturned + sizes.value, sizes.latent)
    return LatentAttention(
        num_heads=len(own),
        unturned_size=sizes.unturned,
        turned_size=sizes.turned,
        scale=sizes.scale,
        compress=make_linear(torch.cat((before, keys)), bias, natively=True),
        query_norm=None if sizes.query is None else norm("q_a_layernorm", sizes.query),
        queries=None if sizes.query is None else make_linear(queries("q_b_proj", sizes.query), None, natively=True),
        latent_norm=norm("kv_a_layernorm", sizes.latent),
        key_HNL=up_HOL[:, : sizes.unturned].contiguous(),
        value_HLV=up_HOL[:, sizes.unturned :].mT.contiguous(),
        out=read_last(
            weights,
            f"{prefix}o_proj",
            hidden_size,
            num_heads * sizes.value,
            range(own.start * sizes.value, own.stop * sizes.value),
            has_bias=sizes.bias,
            group=group,
        ),
    )


def _in_pairs(rows_HRI: Tensor, sizes: _Sizes) -> Tensor:
    """Rows of values that are turned, with those of a pair side by side."""
    if not sizes.pairs_apart:
        return rows_HRI
    return side_by_side(rows_HRI.flatten(0, 1), sizes.turned).view(rows_HRI.shape)
