"""Token ids, limits and prompt lengths against `AutoTokenizer` and `SentenceTransformer` on the same folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the first import of transformers

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from small_tokenizers import (
    BERT_TOKENS,
    ODD_TEXTS,
    ROBERTA_TOKENS,
    edit_json,
    small_tokenizer,
    write_folder,
    write_json,
)
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, BertConfig, BertModel, XLMRobertaConfig, XLMRobertaModel

from nobiru.folder.read import read_folder
from nobiru.frontend.frontend import Frontend
from nobiru.request import EncodedPrompts, PoolingParams

torch.set_num_threads(1)


def rows(encoded: EncodedPrompts) -> list[list[int]]:
    return [ids.tolist() for ids in np.split(encoded.token_ids, np.cumsum(encoded.lengths)[:-1])]


def assert_same_ids(folder: Path, reference: Any = None) -> None:
    """All odd texts, whole and cut on either side, give the ids of AutoTokenizer."""
    frontend = Frontend(read_folder(folder, max_model_len=400), auto_truncate=True)
    reference = reference or AutoTokenizer.from_pretrained(str(folder))
    for side in ("right", "left"):
        reference.truncation_side = side
        for limit in (400, 9, 2):
            expected = reference(list(ODD_TEXTS), truncation=True, max_length=limit)["input_ids"]
            params = PoolingParams(truncate_prompt_tokens=limit, truncation_side=side)
            encoded = frontend.prepare(list(ODD_TEXTS), params)
            for text, wanted, ids in zip(ODD_TEXTS, expected, rows(encoded), strict=True):
                assert ids == wanted, (text, side, limit)
    num_known = frontend.folder.vocab_size  # some classes invent special tokens that the vocabulary lacks
    assert frontend.tokenizer.special_ids == {known for known in reference.all_special_ids if known < num_known}


# A tokenizer file may say something else than the class that tokenizer_config.json names; AutoTokenizer then takes the
# vocabulary from the file and the rest from the class.
CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("wordpiece", "BertTokenizer", {}),
    "bert-fast": ("wordpiece", "BertTokenizerFast", {}),
    "bert-cased": ("wordpiece", "BertTokenizer", {"do_lower_case": False}),
    "bert-cased-accents": ("wordpiece", "BertTokenizer", {"do_lower_case": False, "strip_accents": True}),
    "bert-keeps-accents": ("wordpiece", "BertTokenizer", {"strip_accents": False}),
    "bert-whole-chinese": ("wordpiece", "BertTokenizer", {"tokenize_chinese_chars": False}),
    "bert-splits-special": ("wordpiece", "BertTokenizer", {"split_special_tokens": True}),
    "bert-swapped": ("wordpiece", "BertTokenizer", {"cls_token": "[SEP]", "sep_token": "[CLS]"}),
    "distilbert": ("wordpiece", "DistilBertTokenizerFast", {}),
    "electra": ("wordpiece", "ElectraTokenizer", {"do_lower_case": False}),
    "mpnet": ("wordpiece", "MPNetTokenizer", {}),
    "as-it-is": ("wordpiece", "PreTrainedTokenizerFast", {"do_lower_case": False}),
    "unknown-class": ("wordpiece", "NobodysTokenizer", {"do_lower_case": False}),
    "xlm-roberta": ("unigram", "XLMRobertaTokenizer", {}),
    "xlm-roberta-no-prefix": ("unigram", "XLMRobertaTokenizerFast", {"add_prefix_space": False}),
    "camembert": ("unigram", "CamembertTokenizer", {}),
    "albert": ("albert", "AlbertTokenizer", {}),
    "albert-cased": ("albert", "AlbertTokenizer", {"do_lower_case": False, "keep_accents": True}),
    "deberta-v2": ("albert", "DebertaV2Tokenizer", {}),
    "deberta-v2-options": ("albert", "DebertaV2TokenizerFast", {"do_lower_case": True, "split_by_punct": True}),
    "roberta": ("byte_bpe", "RobertaTokenizer", {}),
    "roberta-prefix": ("byte_bpe", "RobertaTokenizerFast", {"add_prefix_space": True}),
    "roberta-file": ("byte_bpe", "PreTrainedTokenizerFast", {"add_prefix_space": True}),
    "deberta": ("byte_bpe", "DebertaTokenizer", {"cls_token": "<s>", "sep_token": "</s>"}),
}


@pytest.mark.parametrize("name", CLASSES)
def test_classes_of_transformers(tmp_path: Path, name: str) -> None:
    kind, class_name, options = CLASSES[name]
    config: dict[str, Any] = {"tokenizer_class": class_name, **options}
    if name == "mpnet":
        config |= {"bos_token": "[CLS]", "eos_token": "[SEP]"}
    assert_same_ids(write_folder(tmp_path, kind, tokenizer_config=config))


@pytest.mark.parametrize(
    ("kind", "model_type"), [("wordpiece", "bert"), ("unigram", "xlm-roberta"), ("byte_bpe", "roberta")]
)
def test_without_a_named_class(tmp_path: Path, kind: str, model_type: str) -> None:
    folder = write_folder(tmp_path, kind, config={"model_type": model_type})
    edit_json(folder / "tokenizer_config.json", tokenizer_class=None)
    assert_same_ids(folder)


def test_the_class_in_the_models_config(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "unigram", config={"model_type": "bert", "tokenizer_class": "XLMRobertaTokenizer"})
    edit_json(folder / "tokenizer_config.json", tokenizer_class=None)
    assert_same_ids(folder)


def test_modernbert_takes_the_file_whatever_the_class(tmp_path: Path) -> None:
    options = {"tokenizer_class": "BertTokenizer", "do_lower_case": False}
    assert_same_ids(write_folder(tmp_path, tokenizer_config=options, config={"model_type": "modernbert"}))


def test_a_vocabulary_file_alone(tmp_path: Path) -> None:
    options = {"tokenizer_class": "BertTokenizer", "do_lower_case": False}
    folder = write_folder(tmp_path, tokenizer_config=options)
    vocab = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in sorted(vocab, key=vocab.__getitem__)))
    (folder / "tokenizer.json").unlink()
    assert_same_ids(folder)
    edit_json(folder / "tokenizer_config.json", do_lower_case=None)
    assert_same_ids(folder)


def test_the_files_own_truncation_and_padding_give_way(tmp_path: Path) -> None:
    tokenizer = small_tokenizer("wordpiece")
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=128)
    assert_same_ids(write_folder(tmp_path, tokenizer=tokenizer, tokenizer_config={"tokenizer_class": "BertTokenizer"}))


def test_special_tokens_of_the_map_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tokenizer_config={"tokenizer_class": "BertTokenizer"})
    for name in BERT_TOKENS:
        edit_json(folder / "tokenizer_config.json", **{name: None})
    write_json(folder / "special_tokens_map.json", {"cls_token": {"content": "[SEP]"}, "mask_token": "[CLS]"})
    assert_same_ids(folder)


def test_saved_again_by_transformers(tmp_path: Path) -> None:
    for kind, class_name in (("wordpiece", "BertTokenizer"), ("unigram", "XLMRobertaTokenizer")):
        first = write_folder(tmp_path / kind, kind, tokenizer_config={"tokenizer_class": class_name})
        again = tmp_path / f"{kind}-again"
        shutil.copytree(first, again)
        AutoTokenizer.from_pretrained(str(first)).save_pretrained(str(again))
        assert_same_ids(again, AutoTokenizer.from_pretrained(str(again)))


# --- Sentence Transformers ----------------------------------------------------------------------------------------


def add_weights(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    xlm = config["model_type"] == "xlm-roberta"
    model = XLMRobertaModel(XLMRobertaConfig(**config)) if xlm else BertModel(BertConfig(**config))
    model.save_pretrained(folder)


def assert_as_sentence_transformers(folder: Path, *, names: tuple[str | None, ...] = (None,)) -> None:
    """The limit, the ids after cutting, and the prompt's tokens, for each prompt name."""
    model = SentenceTransformer(str(folder), device="cpu")
    read = read_folder(folder)
    frontend = Frontend(read, auto_truncate=True)
    positions = model[0].auto_model.config.max_position_embeddings
    assert read.max_model_len == min(model.max_seq_length, positions)
    assert dict(read.prompts) == model.prompts
    assert read.default_prompt_name == model.default_prompt_name
    for name in names:
        prompt = model._resolve_prompt(None, name)
        features = model.preprocess(list(ODD_TEXTS), prompt=prompt)
        encoded = frontend.prepare(list(ODD_TEXTS), PoolingParams(prompt_name=name))
        for index, ids in enumerate(rows(encoded)):
            wanted = features["input_ids"][index][features["attention_mask"][index].bool()]
            assert ids == wanted.tolist(), (ODD_TEXTS[index], name)
        skipped = 0 if read.pooling.include_prompt else features.get("prompt_length", 0)
        assert encoded.num_skipped_tokens == skipped


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
@pytest.mark.parametrize("limit", [None, 20])
def test_limits_and_lower_case(tmp_path: Path, kind: str, limit: int | None) -> None:
    options = {"tokenizer_class": "BertTokenizer" if kind == "wordpiece" else "XLMRobertaTokenizer"}
    folder = write_folder(tmp_path, kind, tokenizer_config={**options, "do_lower_case": False})
    add_weights(folder)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": limit, "do_lower_case": True})
    assert_as_sentence_transformers(folder)


