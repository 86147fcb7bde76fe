"""The sampler against a plain one, row by row in float64, and both against the processors of transformers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nobiru.folder.spec import GenerationSpec, ModelFolder
from nobiru.generation import GenerationInput, SampleRequest, SamplingParams
from nobiru.runner.draw import DrawOptions, best_tokens, draw
from nobiru.runner.sampler import Sampler
from nobiru.runner.uniform import uniform

VOCAB_SIZE = 61
CPU = torch.device("cpu")
NUMBERS = [0.156742553465558, 0.7515824167881524, 0.82375069931908]


@dataclass(frozen=True)
class Case:
    """One row: its logits and what it asks for."""

    logits: list[float]
    params: SamplingParams
    prompt: list[int]
    output: list[int]
    forbidden: list[int]
    child: int = 0

    def request(self) -> SampleRequest:
        return SampleRequest(
            input=GenerationInput(params=self.params, child=self.child),
            prompt_token_ids=self.prompt,
            output_token_ids=self.output,
            forbidden_token_ids=self.forbidden,
        )


def plain_scores(case: Case) -> list[float]:
    """The logits after forbidden tokens, bias and penalties."""
    params, counts = case.params, Counter(case.output)
    scores = list(case.logits)
    for token_id in case.forbidden:
        scores[token_id] = -math.inf
    for token_id, bias in params.logit_bias.items():
        scores[token_id] += bias
    for token_id in {*case.prompt, *case.output}:
        score = scores[token_id]
        scores[token_id] = score / params.repetition_penalty if score > 0 else score * params.repetition_penalty
    for token_id, count in counts.items():
        scores[token_id] -= params.frequency_penalty * count + params.presence_penalty
    return scores


def plain_distribution(scores: Sequence[float], params: SamplingParams) -> tuple[list[float], float]:
    """The probability of each token, and how near the nearest decision of min-p or top-p was."""
    best = max(scores)
    ratios = [math.exp((score - best) / params.temperature) for score in scores]
    order = sorted(range(len(scores)), key=lambda token_id: (-scores[token_id], token_id))
    kept = [token_id for token_id in order if ratios[token_id] >= params.min_p]
    margin = min([abs(ratio - params.min_p) for ratio in ratios if ratio > 0]) if params.min_p else 1.0
    if params.top_k > 0:
        kept = kept[: params.top_k]
    total, before, nucleus = math.fsum(ratios[token_id] for token_id in kept), 0.0, []
    for token_id in kept:
        if params.top_p < 1:
            margin = min(margin, abs(before / total - params.top_p))
        if params.top_p == 1 or before < params.top_p * total:
            nucleus.append(token_id)
        before += ratios[token_id]
    total = math.fsum(ratios[token_id] for token_id in nucleus)
    return [ratios[token_id] / total if token_id in nucleus else 0.0 for token_id in range(len(scores))], margin


def plain_draw(probabilities: Sequence[float], place: float) -> tuple[int, float]:
    """The token at `place` in the order of ids, and how near the next border between two tokens is."""
    borders = np.cumsum(np.array(probabilities, dtype=np.longdouble))
    token_id = int(np.searchsorted(borders, place, side="right"))
    return token_id, float(np.abs(borders[:-1] - place).min())


def folder(path: Path = Path("nowhere"), eos_token_ids: tuple[int, ...] = (2,), vocab_size: int = 61) -> ModelFolder:
    return ModelFolder(
        path=path,
        transformer_path=path,
        config={},
        model_type="llama",
        modules=(),
        max_model_len=512,
        hidden_size=8,
        embedding_dim=0,
        vocab_size=vocab_size,
        task="generate",
        is_causal=True,
        generation=GenerationSpec(eos_token_ids=eos_token_ids),
    )


def sampler(vocab_size: int = VOCAB_SIZE) -> Sampler:
    return Sampler(folder(vocab_size=vocab_size), vocab_size=vocab_size, device=CPU)


def sample(cases: Sequence[Case]) -> list[int]:
    logits = torch.tensor([case.logits for case in cases], dtype=torch.float32)
    return [token.token_id for token in sampler().sample(logits, [case.request() for case in cases])]


TOKEN_IDS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=12)


@st.composite
def params_of(draw_from: st.DrawFn) -> SamplingParams:
    def sometimes(values: st.SearchStrategy[Any], otherwise: Any) -> Any:
        return draw_from(values if draw_from(st.booleans()) else st.just(otherwise))

    return SamplingParams(
        temperature=sometimes(st.floats(0.05, 5.0), 1.0),
        top_k=sometimes(st.integers(-1, VOCAB_SIZE + 3), 0),
        top_p=sometimes(st.floats(0.01, 1.0), 1.0),
        min_p=sometimes(st.floats(0.0, 1.0), 0.0),
        repetition_penalty=sometimes(st.floats(0.5, 2.0), 1.0),
        presence_penalty=sometimes(st.floats(-2.0, 2.0), 0.0),
        frequency_penalty=sometimes(st.floats(-2.0, 2.0), 0.0),
        logit_bias=sometimes(st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-100, 100), max_size=5), {}),
        seed=draw_from(st.integers(-(2**63), 2**63 - 1)),
    )


@st.composite
def cases(draw_from: st.DrawFn) -> Case:
    random = np.random.default_rng(draw_from(st.integers(0, 2**32)))
    scale = draw_from(st.sampled_from([0.3, 2.0, 10.0]))
    logits = (random.standard_normal(VOCAB_SIZE) * scale).astype(np.float32)
    if draw_from(st.booleans()):  # with ties
        logits = logits.round(0)
    return Case(
        logits=logits.tolist(),
        params=draw_from(params_of()),
        prompt=draw_from(TOKEN_IDS),
        output=draw_from(TOKEN_IDS),
        forbidden=draw_from(TOKEN_IDS),
        child=draw_from(st.integers(0, 3)),
    )


@settings(deadline=None, max_examples=150)
@given(batch=st.lists(cases(), min_size=1, max_size=5))
def test_tokens_are_those_of_the_plain_sampler(batch: list[Case]) -> None:
    for case, found in zip(batch, sample(batch), strict=True):
        assert case.params.seed is not None
        scores = np.array(plain_scores(case), dtype=np.float32).tolist()
        probabilities, margin = plain_distribution(scores, case.params)
        expected, distance = plain_draw(probabilities, uniform(case.params.seed, case.child, len(case.output)))
        # Penalties are computed in float32, so borders and decisions may be that far from the plain ones.
        if margin > 1e-4 and distance > 1e-4:
            assert found == expected
        if margin > 1e-4:
            assert probabilities[found] > 0


@settings(deadline=None, max_examples=100)
@given(batch=st.lists(cases(), min_size=1, max_size=4), num_best=st.sampled_from([4, 16, 1024]))
def test_draws_at_any_place_are_exact(batch: list[Case], num_best: int) -> None:
    """Without penalties everything is computed in float64 and integers, so hardly any distance is too small."""
    places = np.linspace(0.0, 1.0, 23, endpoint=False)
    scores = torch.tensor([case.logits for case in batch], dtype=torch.float32).repeat_interleave(23, 0)
    each = [case.params for case in batch for _ in places]
    options = DrawOptions(
        temperature=np.array([params.temperature for params in each]),
        min_p=np.array([params.min_p for params in each]),
        top_k=np.array([min(params.top_k, VOCAB_SIZE) if params.top_k > 0 else VOCAB_SIZE for params in each]),
        top_p=np.array([params.top_p for params in each]),
        uniform=np.tile(places, len(batch)),
    )
    found = draw(scores, options, num_best=num_best).tolist()
    for number, case in enumerate(batch):
        probabilities, margin = plain_distribution(case.logits, case.params)
        for place, token_id in zip(places, found[number * 23 : (number + 1) * 23], strict=True):
            expected, distance = plain_draw(probabilities, float(place))
            if margin > 1e-11 and distance > 1e-11:
                assert token_id == expected


@settings(deadline=None, max_examples=60)
@given(case=cases())
def test_greedy_takes_the_best_and_the_lowest_id(case: Case) -> None:
    greedy = replace(case, params=SamplingParams(temperature=0.0, logit_bias=case.params.logit_bias))
    scores = np.array(plain_scores(greedy), dtype=np.float32)
    assert sample([greedy]) == [int(scores.argmax())]
    one = replace(case, params=SamplingParams(top_k=1, logit_bias=case.params.logit_bias, seed=1))
    assert sample([one]) == sample([greedy])


@settings(deadline=None, max_examples=60)
@given(case=cases())
def test_a_row_is_the_same_in_every_batch(case: Case) -> None:
    others = [
        Case([0.1 * (7 * n % 61) for n in range(VOCAB_SIZE)], SamplingParams(seed=3), [1], [2, 3], []),
        Case([0.3 * (11 * n % 61) for n in range(VOCAB_SIZE)], SamplingParams(top_p=0.5, seed=3), [1], [2, 3], []),
        Case([0.2 * (13 * n % 61) for n in range(VOCAB_SIZE)], SamplingParams(temperature=0.0), [], [], [0]),
        Case([0.5 * (17 * n % 61) for n in range(VOCAB_SIZE)], SamplingParams(top_k=50, seed=1), [], [], []),
    ]
    alone = sample([case])[0]
    assert sample([*others, case])[-1] == alone
    assert sample([case, *others, *others])[0] == alone


# ---- the plain sampler against transformers --------------------------------------------------------------------------


@settings(deadline=None, max_examples=80)
@given(case=cases())
def test_the_plain_sampler_is_that_of_transformers(case: Case) -> None:
    params = case.params
    case = replace(
        case,
        logits=[logit + 1e-3 * n for n, logit in enumerate(case.logits)],  # transformers treats ties otherwise
        forbidden=[],
        params=SamplingParams(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
        ),
    )
    scores = torch.tensor([case.logits], dtype=torch.float64)
    if case.prompt or case.output:
        ids = torch.tensor([[*case.prompt, *case.output]])
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    torch.testing.assert_close(scores[0], torch.tensor(plain_scores(case), dtype=torch.float64))
    scores = TemperatureLogitsWarper(params.temperature)(None, scores)  # type: ignore[arg-type]
    scores = MinPLogitsWarper(params.min_p)(None, scores)  # type: ignore[arg-type]
    if params.top_k > 0:
        scores = TopKLogitsWarper(params.top_k)(None, scores)  # type: ignore[arg-type]
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)  # type: ignore[arg-type]
    probabilities, margin = plain_distribution(plain_scores(case), case.params)
    if margin > 1e-9:
        np.testing.assert_allclose(scores.softmax(1)[0].numpy(), probabilities, atol=1e-9)


# ---- statistics ------------------------------------------------------------------------------------------------------


def chi_square(found: Counter[int], probabilities: Sequence[float], num_draws: int) -> float:
    """By how many standard deviations the statistic exceeds its mean; tokens of little probability are one class."""
    assert all(probabilities[token_id] > 0 for token_id in found)
    common = [token_id for token_id, p in enumerate(probabilities) if p * num_draws >= 10]
    expected = [probabilities[token_id] * num_draws for token_id in common]
    counts = [found[token_id] for token_id in common]
    if (rest := num_draws - sum(expected)) > 1:
        expected.append(rest)
        counts.append(num_draws - sum(counts))
    statistic = sum((count - mean) ** 2 / mean for count, mean in zip(counts, expected, strict=True))
    freedom = len(counts) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=5),
        SamplingParams(seed=6, temperature=0.7, top_p=0.9),
        SamplingParams(seed=7, temperature=1.5, top_k=20, min_p=0.02),
        SamplingParams(seed=8, presence_penalty=1.0, repetition_penalty=1.3),
    ],
)
@pytest.mark.parametrize("over", ["index", "child", "seed"])
def test_draws_follow_the_distribution(params: SamplingParams, over: str) -> None:
    """Over output indices, over children, and over seeds, each alone."""
    num_draws = 2000
    logits = np.random.default_rng(11).standard_normal(VOCAB_SIZE).astype(np.float32).tolist()
    start = Case(logits, params, [1, 2], [3, 5], [])
    if over == "index":  # the same tokens again and again, so that penalties stay the same
        batch = [replace(start, output=([3, 5] * number)[: number + 2]) for number in range(num_draws)]
    elif over == "child":
        batch = [replace(start, child=number) for number in range(num_draws)]
    else:
        seeds = range(-1000, num_draws - 1000)
        batch = [replace(start, params=msgspec.structs.replace(params, seed=seed)) for seed in seeds]
    probabilities, _ = plain_distribution(np.array(plain_scores(start), np.float32).tolist(), params)
    assert chi_square(Counter(sample(batch)), probabilities, num_draws) < 4


@pytest.mark.parametrize("step", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, -1, 0)])
def test_neighbouring_numbers_are_independent(step: tuple[int, int, int]) -> None:
    """Of seeds, children and indices next to each other: pairs of numbers fill the square evenly."""
    num_pairs, num_cells = 6400, 8
    found: Counter[int] = Counter()
    for number in range(num_pairs):
        place = (number * 3, number % 7 + 1, number % 50)
        pair = [uniform(*place), uniform(*(a + b for a, b in zip(place, step, strict=True)))]
        assert all(0 <= each < 1 for each in pair)
        found[int(pair[0] * num_cells) * num_cells + int(pair[1] * num_cells)] += 1
    assert chi_square(found, [num_cells**-2] * num_cells**2, num_pairs) < 4


def test_numbers_do_not_change_between_versions() -> None:
    assert [uniform(0, 0, 0), uniform(-1, 3, 1000), uniform(2**63 - 1, 127, 0)] == NUMBERS


# ---- values at the edges ---------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(
        st.sampled_from([-math.inf, -3.4e38, -1.5, -1.0, -1e-40, -0.0, 0.0, 1e-40, 1.0, 1.5, 3.4e38])
        | st.floats(width=32, allow_nan=False),
        min_size=1,
        max_size=40,
    ),
    data=st.data(),
)
def test_best_tokens_are_in_order(values: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(values)))
    expected = sorted(range(len(values)), key=lambda token_id: (-values[token_id], token_id))[:count]
    assert best_tokens(torch.tensor([values], dtype=torch.float32), count)[0].tolist() == expected


def test_all_weights_fit_for_a_large_vocabulary() -> None:
    """Equal scores have the largest sum of weights there is."""
    vocab_size = 2**18
    options = DrawOptions(
        temperature=np.array([1.0, 1e-300, 1.0]),
        min_p=np.array([0.0, 0.0, 1.0]),
        top_k=np.array([vocab_size] * 3),
        top_p=np.array([1.0, 0.5, 1.0]),
        uniform=np.array([0.75, 0.5, 1 - 2**-53]),
    )
    found = draw(torch.zeros(3, vocab_size), options)
    assert found.tolist() == [vocab_size * 3 // 4, vocab_size // 4, vocab_size - 1]
