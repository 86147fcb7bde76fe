"""Token ids and texts of language models' tokenizers against `AutoTokenizer` on the same folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the first import of transformers

import pytest
from real_models import smollm2, stories260k
from small_tokenizers import ODD_TEXTS, SENTENCES, byte_fallback_tokenizer, edit_json, small_tokenizer, write_folder
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from transformers import AutoTokenizer

from nobiru.folder.read import read_folder
from nobiru.folder.spec import ModelFolder
from nobiru.frontend.tokenizer import Tokenizer as NobiruTokenizer

TEXTS = (*SENTENCES, *ODD_TEXTS, "a 12345 b  c", "<s>x</s> y", " leading", "\n\nlines\n", "don't 'LL we'Re")


def byte_level() -> Tokenizer:
    """With a step that some classes of transformers do not know: digits apart."""
    tokenizer = small_tokenizer("byte_bpe")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = None
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {"byte-level": byte_level, "byte-fallback": byte_fallback_tokenizer}
CASES: list[tuple[str, str, str | None, dict[str, Any]]] = [
    ("byte-level", "llama", "PreTrainedTokenizerFast", {}),
    ("byte-level", "llama", "LlamaTokenizer", {}),
    ("byte-level", "llama", "LlamaTokenizerFast", {"add_bos_token": True}),
    ("byte-level", "llama", "GPT2Tokenizer", {}),
    ("byte-level", "llama", "GPT2TokenizerFast", {"add_prefix_space": True}),
    ("byte-level", "llama", None, {}),
    ("byte-level", "mistral", "LlamaTokenizer", {}),
    ("byte-level", "qwen2", "Qwen2Tokenizer", {}),
    ("byte-level", "qwen3", "Qwen2TokenizerFast", {"add_bos_token": False}),
    ("byte-level", "qwen3", None, {}),
    ("byte-level", "qwen3", "PreTrainedTokenizerFast", {}),
    ("byte-level", "gpt2", None, {}),
    ("byte-fallback", "llama", "LlamaTokenizer", {}),
    ("byte-fallback", "llama", "LlamaTokenizerFast", {"legacy": True}),
    ("byte-fallback", "llama", "LlamaTokenizer", {"add_prefix_space": False, "add_bos_token": True}),
    ("byte-fallback", "llama", "PreTrainedTokenizerFast", {"add_bos_token": True, "add_eos_token": True}),
    ("byte-fallback", "llama", None, {}),
    ("byte-fallback", "mistral", "LlamaTokenizer", {"legacy": False}),
    ("byte-fallback", "phi3", "LlamaTokenizer", {}),
    ("byte-fallback", "gemma2", "GemmaTokenizer", {"mask_token": "<s>"}),
    ("byte-fallback", "gemma2", None, {"mask_token": "<s>"}),
]


def assert_same(folder: Path, ours: NobiruTokenizer) -> None:
    reference = AutoTokenizer.from_pretrained(str(folder))
    for text in TEXTS:
        ids = ours.encode([text]).token_ids.tolist()
        assert ids == reference(text).input_ids, text
        bare = ids[len(ours.prefix) : len(ids) - len(ours.suffix)]
        assert bare == reference(text, add_special_tokens=False).input_ids, text
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip), text


def around(tokenizer: Tokenizer, template: str) -> None:
    ids = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>") if token in template]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, pair="$A $B", special_tokens=ids)


@pytest.mark.parametrize("template", [None, "<s> $A", "$A </s>"])
@pytest.mark.parametrize(("kind", "model_type", "class_name", "options"), CASES)
def test_classes_of_transformers(
    tmp_path: Path, kind: str, model_type: str, class_name: str | None, options: dict[str, Any], template: str | None
) -> None:
    tokenizer = KINDS[kind]()
    if template is not None:
        around(tokenizer, template)
    write_folder(tmp_path, "byte_bpe", tokenizer=tokenizer, config={"model_type": model_type}, limit=2000)
    edit_json(tmp_path / "config.json", pad_token_id=None)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    others = dict.fromkeys(("cls_token", "sep_token", "mask_token"))
    edit_json(tmp_path / "tokenizer_config.json", **{**names, **others, "tokenizer_class": class_name, **options})
    folder = ModelFolder(
        path=tmp_path,
        transformer_path=tmp_path,
        config={},
        model_type=model_type,
        modules=(),
        max_model_len=2000,
        hidden_size=8,
        embedding_dim=0,
        vocab_size=tokenizer.get_vocab_size() + 8,
    )
    assert_same(tmp_path, NobiruTokenizer(folder))


@pytest.mark.parametrize("model", [stories260k, smollm2])
def test_trained_models(model: Callable[[], Path]) -> None:
    folder = model()
    assert_same(folder, NobiruTokenizer(read_folder(folder)))
