"""Decode steps as CUDA graphs, one for each bucket of batch sizes: a step of few tokens is over sooner than its
hundreds of kernels can be launched one by one.

Owns the choice of a bucket, the padding of a batch to its size, the tensors at fixed addresses that a graph reads, and
what happens when a graph cannot be captured: the step runs without. How a graph is captured is passed in, so all but
that works without a device. Knows nothing of what the captured function computes.

Padding rows decode one token of a sequence that lies in the spare block, which no sequence gets.

Shape legend: B sequences, b those of the bucket (B ≤ b), C hidden size.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nobiru.ops.paged_layout import PagedLayout

logger = logging.getLogger(__name__)

_SMALL_BUCKETS = (1, 2, 4)
_BUCKET_STEP = 8
_MAX_BUCKET = 256

Forward = Callable[[Tensor, PagedLayout], Tensor]


class Graph(Protocol):
    """A captured computation. `output` keeps its place; `replay` fills it from what the inputs' places hold now."""

    output: Tensor

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], Tensor]], Graph]


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, …, up to `max_num_seqs` or just beyond it."""
    most = min(max_num_seqs, _MAX_BUCKET)
    sizes = [*_SMALL_BUCKETS, *range(_BUCKET_STEP, most + _BUCKET_STEP, _BUCKET_STEP)]
    return tuple(sizes[: bisect_left(sizes, most) + 1])


class DecodeGraphs:
    """Runs `forward` of decode batches by replaying graphs.

    `table_width` is the number of blocks of the longest sequence. A graph is captured when its bucket first comes, or
    by `capture_all`.
    """

    def __init__(
        self,
        forward: Forward,
        capture: Capture,
        *,
        sizes: tuple[int, ...],
        block_size: int,
        table_width: int,
        spare_block: int,
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._capture = capture
        self._sizes = sizes
        self._block_size = block_size
        self._table_width = table_width
        self._spare_block = spare_block
        self._device = device
        self._captured: dict[int, _Captured] = {}
        self._has_failed = False

    def capture_all(self) -> None:
        """The largest first: the others then fit into its memory."""
        for size in reversed(self._sizes):
            self._graph(size)

    def run(self, token_ids_B: Tensor, layout: PagedLayout) -> Tensor | None:
        """Hidden states [B, C], good until the next run; None where no graph serves this batch."""
        if not layout.is_decode or layout.num_seqs > self._sizes[-1]:
            return None
        size = self._sizes[bisect_left(self._sizes, layout.num_seqs)]
        captured = self._graph(size)
        if captured is None:
            return None
        captured.token_ids_b[: layout.num_seqs].copy_(token_ids_B, non_blocking=True)
        captured.layout.take_places_of(self._padded(layout, size))
        captured.graph.replay()
        return captured.graph.output[: layout.num_seqs]

    def _graph(self, size: int) -> _Captured | None:
        if size not in self._captured and not self._has_failed:
            token_ids_b = torch.zeros(size, dtype=torch.int64, device=self._device)
            layout = self._padded(None, size)
            layout.take_places_of(layout)  # makes the tensors, so that capturing makes none of them
            try:
                graph = self._capture(lambda: self._forward(token_ids_b, layout))
            except RuntimeError as error:
                self._has_failed = True
                first_line = str(error).split("\n")[0]
                logger.warning("decode steps run without CUDA graphs: capturing one failed (%s)", first_line)
                return None
            self._captured[size] = _Captured(graph, token_ids_b, layout)
        return self._captured.get(size)

    def _padded(self, layout: PagedLayout | None, size: int) -> PagedLayout:
        """The layout with rows up to `size` added, and block tables of the common width."""
        num_added = size - (0 if layout is None else layout.num_seqs)
        starts, tables = np.zeros(num_added, dtype=np.int64), [np.array([self._spare_block])] * num_added
        if layout is not None:
            starts = np.concatenate((layout.starts_B, starts))
            own = [row[:count] for row, count in zip(layout.block_table_BM, layout.num_blocks_B.tolist(), strict=True)]
            tables = own + tables
        return PagedLayout(
            starts,
            np.ones(size, dtype=np.int64),
            tables,
            block_size=self._block_size,
            device=self._device,
            table_width=self._table_width,
        )


class _Captured:
    """A graph with the tensors it reads."""

    def __init__(self, graph: Graph, token_ids_b: Tensor, layout: PagedLayout) -> None:
        self.graph = graph
        self.token_ids_b = token_ids_b
        self.layout = layout


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self._graph = graph
        self.output = output

    def replay(self) -> None:
        self._graph.replay()


def cuda_capture() -> Capture:
    """Captures on the current CUDA device. All graphs share one pool of memory, so one output is good at a time."""
    pool = torch.cuda.graph_pool_handle()

    def capture(compute: Callable[[], Tensor]) -> Graph:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.inference_mode():
            for _ in range(2):  # kernels are chosen and loaded outside of the graph
                compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool), torch.inference_mode():
            output = compute()
        return _CudaGraph(graph, output)

    return capture
