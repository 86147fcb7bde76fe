"""From token vectors to one vector per sequence, in all modes of Sentence Transformers, on a packed batch.

Owns what pooling means, also where a skipped prompt covers the whole sequence: then "cls" takes the first token, "max"
gives -inf and every other mode zeros, as Sentence Transformers does. Sums are float32.

Shape legend: T tokens, R of them that are read, B sequences, C hidden size.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from nobiru.folder.spec import PoolingSpec
from nobiru.ops.layout import PackedLayout
from nobiru.ops.native.encoder_ends import ends_for


class Pooler:
    """`pooler(hidden, layout, skipped)` gives [B, len(modes) * C] in float32."""

    def __init__(self, spec: PoolingSpec) -> None:
        self._spec = spec

    def __call__(self, hidden_TC: Tensor, layout: PackedLayout, skipped_B: NDArray[np.int64]) -> Tensor:
        """`skipped_B` leading tokens of each sequence are left out, unless the model's pooling includes prompts."""
        kept = _Kept(hidden_TC, layout, self._skipped(layout, skipped_B))
        pooled = [kept.pool(mode).float() for mode in self._spec.modes]
        return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=-1)

    def rows(self, layout: PackedLayout, skipped_B: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """[R]: the tokens, ascending, whose hidden states a call with the same arguments reads; None: all."""
        read = {"cls": _first_rows(layout, self._skipped(layout, skipped_B)), "lasttoken": layout.ends_B - 1}
        if any(mode not in read for mode in self._spec.modes):
            return None
        return np.unique(np.concatenate([read[mode] for mode in self._spec.modes]))

    def _skipped(self, layout: PackedLayout, skipped_B: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.zeros_like(skipped_B) if self._spec.include_prompt else np.minimum(skipped_B, layout.lengths_B)


def _first_rows(layout: PackedLayout, skipped_B: NDArray[np.int64]) -> NDArray[np.int64]:
    """[B]: the first token of each sequence that is not skipped; of one that is skipped altogether, its first."""
    return layout.starts_B + np.where(skipped_B < layout.lengths_B, skipped_B, 0)


class _Kept:
    """The tokens of one batch that take part in pooling."""

    def __init__(self, hidden_TC: Tensor, layout: PackedLayout, skipped_B: NDArray[np.int64]) -> None:
        self._hidden_TC = hidden_TC
        self._layout = layout
        self._skipped_B = skipped_B
        self._counts_B = layout.lengths_B - skipped_B

    def pool(self, mode: str) -> Tensor:
        if mode == "cls":
            return self._rows(_first_rows(self._layout, self._skipped_B))
        if mode == "max":
            return self._max()
        if mode == "lasttoken":
            return self._without_empty(self._rows(self._layout.ends_B - 1))
        counts_B = np.maximum(self._counts_B, 1)
        if mode == "mean":
            return self._weighted_sum(np.repeat(1 / counts_B, self._layout.lengths_B))
        if mode == "mean_sqrt_len_tokens":
            return self._weighted_sum(np.repeat(counts_B**-0.5, self._layout.lengths_B))
        assert mode == "weightedmean", mode
        # Weights are places from 1, counted from the sequence's first token whether it is skipped or not.
        first_B, last_B = self._skipped_B + 1, self._layout.lengths_B
        totals_B = np.maximum((first_B + last_B) * self._counts_B // 2, 1)
        places_T = self._layout.positions + 1
        return self._weighted_sum(places_T / np.repeat(totals_B, self._layout.lengths_B))

    def _weighted_sum(self, weights_T: NDArray[np.float64]) -> Tensor:
        """Sum of each sequence's tokens times their weights; skipped tokens weigh nothing."""
        layout = self._layout
        if self._skipped_B.any():
            weights_T = np.where(layout.positions >= np.repeat(self._skipped_B, layout.lengths_B), weights_T, 0.0)
        if (ends := ends_for(self._hidden_TC)) is not None:
            return ends.sum_tokens(self._hidden_TC, weights_T.astype(np.float32), layout.bounds)
        tokens_T = layout.to_device(np.arange(layout.num_tokens))
        return F.embedding_bag(
            tokens_T,
            self._hidden_TC.float(),
            layout.to_device(layout.starts_B),
            mode="sum",
            per_sample_weights=layout.to_device(weights_T.astype(np.float32)),
        )

    def _max(self) -> Tensor:
        layout = self._layout
        hidden_TC = self._hidden_TC
        if self._skipped_B.any():
            skipped = layout.positions < np.repeat(self._skipped_B, layout.lengths_B)
            hidden_TC = hidden_TC.masked_fill(layout.to_device(skipped)[:, None], float("-inf"))
        owners_T = layout.to_device(np.repeat(np.arange(layout.num_seqs), layout.lengths_B))
        highest_BC = hidden_TC.new_full((layout.num_seqs, hidden_TC.shape[1]), float("-inf"))
        return highest_BC.scatter_reduce_(0, owners_T[:, None].expand_as(hidden_TC), hidden_TC, reduce="amax")

    def _rows(self, places_B: NDArray[np.int64]) -> Tensor:
        return self._hidden_TC.index_select(0, self._layout.to_device(places_B))

    def _without_empty(self, rows_BC: Tensor) -> Tensor:
        empty_B = self._counts_B == 0
        if not empty_B.any():
            return rows_BC
        return rows_BC.masked_fill(self._layout.to_device(empty_B)[:, None], 0.0)
