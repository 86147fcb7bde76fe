"""Decoders over the KV cache against `transformers` on the same folder: whole prompts, chunks, and token by token."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from sentence_transformers import SentenceTransformer
from torch import Tensor

from nobiru.folder.read import read_folder
from nobiru.folder.spec import ModelFolder
from nobiru.models.causal_fallback import CausalFallback
from nobiru.models.decoder import Decoder
from nobiru.models.registry import NATIVE_CAUSAL, NATIVE_MOE, CausalModel, load_causal
from nobiru.models.weights import FLOAT32, Precision
from nobiru.ops.paged_layout import LayerCache, PagedLayout
from nobiru.ops.scratch import Scratch
from tests.real_models import stories260k
from tests.small_models import CAUSAL_EMBEDDERS, LANGUAGE_MODELS, SENTENCES, make

CPU = torch.device("cpu")
BLOCK_SIZE = 8
# Beyond windows (20 and 24), the original length of scaled positions (64), and several blocks.
LENGTHS = (1, 130, 9, 23, 64, 41)
NAMES = [*LANGUAGE_MODELS, *CAUSAL_EMBEDDERS]

torch.set_num_threads(1)


class Case:
    """One small model: its folder, random texts, and the results of `transformers` for each of them alone."""

    def __init__(self, path: Path) -> None:
        self.folder = read_folder(path)
        generator = np.random.default_rng(0)
        lengths = [min(length, self.folder.max_model_len) for length in LENGTHS]
        self.texts = [torch.from_numpy(generator.integers(0, self.folder.vocab_size, length)) for length in lengths]
        generates = self.folder.task == "generate"
        auto: Any = transformers.AutoModelForCausalLM if generates else transformers.AutoModel
        model = auto.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
        with torch.inference_mode():
            outputs = [model(ids_L[None]) for ids_L in self.texts]
        self.expected = [(out.logits if generates else out.last_hidden_state)[0] for out in outputs]

    def load(self, precision: Precision = FLOAT32) -> CausalModel:
        return load_causal(self.folder, precision, CPU)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return cache(lambda name: Case(make(name, tmp_path_factory.mktemp("models"))))


class Steps:
    """Runs a decoder over a cache whose blocks lie in random order, and gathers the results of each text."""

    def __init__(self, model: CausalModel, folder: ModelFolder, texts: Sequence[Tensor]) -> None:
        self.model = model
        self.generates = folder.task == "generate"
        self.texts = texts
        counts = [-(-len(ids_L) // BLOCK_SIZE) for ids_L in texts]
        free = iter(np.random.default_rng(1).permutation(sum(counts)).tolist())
        self.tables = [[next(free) for _ in range(count)] for count in counts]
        shape = sum(counts), BLOCK_SIZE, model.num_kv_heads, model.head_size
        # What nobody wrote must not matter.
        empty = torch.full(shape, float("nan"), dtype=model.dtype)
        self.cache = [LayerCache(keys_NSKD=empty.clone(), values_NSKD=empty.clone()) for _ in range(model.num_layers)]
        self.starts = [0] * len(texts)
        self.results: list[list[Tensor]] = [[] for _ in texts]
        self.scratch = Scratch()

    def step(self, counts: dict[int, int]) -> None:
        """Run `counts[i]` tokens of text i, or what is left of it."""
        ends = {index: min(self.starts[index] + count, len(self.texts[index])) for index, count in counts.items()}
        parts = {index: self.texts[index][self.starts[index] : end] for index, end in ends.items()}
        layout = PagedLayout(
            np.array([self.starts[index] for index in parts]),
            np.array([len(part) for part in parts.values()]),
            [self.tables[index] for index in parts],
            block_size=BLOCK_SIZE,
        )
        with torch.inference_mode():
            rows = self.model.forward(torch.cat(list(parts.values())), layout, self.cache, self.scratch)
            if self.generates:
                rows = self.model.logits(rows)
                assert rows.dtype == torch.float32
        for (index, part), found in zip(parts.items(), rows.split([len(part) for part in parts.values()]), strict=True):
            self.results[index].append(found)
            self.starts[index] += len(part)

    def run(self, first: int, later: int) -> list[Tensor]:
        """All texts together: `first` tokens of each in its first step, `later` in each one behind that."""
        while unfinished := [index for index, ids_L in enumerate(self.texts) if self.starts[index] < len(ids_L)]:
            self.step({index: later if self.starts[index] else first for index in unfinished})
        return [torch.cat(parts) for parts in self.results]


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 1e-4) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert float((ours - theirs).abs().max()) <= tolerance * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("name", NAMES)
def test_prompts_chunks_and_single_tokens(case: Callable[[str], Case], name: str) -> None:
    one = case(name)
    model = one.load()
    assert isinstance(model, Decoder if one.folder.model_type in {*NATIVE_CAUSAL, *NATIVE_MOE} else CausalFallback)
    assert (model.num_layers, model.vocab_size, model.dtype) == (3, one.folder.vocab_size, torch.float32)
    for first, later in ((1000, 1), (13, 13), (6, 1)):
        assert_close(Steps(model, one.folder, one.texts).run(first, later), one.expected)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "qwen3-moe", "olmoe", "deepseek-v3"])
def test_texts_at_different_places_of_their_lives(case: Callable[[str], Case], name: str) -> None:
    """One step has a new prompt, a chunk in the middle and single tokens."""
    one = case(name)
    steps = Steps(one.load(), one.folder, one.texts)
    steps.step({1: 37, 3: 22, 4: 50})
    steps.step({3: 1, 0: 1, 1: 60, 4: 1, 2: 9})
    steps.step({4: 100, 1: 1})
    steps.step({5: 41, 1: 100})
    assert_close([torch.cat(parts) for parts in steps.results], one.expected)


@pytest.mark.parametrize(
    "name", ["llama", "llama-biases", "qwen2", "qwen3", "mistral", "gemma", "mixtral", "qwen2-moe", "olmoe"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close(case: Callable[[str], Case], name: str, dtype: torch.dtype) -> None:
    one = case(name)
    model = one.load(Precision(weights=dtype, compute=dtype))
    assert model.dtype == dtype
    found, expected = (
        torch.cat(list(parts)) for parts in (Steps(model, one.folder, one.texts).run(40, 7), one.expected)
    )
    assert float((found - expected).abs().mean() / expected.abs().mean()) <= 0.1


@pytest.mark.parametrize("name", ["llama", "qwen3", "llama-biases", "qwen3-moe", "deepseek-v3"])
def test_rounded_weights_in_exact_arithmetic(case: Callable[[str], Case], name: str) -> None:
    """bfloat16 without instructions for it: `transformers` with weights rounded to it, in float32."""
    one = case(name)
    rounded = transformers.AutoModelForCausalLM.from_pretrained(one.folder.path, dtype=torch.bfloat16).float().eval()
    with torch.inference_mode():
        expected = [rounded(ids_L[None]).logits[0] for ids_L in one.texts]
    model = one.load(Precision(weights=torch.bfloat16, compute=torch.float32))
    assert_close(Steps(model, one.folder, one.texts).run(1000, 1), expected)


def test_a_window_is_looked_at_where_a_text_outgrows_it(case: Callable[[str], Case]) -> None:
    """With a limit of tokens inside the window, the model is the one without a window."""
    one = case("mistral")
    short = read_folder(one.folder.path, max_model_len=20)
    model = load_causal(short, FLOAT32, CPU)
    texts = [ids_L[:20] for ids_L in one.texts]
    assert_close(Steps(model, short, texts).run(11, 1), [logits[:20] for logits in one.expected])


def test_the_story_that_the_trained_model_tells() -> None:
    path = stories260k()
    expected = json.loads((path.parent / "expected.json").read_text())
    for name in ("stories260K", "stories260K-moe8x-noisy", "stories260K-qwen3moe8x-noisy"):
        folder, told = read_folder(path.parent / name), expected[name]
        prompt, tokens = told["prompt_token_ids"], told["greedy_token_ids"]
        ids = torch.tensor(prompt + tokens)
        found = Steps(load_causal(folder, FLOAT32, CPU), folder, [ids]).run(len(prompt), 1)[0]
        assert found.argmax(-1)[len(prompt) - 1 : -1].tolist() == tokens, name


@pytest.mark.parametrize("name", CAUSAL_EMBEDDERS)
@pytest.mark.parametrize("prompt_name", ["query", "document"])
def test_vectors_of_the_last_token(case: Callable[[str], Case], name: str, prompt_name: str) -> None:
    """Token ids are those of the tokenizer, prompt in front; the state of the last one is the vector."""
    folder = case(name).folder
    reference = SentenceTransformer(str(folder.path), device="cpu")
    texts = [folder.prompts[prompt_name] + text for text in SENTENCES[:4]]
    ids = [torch.tensor(reference.tokenizer(text)["input_ids"])[: folder.max_model_len] for text in texts]
    states = Steps(case(name).load(), folder, ids).run(17, 17)
    vectors_BC = F.normalize(torch.stack([hidden_LC[-1] for hidden_LC in states]), dim=-1)
    expected_BC = torch.from_numpy(reference.encode(list(SENTENCES[:4]), prompt_name=prompt_name))
    assert (folder.task, folder.pooling.modes) == ("embed", ("lasttoken",))
    assert float((vectors_BC - expected_BC).abs().max()) <= 1e-5
