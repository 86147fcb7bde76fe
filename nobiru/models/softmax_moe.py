"""Experts chosen by a softmax over a gate's scores: what Mixtral, OLMoE and Qwen-MoE have in common."""

from __future__ import annotations

from collections.abc import Callable

from nobiru.folder.spec import ModelFolder
from nobiru.layers.moe import SharedExpert
from nobiru.layers.routing import SoftmaxRouter
from nobiru.models.config import ConfigFields
from nobiru.models.decoder import DecoderConfig, read_linear
from nobiru.models.experts import ExpertNames
from nobiru.models.moe import MoeConfig, read_num_experts, read_top_k
from nobiru.models.weights import ModelWeights


def read_softmax_moe(
    folder: ModelFolder,
    fields: ConfigFields,
    config: DecoderConfig,
    *,
    num_experts: int,
    top_k: int,
    normalizes: bool,
    rounds: bool = True,
    intermediate_size: int | None = None,
    layers: tuple[int, ...] | None = None,
    read_shared: Callable[[ModelWeights, str], SharedExpert] | None = None,
    parts: tuple[str, ...] = ("mlp.",),
    names: ExpertNames | None = None,
) -> MoeConfig:
    """The MoE layers of a decoder. `num_experts` and `top_k` are the family's defaults, for `config.json` without them;
    experts are as large as a dense layer and in all layers unless said. The rest is as in `MoeConfig` and
    `SoftmaxRouter`.
    """
    num_experts = read_num_experts(folder, fields, default=num_experts)
    top_k = read_top_k(fields, num_experts, default=top_k)

    def read_router(weights: ModelWeights, prefix: str) -> SoftmaxRouter:
        gate = read_linear(weights, f"{prefix}gate", num_experts, config.hidden_size, has_bias=False)
        return SoftmaxRouter(gate=gate, top_k=top_k, normalizes=normalizes, rounds=rounds)

    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size if intermediate_size is None else intermediate_size,
        activation=config.activation,
        layers=tuple(range(config.num_layers)) if layers is None else layers,
        read_router=read_router,
        read_shared=read_shared,
        parts=parts,
        names=names or ExpertNames(),
    )
