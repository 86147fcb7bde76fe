"""Packs the sequences of one step: shortest first, token ids one after another, options in the same order.

Owns the order of a batch and the checks that keep a bad sequence from reaching the device. Runs before every step, so
it is numpy on whole arrays: 256 sequences take a fraction of a millisecond.

Shape legend: B sequences, T tokens in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nobiru.errors import InvalidRequestError
from nobiru.ops.layout import PackedLayout
from nobiru.request import SequenceInput


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """`order_B[i]` is the number, in the caller's order, of the sequence at place i of the batch."""

    token_ids_T: Tensor
    layout: PackedLayout
    order_B: NDArray[np.int64]
    num_skipped_B: NDArray[np.int64]


def pack(
    sequences: Sequence[SequenceInput], *, vocab_size: int, max_model_len: int, device: torch.device
) -> PackedBatch:
    """`InvalidRequestError` for a sequence that is empty, too long, or has token ids outside of the vocabulary."""
    lengths_B = np.fromiter((sequence.token_ids.size for sequence in sequences), np.int64, len(sequences))
    order_B = np.argsort(lengths_B, kind="stable")
    lengths_B = lengths_B[order_B]
    _check_lengths(lengths_B, max_model_len)
    token_ids_T = np.concatenate([sequences[index].token_ids for index in order_B])
    check_ids(token_ids_T, vocab_size)
    skipped = np.fromiter((sequence.num_skipped_tokens for sequence in sequences), np.int64, len(sequences))
    layout = PackedLayout(lengths_B, device)
    return PackedBatch(
        token_ids_T=layout.to_device(token_ids_T), layout=layout, order_B=order_B, num_skipped_B=skipped[order_B]
    )


def _check_lengths(sorted_lengths: NDArray[np.int64], max_model_len: int) -> None:
    if sorted_lengths[0] == 0:
        raise InvalidRequestError("a sequence has no tokens; at least 1 is needed")
    if sorted_lengths[-1] > max_model_len:
        raise InvalidRequestError(
            f"a sequence has {sorted_lengths[-1]} tokens; the model's limit is {max_model_len} (max_model_len)"
        )


def check_ids(token_ids: NDArray[np.int32], vocab_size: int) -> None:
    lowest, highest = int(token_ids.min()), int(token_ids.max())
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise InvalidRequestError(f"token id {wrong} is not in the vocabulary, 0 to {vocab_size - 1}")
