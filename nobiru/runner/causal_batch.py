"""Packs the sequences of one step over the KV cache: those with one token first, and alike ones side by side.

Owns the order of such a batch and the checks that keep a bad sequence from reaching the device. It is numpy on whole
arrays, because it runs before every step.

Shape legend: B sequences, T tokens in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nobiru.errors import InvalidRequestError
from nobiru.generation import CausalInput
from nobiru.ops.paged_layout import PagedLayout
from nobiru.runner.batch import check_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class CausalLimits:
    """What inputs have to keep to. `num_blocks` of the KV cache are for sequences."""

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CausalBatch:
    """`inputs` are in the batch's order; `order[i]` is the number, in the caller's order, of the one at place i."""

    inputs: list[CausalInput]
    order: list[int]
    token_ids_T: Tensor
    layout: PagedLayout


def pack_causal(inputs: Sequence[CausalInput], limits: CausalLimits, device: torch.device) -> CausalBatch:
    """`InvalidRequestError` for a sequence that is empty, too long, or has token ids outside of the vocabulary."""
    starts = np.fromiter((each.start for each in inputs), np.int64, len(inputs))
    lengths = np.fromiter((each.token_ids.size for each in inputs), np.int64, len(inputs))
    _check_lengths(starts, lengths, limits.max_model_len)
    # Groups of similar shape attend together: decoding, then prompts from their start, then parts of prompts.
    kinds = np.where(lengths == 1, 0, np.where(starts == 0, 1, 2))
    order_B = np.lexsort((starts, lengths, kinds))
    chosen = [inputs[number] for number in order_B.tolist()]
    token_ids_T = np.concatenate([each.token_ids for each in chosen])
    check_ids(token_ids_T, limits.vocab_size)
    layout = PagedLayout(
        starts[order_B],
        lengths[order_B],
        [each.block_ids for each in chosen],
        block_size=limits.block_size,
        device=device,
    )
    assert layout.block_table_BM.min() >= 0 and layout.block_table_BM.max() < limits.num_blocks, "blocks exist"
    return CausalBatch(inputs=chosen, order=order_B.tolist(), token_ids_T=layout.to_device(token_ids_T), layout=layout)


def _check_lengths(starts: np.ndarray, lengths: np.ndarray, max_model_len: int) -> None:
    if lengths.min() == 0:
        raise InvalidRequestError("a sequence has no tokens; at least 1 is needed")
    longest = int((starts + lengths).max())
    if longest > max_model_len:
        raise InvalidRequestError(
            f"a sequence has {longest} tokens; the model's limit is {max_model_len} (max_model_len)"
        )
