"""Which code runs which architecture: native families by `model_type`, everything else through `transformers`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from nobiru.folder.spec import ModelFolder
from nobiru.models.bert import load_bert, load_roberta
from nobiru.models.causal_fallback import load_causal_fallback
from nobiru.models.distilbert import load_distilbert
from nobiru.models.fallback import load_fallback
from nobiru.models.llama import load_llama
from nobiru.models.mistral import load_mistral
from nobiru.models.mpnet import load_mpnet
from nobiru.models.qwen import load_qwen2, load_qwen3
from nobiru.models.weights import Precision
from nobiru.ops.layout import PackedLayout
from nobiru.ops.paged_layout import LayerCache, PagedLayout
from nobiru.ops.scratch import Scratch


class Encoder(Protocol):
    """Maps a packed batch to hidden states. `attention` says in words how sequences are kept apart; several threads may
    call `forward` at once if `is_reentrant`."""

    attention: str
    is_reentrant: bool

    def forward(self, token_ids_T: Tensor, layout: PackedLayout, scratch: Scratch | None = None) -> Tensor:
        """Token ids [T] → hidden states [T, C] in the dtype of arithmetic. `scratch`, on CPUs, is the thread's own."""


class CausalModel(Protocol):
    """Runs over a KV cache of `num_layers` layers with `num_kv_heads` heads of `head_size` values in `dtype`, which is
    also the dtype of arithmetic. Several threads may call `forward` and `logits` at once if `is_reentrant`."""

    is_reentrant: bool
    num_layers: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    dtype: torch.dtype

    def forward(
        self, token_ids_T: Tensor, layout: PagedLayout, cache: Sequence[LayerCache], scratch: Scratch | None = None
    ) -> Tensor:
        """Token ids [T] → hidden states [T, C] behind the last norm; keys and values go into the cache."""

    def logits(self, hidden_BC: Tensor) -> Tensor:
        """Hidden states [B, C] → scores for the next token [B, V] in float32."""


Loader = Callable[[ModelFolder, Precision, torch.device], Encoder]
CausalLoader = Callable[[ModelFolder, Precision, torch.device], CausalModel]

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


def load_encoder(folder: ModelFolder, precision: Precision, device: torch.device) -> Encoder:
    """The encoder of a folder; `ModelFolderError` names what cannot be honoured."""
    return NATIVE.get(folder.model_type, load_fallback)(folder, precision, device)


def load_causal(folder: ModelFolder, precision: Precision, device: torch.device) -> CausalModel:
    """The decoder of a folder with `is_causal`; `ModelFolderError` names what cannot be honoured."""
    return NATIVE_CAUSAL.get(folder.model_type, load_causal_fallback)(folder, precision, device)
