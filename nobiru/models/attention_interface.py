"""Attention of ours inside a model of `transformers`, by way of the interface that it has for that.

Owns how the model's calls look: one sequence [1, H, T, D] that stands for a whole batch. What is attended to is the
caller's.

Shape legend: T tokens, H query heads, K key heads, D values a head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCall:
    """What one layer asks for. `window` w: of the tokens before, a token sees itself and w - 1."""

    query_THD: Tensor
    key_TKD: Tensor
    value_TKD: Tensor
    scale: float
    window: int | None
    softcap: float | None


Attend = Callable[[AttentionCall], Tensor]


class AttentionInterface:
    """Calls of a model that uses it are answered by whatever it is `within`, [T, H, D] for each.

    A model that asks for one of `unsupported` gets a `ValueError`, which says that it cannot run in this `way`.
    """

    def __init__(self, way: str, *, unsupported: Collection[str]) -> None:
        self._way = way
        self._unsupported = unsupported
        self._attend: Attend | None = None

    def use_in(self, model: Any) -> None:
        """From now on the model has no other attention."""
        from transformers import AttentionInterface as Registry

        # It looks for names in a table of its own, so each gets one that nobody else has.
        name = f"nobiru_{id(self):x}"
        Registry.register(name, self)
        model.set_attn_implementation(name)

    @contextmanager
    def within(self, attend: Attend) -> Iterator[None]:
        """Attention calls in this block are `attend`'s; a model's layers call in order."""
        self._attend = attend
        try:
            yield
        finally:
            self._attend = None

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """q [1, H, T, D], k and v [1, K, T, D] → [1, T, H, D]."""
        assert self._attend is not None, "called outside of a forward pass"
        for name, given in {**options, "softcap": softcap}.items():
            if given is not None and name in self._unsupported:
                raise ValueError(f"attention with {name} cannot run {self._way}")
        call = AttentionCall(
            query_THD=query[0].transpose(0, 1),
            key_TKD=key[0].transpose(0, 1),
            value_TKD=value[0].transpose(0, 1),
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=sliding_window,
            softcap=softcap,
        )
        return self._attend(call)[None], None