def test_lower_case_is_not_asked_twice(tmp_path: Path) -> None:
    tokenizer = small_tokenizer("unigram")
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    folder = write_folder(tmp_path, "unigram", tokenizer=tokenizer)
    add_weights(folder)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 24, "do_lower_case": True})
    assert_as_sentence_transformers(folder)


@pytest.mark.parametrize("include_prompt", [True, False])
def test_prompts(tmp_path: Path, include_prompt: bool) -> None:
    folder = write_folder(tmp_path)
    add_weights(folder)
    edit_json(folder / "1_Pooling" / "config.json", include_prompt=include_prompt)
    # The last is longer than the limit, the last but one ends in a special token of its own.
    prompts = {"query": "the query: ", "none": "", "mask": "a [MASK]", "long": "the fox jumps " * 20}
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "query"})
    assert_as_sentence_transformers(folder, names=(None, *prompts, "document"))


def test_prompts_without_special_tokens(tmp_path: Path) -> None:
    tokenizer = small_tokenizer("wordpiece")
    tokenizer.post_processor = None
    folder = write_folder(tmp_path, tokenizer=tokenizer)
    add_weights(folder)
    edit_json(folder / "1_Pooling" / "config.json", include_prompt=False)
    prompts = {"plain": "the query: ", "mask": "a [MASK]", "unknown": "\u2603"}
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts})
    assert_as_sentence_transformers(folder, names=(None, *prompts))


