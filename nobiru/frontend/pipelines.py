"""From tokenizer files to a `tokenizers.Tokenizer` that gives the ids which `transformers` would give.

Owns the difference between `tokenizer.json` and what `AutoTokenizer` of transformers 5 makes of it: for the classes in
`_PIPELINES` it takes vocabulary and merges from the file, but builds normalizer, pre-tokenizer and special tokens from
`tokenizer_config.json`. For all other classes the file counts as it is. Knows nothing of cutting or batches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from nobiru.errors import ModelFolderError
from nobiru.folder.files import read_object
from nobiru.folder.spec import ModelFolder

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BERT_TOKENS = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
_ROBERTA_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "cls_token": "<s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}
_GPT2_TOKENS = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
_LLAMA_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_GEMMA_TOKENS = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}
_MAX_CHARS_PER_WORD = 100  # longer words are [UNK]
# How Qwen2 cuts texts before its vocabulary is applied.
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS_AT_SPACES = frozenset({"BertPreTokenizer", "Whitespace", "WhitespaceSplit"})


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A tokenizer that neither cuts nor pads, and what the files say besides.

    `special_ids` are those of named special tokens. `cuts_at_spaces` tells that no token reaches over a space, so that
    a text may be tokenized in pieces.
    """

    tokenizer: Tokenizer
    special_ids: frozenset[int]
    truncation_side: str
    cuts_at_spaces: bool


@dataclass(frozen=True, kw_only=True)
class _Files:
    """`config` is `tokenizer_config.json`, `named` the special tokens by name, `path` the folder (for messages)."""

    path: Path
    config: Mapping[str, Any]
    named: Mapping[str, str]

    def flag(self, name: str, default: bool) -> bool:
        value = self.config.get(name)
        return default if value is None else bool(value)


def load_backend(folder: ModelFolder) -> Backend:
    """Build the tokenizer of a model folder; `ModelFolderError` when its files are missing or cannot be honoured."""
    path = folder.transformer_path
    config = read_object(path / "tokenizer_config.json", required=False)
    if config.get("auto_map") and not (path / "tokenizer.json").exists():
        raise ModelFolderError(f"{path / 'tokenizer_config.json'}: field 'auto_map' needs code from the model's folder")
    class_name = _class_name(folder, config)
    pipeline = _PIPELINES.get(class_name)
    defaults = pipeline.tokens if pipeline is not None else {}
    files = _Files(path=path, config=config, named={**defaults, **_named_tokens(path, config)})
    tokenizer = _from_files(path, files, class_name)
    truncation = tokenizer.truncation or {}
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if pipeline is not None and isinstance(tokenizer.model, pipeline.model):
        pipeline.build(tokenizer, files)
    _add_tokens(tokenizer, files)
    tokenizer.encode_special_tokens = files.flag("split_special_tokens", False)
    if folder.lower_case:
        _lower_case(tokenizer)
    return Backend(
        tokenizer=tokenizer,
        special_ids=_special_ids(tokenizer, files),
        truncation_side=str(config.get("truncation_side") or truncation.get("direction") or "right"),
        cuts_at_spaces=_cuts_at_spaces(tokenizer.pre_tokenizer),
    )


def _class_name(folder: ModelFolder, config: Mapping[str, Any]) -> str:
    """The class that AutoTokenizer would take, without the `Fast` that older versions wrote behind it."""
    if folder.model_type in _GENERIC_MODEL_TYPES:
        return ""
    named = config.get("tokenizer_class") or folder.config.get("tokenizer_class")
    if named:
        return str(named).removesuffix("Fast")
    return _CLASS_OF_MODEL_TYPE.get(folder.model_type, "")


def _from_files(path: Path, files: _Files, class_name: str) -> Tokenizer:
    file = path / "tokenizer.json"
    if file.exists():
        try:
            return Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more precise
            raise ModelFolderError(f"{file} cannot be read: {error}") from error
    vocab = path / "vocab.txt"
    if vocab.exists() and class_name in _WORDPIECE_CLASSES:
        words = models.WordPiece.read_file(str(vocab))
        return Tokenizer(models.WordPiece(words, unk_token=files.named["unk_token"]))
    raise ModelFolderError(
        f"{file} is missing. Save a fast tokenizer into the folder: "
        f"transformers.AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
    )


