"""Which code runs which architecture: native families by `model_type`, everything else through `transformers`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nobiru.errors import ConfigError, ModelFolderError
from nobiru.folder.spec import ModelFolder
from nobiru.layers.sharding import TensorGroup
from nobiru.models.bert import load_bert, load_roberta
from nobiru.models.causal_fallback import load_causal_fallback
from nobiru.models.deepseek import load_deepseek_v2, load_deepseek_v3
from nobiru.models.distilbert import load_distilbert
from nobiru.models.fallback import load_fallback
from nobiru.models.llama import load_llama
from nobiru.models.mistral import load_mistral
from nobiru.models.mixtral import load_mixtral
from nobiru.models.moe import MoeParts, SlotChoice
from nobiru.models.mpnet import load_mpnet
from nobiru.models.nomic_moe import has_experts, load_nomic_moe
from nobiru.models.olmoe import load_olmoe
from nobiru.models.qwen import load_qwen2, load_qwen3
from nobiru.models.qwen_moe import load_qwen2_moe, load_qwen3_moe
from nobiru.models.weights import Precision
from nobiru.ops.layout import PackedLayout
from nobiru.ops.paged_layout import LayerCache, PagedLayout
from nobiru.ops.scratch import Scratch


class Encoder(Protocol):
    """Maps a packed batch to hidden states. `attention` says in words how sequences are kept apart, `arithmetic` what
    multiplies; several threads may call `forward` at once if `is_reentrant`, and with `has_own_threads` it spreads
    itself over the cores."""

    attention: str
    arithmetic: str
    is_reentrant: bool
    has_own_threads: bool

    def forward(
        self,
        token_ids_T: Tensor,
        layout: PackedLayout,
        scratch: Scratch | None = None,
        rows_R: NDArray[np.int64] | None = None,
    ) -> Tensor:
        """Token ids [T] → hidden states [T, C] in the dtype of arithmetic. `scratch`, on CPUs, is the thread's own.

        With `rows_R`, ascending, only these tokens' hidden states need be right.
        """


class CausalModel(Protocol):
    """Runs over a KV cache of `num_layers` layers with `num_kv_heads` heads of `head_size` values in `dtype`, which is
    also the dtype of arithmetic. Several threads may call `forward` and `logits` at once if `is_reentrant`. `moe` are
    its MoE layers, where their experts may be spread over ranks."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    dtype: torch.dtype

    @property
    def is_reentrant(self) -> bool: ...

    @property
    def is_native(self) -> bool: ...

    @property
    def moe(self) -> MoeParts | None: ...

    def forward(
        self,
        token_ids_T: Tensor,
        layout: PagedLayout,
        cache: Sequence[LayerCache],
        scratch: Scratch | None = None,
        rows_R: Tensor | None = None,
    ) -> Tensor:
        """Token ids [T] → hidden states [T, C] behind the last norm; keys and values go into the cache.

        With `rows_R`, int64 and ascending, the hidden states of these tokens, [R, C].
        """

    def logits(self, hidden_BC: Tensor, scratch: Scratch | None = None) -> Tensor:
        """Hidden states [B, C] → scores for the next token [B, V] in float32, perhaps in the scratch's memory."""


Loader = Callable[[ModelFolder, Precision, torch.device], Encoder]
CausalLoader = Callable[[ModelFolder, Precision, torch.device], CausalModel]
MoeLoader = Callable[[ModelFolder, Precision, torch.device, SlotChoice | None], CausalModel]
SpreadLoader = Callable[[ModelFolder, Precision, torch.device, TensorGroup | None], CausalModel]
SpreadMoeLoader = Callable[[ModelFolder, Precision, torch.device, SlotChoice | None, TensorGroup | None], CausalModel]

NATIVE: Mapping[str, Loader] = MappingProxyType(
    {
        "bert": load_bert,
        "camembert": load_roberta,
        "distilbert": load_distilbert,
        "mpnet": load_mpnet,
        "roberta": load_roberta,
        "xlm-roberta": load_roberta,
    }
)


NATIVE_CAUSAL: Mapping[str, CausalLoader] = MappingProxyType(
    {"llama": load_llama, "mistral": load_mistral, "qwen2": load_qwen2, "qwen3": load_qwen3}
)


# What may hold some of a model's experts only.
NATIVE_MOE: Mapping[str, MoeLoader] = MappingProxyType(
    {
        "deepseek_v2": load_deepseek_v2,
        "deepseek_v3": load_deepseek_v3,
        "mixtral": load_mixtral,
        "olmoe": load_olmoe,
        "qwen2_moe": load_qwen2_moe,
        "qwen3_moe": load_qwen3_moe,
    }
)


# What may be spread over several workers.
SPREAD_CAUSAL: Mapping[str, SpreadLoader] = MappingProxyType(
    {"llama": load_llama, "mistral": load_mistral, "qwen2": load_qwen2, "qwen3": load_qwen3}
)


SPREAD_MOE: Mapping[str, SpreadMoeLoader] = MappingProxyType(
    {
        "deepseek_v2": load_deepseek_v2,
        "deepseek_v3": load_deepseek_v3,
        "mixtral": load_mixtral,
        "olmoe": load_olmoe,
        "qwen2_moe": load_qwen2_moe,
        "qwen3_moe": load_qwen3_moe,
    }
)


def load_encoder(folder: ModelFolder, precision: Precision, device: torch.device) -> Encoder:
    """The encoder of a folder; `ModelFolderError` names what cannot be honoured."""
    if precision.quantization is not None:
        _check_quantization(folder, precision.quantization, device)
    if folder.model_type == "nomic_bert" and has_experts(folder.config):
        return load_nomic_moe(folder, precision, device)
    return NATIVE.get(folder.model_type, load_fallback)(folder, precision, device)


def _check_quantization(folder: ModelFolder, quantization: str, device: torch.device) -> None:
    if folder.model_type not in NATIVE or device.type != "cpu":
        raise ConfigError(
            f"quantization is {quantization!r}, but the model is {folder.model_type!r} on {device.type}; it is for "
            f"{', '.join(NATIVE)} on cpu",
            param="quantization",
        )


def load_causal(
    folder: ModelFolder,
    precision: Precision,
    device: torch.device,
    *,
    slots: SlotChoice | None = None,
    group: TensorGroup | None = None,
) -> CausalModel:
    """The decoder of a folder with `is_causal`; `ModelFolderError` names what cannot be honoured.

    `slots` [MoE layers, slots] is which logical expert goes into which slot of this rank, -1 for none; without it every
    expert goes into the slot of its number. With `group` this worker's share of the model; `ConfigError` if there are
    no shares of it.
    """
    kind = folder.model_type
    if group is not None and kind in SPREAD_MOE:
        return SPREAD_MOE[kind](folder, precision, device, slots, group)
    if group is not None and kind not in SPREAD_CAUSAL:
        raise ConfigError(
            f"tensor_parallel_size is {group.shard.size}, but {kind!r} cannot be spread over workers; "
            f"{', '.join((*SPREAD_CAUSAL, *SPREAD_MOE))} can",
            param="tensor_parallel_size",
        )
    if kind in NATIVE_MOE:
        return NATIVE_MOE[kind](folder, precision, device, slots)
    if slots is not None:
        raise ModelFolderError(
            f"{folder.path}: experts of {kind!r} cannot be spread over ranks; those of {', '.join(NATIVE_MOE)} can"
        )
    if group is not None:
        return SPREAD_CAUSAL[kind](folder, precision, device, group)
    return NATIVE_CAUSAL.get(kind, load_causal_fallback)(folder, precision, device)
