"""Decode steps through captured graphs, with a capture that runs on the CPU: buckets, padding, fixed places."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nobiru.ops.paged_layout import PagedLayout
from nobiru.runner.graphs import DecodeGraphs, bucket_sizes

BLOCK_SIZE, TABLE_WIDTH, SPARE = 4, 5, 40
CPU = torch.device("cpu")


class Recorded:
    """Runs the computation again at each replay, with results at the place they had first."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self.output = compute().clone()

    def replay(self) -> None:
        self.output.copy_(self._compute())


def facts(token_ids_T: Tensor, layout: PagedLayout) -> Tensor:
    """A row of everything that attention of a decode step reads."""
    used = layout.block_table.clone()
    beyond = torch.arange(used.shape[1]) >= -(-layout.context_lengths[:, None] // BLOCK_SIZE)
    used[beyond] = -1
    columns = (token_ids_T, layout.positions_T, layout.slots_T, layout.context_lengths, layout.last_B)
    width = torch.full((len(token_ids_T), 1), layout.max_context)
    starts = layout.cu_contexts.diff()[:, None]
    return torch.cat([*(column[:, None] for column in columns), used, width, starts], dim=1).double()


def make_graphs(capture: Callable[..., Recorded] = Recorded, max_num_seqs: int = 20) -> DecodeGraphs:
    return DecodeGraphs(
        facts,
        capture,
        sizes=bucket_sizes(max_num_seqs),
        block_size=BLOCK_SIZE,
        table_width=TABLE_WIDTH,
        spare_block=SPARE,
        device=CPU,
    )


def batch(starts: list[int], seed: int = 0, length: int = 1) -> tuple[Tensor, PagedLayout, PagedLayout]:
    """Token ids, their layout, and the same with tables of the common width."""
    random = np.random.default_rng(seed)
    lengths = np.full(len(starts), length)
    blocks = [random.permutation(SPARE)[: -(-(start + length) // BLOCK_SIZE)] for start in starts]
    layouts = [
        PagedLayout(np.array(starts), lengths, blocks, block_size=BLOCK_SIZE, table_width=width)
        for width in (None, TABLE_WIDTH)
    ]
    return torch.from_numpy(random.integers(0, 99, len(starts) * length)), layouts[0], layouts[1]


def test_buckets() -> None:
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(3) == (1, 2, 4)
    assert bucket_sizes(8) == (1, 2, 4, 8)
    assert bucket_sizes(33) == (1, 2, 4, 8, 16, 24, 32, 40)
    assert bucket_sizes(10**6)[-1] == 256


@given(
    st.lists(st.lists(st.integers(0, TABLE_WIDTH * BLOCK_SIZE - 1), min_size=1, max_size=20), min_size=1, max_size=5)
)
def test_each_step_reads_its_own_places(steps: list[list[int]]) -> None:
    graphs = make_graphs()
    for seed, starts in enumerate(steps):
        token_ids, layout, wide = batch(starts, seed)
        found = graphs.run(token_ids, layout)
        assert found is not None and torch.equal(found, facts(token_ids, wide))


def test_padding_rows_stay_in_the_spare_block() -> None:
    seen: list[Tensor] = []

    def capture(compute: Callable[[], Tensor]) -> Recorded:
        recorded = Recorded(compute)
        seen.append(recorded.output)
        return recorded

    token_ids, layout, _ = batch([7] * 5)
    make_graphs(capture).run(token_ids, layout)
    (rows,) = seen
    assert len(rows) == 8
    assert (rows[5:, 1] == 0).all() and (rows[5:, 2] == SPARE * BLOCK_SIZE).all() and (rows[5:, 3] == 1).all()


def test_a_bucket_is_captured_once() -> None:
    calls = []

    def capture(compute: Callable[[], Tensor]) -> Recorded:
        calls.append(len(compute()))
        return Recorded(compute)

    graphs = make_graphs(capture)
    for num_seqs in (3, 4, 3, 9, 16):
        graphs.run(*batch([2] * num_seqs)[:2])
    assert calls == [4, 16]
    graphs.capture_all()
    assert calls == [4, 16, 24, 8, 2, 1]


def test_other_batches_run_without() -> None:
    graphs = make_graphs(max_num_seqs=8)
    assert graphs.run(*batch([2] * 9)[:2]) is None
    assert graphs.run(*batch([2, 3], length=2)[:2]) is None


def test_when_capturing_fails_everything_runs_without(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def capture(compute: Callable[[], Tensor]) -> Recorded:
        calls.append(1)
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    graphs = make_graphs(capture)
    graphs.capture_all()
    assert graphs.run(*batch([2])[:2]) is None and calls == [1]
    assert "operation not permitted when stream is capturing" in caplog.text and "and more" not in caplog.text
