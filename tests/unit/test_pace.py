"""Reading at a limit: never faster on average, and parts of a file in chunks."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from nobiru.models.pace import CHUNK_BYTES, Pace
from nobiru.models.safetensors_file import SafetensorsFile


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds


@given(st.lists(st.tuples(st.integers(0, 10_000), st.floats(0, 5)), min_size=1, max_size=20), st.integers(1, 10_000))
def test_the_average_stays_below_the_limit(chunks: list[tuple[int, float]], limit: int) -> None:
    clock = Clock()
    pace = Pace(limit, clock=clock, sleep=clock.sleep)
    num_bytes, waited_s = 0, 0.0
    for size, reading_s in chunks:
        num_bytes += size
        pace.took(size)
        assert clock.now_s - 100.0 >= num_bytes / limit * (1 - 1e-9)
        waited_s += reading_s
        clock.now_s += reading_s
    assert clock.now_s - 100.0 <= num_bytes / limit + waited_s + 1e-6, "it waits for nothing else"


def test_a_file_is_read_in_chunks_at_its_pace(tmp_path: Path) -> None:
    rows = torch.arange(6 * CHUNK_BYTES // 8, dtype=torch.float32).view(3, -1)
    save_file({"rows": rows}, tmp_path / "model.safetensors")
    clock = Clock()
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        clock.sleep(seconds)

    file = SafetensorsFile(tmp_path / "model.safetensors")
    read = file.rows("rows", 1, 3, pace=Pace(CHUNK_BYTES, clock=clock, sleep=sleep))
    assert torch.equal(read, rows[1:3])
    assert sleeps == [1.0, 1.0], "two rows are two chunks"
    began_s = time.monotonic()
    file.rows("rows", 0, 3, pace=Pace(10 * CHUNK_BYTES))
    assert time.monotonic() - began_s >= 0.29