def _named_tokens(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name; `special_tokens_map.json` is read only where older versions needed it."""
    fields = dict(config)
    if "added_tokens_decoder" not in config:
        fields |= read_object(path / "special_tokens_map.json", required=False)
    return {name: text for name in _NAMES if (text := _content(fields.get(name))) is not None}


def _content(token: object) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _add_tokens(tokenizer: Tokenizer, files: _Files) -> None:
    """Special tokens are found in texts whole, also those that `tokenizer.json` lists as mere vocabulary."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    fields = files.config.get("added_tokens_decoder")
    listed = list(fields.values()) if isinstance(fields, dict) else []
    for token in listed:
        text = _content(token)
        if isinstance(token, dict) and text not in known and tokenizer.token_to_id(str(text)) is not None:
            tokenizer.add_tokens([AddedToken(**token)])
            known.add(str(text))
    for text in files.named.values():
        if text not in known and tokenizer.token_to_id(text) is not None:
            tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])
            known.add(text)


def _special_ids(tokenizer: Tokenizer, files: _Files) -> frozenset[int]:
    extra = files.config.get("extra_special_tokens") or files.config.get("additional_special_tokens") or []
    tokens = [*files.named.values(), *(extra.values() if isinstance(extra, dict) else extra)]
    ids = (tokenizer.token_to_id(text) for token in tokens if (text := _content(token)) is not None)
    return frozenset(identifier for identifier in ids if identifier is not None)


def _lower_case(tokenizer: Tokenizer) -> None:
    """Sentence Transformers' `do_lower_case`: a Lowercase in front, unless there is one."""
    parts = _parts(tokenizer.normalizer)
    if not any(isinstance(part, normalizers.Lowercase) for part in parts):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *parts])


def _parts(normalizer: Any) -> list[Any]:
    if normalizer is None:
        return []
    return (
        [normalizer[index] for index in range(len(normalizer))]
        if type(normalizer) is normalizers.Sequence
        else [normalizer]
    )


def _cuts_at_spaces(pre_tokenizer: Any) -> bool:
    """Whether some step splits at every run of spaces, whatever the other steps do."""
    if pre_tokenizer is None:
        return False
    state = json.loads(pre_tokenizer.__getstate__())
    steps = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    return any(
        step["type"] in _SPLITS_AT_SPACES
        or (step["type"] == "Metaspace" and step.get("split", True))
        or (step["type"] == "ByteLevel" and step.get("use_regex", True))
        or (step["type"] == "Split" and r"\s" in step["pattern"].get("Regex", ""))
        for step in steps
    )


# --- what transformers builds -------------------------------------------------------------------------------------


def _surround(tokenizer: Tokenizer, files: _Files, first: str | None, last: str) -> None:
    """The post-processor: a named special token (or none) in front of the text, another behind it."""
    names = [name for name in (first, last) if name is not None]
    tokens = {files.named[name]: tokenizer.token_to_id(files.named[name]) for name in names}
    if missing := [text for text, identifier in tokens.items() if identifier is None]:
        raise ModelFolderError(
            f"{files.path / 'tokenizer_config.json'}: the special token {missing[0]!r} is not in the vocabulary"
        )
    sequence = ["$A", files.named[last]] if first is None else [files.named[first], "$A", files.named[last]]
    tokenizer.post_processor = processors.TemplateProcessing(single=sequence, special_tokens=list(tokens.items()))


def _build_wordpiece(tokenizer: Tokenizer, files: _Files) -> None:
    strip_accents = files.config.get("strip_accents")
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=files.flag("clean_text", True),
        handle_chinese_chars=files.flag("tokenize_chinese_chars", True),
        strip_accents=None if strip_accents is None else bool(strip_accents),
        lowercase=files.flag("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    model = tokenizer.model
    assert isinstance(model, models.WordPiece), "the table says so"
    model.unk_token = files.named["unk_token"]
    model.max_input_chars_per_word = _MAX_CHARS_PER_WORD
    model.continuing_subword_prefix = "##"
    _surround(tokenizer, files, "cls_token", "sep_token")


def _build_byte_bpe(tokenizer: Tokenizer, files: _Files) -> None:
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=files.flag("add_prefix_space", False))
    _surround(tokenizer, files, "cls_token", "sep_token")


def _sentence_pieces(files: _Files) -> Any:
    scheme = "always" if files.flag("add_prefix_space", True) else "never"
    return pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme)]
    )


def _precompiled(tokenizer: Tokenizer) -> list[Any]:
    """SentencePiece's own normalization, of which there is at most one."""
    return [part for part in _parts(tokenizer.normalizer) if isinstance(part, normalizers.Precompiled)][:1]


