"""On a CUDA device: the sampler chooses what it chooses on the CPU, token for token.

Needs torch and numpy only.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nobiru.errors import InferenceError
from nobiru.folder.spec import GenerationSpec, ModelFolder
from nobiru.generation import GenerationInput, SampledToken, SampleRequest, SamplingParams
from nobiru.runner.sampler import Sampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
VOCAB_SIZE = 50_021  # rows that do not begin at multiples of 16 bytes
OPTIONS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2),
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.7, min_p=0.01),
    SamplingParams(seed=3, top_k=1),
    SamplingParams(seed=4, top_k=50, top_p=0.9),
    SamplingParams(seed=5, top_k=5000, top_p=0.9),
    SamplingParams(seed=6, top_p=0.5),
    SamplingParams(seed=7, temperature=20.0, top_p=0.95),
    SamplingParams(seed=8, logit_bias={7: 30.0}, temperature=2.0, logprobs=5),
]


def sample(device: str, logits_BV: torch.Tensor, all_params: list[SamplingParams]) -> list[SampledToken]:
    folder = ModelFolder(
        path=Path("nowhere"),
        transformer_path=Path("nowhere"),
        config={},
        model_type="llama",
        modules=(),
        max_model_len=512,
        hidden_size=8,
        embedding_dim=0,
        vocab_size=VOCAB_SIZE,
        generation=GenerationSpec(eos_token_ids=(2,)),
    )
    requests = [
        SampleRequest(
            input=GenerationInput(params=params, child=row),
            prompt_token_ids=[1, 2, 3],
            output_token_ids=[3, 4, 4],
            forbidden_token_ids=[9, 10] if row % 2 else [],
        )
        for row, params in enumerate(all_params)
    ]
    sampler = Sampler(folder, vocab_size=VOCAB_SIZE, device=torch.device(device))
    return sampler.sample(logits_BV.to(device), requests)


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("copies", [1, 7])
def test_tokens_are_those_of_the_cpu(has_ties: bool, copies: int) -> None:
    all_params = OPTIONS * copies
    logits_BV = torch.randn(len(all_params), VOCAB_SIZE, generator=torch.Generator().manual_seed(copies)) * 2
    if has_ties:
        logits_BV = logits_BV.bfloat16().float()
    expected, found = (sample(device, logits_BV, all_params) for device in ("cpu", "cuda"))
    assert [token.token_id for token in found] == [token.token_id for token in expected]
    for token, other in zip(found, expected, strict=True):
        assert token.logprob == (None if other.logprob is None else pytest.approx(other.logprob, abs=1e-6))
        assert [each for each, _ in token.top or ()] == [each for each, _ in other.top or ()]


@pytest.mark.parametrize("params", OPTIONS)
def test_logits_that_are_not_finite_are_an_error(params: SamplingParams) -> None:
    logits_BV = torch.zeros(3, VOCAB_SIZE)
    logits_BV[1, 4000] = torch.nan
    with pytest.raises(InferenceError, match="not finite for 1 of 3"):
        sample("cuda", logits_BV, [params] * 3)
    assert len(sample("cuda", torch.zeros(3, VOCAB_SIZE), [params] * 3)) == 3
