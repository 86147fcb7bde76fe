"""Tensor parallelism: layers whose heads, columns and vocabulary are spread over the workers of one rank.

Owns the arithmetic of shares, which is pure, and the layers that put together what workers computed, as Megatron has
them (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053): all workers hold the same hidden states; a layer's first
projection is cut by rows of its weight and its last by columns, so that one sum over the workers stands behind the
last. Knows nothing of processes: a `TensorGroup` carries tensors between them.

Shape legend: T tokens, t of them for each worker, C hidden size, I input values, O output values, v tokens of the
vocabulary for each worker, W workers, N = W * T rows, H heads of queries and keys, D values a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nobiru.errors import ConfigError
from nobiru.layers.decoder_block import FeedForward
from nobiru.layers.linear import Linear
from nobiru.layers.rms_norm import ProjectionNorm
from nobiru.ops.scratch import Buffer, Scratch

_OPTION = "tensor_parallel_size"


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadShare:
    """The query heads and key heads of one worker. `num_copies` workers have the same key heads."""

    queries: range
    keys: range
    num_copies: int


@dataclass(frozen=True, slots=True)
class Shard:
    """Worker number `index` of `size`. Shares are contiguous, in the order of the workers."""

    index: int
    size: int

    def heads(self, num_heads: int, num_kv_heads: int) -> HeadShare:
        """This worker's heads; queries have their key heads beside them. `ConfigError` where heads cannot be spread.

        With more workers than key heads, several workers hold the same one.
        """
        if num_heads % self.size:
            raise ConfigError(
                f"{_OPTION} is {self.size}; it must divide the model's {num_heads} attention heads", param=_OPTION
            )
        if num_kv_heads % self.size and self.size % num_kv_heads:
            raise ConfigError(
                f"{_OPTION} is {self.size}; it must divide the model's {num_kv_heads} key heads, or be a multiple",
                param=_OPTION,
            )
        num_copies = max(1, self.size // num_kv_heads)
        first_key, num_keys = self.index * num_kv_heads // self.size, max(1, num_kv_heads // self.size)
        num_queries = num_heads // self.size
        return HeadShare(
            queries=range(self.index * num_queries, (self.index + 1) * num_queries),
            keys=range(first_key, first_key + num_keys),
            num_copies=num_copies,
        )

    def part(self, total: int, what: str) -> range:
        """This worker's of `total` columns or rows, as even as possible; `ConfigError` if some worker got none."""
        if total < self.size:
            raise ConfigError(f"{_OPTION} is {self.size}, but the model has {total} {what} only", param=_OPTION)
        return range(self.index * total // self.size, (self.index + 1) * total // self.size)

    def block(self, total: int) -> tuple[range, int]:
        """This worker's of `total` in blocks of equal size, and that size; the last ones may be smaller or empty."""
        size = -(-total // self.size)
        return range(min(total, self.index * size), min(total, (self.index + 1) * size)), size


WHOLE = Shard(0, 1)


class TensorGroup(Protocol):
    """The workers of a rank, which exchange tensors of the same shapes in the same order. Raises `GroupError`."""

    @property
    def shard(self) -> Shard: ...

    def all_reduce(self, x: Tensor) -> None:
        """Put the sum over all workers into a contiguous x, the same bits everywhere."""

    def all_gather(self, x: Tensor) -> Tensor:
        """The workers' x [n, …], one below the other [W * n, …]."""

    def gather(self, x: Tensor) -> Tensor:
        """As `all_gather` on worker 0; no rows on others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SummedLinear:
    """A linear layer whose input values are spread: each worker's `linear` has some columns of the weight.

    One worker's has the bias.
    """

    linear: Linear
    group: TensorGroup

    def __call__(self, x_TI: Tensor, buffer: Buffer | None = None) -> Tensor:
        y_TO = self.linear(x_TI, buffer)
        self.group.all_reduce(y_TO)
        return y_TO


@dataclass(frozen=True, kw_only=True, slots=True)
class SpreadWords:
    """Token vectors by token id, of a table whose rows are spread; those of this worker begin with number `first`."""

    words_vC: Tensor
    first: int
    group: TensorGroup

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        rows_T = token_ids_T - self.first
        is_elsewhere_T = (rows_T < 0) | (rows_T >= self.words_vC.shape[0])
        found_TC = F.embedding(rows_T.masked_fill(is_elsewhere_T, 0), self.words_vC)
        found_TC.masked_fill_(is_elsewhere_T[:, None], 0)
        self.group.all_reduce(found_TC)
        return found_TC


@dataclass(frozen=True, kw_only=True, slots=True)
class SpreadHead:
    """Scores of all `vocab_size` tokens on worker 0; others compute theirs for it, and have no rows.

    `linear` C → v has as many rows on each worker; those beyond the vocabulary mean nothing.
    """

    linear: Linear
    vocab_size: int
    group: TensorGroup

    def __call__(self, x_TI: Tensor, buffer: Buffer | None = None) -> Tensor:
        scores_Nv = self.group.gather(self.linear(x_TI, buffer))
        if not scores_Nv.shape[0]:
            return scores_Nv
        scores_WTv = scores_Nv.view(self.group.shard.size, x_TI.shape[0], -1)
        return scores_WTv.transpose(0, 1).flatten(1)[:, : self.vocab_size]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpreadProjectionNorm:
    """A `ProjectionNorm` of heads that are spread. `num_values` of queries and of keys are there on all workers, with
    the copies."""

    norm: ProjectionNorm
    num_values: tuple[int, int]
    group: TensorGroup

    def __call__(self, x_THD: Tensor) -> Tensor:
        num_heads = self.norm.num_heads
        exact_THD = x_THD.float()
        parts = exact_THD.split_with_sizes((num_heads, x_THD.shape[1] - num_heads), 1)
        squares_T2 = torch.stack([part.square().sum((1, 2)) for part in parts], 1)
        self.group.all_reduce(squares_T2)
        scales_T2 = (squares_T2 / squares_T2.new_tensor(self.num_values) + self.norm.eps).rsqrt()
        normed = [part * scales_T2[:, number, None, None] for number, part in enumerate(parts)]
        return torch.cat(normed, 1).to(x_THD.dtype).mul_(self.norm.weight_HD)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitTokens:
    """A feed-forward that each worker has whole; each computes some of the tokens, and all get the results."""

    mlp: FeedForward
    group: TensorGroup

    def __call__(self, x_TC: Tensor, scratch: Scratch | None) -> Tensor:
        own, size = self.group.shard.block(x_TC.shape[0])
        y_tC = self.mlp(x_TC[own.start : own.stop], scratch)
        if len(own) < size:
            y_tC = F.pad(y_tC, (0, 0, 0, size - len(own)))
        return self.group.all_gather(y_tC)[: x_TC.shape[0]]
