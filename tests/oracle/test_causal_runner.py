"""A step of a causal model: the caller's order, shares, repetition, and what is refused.

Logits and states of the models themselves are compared elsewhere; here a batch is compared with one sequence at a time,
and vectors with Sentence Transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from nobiru.errors import InvalidRequestError
from nobiru.folder.read import read_folder
from nobiru.generation import CausalInput, GenerationInput, SampledToken, SampleRequest, SamplingParams
from nobiru.request import SequenceInput
from nobiru.runner.causal import CausalRunner
from tests.small_models import SENTENCES, make

BLOCK_SIZE, NUM_BLOCKS = 4, 1200
GREEDY = SampleRequest(
    input=GenerationInput(params=SamplingParams(temperature=0.0, logprobs=1)), prompt_token_ids=[], output_token_ids=[]
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen3-embedding", tmp_path_factory.mktemp("models"))


def load(path: Path, *, threads: int = 1) -> CausalRunner:
    folder = read_folder(path)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        runner = CausalRunner.load(folder, dtype="float32", device="cpu", max_model_len=folder.max_model_len)
    finally:
        torch.set_num_threads(before)
    runner.allocate_cache(NUM_BLOCKS, BLOCK_SIZE)
    return runner


def texts(lengths: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(4, 90, length).astype(np.int32) for length in lengths]


def blocks_for(lengths: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    """Blocks for texts of these lengths, scattered over the cache."""
    ids = np.random.default_rng(seed).permutation(NUM_BLOCKS).astype(np.int32)
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    return np.split(ids, np.cumsum(counts))[: len(counts)]


def part(text: np.ndarray, blocks: np.ndarray, start: int, stop: int, **wish: Any) -> CausalInput:
    return CausalInput(seq_id=0, token_ids=text[start:stop], start=start, block_ids=blocks, **wish)


def close(found: Sequence[object], expected: Sequence[object]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, SampledToken) and isinstance(other, SampledToken)
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_mixed_step_equals_one_sequence_at_a_time(llama: Path, threads: int) -> None:
    lengths = [30, 1, 17, 50, 9, 9, 44, 2, 60, 33]
    starts = [29, 0, 16, 0, 0, 0, 30, 1, 40, 32]  # decoding, whole prompts, and the ends of prompts
    some, blocks = texts(lengths), blocks_for(lengths)
    alone = load(llama)
    expected = [
        alone.run([part(text, own, 0, text.size, sample=GREEDY)])[0] for text, own in zip(some, blocks, strict=True)
    ]
    runner = load(llama, threads=threads)
    for text, own, start in zip(some, blocks, starts, strict=True):
        if start:
            assert runner.run([part(text, own, 0, start)]) == [None]
    step = [
        part(text, own, start, text.size, sample=GREEDY) for text, own, start in zip(some, blocks, starts, strict=True)
    ]
    first = runner.run(step)
    close(first, expected)
    close(runner.run(step), first)  # again, as after a step that failed
    close(runner.run(step[:4]) + runner.run(step[4:]), first)


def test_only_those_that_ask_get_something(llama: Path) -> None:
    lengths = [20, 12, 7, 30, 6]
    some, blocks = texts(lengths), blocks_for(lengths)
    runner = load(llama)
    wishes: list[dict[str, Any]] = [{}, {"sample": GREEDY}, {}, {"sample": GREEDY}, {}]
    step = [part(text, own, 0, text.size, **wish) for text, own, wish in zip(some, blocks, wishes, strict=True)]
    rows: list[int] = []
    logits = runner._model.logits
    runner._model.logits = lambda hidden_BC, _: rows.append(len(hidden_BC)) or logits(hidden_BC)  # type: ignore[method-assign,func-returns-value]
    results = runner.run(step)
    assert [result is not None for result in results] == [False, True, False, True, False]
    assert rows == [2]
    assert runner.run([]) == []


def test_decoding_in_shares_equals_one_thread(llama: Path) -> None:
    lengths = [3 + number % 40 for number in range(40)]
    some, blocks = texts(lengths), blocks_for(lengths)
    results = []
    for threads in (1, 2):
        runner = load(llama, threads=threads)
        runner.run([part(text, own, 0, text.size - 1) for text, own in zip(some, blocks, strict=True)])
        results.append(
            runner.run(
                [
                    part(text, own, text.size - 1, text.size, sample=GREEDY)
                    for text, own in zip(some, blocks, strict=True)
                ]
            )
        )
    close(results[1], results[0])


@pytest.mark.parametrize("threads", [1, 2])
def test_vectors_equal_sentence_transformers(embedder: Path, threads: int) -> None:
    reference = SentenceTransformer(str(embedder), device="cpu")
    runner = load(embedder, threads=threads)
    sentences = list(SENTENCES) * 3
    ids = [np.array(reference.tokenizer(text)["input_ids"], dtype=np.int32)[:120] for text in sentences]
    wishes = [{}, {"dimensions": 8}, {"normalize": False}, {"dimensions": 4, "normalize": False}]
    chosen = [wishes[number % 4] for number in range(len(ids))]
    blocks = blocks_for([each.size for each in ids])
    inputs = [
        part(text, own, 0, text.size, pooling=SequenceInput(token_ids=text, **wish))  # type: ignore[arg-type]
        for text, own, wish in zip(ids, blocks, chosen, strict=True)
    ]
    found = runner.run(inputs)
    transformer, pooling = reference[0], reference[1]
    for number, (vector, wish) in enumerate(zip(found, chosen, strict=True)):
        features = reference.tokenizer(sentences[number], return_tensors="pt", truncation=True, max_length=120)
        with torch.inference_mode():
            pooled: Tensor = pooling(transformer(dict(features)))["sentence_embedding"][0]
        expected = pooled[: wish.get("dimensions")]
        if wish.get("normalize", True):
            expected = torch.nn.functional.normalize(expected, dim=0)
        assert isinstance(vector, np.ndarray) and vector.dtype == np.float32
        np.testing.assert_allclose(vector, expected.numpy(), atol=2e-5)


def test_a_prompt_that_covers_the_text_leaves_nothing(embedder: Path) -> None:
    runner = load(embedder)
    (text,), (blocks,) = texts([6]), blocks_for([6])
    wish = SequenceInput(token_ids=text, normalize=False, num_skipped_tokens=6)
    (vector,) = runner.run([part(text, blocks, 0, 6, pooling=wish)])
    assert isinstance(vector, np.ndarray) and vector.any()  # this model's pooling includes prompts
    object.__setattr__(runner._folder.pooling, "include_prompt", False)
    (vector,) = runner.run([part(text, blocks, 0, 6, pooling=wish)])
    assert isinstance(vector, np.ndarray) and not vector.any()


@pytest.mark.parametrize(
    ("text", "start", "said"),
    [
        (np.array([], dtype=np.int32), 0, "no tokens"),
        (np.array([5, -1], dtype=np.int32), 0, "token id -1"),
        (np.array([5, 10**6], dtype=np.int32), 0, "token id 1000000"),
        (np.array([5], dtype=np.int32), 10**5, "100001 tokens"),
    ],
)
def test_what_is_refused(llama: Path, text: np.ndarray, start: int, said: str) -> None:
    runner = load(llama)
    good = part(np.array([5], dtype=np.int32), np.array([0]), 0, 1, sample=GREEDY)
    bad = CausalInput(seq_id=1, token_ids=text, start=start, block_ids=np.arange(10**5 // BLOCK_SIZE + 1))
    with pytest.raises(InvalidRequestError, match=said):
        runner.run([good, bad])
    assert isinstance(runner.run([good])[0], SampledToken)


def test_blocks_that_do_not_exist_are_a_bug(llama: Path) -> None:
    runner = load(llama)
    with pytest.raises(AssertionError, match="blocks exist"):
        runner.run([part(np.array([5], dtype=np.int32), np.array([NUM_BLOCKS]), 0, 1)])


def test_warm_up_fits_into_any_cache(llama: Path) -> None:
    runner = load(llama)
    for num_blocks in (1, 2, 50):
        runner.allocate_cache(num_blocks, BLOCK_SIZE)
        runner.warm_up()
    facts = runner.describe()
    assert facts["architecture"] == "llama" and facts["device"] == "cpu" and str(facts["attention"]).startswith("paged")
