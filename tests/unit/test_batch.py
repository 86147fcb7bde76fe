"""Packing a step: the order, the groups of similar lengths, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nobiru.errors import InvalidRequestError
from nobiru.ops.layout import MAX_PADDING, MIN_RUN_TOKENS, PackedLayout, plan_groups
from nobiru.request import SequenceInput
from nobiru.runner.batch import PackedBatch, pack

LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=60)
CPU = torch.device("cpu")


def sequence(*token_ids: int, skipped: int = 0) -> SequenceInput:
    return SequenceInput(token_ids=np.array(token_ids, dtype=np.int32), num_skipped_tokens=skipped)


def packed(*sequences: SequenceInput) -> PackedBatch:
    return pack(sequences, vocab_size=100, max_model_len=80, device=CPU)


@given(LENGTHS, st.sampled_from([MIN_RUN_TOKENS, 0, math.inf]))
def test_groups_cover_the_batch_with_little_padding(lengths: list[int], min_run_tokens: float) -> None:
    sorted_lengths = np.sort(np.array(lengths, dtype=np.int64))
    groups = plan_groups(sorted_lengths, min_run_tokens=min_run_tokens)
    assert [index for group in groups for index in range(group.start, group.stop)] == list(range(len(lengths)))
    for group in groups:
        members = sorted_lengths[group]
        padding = members.size * members[-1] - members.sum()
        assert padding <= MAX_PADDING * members.sum()
        if padding:
            assert all(run_tokens < min_run_tokens for run_tokens in runs(members))
    # Equal lengths are never split: each boundary is a step up.
    assert all(sorted_lengths[group.start - 1] < sorted_lengths[group.start] for group in groups[1:])


def runs(members: np.ndarray) -> list[int]:
    values, counts = np.unique(members, return_counts=True)
    return (values * counts).tolist()


def test_small_neighbours_share_a_group() -> None:
    groups = plan_groups(np.array([8, 9, 9, 10, 40], dtype=np.int64))
    assert [(group.start, group.stop) for group in groups] == [(0, 4), (4, 5)]


def test_one_long_run_is_one_view() -> None:
    layout = PackedLayout(np.full(5, 30, dtype=np.int64))
    (group,) = layout.groups
    assert (group.num_seqs, group.length, group.tokens) == (5, 30, slice(0, 150))
    assert group.padded_nL is None


@given(LENGTHS)
def test_padded_groups_gather_each_token_once(lengths: list[int]) -> None:
    layout = PackedLayout(np.sort(np.array(lengths, dtype=np.int64)))
    places = torch.arange(layout.num_tokens)
    seen = []
    for group in layout.grouped(plan_groups(layout.lengths_B, min_run_tokens=math.inf)):
        if group.padded_nL is None or group.real_t is None or group.key_mask_n11L is None:
            seen.append(places[group.tokens])
            continue
        assert group.padded_nL.numel() == group.num_seqs * group.length == group.key_mask_n11L.numel()
        seen.append(group.padded_nL[group.real_t])
        assert torch.equal(group.key_mask_n11L.flatten().nonzero().flatten(), group.real_t)
    assert torch.equal(torch.cat(seen), places)


@given(LENGTHS)
def test_positions_and_boundaries(lengths: list[int]) -> None:
    layout = PackedLayout(np.sort(np.array(lengths, dtype=np.int64)))
    expected = np.concatenate([np.arange(length) for length in sorted(lengths)])
    assert layout.positions_T.tolist() == expected.tolist()
    assert layout.cu_seqlens.dtype == torch.int32
    assert layout.cu_seqlens.diff().tolist() == sorted(lengths)


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=20), min_size=1, max_size=30))
def test_pack_keeps_every_sequence(token_ids: list[list[int]]) -> None:
    sequences = [sequence(*ids, skipped=number) for number, ids in enumerate(token_ids)]
    batch = packed(*sequences)
    pieces = batch.token_ids_T.split(batch.layout.lengths_B.tolist())
    for piece, number, skipped in zip(pieces, batch.order_B, batch.num_skipped_B, strict=True):
        assert piece.tolist() == token_ids[number]
        assert skipped == number
    assert sorted(batch.order_B.tolist()) == list(range(len(token_ids)))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (sequence(), "no tokens"),
        (sequence(*range(81)), r"81 tokens.*limit is 80"),
        (sequence(5, 100), r"token id 100 is not in the vocabulary, 0 to 99"),
        (sequence(-1, 3), r"token id -1"),
    ],
)
def test_bad_sequences_are_refused(bad: SequenceInput, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        packed(sequence(1, 2), bad)
