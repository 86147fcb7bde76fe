"""Small tokenizers and the folders around them, for tests: no weights, no torch, written in milliseconds.

Owns vocabularies of every kind that encoders have, trained here on a few sentences, and the JSON files that make a
folder of one. Knows nothing of nobiru.
"""

from __future__ import annotations

import functools
import json
import math
import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SENTENCES = (
    "The quick brown fox jumps over the lazy dog while the cat sleeps in the sun.",
    "Don't panic: version 2.4.1 fixes 17 bugs, says the spokesman (see the notes).",
    "Der Zug nach Hamburg hat heute wegen eines Sturms eine Stunde Verspätung.",
    "El equipo ganó el partido en el último minuto con un gol de cabeza.",
    "Поезд прибывает на второй путь через пять минут, будьте осторожны.",
    "日本語の文章も少しだけ含まれています。電車は駅に着きました。",
)

# Everything that normalizers, pre-tokenizers and special tokens treat in their own ways.
ODD_TEXTS = (
    "",
    " ",
    "   a  b ",
    "Hello World!",
    "trailing space ",
    "\tleading tab",
    "tab\tnew\nline\r\nend \n",
    "ÀÉÎõü Straße İstanbul ǅ ﬁ ½ ①",
    "e\u0301 a\u0308 n\u0303 \u0301alone",
    "日本語の文章、漢字とカナ。",
    "한국어 문장",
    "مرحبا بالعالم สวัสดีชาวโลก",
    "👩‍👩‍👧‍👦 🇯🇵 👍🏽",
    "a\x00b\x01c\x1cd\u200be\ufeff \ufffd",
    "[CLS] x [SEP] <s> </s> <mask> [MASK] [mask] <MASK> <unk>",
    "fox<mask>dog [MASK]cat",
    "x" * 150,
    "don't can't it's 1,234.56 -- ... ?! ``quoted''",
    "▁under ▁score",
    "\u2028 \u00a0nbsp\u3000ideographic",
    "the fox " * 40,
    "CamelCase URLs https://example.org/a?b=c#d",
    "ß ẞ SS I \u0131 İ i \uff21\uff42\uff43",
)

BERT_TOKENS = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
ROBERTA_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "cls_token": "<s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}


ALBERT_TOKENS = BERT_TOKENS | {"unk_token": "<unk>", "pad_token": "<pad>"}
MODEL_TYPES = {"wordpiece": "bert", "unigram": "xlm-roberta", "albert": "albert", "byte_bpe": "roberta"}
_TOKENS = {"wordpiece": BERT_TOKENS, "unigram": ROBERTA_TOKENS, "albert": ALBERT_TOKENS, "byte_bpe": ROBERTA_TOKENS}
_BERT_ORDER = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
_ROBERTA_ORDER = ("cls_token", "pad_token", "sep_token", "unk_token", "mask_token")
_ORDER = {"wordpiece": _BERT_ORDER, "unigram": _ROBERTA_ORDER, "albert": _BERT_ORDER, "byte_bpe": _ROBERTA_ORDER}


def _surround(tokenizer: Tokenizer, first: str, last: str) -> None:
    ids = {token: tokenizer.token_to_id(token) for token in (first, last)}
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", pair=f"{first} $A {last} $B:1 {last}:1", special_tokens=list(ids.items())
    )


def _word_pieces(special: list[str]) -> dict[str, int]:
    """All characters, in both cases, so that lower-casing shows; half of the words; beginnings and ends of others."""
    words = sorted({word for sentence in SENTENCES for word in re.findall(r"\w+", sentence.lower())})
    characters = {character for sentence in SENTENCES for character in sentence + sentence.upper()} | set("ÀÉÎõüß")
    pieces = {*characters, *(f"##{character}" for character in characters), *words[::2]}
    pieces |= {word[:3] for word in words[1::2]} | {f"##{word[3:6]}" for word in words[1::2] if len(word) > 3}
    return {piece: number for number, piece in enumerate([*special, *sorted(pieces - {" "} - set(special))])}


