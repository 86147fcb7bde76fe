"""A short soak: random changes and deaths under load lose no token and leave nothing behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from small_models import make

from benchmarks.elastic_soak import Soak, run


@pytest.mark.alone
@pytest.mark.timeout(300)  # some fifteen processes are started; busy machines take long for that
def test_ten_random_changes_leave_nothing_behind(tmp_path: Path) -> None:
    soak = Soak(
        model=str(make("qwen3-moe", tmp_path)),
        num_operations=10,
        seed=1,
        num_clients=2,
        max_tokens=48,
        max_size=3,
        rank_timeout_s=10.0,
        warm_up=(3, 1),
        log=tmp_path / "server.log",
    )
    report = asyncio.run(run(soak))
    assert report.problems == [], (tmp_path / "server.log").read_text()[-5000:]
    assert sum(report.changes.values()) == 10
    assert report.num_failure_epochs > 0
    assert report.num_requests > 20
