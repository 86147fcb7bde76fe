"""How often a sequence has used which tokens, as penalties need it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """The distinct tokens of one sequence: `ids` [u] and how often each is in the output, `counts` [u].

    Tokens of `prompt_token_ids` are there with a count of 0. `vocab_size` bounds the ids; others are left out.
    """

    def __init__(self, prompt_token_ids: Sequence[int], vocab_size: int) -> None:
        prompt = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        prompt = prompt[(prompt >= 0) & (prompt < vocab_size)]
        self._vocab_size = vocab_size
        self._num_ids = prompt.size
        self._ids = np.zeros(prompt.size + 64, dtype=np.int64)
        self._ids[: prompt.size] = prompt
        self._counts = np.zeros(self._ids.size, dtype=np.float32)
        self._place_of = {token_id: place for place, token_id in enumerate(prompt.tolist())}

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: self._num_ids]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: self._num_ids]

    def add(self, token_ids: Iterable[int]) -> None:
        """Count tokens of the output."""
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                continue
            place = self._place_of.get(token_id)
            if place is None:
                place = self._place_of[token_id] = self._num_ids
                if place == self._ids.size:
                    self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                    self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
                self._ids[place] = token_id
                self._num_ids += 1
            self._counts[place] += 1
