"""How the sequences of a step attend together where no kernel takes blocks as they are: groups of similar shape.

Owns the plan: which sequences are computed side by side, from which rows of the cache, under which mask. It is made
once a step and used in every layer. Padding repeats a sequence's own last token, so that what others left in the cache,
which may not be a number, is never read.

Shape legend: n sequences of a group, L the longest context of a group that its tokens see, t tokens of one sequence in
the step, M blocks of the sequence that has most.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nobiru.ops.layout import MIN_RUN_TOKENS, plan_groups
from nobiru.ops.native.library import TILE_TOKENS
from nobiru.ops.paged_layout import PagedLayout

Integers = NDArray[np.int64]
_JOIN_ALL = float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeGroup:
    """Sequences with one token each. `tokens_n` are their places in the batch, `slots_nL` (flat) the rows of the cache
    to gather; `mask_n11L` is added to scores, None when all contexts are equally long."""

    tokens_n: Tensor | slice
    slots_nL: Tensor
    num_seqs: int
    length: int
    mask_n11L: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FreshGroup:
    """Sequences with nothing in the cache before, which attend among the step's own tokens.

    `tokens` are their places in the batch, [n, L]: a slice, or (flat) places to gather whose `real_t` exist. `mask_LL`
    is added to scores; None means causal.
    """

    tokens: Tensor | slice
    num_seqs: int
    length: int
    real_t: Tensor | None
    places_t: Tensor | slice
    mask_LL: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """One sequence with several tokens behind a context; `slots_L` as in `DecodeGroup`."""

    tokens: slice
    slots_L: Tensor
    mask_tL: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRows:
    """All sequences with one token, for a kernel that follows block tables: their places in the batch (int64), blocks
    [n, M] and contexts [n], both int32."""

    tokens_n: Tensor
    block_table_nM: Tensor
    contexts_n: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillPlan:
    """Every sequence with several tokens is in exactly one part."""

    fresh: list[FreshGroup]
    chunks: list[Chunk]


def decode_rows(layout: PagedLayout) -> DecodeRows | None:
    """None if no sequence has one token only. Made once per layout, as all these plans are."""
    return layout.derive("decode rows", lambda: _decode_rows(layout))


def prefill_tiles(layout: PagedLayout) -> Tensor | None:
    """All sequences with several tokens, cut into tiles for the native kernel, [tiles, 4] int64; None without any.

    Of each tile: the sequence, its first token in the batch, that token's position, the number of tokens.
    """
    return layout.derive("prefill tiles", lambda: _prefill_tiles(layout))


def _prefill_tiles(layout: PagedLayout) -> Tensor | None:
    tiles = []
    for row in np.flatnonzero(layout.lengths_B > 1).tolist():
        start, length, end = (int(each[row]) for each in (layout.starts_B, layout.lengths_B, layout.ends_B))
        for first in range(0, length, TILE_TOKENS):
            tiles.append((row, end - length + first, start + first, min(TILE_TOKENS, length - first)))
    return layout.to_device(np.array(tiles, dtype=np.int64)) if tiles else None


def plan_decoding(layout: PagedLayout, window: int | None, dtype: torch.dtype) -> list[DecodeGroup]:
    """Groups for tokens that see `window` tokens, themselves included; masks are in `dtype`."""
    return layout.derive(("decoding", window, dtype), lambda: _plan_decoding(_Planner(layout, window, dtype)))


def plan_prefill(layout: PagedLayout, window: int | None, dtype: torch.dtype) -> PrefillPlan:
    return layout.derive(("prefill", window, dtype), lambda: _plan_prefill(_Planner(layout, window, dtype)))


def _decode_rows(layout: PagedLayout) -> DecodeRows | None:
    rows = np.flatnonzero(layout.lengths_B == 1)
    if not rows.size:
        return None
    width = int(layout.num_blocks_B[rows].max())
    return DecodeRows(
        tokens_n=layout.to_device(layout.ends_B[rows] - 1),
        block_table_nM=layout.to_device(np.ascontiguousarray(layout.block_table_BM[rows, :width], dtype=np.int32)),
        contexts_n=layout.to_device(layout.contexts_B[rows].astype(np.int32)),
    )


def _plan_decoding(planner: _Planner) -> list[DecodeGroup]:
    rows = np.flatnonzero(planner.layout.lengths_B == 1)
    return [planner.decode_group(group) for group in _groups(rows, planner.seen(rows))]


def _plan_prefill(planner: _Planner) -> PrefillPlan:
    lengths_B, starts_B = planner.layout.lengths_B, planner.layout.starts_B
    fresh = np.flatnonzero((lengths_B > 1) & (starts_B == 0))
    chunked = np.flatnonzero((lengths_B > 1) & (starts_B > 0))
    return PrefillPlan(
        fresh=[planner.fresh_group(rows) for rows in _groups(fresh, lengths_B[fresh], min_run_tokens=MIN_RUN_TOKENS)],
        chunks=[planner.chunk(int(row)) for row in chunked],
    )


def _places(layout: PagedLayout, places: Integers) -> Tensor | slice:
    """A slice where they are one after another."""
    first = int(places[0])
    if places[-1] - first == places.size - 1 and (np.diff(places) == 1).all():
        return slice(first, first + places.size)
    return layout.to_device(places)


def _groups(rows: Integers, lengths: Integers, *, min_run_tokens: float = _JOIN_ALL) -> list[Integers]:
    """Rows of similar lengths, each group ascending."""
    if not rows.size:
        return []
    order = np.argsort(lengths, kind="stable")
    return [rows[order[part]] for part in plan_groups(lengths[order], min_run_tokens=min_run_tokens)]


class _Planner:
    def __init__(self, layout: PagedLayout, window: int | None, dtype: torch.dtype) -> None:
        self.layout = layout
        self._window = window
        self._dtype = dtype

    def seen(self, rows: Integers) -> Integers:
        """How many tokens a sequence's last token sees."""
        contexts = self.layout.contexts_B[rows]
        return contexts if self._window is None else np.minimum(contexts, self._window)

    def decode_group(self, rows: Integers) -> DecodeGroup:
        layout, seen_n = self.layout, self.seen(rows)
        length = int(seen_n[-1])
        places_nL = (layout.contexts_B[rows] - seen_n)[:, None] + np.minimum(np.arange(length), seen_n[:, None] - 1)
        mask = None
        if seen_n[0] != length:
            mask = self._mask(np.arange(length) < seen_n[:, None])[:, None, None, :]
        return DecodeGroup(
            tokens_n=_places(layout, layout.ends_B[rows] - 1),
            slots_nL=layout.to_device(layout.slots_of(rows[:, None], places_nL).reshape(-1)),
            num_seqs=rows.size,
            length=length,
            mask_n11L=mask,
        )

    def fresh_group(self, rows: Integers) -> FreshGroup:
        layout = self.layout
        lengths_n, begins_n = layout.lengths_B[rows], layout.ends_B[rows] - layout.lengths_B[rows]
        length = int(lengths_n[-1])
        places_nL = begins_n[:, None] + np.minimum(np.arange(length), lengths_n[:, None] - 1)
        is_real_nL = np.arange(length) < lengths_n[:, None]
        is_windowed = self._window is not None and self._window < length
        places = np.arange(length)
        return FreshGroup(
            tokens=_places(layout, places_nL.reshape(-1)),
            num_seqs=rows.size,
            length=length,
            real_t=None if lengths_n[0] == length else layout.to_device(np.flatnonzero(is_real_nL)),
            places_t=_places(layout, places_nL[is_real_nL]),
            mask_LL=self._mask(self._allowed(places, places)) if is_windowed else None,
        )

    def chunk(self, row: int) -> Chunk:
        layout = self.layout
        context, length, end = int(layout.contexts_B[row]), int(layout.lengths_B[row]), int(layout.ends_B[row])
        start = context - length
        first = 0 if self._window is None else max(0, start - self._window + 1)
        places_L = np.arange(first, context)
        return Chunk(
            tokens=slice(end - length, end),
            slots_L=layout.to_device(layout.slots_of(np.full(places_L.size, row), places_L)),
            mask_tL=self._mask(self._allowed(np.arange(start, context), places_L)),
        )

    def _allowed(self, queries: Integers, keys: Integers) -> NDArray[np.bool_]:
        distances = queries[:, None] - keys
        allowed: NDArray[np.bool_] = distances >= 0
        return allowed if self._window is None else allowed & (distances < self._window)

    def _mask(self, allowed: NDArray[np.bool_]) -> Tensor:
        """Zero where attention is allowed, else minus infinity."""
        hidden = ~self.layout.to_device(allowed)
        return torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
