"""How many tokens a step takes where nobody says."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import make

from nobiru.config import EngineConfig
from nobiru.engine.build import build_engine
from nobiru.engine.limits import MAX_TIMED_TOKEN_BUDGET, SERVER_STEP_S, timed_token_budget
from nobiru.runner.runner import PoolingRunner


@given(st.floats(1, 1e7), st.sampled_from([256, 1024, 8192]))
def test_as_many_as_take_the_time_within_bounds(tokens_per_s: float, least: int) -> None:
    budget = timed_token_budget(tokens_per_s, SERVER_STEP_S, least=least)
    assert least <= budget <= max(least, MAX_TIMED_TOKEN_BUDGET)
    assert budget == least or budget <= tokens_per_s * SERVER_STEP_S
    assert budget >= min(tokens_per_s * SERVER_STEP_S, MAX_TIMED_TOKEN_BUDGET) - 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("bert-mean-normalize", tmp_path_factory.mktemp("limits"))


@pytest.mark.parametrize(
    ("tokens_per_s", "chosen", "budget"),
    [(20_000.0, None, 2000 - 2000 % 256), (5_000.0, None, 1024), (1e6, None, 4096), (1e6, 512, 512)],
)
def test_a_server_takes_what_its_machine_does_in_time(
    model: Path, monkeypatch: pytest.MonkeyPatch, tokens_per_s: float, chosen: int | None, budget: int
) -> None:
    monkeypatch.setattr(PoolingRunner, "tokens_per_s", lambda self, num_tokens: tokens_per_s)
    config = EngineConfig(model=str(model), dtype="float32", device="cpu", num_threads=1, max_num_batched_tokens=chosen)
    for step_s, expected in ((SERVER_STEP_S, budget), (None, chosen or 1024)):
        engine = build_engine(config, default_budget=1024, step_s=step_s)
        limits = engine.core.scheduler.config
        assert limits.max_num_batched_tokens == expected
        assert limits.hurried_step_tokens == (1024 if expected > 1024 else None)


def test_the_rate_is_that_of_the_machine(model: Path) -> None:
    config = EngineConfig(model=str(model), dtype="float32", device="cpu", num_threads=1)
    runner = build_engine(config, default_budget=1024).runner
    assert isinstance(runner, PoolingRunner)
    assert 100 < runner.tokens_per_s(256) < 1e8
