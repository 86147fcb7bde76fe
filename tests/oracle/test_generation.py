"""Greedy texts token for token those of `transformers.generate`, in every way of running them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from small_models import make

from benchmarks.generate_parity import MODES, Reference, load_reference, make_prompts, reference_texts, run_mode

SHARED = Path(__file__).parents[2].parent / "shared" / "models"

TRAINED = ("stories260K", "stories260K-moe8x-noisy", "stories260K-qwen3moe8x-noisy")


NUM_TOKENS = 24


@dataclass(frozen=True, kw_only=True)
class Case:
    """A folder, the model as `transformers` has it, and what that generates."""

    folder: Path
    model: Any
    reference: Reference


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen3-moe", "olmoe", "deepseek-v3", *TRAINED])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    import transformers

    folder = Path(os.environ.get("NOBIRU_SHARED_MODELS", SHARED)) / request.param
    if request.param not in TRAINED:
        folder = make(request.param, tmp_path_factory.mktemp("model"))
    elif not folder.is_dir():
        pytest.skip(f"{request.param} is not at hand")
    model = load_reference(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    longest = model.config.max_position_embeddings
    prompts = [tokenizer(text)["input_ids"][: longest - NUM_TOKENS] for text in make_prompts(10)]
    return Case(folder=folder, model=model, reference=reference_texts(model, prompts, NUM_TOKENS))


@pytest.mark.parametrize("mode", MODES)
def test_greedy_texts_equal_those_of_transformers(case: Case, mode: str) -> None:
    agreement = run_mode(case.folder, mode, case.reference, case.model)
    assert agreement.ok, agreement