def _build_unigram(tokenizer: Tokenizer, files: _Files, *, first: str | None, last: str) -> None:
    tokenizer.normalizer = normalizers.Sequence(_precompiled(tokenizer))
    tokenizer.pre_tokenizer = _sentence_pieces(files)
    _surround(tokenizer, files, first, last)


def _build_albert(tokenizer: Tokenizer, files: _Files) -> None:
    steps: list[Any] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not files.flag("keep_accents", False):
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if files.flag("do_lower_case", True):
        steps.append(normalizers.Lowercase())
    tokenizer.normalizer = normalizers.Sequence([*steps, *_precompiled(tokenizer)])
    tokenizer.pre_tokenizer = _sentence_pieces(files)
    _surround(tokenizer, files, "cls_token", "sep_token")


def _build_deberta_v2(tokenizer: Tokenizer, files: _Files) -> None:
    lower: list[Any] = [normalizers.Lowercase()] if files.flag("do_lower_case", False) else []
    tokenizer.normalizer = normalizers.Sequence(
        [
            *lower,
            normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " "),
            normalizers.NFC(),
            normalizers.Strip(left=False, right=True),
        ]
    )
    split: list[Any] = [pre_tokenizers.Punctuation(behavior="isolated")] if files.flag("split_by_punct", False) else []
    scheme = "always" if files.flag("add_prefix_space", True) else "first"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*split, pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme)]
    )
    _surround(tokenizer, files, "cls_token", "sep_token")


def _build_llama(tokenizer: Tokenizer, files: _Files) -> None:
    """SentencePiece with byte fallback; a file that is byte-level all the same counts as it is."""
    if _is_byte_level(tokenizer):
        return
    prefixed = files.flag("add_prefix_space", True)
    scheme = "never" if not prefixed else "always" if files.flag("legacy", False) else "first"
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(content=" ", left=1)] if prefixed else []
    tokenizer.decoder = decoders.Sequence([*_pieces_decoder(), *strip])
    _set_unknown(tokenizer, byte_fallback=True)


def _build_gemma(tokenizer: Tokenizer, files: _Files) -> None:
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous", invert=False)
    tokenizer.decoder = decoders.Sequence(_pieces_decoder())
    _set_unknown(tokenizer, byte_fallback=True, unk_token=files.named["unk_token"])


def _build_gpt2(tokenizer: Tokenizer, files: _Files) -> None:
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=files.flag("add_prefix_space", False))
    tokenizer.decoder = decoders.ByteLevel()
    _set_unknown(tokenizer, byte_fallback=False)


def _build_qwen2(tokenizer: Tokenizer, files: _Files) -> None:
    words = pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated", invert=False)
    prefixed = files.flag("add_prefix_space", False)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=prefixed, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _set_unknown(tokenizer, byte_fallback=False)


