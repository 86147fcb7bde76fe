"""Vectors of the runner against Sentence Transformers on the same folder, for every small model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from nobiru.config import Quantization
from nobiru.errors import ConfigError
from nobiru.folder.read import read_folder
from nobiru.layers import encoder as encoder_layers
from nobiru.models import fallback
from nobiru.request import SequenceInput, Vectors
from nobiru.runner import runner as runner_module
from nobiru.runner.dtype import DeviceFacts
from nobiru.runner.runner import PoolingRunner
from tests.small_models import NAMES, SENTENCES, make

TEXTS = [*SENTENCES, *(text[:25] for text in SENTENCES), "", "a", " ".join(SENTENCES[:3]), "b", "one two"]
FAST_BFLOAT16 = DeviceFacts(cpu_flags=frozenset({"avx512_bf16"}))
SLOW_BFLOAT16 = DeviceFacts(cpu_flags=frozenset())

torch.set_num_threads(1)


class Case:
    """One small model: its folder, Sentence Transformers' vectors, and the token ids those came from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = SentenceTransformer(str(folder), device="cpu")
        self.reference = self.encode(TEXTS)
        self.sequences = [self.sequence(text) for text in TEXTS]

    def encode(self, texts: list[str], **options: object) -> Vectors:
        return self.model.encode(texts, convert_to_numpy=True, **options)  # type: ignore[no-any-return, call-overload]

    def sequence(self, text: str) -> SequenceInput:
        """The default prompt in front, cut to the limit, as Sentence Transformers does it."""
        prompt = self.model.prompts.get(self.model.default_prompt_name or "", "")
        tokens = self.model.tokenizer(prompt + text, truncation=True, max_length=self.model.max_seq_length)
        skipped = len(self.model.tokenizer(prompt)["input_ids"]) - 1 if prompt else 0
        return SequenceInput(token_ids=np.array(tokens["input_ids"], dtype=np.int32), num_skipped_tokens=skipped)

    def runner(self, dtype: str = "float32", quantization: Quantization | None = None) -> PoolingRunner:
        folder = read_folder(self.folder)
        limit = folder.max_model_len
        return PoolingRunner.load(folder, dtype=dtype, device="cpu", max_model_len=limit, quantization=quantization)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return cache(lambda name: Case(make(name, tmp_path_factory.mktemp("models"))))


def assert_close(found: Vectors, expected: Vectors, *, min_cosine: float, max_difference: float) -> None:
    assert found.shape == expected.shape and found.dtype == np.float32
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    assert ((found * expected).sum(axis=1) / lengths).min() >= min_cosine
    assert np.abs(found - expected).max() <= max_difference * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("name", NAMES)
def test_float32_equals_sentence_transformers(name: str, case: Callable[[str], Case]) -> None:
    found = np.stack(case(name).runner().run(case(name).sequences))
    assert_close(found, case(name).reference, min_cosine=0.99999, max_difference=1e-4)


@pytest.mark.parametrize("name", ["bert-all-modes", "xlm-roberta", "mpnet", "distilbert"])
def test_without_native_kernels(name: str, case: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_layers, "load_encoder_kernels", lambda: None)
    runner = case(name).runner()
    assert runner.describe()["arithmetic"] == "torch"
    assert_close(
        np.stack(runner.run(case(name).sequences)), case(name).reference, min_cosine=0.99999, max_difference=1e-4
    )