def _settled(tokenizer: Tokenizer, special: list[str]) -> Tokenizer:
    """With the same pieces, but an order and scores that do not differ from training to training."""
    made = json.loads(tokenizer.to_str())
    text = "▁" + "▁".join(" ".join(SENTENCES).split())
    pieces = sorted({piece for piece, _ in made["model"]["vocab"]} - set(special))
    counts = [(piece, text.count(piece) + 1) for piece in pieces]
    total = sum(count for _, count in counts)
    made["model"]["vocab"] = [[piece, 0.0] for piece in special]
    made["model"]["vocab"] += [[piece, math.log(count / total)] for piece, count in counts]
    return Tokenizer.from_str(json.dumps(made))


@functools.cache
def _trained(kind: str) -> str:
    special = list(dict.fromkeys(special_tokens(kind)[name] for name in _ORDER[kind]))
    trainer: Any
    if kind == "wordpiece":
        # Its trainer gives another vocabulary each time, so this one is made by hand.
        tokenizer = Tokenizer(models.WordPiece(_word_pieces(special), unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
        trainer = None
    elif kind == "byte_bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    if trainer is not None:
        tokenizer.train_from_iterator(SENTENCES, trainer)
    if isinstance(tokenizer.model, models.Unigram):
        tokenizer = _settled(tokenizer, special)
    _surround(tokenizer, special_tokens(kind)["cls_token"], special_tokens(kind)["sep_token"])
    return tokenizer.to_str()


def small_tokenizer(kind: str) -> Tokenizer:
    """A tokenizer of `kind` "wordpiece", "unigram", "albert" (unigram) or "byte_bpe", with special tokens around."""
    return Tokenizer.from_str(_trained(kind))


def byte_fallback_tokenizer() -> Tokenizer:
    """As Llama's: spaces are ▁, what is not in the vocabulary becomes bytes, a first space is stripped in decoding."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False, limit_alphabet=60)
    trained.train_from_iterator(SENTENCES[:4], trainer)
    tokenizer = Tokenizer(trained.model)  # in which bytes are no special tokens
    tokenizer.normalizer = trained.normalizer
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special[:3]])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def special_tokens(kind: str) -> dict[str, str]:
    return _TOKENS[kind]


def write_json(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def edit_json(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file; None removes one."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    content = {name: value for name, value in (content | changes).items() if value is not None}
    write_json(path, content)


def write_folder(
    path: Path,
    kind: str = "wordpiece",
    *,
    tokenizer: Tokenizer | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    hidden_size: int = 8,
    limit: int = 32,
) -> Path:
    """A Sentence Transformers folder (Transformer, mean Pooling, Normalize) without weights."""
    tokenizer = tokenizer or small_tokenizer(kind)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    base = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": limit}
    write_json(path / "tokenizer_config.json", {**special_tokens(kind), **base, **(tokenizer_config or {})})
    model_config = {
        "model_type": MODEL_TYPES[kind],
        "architectures": ["BertModel"],
        "hidden_size": hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 512,
        "pad_token_id": tokenizer.token_to_id(special_tokens(kind)["pad_token"]),
        "vocab_size": tokenizer.get_vocab_size(),
    }
    write_json(path / "config.json", {**model_config, **(config or {})})
    names = ("Transformer", "Pooling", "Normalize")
    paths = ("", "1_Pooling", "2_Normalize")
    modules = [
        {"idx": index, "name": str(index), "path": place, "type": f"sentence_transformers.models.{name}"}
        for index, (name, place) in enumerate(zip(names, paths, strict=True))
    ]
    write_json(path / "modules.json", modules)
    write_json(path / "1_Pooling" / "config.json", {"embedding_dimension": hidden_size, "pooling_mode": "mean"})
    return path
