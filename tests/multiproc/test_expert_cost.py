"""The benchmark of what a step of expert-parallel ranks pays runs, and its parts are parts of a step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from small_models import make

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_what_a_step_pays_is_measured(tmp_path: Path) -> None:
    model = make("qwen3-moe", tmp_path)
    command = [sys.executable, "-m", "benchmarks.expert_cost", str(model), "--ranks", "1,2", "--steps", "5"]
    done = subprocess.run(
        [*command, "--streams", "2", "--dtype", "float32"], cwd=REPOSITORY, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    assert [each["ranks"] for each in results] == [1, 2]
    for each in results:
        assert 0 < each["gather"] < each["step"] and 0 < each["exchanges"] < each["step"]
        assert each["resident MiB"] > 10