@pytest.mark.parametrize("natively", [True, False])
@pytest.mark.parametrize("name", ["bert-all-modes", "xlm-roberta", "mpnet", "distilbert"])
def test_int8_is_close(name: str, natively: bool, case: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    if not natively:  # a processor without instructions for it, or no compiler: the same weights, rounded
        monkeypatch.setattr(encoder_layers, "load_encoder_kernels", lambda: None)
    for dtype in ("float32", "auto"):
        runner = case(name).runner(dtype, quantization="int8")
        found = np.stack(runner.run(case(name).sequences))
        assert_close(found, case(name).reference, min_cosine=0.99, max_difference=0.1)
        assert np.abs(found - case(name).reference).max() > 1e-4  # the weights were rounded


@pytest.mark.parametrize("name", ["modernbert", "deberta-v2"])
def test_int8_of_other_models_is_refused(name: str, case: Callable[[str], Case]) -> None:
    with pytest.raises(ConfigError, match="quantization is 'int8'"):
        case(name).runner(quantization="int8")


@pytest.mark.parametrize("name", NAMES)
def test_alone_equals_batched_equals_shuffled(name: str, case: Callable[[str], Case]) -> None:
    runner, sequences = case(name).runner(), case(name).sequences
    batched = np.stack(runner.run(sequences))
    alone = np.stack([runner.run([sequence])[0] for sequence in sequences])
    order = np.random.default_rng(1).permutation(len(sequences))
    shuffled = np.empty_like(batched)
    shuffled[order] = runner.run([sequences[index] for index in order])
    bound = 1e-5 * max(1.0, np.abs(batched).max())
    assert np.abs(alone - batched).max() <= bound
    assert np.abs(shuffled - batched).max() <= bound


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_weights_are_close(name: str, case: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "gather_facts", lambda: SLOW_BFLOAT16)
    runner = case(name).runner("bfloat16")
    assert (runner.describe()["dtype"], runner.describe()["compute_dtype"]) == ("bfloat16", "float32")
    found = np.stack(runner.run(case(name).sequences))
    assert_close(found, case(name).reference, min_cosine=0.999, max_difference=0.02)
    assert np.abs(found - case(name).reference).max() > 1e-5  # the weights were rounded


@pytest.mark.parametrize("name", ["bert-all-modes", "xlm-roberta", "mpnet", "modernbert", "deberta-v2", "distilbert"])
def test_bfloat16_arithmetic_is_close(name: str, case: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "gather_facts", lambda: FAST_BFLOAT16)
    runner = case(name).runner("auto")
    assert runner.describe()["compute_dtype"] == "bfloat16"
    found = np.stack(runner.run(case(name).sequences))
    assert_close(found, case(name).reference, min_cosine=0.999, max_difference=0.02)


def test_dimensions_and_normalization(case: Callable[[str], Case]) -> None:
    plain, normalized = case("bert-mean"), case("bert-mean-normalize")
    ids = plain.sequences[0].token_ids
    options: list[tuple[int | None, bool | None]] = [
        (dimensions, choice) for dimensions in (None, 1, 7, 64) for choice in (None, True, False)
    ]
    wishes = [SequenceInput(token_ids=ids, dimensions=size, normalize=choice) for size, choice in options]
    for subject in (plain, normalized):
        runner = subject.runner()
        raw = runner.run([SequenceInput(token_ids=ids, normalize=False)])[0]
        for vector, (size, choice) in zip(runner.run(wishes), options, strict=True):
            unit = choice if choice is not None else subject is normalized or size is not None
            expected = raw[:size] / np.linalg.norm(raw[:size]) if unit else raw[:size]
            np.testing.assert_allclose(vector, expected, atol=1e-6)
    wishes = [SequenceInput(token_ids=each.token_ids, dimensions=16) for each in normalized.sequences]
    found = normalized.runner().run(wishes)
    expected = normalized.encode(TEXTS, truncate_dim=16, normalize_embeddings=True)
    assert_close(np.stack(found), expected, min_cosine=0.99999, max_difference=1e-4)


@pytest.mark.parametrize("name", ["roberta", "xlm-roberta", "mpnet", "bert-cls"])
def test_padding_tokens_inside_a_text(name: str, case: Callable[[str], Case]) -> None:
    pad = case(name).model.tokenizer.pad_token
    texts = [f"a {pad} b", f"{pad}{pad} the planet {pad}", "nothing special", f"the end {pad}"]
    found = np.stack(case(name).runner().run([case(name).sequence(text) for text in texts]))
    # One by one: in a batch, Sentence Transformers cannot tell such tokens from its own padding everywhere.
    expected = np.stack([case(name).encode([text])[0] for text in texts])
    assert_close(found, expected, min_cosine=0.99999, max_difference=1e-4)


def test_a_prompt_that_covers_the_whole_text(case: Callable[[str], Case]) -> None:
    subject = case("bert-prompts-all-modes")
    ids = subject.sequences[0].token_ids[:6]
    runner = subject.runner()
    covered, beside = runner.run(
        [
            SequenceInput(token_ids=ids, num_skipped_tokens=6),
            SequenceInput(token_ids=subject.sequences[1].token_ids, num_skipped_tokens=3),
        ]
    )
    size = 64
    features = {"input_ids": torch.tensor(ids[None]).long(), "attention_mask": torch.ones(1, 6, dtype=torch.long)}
    with torch.inference_mode():
        hidden = subject.model[0](features)
        pooled = subject.model[1]({**hidden, "prompt_length": 6})["sentence_embedding"][0].numpy()
    assert np.isneginf(pooled[size : 2 * size]).all()  # "max" of nothing
    np.testing.assert_allclose(covered, pooled, atol=1e-5)
    assert np.isfinite(beside).all()


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("bert-cls", "packed"),
        ("modernbert", "packed"),
        ("nomic-bert", "packed"),
        ("electra", "packed"),
        ("albert", "packed"),
        ("deberta-v2", "padded groups"),
    ],
)
def test_which_way_an_architecture_runs(name: str, way: str, case: Callable[[str], Case]) -> None:
    assert str(case(name).runner().describe()["attention"]).startswith(way)


def test_packing_that_differs_is_not_used(case: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    def leaky(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object, **options: object) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1)

    monkeypatch.setattr(fallback, "packed_attention", leaky)
    runner = case("nomic-bert").runner()
    assert "differs" in str(runner.describe()["attention"])
    found = np.stack(runner.run(case("nomic-bert").sequences))
    assert_close(found, case("nomic-bert").reference, min_cosine=0.99999, max_difference=1e-4)


def test_two_threads_give_what_one_gives(case: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    cuts = []
    plan = runner_module.plan_shares
    monkeypatch.setattr(runner_module, "plan_shares", lambda *args: cuts.append(plan(*args)) or cuts[-1])
    torch.set_num_threads(2)
    try:
        runner = case("bert-all-modes").runner()
        found = np.stack(runner.run(case("bert-all-modes").sequences))
        assert cuts[-1] is not None and len(cuts[-1]) == 2
    finally:
        torch.set_num_threads(1)
    assert_close(found, case("bert-all-modes").reference, min_cosine=0.99999, max_difference=1e-4)


def test_nothing_to_do(case: Callable[[str], Case]) -> None:
    runner = case("bert-cls").runner()
    runner.warm_up()
    assert runner.run([]) == []
