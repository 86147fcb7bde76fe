"""What the sampler keeps of a sequence, what it refuses, log-probabilities, and the counts of tokens."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nobiru.errors import InferenceError, InvalidRequestError
from nobiru.folder.spec import GenerationSpec, ModelFolder
from nobiru.generation import GenerationInput, SampleRequest, SamplingParams
from nobiru.runner.sampler import Sampler
from nobiru.runner.token_counts import TokenCounts

VOCAB_SIZE = 37


def make_sampler(vocab_size: int = VOCAB_SIZE) -> Sampler:
    folder = ModelFolder(
        path=Path("nowhere"),
        transformer_path=Path("nowhere"),
        config={},
        model_type="llama",
        modules=(),
        max_model_len=512,
        hidden_size=8,
        embedding_dim=0,
        vocab_size=vocab_size,
        generation=GenerationSpec(eos_token_ids=(2,)),
    )
    return Sampler(folder, vocab_size=vocab_size, device=torch.device("cpu"))


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def request(
    params: SamplingParams | None = None,
    output: tuple[int, ...] = (),
    prompt: tuple[int, ...] = (1, 2),
    forbidden: tuple[int, ...] = (),
    source: GenerationInput | None = None,
) -> SampleRequest:
    return SampleRequest(
        input=source or GenerationInput(params=params or SamplingParams(temperature=0.0)),
        prompt_token_ids=prompt,
        output_token_ids=output,
        forbidden_token_ids=forbidden,
    )


# ---- state -----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=80)
@given(outputs=st.lists(st.lists(st.integers(0, 5), max_size=8), min_size=1, max_size=8))
def test_state_is_a_function_of_the_output(outputs: list[list[int]]) -> None:
    """Longer, the same, shorter and other outputs, in any order: a used state chooses what a new one does."""
    params = SamplingParams(
        temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.7, presence_penalty=0.3, logprobs=0
    )
    source = GenerationInput(params=params)
    logits = torch.linspace(1.0, 0.9, 6)[None]
    for number, output in enumerate(outputs):
        used = make_sampler(6).sample(logits, [request(output=tuple(output), source=source)])
        assert used == make_sampler(6).sample(logits, [request(params, output=tuple(output))]), f"at output {number}"


def test_penalties_see_tokens_that_were_added() -> None:
    source = GenerationInput(params=SamplingParams(temperature=0.0, frequency_penalty=1.0))
    logits = torch.zeros(1, 4)
    logits[0, 3] = 2.5
    sampler = make_sampler(4)
    output: list[int] = []
    for _ in range(6):
        output.append(sampler.sample(logits, [request(output=tuple(output), source=source)])[0].token_id)
    assert output == [3, 3, 3, 0, 1, 2]


def test_only_the_repetition_penalty_looks_at_the_prompt() -> None:
    logits = torch.tensor([[2.0, 1.5, 1.0]])
    sampler = make_sampler(3)
    for params, expected in (
        (SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0), 0),
        (SamplingParams(temperature=0.0, repetition_penalty=2.0), 1),
    ):
        assert sampler.sample(logits, [request(params, prompt=(0, 0))])[0].token_id == expected


@given(
    prompt=st.lists(st.integers(-3, VOCAB_SIZE + 3), max_size=20),
    output=st.lists(st.lists(st.integers(-3, VOCAB_SIZE + 3), max_size=90), max_size=4),
)
def test_token_counts(prompt: list[int], output: list[list[int]]) -> None:
    counts = TokenCounts(prompt, VOCAB_SIZE)
    for part in output:
        counts.add(part)
    expected = dict.fromkeys(prompt, 0) | Counter(token_id for part in output for token_id in part)
    found = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert found == {token_id: count for token_id, count in expected.items() if 0 <= token_id < VOCAB_SIZE}
    assert counts.ids.size == len(found)


def test_logits_are_left_as_they_are() -> None:
    logits = random_logits(3)
    before = logits.clone()
    everything = SamplingParams(
        seed=1, top_k=5, top_p=0.9, min_p=0.01, logit_bias={3: 5.0}, repetition_penalty=1.5, logprobs=4
    )
    make_sampler().sample(logits, [request(everything, (1, 2)), request(forbidden=(3,)), request()])
    assert torch.equal(logits, before)


def test_no_requests_give_no_tokens() -> None:
    assert make_sampler().sample(torch.zeros(0, VOCAB_SIZE), []) == []


# ---- forbidden tokens, bias ------------------------------------------------------------------------------------------


def test_forbidden_tokens_are_not_chosen_even_with_a_bias() -> None:
    logits = torch.zeros(1, 4)
    logits[0, 2] = 50.0
    params = SamplingParams(temperature=0.0, logit_bias={2: 100.0, 1: 1.0})
    sampler = make_sampler(4)
    assert sampler.sample(logits, [request(params)])[0].token_id == 2
    assert sampler.sample(logits, [request(params, forbidden=(2, 99, -1))])[0].token_id == 1
    drawn = [SamplingParams(seed=seed, temperature=50.0) for seed in range(200)]
    found = sampler.sample(logits.repeat(200, 1), [request(each, forbidden=(2, 0)) for each in drawn])
    assert {token.token_id for token in found} == {1, 3}


@pytest.mark.parametrize("extreme", [1e300, 3.5e38])
def test_an_extreme_bias_overflows_into_no_infinity(extreme: float) -> None:
    logits = random_logits(2)
    params = SamplingParams(seed=1, logit_bias={7: extreme, 3: -extreme}, repetition_penalty=1e-60)
    tokens = make_sampler().sample(logits, [request(params, (7, 3)), request()])
    assert tokens[0].token_id == 7
    assert tokens[1].token_id == int(logits[1].argmax())


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_a_bias_for_no_token_is_refused(token_id: int) -> None:
    sampler, params = make_sampler(), SamplingParams(logit_bias={token_id: 1.0}, seed=1)
    for attempt in (lambda: sampler.check(params), lambda: sampler.sample(random_logits(1), [request(params)])):
        with pytest.raises(InvalidRequestError, match=f"{token_id}.*0 to {VOCAB_SIZE - 1}") as caught:
            attempt()
        assert caught.value.param == "logit_bias"


# ---- what cannot be sampled ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1),
        SamplingParams(seed=1, top_k=3),
        SamplingParams(seed=1, top_p=0.5),
        SamplingParams(seed=1, repetition_penalty=1.1, logprobs=2),
        SamplingParams(temperature=0.0, presence_penalty=1.1),
        SamplingParams(temperature=0.0, logit_bias={1: 1.0}),
    ],
)
@pytest.mark.parametrize("values", [{4: math.nan}, {4: math.inf}, dict.fromkeys(range(VOCAB_SIZE), -math.inf)])
@pytest.mark.parametrize("company", [0, 2])
def test_logits_that_are_not_finite_are_an_error(
    params: SamplingParams, values: dict[int, float], company: int
) -> None:
    logits = random_logits(1 + company)
    logits[0, list(values)] = torch.tensor(list(values.values()))
    requests = [request(params, (4, 1)), *[request(SamplingParams(seed=2))] * company]
    with pytest.raises(InferenceError, match=f"not finite for 1 of {1 + company}"):
        make_sampler().sample(logits, requests)


def test_nothing_left_to_choose_is_an_error() -> None:
    with pytest.raises(InferenceError, match="no token is left"):
        make_sampler().sample(random_logits(1), [request(forbidden=tuple(range(VOCAB_SIZE)))])


def test_some_logits_may_be_minus_infinity() -> None:
    logits = torch.full((4, VOCAB_SIZE), -math.inf)
    logits[:, 5] = 1.0
    params: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_p": 0.5}, {"repetition_penalty": 1e-60, "min_p": 1.0}]
    tokens = make_sampler().sample(logits, [request(SamplingParams(seed=1, **each), (4, 5)) for each in params])
    assert [token.token_id for token in tokens] == [5] * 4


# ---- log-probabilities -----------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_logits_as_they_were() -> None:
    logits = random_logits(5)
    expected = logits.double().log_softmax(1)
    changed = {"temperature": 0.3, "top_k": 2, "repetition_penalty": 1.9, "logit_bias": {9: 3.0}, "seed": 4}
    counts = [0, 3, None, 20, 1]
    requests = [request(SamplingParams(logprobs=count, **changed), (1, 9), forbidden=(3,)) for count in counts]
    tokens = make_sampler().sample(logits, requests)
    without = [request(SamplingParams(**changed), (1, 9), forbidden=(3,)) for _ in counts]
    assert [token.token_id for token in tokens] == [t.token_id for t in make_sampler().sample(logits, without)]
    for row, (token, count) in enumerate(zip(tokens, counts, strict=True)):
        if count is None:
            assert token.logprob is None and token.top is None
            continue
        assert token.logprob == pytest.approx(float(expected[row, token.token_id]), abs=1e-6)
        assert token.top is not None
        best = expected[row].sort(descending=True)
        assert [token_id for token_id, _ in token.top] == best.indices[:count].tolist()
        np.testing.assert_allclose([logprob for _, logprob in token.top], best.values[:count].numpy(), atol=1e-6)


def test_more_logprobs_than_tokens() -> None:
    token = make_sampler(3).sample(torch.tensor([[0.0, 1.0, 1.0]]), [request(SamplingParams(seed=0, logprobs=20))])[0]
    assert token.top is not None
    assert [token_id for token_id, _ in token.top] == [1, 2, 0]
    assert sum(math.exp(logprob) for _, logprob in token.top) == pytest.approx(1.0, abs=1e-6)


def test_logprobs_do_not_depend_on_the_batch() -> None:
    logits = random_logits(9)
    params = SamplingParams(seed=0, logprobs=5)
    together = make_sampler().sample(logits, [request(params)] * 9)
    assert together == [make_sampler().sample(row[None], [request(params)])[0] for row in logits]
