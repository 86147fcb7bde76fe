"""Which code runs which architecture: native families by `model_type`, everything else through `transformers`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from nobiru.folder.spec import ModelFolder
from nobiru.models.bert import load_bert, load_roberta
from nobiru.models.distilbert import load_distilbert
from nobiru.models.fallback import load_fallback
from nobiru.models.mpnet import load_mpnet
from nobiru.models.weights import Precision
from nobiru.ops.layout import PackedLayout
from nobiru.ops.scratch import Scratch


class Encoder(Protocol):
    """Maps a packed batch to hidden states. `attention` says in words how sequences are kept apart; several threads may
    call `forward` at once if `is_reentrant`."""

    attention: str
    is_reentrant: bool

    def forward(self, token_ids_T: Tensor, layout: PackedLayout, scratch: Scratch | None = None) -> Tensor:
        """Token ids [T] → hidden states [T, C] in the dtype of arithmetic. `scratch`, on CPUs, is the thread's own."""


Loader = Callable[[ModelFolder, Precision, torch.device], Encoder]

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


def load_encoder(folder: ModelFolder, precision: Precision, device: torch.device) -> Encoder:
    """The encoder of a folder; `ModelFolderError` names what cannot be honoured."""
    return NATIVE.get(folder.model_type, load_fallback)(folder, precision, device)
