"""The models that ranks serve in these tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_models import make


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("bert-mean-normalize", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("language-model"))


@pytest.fixture(scope="session")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen3-moe", tmp_path_factory.mktemp("moe"))