def _pieces_decoder() -> list[Any]:
    return [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def _set_unknown(tokenizer: Tokenizer, *, byte_fallback: bool, unk_token: str | None = None) -> None:
    """What becomes of characters that are not in the vocabulary."""
    model = tokenizer.model
    assert isinstance(model, models.BPE), "the table says so"
    model.fuse_unk = model.byte_fallback = byte_fallback
    model.unk_token = unk_token


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    parts = (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.post_processor, tokenizer.decoder)
    return any(b'"ByteLevel"' in part.__getstate__() for part in parts if part is not None)


@dataclass(frozen=True, kw_only=True)
class _Pipeline:
    """`build` works on tokenizers whose model is a `model`; `tokens` are the special ones unless files name others."""

    model: type[Any]
    tokens: Mapping[str, str]
    build: Callable[[Tokenizer, _Files], None]


_BERT = _Pipeline(model=models.WordPiece, tokens=_BERT_TOKENS, build=_build_wordpiece)
_MPNET = _Pipeline(model=models.WordPiece, tokens={**_ROBERTA_TOKENS, "unk_token": "[UNK]"}, build=_build_wordpiece)
_FUNNEL = _Pipeline(
    model=models.WordPiece,
    tokens={"unk_token": "<unk>", "sep_token": "<sep>", "pad_token": "<pad>", "cls_token": "<cls>"},
    build=_build_wordpiece,
)
_XLM_ROBERTA = _Pipeline(
    model=models.Unigram,
    tokens=_ROBERTA_TOKENS,
    build=partial(_build_unigram, first="bos_token", last="eos_token"),
)
_T5 = _Pipeline(
    model=models.Unigram,
    tokens={"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
    build=partial(_build_unigram, first=None, last="eos_token"),
)
_ALBERT = _Pipeline(
    model=models.Unigram,
    tokens={**_BERT_TOKENS, "unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "[CLS]", "eos_token": "[SEP]"},
    build=_build_albert,
)
_DEBERTA_V2 = _Pipeline(model=models.Unigram, tokens=_BERT_TOKENS, build=_build_deberta_v2)

_LLAMA = _Pipeline(model=models.BPE, tokens=_LLAMA_TOKENS, build=_build_llama)
_GEMMA = _Pipeline(model=models.BPE, tokens=_GEMMA_TOKENS, build=_build_gemma)
_GPT2 = _Pipeline(model=models.BPE, tokens=_GPT2_TOKENS, build=_build_gpt2)
_QWEN2 = _Pipeline(
    model=models.BPE,
    tokens=dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
    build=_build_qwen2,
)

_WORDPIECE_CLASSES = {
    "BertTokenizer": _BERT,
    "ConvBertTokenizer": _BERT,
    "DistilBertTokenizer": _BERT,
    "ElectraTokenizer": _BERT,
    "FunnelTokenizer": _FUNNEL,
    "LayoutLMTokenizer": _BERT,
    "MPNetTokenizer": _MPNET,
    "MobileBertTokenizer": _BERT,
    "SqueezeBertTokenizer": _BERT,
}
_PIPELINES = {
    **_WORDPIECE_CLASSES,
    "AlbertTokenizer": _ALBERT,
    "BartTokenizer": _Pipeline(model=models.BPE, tokens=_ROBERTA_TOKENS, build=_build_byte_bpe),
    "CamembertTokenizer": _XLM_ROBERTA,
    "DebertaTokenizer": _Pipeline(model=models.BPE, tokens=_BERT_TOKENS, build=_build_byte_bpe),
    "DebertaV2Tokenizer": _DEBERTA_V2,
    "GPT2Tokenizer": _GPT2,
    "GemmaTokenizer": _GEMMA,
    "LlamaTokenizer": _LLAMA,
    "LongformerTokenizer": _Pipeline(model=models.BPE, tokens=_ROBERTA_TOKENS, build=_build_byte_bpe),
    "Qwen2Tokenizer": _QWEN2,
    "RobertaTokenizer": _Pipeline(model=models.BPE, tokens=_ROBERTA_TOKENS, build=_build_byte_bpe),
    "T5Tokenizer": _T5,
    "XLMRobertaTokenizer": _XLM_ROBERTA,
}
# Where the files name no class; architectures that are not here take tokenizer.json as it is.
_CLASS_OF_MODEL_TYPE = {
    "albert": "AlbertTokenizer",
    "bert": "BertTokenizer",
    "camembert": "CamembertTokenizer",
    "convbert": "BertTokenizer",
    "deberta": "DebertaTokenizer",
    "deberta-v2": "DebertaV2Tokenizer",
    "distilbert": "BertTokenizer",
    "electra": "BertTokenizer",
    "funnel": "FunnelTokenizer",
    "gemma": "GemmaTokenizer",
    "gemma2": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "gpt2": "GPT2Tokenizer",
    "gte": "XLMRobertaTokenizer",
    "jina_embeddings_v3": "XLMRobertaTokenizer",
    "layoutlm": "BertTokenizer",
    "longformer": "RobertaTokenizer",
    "megatron-bert": "BertTokenizer",
    "mobilebert": "BertTokenizer",
    "mpnet": "MPNetTokenizer",
    "mt5": "T5Tokenizer",
    "nezha": "BertTokenizer",
    "nomic_bert": "BertTokenizer",
    "phi": "GPT2Tokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen2_moe": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
    "qwen3_next": "Qwen2Tokenizer",
    "roberta": "RobertaTokenizer",
    "roberta-prelayernorm": "RobertaTokenizer",
    "squeezebert": "BertTokenizer",
    "t5": "T5Tokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "xmod": "XLMRobertaTokenizer",
}
# Architectures whose folders often name a wrong class; AutoTokenizer takes their tokenizer.json as it is.
_GENERIC_MODEL_TYPES = frozenset(
    {"modernbert", "nystromformer", "umt5", "xlm-roberta-xl"}
    | {"ernie4_5", "ernie4_5_moe", "jamba", "minicpm3", "minimax_m2", "ministral", "mistral", "mixtral", "nemotron"}
    | {"phi3", "phimoe"}
)
