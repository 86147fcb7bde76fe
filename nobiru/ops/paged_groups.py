"""How the sequences of a step attend together where no kernel takes blocks as they are: groups of similar shape.

Owns the plan: which sequences are computed side by side, from which rows of the cache, under which mask. It is made
once a step and used in every layer. Padding repeats a sequence's own last token, so that what others left in the cache,
which may not be a number, is never read.

Shape legend: n sequences of a group, L the longest context of a group that its tokens see, t tokens of one sequence in
the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nobiru.ops.layout import plan_groups
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
class AttentionPlan:
    """Every token of the step is in exactly one part."""

    decoding: list[DecodeGroup]
    fresh: list[FreshGroup]
    chunks: list[Chunk]


def plan_attention(layout: PagedLayout, window: int | None, dtype: torch.dtype) -> AttentionPlan:
    """The plan for tokens that see `window` tokens, themselves included; masks are in `dtype`. Made once per layout."""
    key = (window, dtype)
    if key not in layout.derived:
        layout.derived[key] = _plan(layout, window, dtype)
    plan: AttentionPlan = layout.derived[key]
    return plan


def _plan(layout: PagedLayout, window: int | None, dtype: torch.dtype) -> AttentionPlan:
    planner = _Planner(layout, window, dtype)
    lengths_B, starts_B = layout.lengths_B, layout.starts_B
    decoding = np.flatnonzero(lengths_B == 1)
    fresh = np.flatnonzero((lengths_B > 1) & (starts_B == 0))
    chunked = np.flatnonzero((lengths_B > 1) & (starts_B > 0))
    return AttentionPlan(
        decoding=[planner.decode_group(rows) for rows in _groups(decoding, planner.seen(decoding))],
        fresh=[planner.fresh_group(rows) for rows in _groups(fresh, lengths_B[fresh], min_run_tokens=32)],
        chunks=[planner.chunk(int(row)) for row in chunked],
    )


def _groups(rows: Integers, lengths: Integers, *, min_run_tokens: float = _JOIN_ALL) -> list[Integers]:
    """Rows of similar lengths, each group ascending."""
    if not rows.size:
        return []
    order = np.argsort(lengths, kind="stable")
    return [rows[order[part]] for part in plan_groups(lengths[order], min_run_tokens=min_run_tokens)]


class _Planner:
    def __init__(self, layout: PagedLayout, window: int | None, dtype: torch.dtype) -> None:
        self._layout = layout
        self._window = window
        self._dtype = dtype

    def seen(self, rows: Integers) -> Integers:
        """How many tokens a sequence's last token sees."""
        contexts = self._layout.contexts_B[rows]
        return contexts if self._window is None else np.minimum(contexts, self._window)

    def decode_group(self, rows: Integers) -> DecodeGroup:
        layout, seen_n = self._layout, self.seen(rows)
        length = int(seen_n[-1])
        places_nL = (layout.contexts_B[rows] - seen_n)[:, None] + np.minimum(np.arange(length), seen_n[:, None] - 1)
        mask = None
        if seen_n[0] != length:
            mask = self._mask(np.arange(length) < seen_n[:, None])[:, None, None, :]
        return DecodeGroup(
            tokens_n=self._places(layout.ends_B[rows] - 1),
            slots_nL=layout.to_device(layout.slots_of(rows[:, None], places_nL).reshape(-1)),
            num_seqs=rows.size,
            length=length,
            mask_n11L=mask,
        )

    def fresh_group(self, rows: Integers) -> FreshGroup:
        layout = self._layout
        lengths_n, begins_n = layout.lengths_B[rows], layout.ends_B[rows] - layout.lengths_B[rows]
        length = int(lengths_n[-1])
        places_nL = begins_n[:, None] + np.minimum(np.arange(length), lengths_n[:, None] - 1)
        is_real_nL = np.arange(length) < lengths_n[:, None]
        is_windowed = self._window is not None and self._window < length
        places = np.arange(length)
        return FreshGroup(
            tokens=self._places(places_nL.reshape(-1)),
            num_seqs=rows.size,
            length=length,
            real_t=None if lengths_n[0] == length else layout.to_device(np.flatnonzero(is_real_nL)),
            places_t=self._places(places_nL[is_real_nL]),
            mask_LL=self._mask(self._allowed(places, places)) if is_windowed else None,
        )

    def chunk(self, row: int) -> Chunk:
        layout = self._layout
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
        hidden = ~self._layout.to_device(allowed)
        return torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))

    def _places(self, places: Integers) -> Tensor | slice:
        first = int(places[0])
        if places[-1] - first == places.size - 1 and (np.diff(places) == 1).all():
            return slice(first, first + places.size)
        return self._layout.to_device(places)
