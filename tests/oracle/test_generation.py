"""Greedy texts token for token those of `transformers.generate`, in every way of running them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from small_models import make

from benchmarks.generate_parity import MODES, load_reference, make_prompts, reference_texts, run_mode

SHARED = Path(__file__).parents[2].parent / "shared" / "models"

TRAINED = ("stories260K", "stories260K-moe8x-noisy", "stories260K-qwen3moe8x-noisy")


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen3-moe", "olmoe", *TRAINED])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param not in TRAINED:
        return make(request.param, tmp_path_factory.mktemp("model"))
    place = Path(os.environ.get("NOBIRU_SHARED_MODELS", SHARED)) / request.param
    if not place.is_dir():
        pytest.skip(f"{request.param} is not at hand")
    return place


@pytest.mark.parametrize("mode", MODES)
def test_greedy_texts_equal_those_of_transformers(folder: Path, mode: str, request: pytest.FixtureRequest) -> None:
    import transformers

    model = load_reference(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    longest = model.config.max_position_embeddings
    num_tokens = 24
    prompts = [tokenizer(text)["input_ids"][: longest - num_tokens] for text in make_prompts(10)]
    reference = reference_texts(model, prompts, num_tokens)
    agreement = run_mode(folder, mode, reference, model)
    assert agreement.ok, agreement