def test_a_folder_that_cuts_at_the_left(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tokenizer_config={"truncation_side": "left"})
    add_weights(folder)
    assert_as_sentence_transformers(folder)


def test_a_plain_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, limit=10**30)
    add_weights(folder)
    (folder / "modules.json").unlink()
    assert_as_sentence_transformers(folder)


def test_roberta_is_held_to_its_positions(tmp_path: Path) -> None:
    """Sentence Transformers would accept as many tokens as there are rows, and fail on the last two."""
    folder = write_folder(tmp_path, "unigram", limit=10**30, config={"max_position_embeddings": 34})
    add_weights(folder)
    model = SentenceTransformer(str(folder), device="cpu")
    read = read_folder(folder)
    assert (model.max_seq_length, read.max_model_len) == (34, 32)
    with pytest.raises((IndexError, RuntimeError)):
        model.encode("fox " * 100)
    model.max_seq_length = read.max_model_len
    assert np.isfinite(model.encode("fox " * 100)).all()


def test_unigram_without_whitespace_split(tmp_path: Path) -> None:
    """A tokenizer file that keeps spaces together, which only a class of its own would split."""
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.0), ("▁", -2.0), ("a", -2.0), ("b", -2.5)], 0))
    tokenizer.add_special_tokens([*ROBERTA_TOKENS.values()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    folder = write_folder(tmp_path, "unigram", tokenizer=tokenizer)
    assert_same_ids(folder)
