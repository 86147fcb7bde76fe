"""Small random models in the layouts that real folders have, for tests.

Owns a table of recipes: an architecture of `transformers` with random weights, a tokenizer trained here on a few
sentences, and, for embedding models, the modules of Sentence Transformers behind it. Weights are scaled so that
attention, every layer and every module change the result; a mistake in one of them shows. Knows nothing of nobiru.

    python -m tests.small_models DEST [NAME ...]
"""

from __future__ import annotations

import argparse
import json
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, LayerNorm, Normalize, Pooling, Transformer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

HIDDEN_SIZE = 64
MAX_LENGTH = 96
# Of language models.
MAX_CONTEXT = 256

SENTENCES = (
    "The quick brown fox jumps over the lazy dog while the cat sleeps in the sun.",
    "Stock markets fell sharply on Tuesday after the central bank raised its interest rate.",
    "A new telescope has taken the first picture of a planet around another star.",
    "The recipe needs two cups of flour, three eggs, a little salt and warm water.",
    "Scientists report that the glacier lost more ice this summer than ever before.",
    "How do I reset my password if I no longer have access to my e-mail account?",
    "Der Zug nach Hamburg hat heute wegen eines Sturms eine Stunde Verspätung.",
    "El equipo ganó el partido en el último minuto con un gol de cabeza.",
    "Le musée ouvre à neuf heures et ferme à dix-huit heures, sauf le lundi.",
    "Поезд прибывает на второй путь через пять минут, будьте осторожны.",
    "日本語の文章も少しだけ含まれています。電車は駅に着きました。",
    "The committee will publish its decision next week, said a spokesman for the ministry.",
    "Version 2.4.1 fixes 17 bugs; see https://example.org/notes for the full list.",
    "She walked along the river, past the old mill, and thought about the letter.",
)

POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


# --- tokenizers ---------------------------------------------------------------------------------------------------


def _wrap(tokenizer: Tokenizer, tokens: dict[str, str]) -> PreTrainedTokenizerFast:
    first, last = tokens["cls_token"], tokens["sep_token"]
    ids = {token: tokenizer.token_to_id(token) for token in (first, last)}
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", pair=f"{first} $A {last} $B:1 {last}:1", special_tokens=list(ids.items())
    )
    wrapped: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, model_max_length=MAX_LENGTH, **tokens
    )
    return wrapped


def wordpiece() -> PreTrainedTokenizerFast:
    """As BERT has it: lower case, accents stripped, [CLS] … [SEP]."""
    tokens = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    tokens["mask_token"] = "[MASK]"
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return _wrap(tokenizer, tokens)


def unigram() -> PreTrainedTokenizerFast:
    """As XLM-RoBERTa has it: pieces with ▁, <s> … </s>, padding id 1."""
    tokens = {"unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>"}
    tokens |= {"mask_token": "<mask>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return _wrap(tokenizer, tokens)


def byte_bpe() -> PreTrainedTokenizerFast:
    """As RoBERTa has it: byte-level BPE, <s> … </s>, padding id 1."""
    tokens = {"unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>"}
    tokens |= {"mask_token": "<mask>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return _wrap(tokenizer, tokens)


CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ "<|im_start|>" + message["role"] + "\\n" + message["content"] + "<|im_end|>\\n" }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ "<|im_start|>assistant\\n" }}
{%- endif -%}"""


def _decoder_bpe(tokens: dict[str, str], template: str | None, **options: Any) -> PreTrainedTokenizerFast:
    """Byte-level BPE with what decoders put around a text, which `template` says."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = list(dict.fromkeys(tokens.values()))
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    if template is not None:
        ids = [(token, tokenizer.token_to_id(token)) for token in special if token in template]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    wrapped: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, model_max_length=MAX_CONTEXT, **(tokens | options)
    )
    return wrapped


def llama_bpe() -> PreTrainedTokenizerFast:
    """As Llama has it: <s> in front, and no chat template."""
    return _decoder_bpe({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}, "<s> $A")


def chat_bpe() -> PreTrainedTokenizerFast:
    """As Qwen has it: nothing around a text, and a chat template."""
    tokens = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": "<|im_start|>"}
    return _decoder_bpe(tokens, None, chat_template=CHAT_TEMPLATE)


def embedding_bpe() -> PreTrainedTokenizerFast:
    """As Qwen3-Embedding has it: the token whose state is the vector behind a text, padding in front."""
    tokens = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return _decoder_bpe(tokens, "$A <|endoftext|>", padding_side="left")


# --- architectures --------------------------------------------------------------------------------------------------


def _randomize(model: torch.nn.Module) -> None:
    """Weights large enough that attention is far from uniform and no layer is near the identity."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0, 0.1)
            else:
                parameter.normal_(0.0, 0.5 if "embeddings" in name else 0.17)


def _config(class_name: str, tokenizer: PreTrainedTokenizerFast, **changes: Any) -> Any:
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN_SIZE,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 112,
        "max_position_embeddings": MAX_LENGTH + 2,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "sep_token_id": tokenizer.sep_token_id,
        "cls_token_id": tokenizer.cls_token_id,
    }
    return getattr(transformers, class_name)(**(common | changes))


@dataclass(frozen=True)
class Encoder:
    """An architecture: config class, model class, tokenizer, and what differs from the common sizes.

    `generation` are fields of `generation_config.json`.
    """

    config: str
    model: str
    tokenizer: Callable[[], PreTrainedTokenizerFast]
    changes: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)

    def build(self) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
        tokenizer = self.tokenizer()
        model = getattr(transformers, self.model)(_config(self.config, tokenizer, **self.changes))
        _randomize(model)
        for name, value in self.generation.items():
            setattr(model.generation_config, name, value)
        return model.eval(), tokenizer


def _decoder(family: str, changes: dict[str, Any] | None = None, **options: Any) -> Encoder:
    """A decoder with its language model's head, grouped heads, and a longer context than the encoders have."""
    common = {"max_position_embeddings": MAX_CONTEXT, "num_key_value_heads": 2, "tie_word_embeddings": False}
    names = {"config": f"{family}Config", "model": f"{family}ForCausalLM", "tokenizer": llama_bpe}
    return Encoder(**(names | options), changes=common | (changes or {}))


BERT = Encoder("BertConfig", "BertModel", wordpiece)
BERT_MLM = Encoder("BertConfig", "BertForMaskedLM", wordpiece, {"hidden_act": "gelu_new", "num_attention_heads": 2})
BERT_RELU = Encoder("BertConfig", "BertModel", wordpiece, {"hidden_act": "relu", "num_attention_heads": 1})
ROBERTA = Encoder("RobertaConfig", "RobertaModel", byte_bpe, {"type_vocab_size": 1, "layer_norm_eps": 1e-5})
XLM_ROBERTA = Encoder("XLMRobertaConfig", "XLMRobertaModel", unigram, {"type_vocab_size": 1, "layer_norm_eps": 1e-5})
CAMEMBERT = Encoder("CamembertConfig", "CamembertModel", unigram, {"type_vocab_size": 1})
DISTILBERT = Encoder(
    "DistilBertConfig",
    "DistilBertModel",
    wordpiece,
    {"dim": HIDDEN_SIZE, "hidden_dim": 112, "n_layers": 3, "n_heads": 4},
)
MPNET = Encoder("MPNetConfig", "MPNetModel", unigram, {"relative_attention_num_buckets": 32, "layer_norm_eps": 1e-5})
# Local attention of ±4 tokens in two layers of three, so that it matters for short texts.
MODERNBERT = Encoder("ModernBertConfig", "ModernBertModel", wordpiece, {"local_attention": 8})
NOMIC_BERT = Encoder("NomicBertConfig", "NomicBertModel", wordpiece)
ELECTRA = Encoder("ElectraConfig", "ElectraModel", wordpiece, {"embedding_size": 32})
ALBERT = Encoder("AlbertConfig", "AlbertModel", unigram, {"embedding_size": 32, "num_hidden_groups": 1})
DEBERTA = Encoder(
    "DebertaV2Config",
    "DebertaV2Model",
    unigram,
    {
        "relative_attention": True,
        "position_buckets": 16,
        "pos_att_type": ["p2c", "c2p"],
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "position_biased_input": False,
        "type_vocab_size": 0,
    },
)


def _rope(rope_type: str, max_position_embeddings: int = MAX_CONTEXT, **numbers: Any) -> Encoder:
    rope = {"rope_type": rope_type, "rope_theta": 500.0, **numbers}
    return _decoder("Llama", {"rope_parameters": rope, "max_position_embeddings": max_position_embeddings})


LLAMA = _decoder("Llama", {"tie_word_embeddings": True})
LLAMA_BIASES = _decoder("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "num_key_value_heads": 4})
LLAMA3_NUMBERS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN_MSCALE = {"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False, "beta_fast": 16.0}
LONGROPE_NUMBERS = {"short_factor": [1.0 + i / 4 for i in range(8)], "long_factor": [4.0 + i for i in range(8)]}
ROPES: dict[str, Encoder] = {
    "llama3": _rope("llama3", original_max_position_embeddings=64, **LLAMA3_NUMBERS),
    "linear": _rope("linear", MAX_CONTEXT // 2, factor=2.0),
    "yarn": _rope("yarn", factor=4.0, original_max_position_embeddings=64),
    "yarn-mscale": _rope("yarn", original_max_position_embeddings=64, **YARN_MSCALE),
    "yarn-factor": _rope("yarn", MAX_CONTEXT // 4, factor=4.0, attention_factor=1.5),
    "dynamic": _rope("dynamic", factor=4.0),
    "longrope": _rope("longrope", original_max_position_embeddings=64, **LONGROPE_NUMBERS),
}
# Windows that matter for short texts, in all layers or in some.
MISTRAL = _decoder("Mistral", {"sliding_window": 20})
QWEN2 = _decoder(
    "Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}, tokenizer=chat_bpe
)
QWEN3 = _decoder(
    "Qwen3",
    {"head_dim": 24, "tie_word_embeddings": True},
    tokenizer=chat_bpe,
    generation={"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [0, 1]},
)
QWEN3_BIAS = _decoder("Qwen3", {"head_dim": 24, "attention_bias": True, "num_key_value_heads": 1})
QWEN3_EMBEDDING = _decoder("Qwen3", {"head_dim": 24}, model="Qwen3Model", tokenizer=embedding_bpe)
MIXTRAL = _decoder("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None})
GEMMA = _decoder("Gemma", {"head_dim": 24, "num_key_value_heads": 1, "tie_word_embeddings": True})
# Every other layer has a window; scores and logits are capped.
GEMMA2 = _decoder(
    "Gemma2",
    {
        "head_dim": 24,
        "query_pre_attn_scalar": 16,
        "sliding_window": 20,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
    },
)
GEMMA3 = _decoder(
    "Gemma3",
    {"head_dim": 24, "sliding_window": 20, "sliding_window_pattern": 2, "tie_word_embeddings": True},
    config="Gemma3TextConfig",
)
GEMMA_EMBEDDING = _decoder("Gemma", {"head_dim": 24}, model="GemmaModel", tokenizer=embedding_bpe)
PHI3 = _decoder("Phi3", {"pad_token_id": 1, "sliding_window": 20})
GRANITE = _decoder("Granite", {"logits_scaling": 2.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7})
GPT2 = Encoder(
    "GPT2Config",
    "GPT2LMHeadModel",
    llama_bpe,
    {
        "n_embd": HIDDEN_SIZE,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": MAX_CONTEXT,
        "max_position_embeddings": MAX_CONTEXT,
    },
)
OPT = _decoder("OPT", {"ffn_dim": 112, "word_embed_proj_dim": HIDDEN_SIZE, "do_layer_norm_before": True})
GPT_NEOX = _decoder("GPTNeoX", {"rotary_pct": 0.5})


# --- recipes ------------------------------------------------------------------------------------------------------

Modules = Callable[[], list[torch.nn.Module]]


def _pooling(*modes: str, **options: Any) -> torch.nn.Module:
    pooling: torch.nn.Module = Pooling(HIDDEN_SIZE, pooling_mode=modes, **options)
    return pooling


def _random(module: torch.nn.Module) -> torch.nn.Module:
    _randomize(module)
    return module


def _mean_normalize() -> list[torch.nn.Module]:
    return [_pooling("mean"), Normalize()]


def _dense_tanh() -> list[torch.nn.Module]:
    return [_pooling("mean"), _random(Dense(HIDDEN_SIZE, 48)), Normalize()]


def _dense_identity_residual() -> list[torch.nn.Module]:
    dense = Dense(HIDDEN_SIZE, HIDDEN_SIZE, bias=False, activation_function=torch.nn.Identity(), use_residual=True)
    return [_pooling("cls"), _random(dense)]


def _dense_chain() -> list[torch.nn.Module]:
    wide = Dense(2 * HIDDEN_SIZE, 96, activation_function=torch.nn.GELU(), use_residual=True)
    narrow = Dense(96, 40, activation_function=torch.nn.Identity())
    return [_pooling("cls", "mean"), _random(wide), _random(narrow), Normalize()]


def _layer_norm() -> list[torch.nn.Module]:
    return [_pooling("mean"), _random(LayerNorm(HIDDEN_SIZE)), Normalize()]


def _last_token() -> list[torch.nn.Module]:
    return [_pooling("lasttoken"), Normalize()]


def _pool_only(*modes: str, **options: Any) -> Modules:
    return lambda: [_pooling(*modes, **options)]


@dataclass(frozen=True)
class Recipe:
    """One folder: encoder, modules behind it, options of the Sentence Transformers model, and a last change on disk."""

    encoder: Encoder = BERT
    modules: Modules = _mean_normalize
    options: dict[str, Any] = field(default_factory=dict)
    max_seq_length: int = MAX_LENGTH
    finish: Callable[[Path], None] | None = None
    plain: bool = False


def _shard(folder: Path) -> None:
    """Split the weights into three files with an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for part in range(3):
        file_name = f"model-{part + 1:05}-of-00003.safetensors"
        chosen = names[part::3]
        save_file({name: tensors[name] for name in chosen}, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(chosen, file_name)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _to_transformers_4(folder: Path) -> None:
    """A decoder's folder as transformers 4 wrote it: `rope_scaling` beside `rope_theta`, and buffers of frequencies."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type" if name == "rope_type" else name: value for name, value in rope.items()}
    path.write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(folder / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _to_bin(folder: Path) -> None:
    """`pytorch_model.bin` instead of safetensors, in every module."""
    for path in sorted(folder.rglob("model.safetensors")):
        torch.save(load_file(path), path.with_name("pytorch_model.bin"))
        path.unlink()


def _to_sharded_bin(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for part in range(2):
        file_name = f"pytorch_model-{part + 1:05}-of-00002.bin"
        chosen = sorted(tensors)[part::2]
        torch.save({name: tensors[name] for name in chosen}, folder / file_name)
        weight_map |= dict.fromkeys(chosen, file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")


def _to_gamma_beta(folder: Path) -> None:
    """LayerNorm weights under the names that TensorFlow checkpoints had, with the `bert.` prefix."""
    old_names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for new, old in old_names.items():
            name = name.replace(new, old)
        tensors["bert." + name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _to_legacy(folder: Path) -> None:
    """The spelling that Sentence Transformers 2 wrote: class names, pooling flags, `word_embedding_dimension`."""
    path = folder / "modules.json"
    modules = json.loads(path.read_text(encoding="utf-8"))
    for module in modules:
        class_name = module["type"].rpartition(".")[2]
        module["type"] = f"sentence_transformers.models.{class_name}"
        if class_name == "Pooling":
            config_path = folder / module["path"] / "config.json"
            mode = json.loads(config_path.read_text(encoding="utf-8"))["pooling_mode"]
            flags = {
                f"pooling_mode_{known}": known.removesuffix("_tokens").removesuffix("_token") == mode
                for known in ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
            }
            config = {"word_embedding_dimension": HIDDEN_SIZE, **flags}
            config_path.write_text(json.dumps(config), encoding="utf-8")
    path.write_text(json.dumps(modules), encoding="utf-8")


PROMPTS = {
    "prompts": {"query": "the query: ", "document": "a longer prompt for the document: "},
    "default_prompt_name": "document",
}

EMBEDDERS: dict[str, Recipe] = {
    "bert-mean-normalize": Recipe(),
    **{f"bert-{mode.replace('_', '-')}": Recipe(modules=_pool_only(mode)) for mode in POOLING_MODES},
    "bert-cls-max-mean": Recipe(modules=_pool_only("cls", "max", "mean")),
    "bert-all-modes": Recipe(modules=_pool_only(*POOLING_MODES)),
    "bert-relu-one-head": Recipe(encoder=BERT_RELU),
    "bert-dense-tanh": Recipe(modules=_dense_tanh),
    "bert-dense-identity-residual": Recipe(modules=_dense_identity_residual),
    "bert-dense-chain": Recipe(modules=_dense_chain),
    "bert-layernorm": Recipe(modules=_layer_norm),
    "bert-prompts": Recipe(modules=lambda: [_pooling("mean", include_prompt=False), Normalize()], options=PROMPTS),
    "bert-prompts-all-modes": Recipe(modules=_pool_only(*POOLING_MODES, include_prompt=False), options=PROMPTS),
    "bert-short-limit": Recipe(max_seq_length=16),
    "bert-sharded": Recipe(finish=_shard),
    "bert-bin": Recipe(modules=_dense_tanh, finish=_to_bin),
    "bert-sharded-bin": Recipe(finish=_to_sharded_bin),
    "bert-gamma-beta": Recipe(finish=_to_gamma_beta),
    "bert-legacy-modules": Recipe(finish=_to_legacy),
    "bert-plain": Recipe(plain=True),
    "bert-mlm-heads": Recipe(encoder=BERT_MLM, plain=True),
    "roberta": Recipe(encoder=ROBERTA),
    "xlm-roberta": Recipe(encoder=XLM_ROBERTA),
    "camembert": Recipe(encoder=CAMEMBERT, modules=_pool_only("mean")),
    "distilbert": Recipe(encoder=DISTILBERT),
    "mpnet": Recipe(encoder=MPNET),
    "modernbert": Recipe(encoder=MODERNBERT, modules=lambda: [_pooling("cls"), Normalize()]),
    "nomic-bert": Recipe(encoder=NOMIC_BERT),
    "electra": Recipe(encoder=ELECTRA),
    "albert": Recipe(encoder=ALBERT),
    "deberta-v2": Recipe(encoder=DEBERTA),
}

LANGUAGE_MODELS: dict[str, Recipe] = {
    "llama": Recipe(encoder=LLAMA, plain=True),
    "llama-biases": Recipe(encoder=LLAMA_BIASES, plain=True),
    **{f"llama-{name}": Recipe(encoder=encoder, plain=True) for name, encoder in ROPES.items()},
    "llama-sharded": Recipe(encoder=LLAMA_BIASES, plain=True, finish=_shard),
    "llama-transformers-4": Recipe(encoder=ROPES["yarn"], plain=True, finish=_to_transformers_4),
    "mistral": Recipe(encoder=MISTRAL, plain=True),
    "qwen2": Recipe(encoder=QWEN2, plain=True),
    "qwen3": Recipe(encoder=QWEN3, plain=True),
    "qwen3-bias": Recipe(encoder=QWEN3_BIAS, plain=True),
    "mixtral": Recipe(encoder=MIXTRAL, plain=True),
    "gemma": Recipe(encoder=GEMMA, plain=True),
    "gemma2": Recipe(encoder=GEMMA2, plain=True),
    "gemma3": Recipe(encoder=GEMMA3, plain=True),
    "phi3": Recipe(encoder=PHI3, plain=True),
    "granite": Recipe(encoder=GRANITE, plain=True),
    "gpt2": Recipe(encoder=GPT2, plain=True),
    "gpt-neox": Recipe(encoder=GPT_NEOX, plain=True),
    "opt": Recipe(encoder=OPT, plain=True),
}

INSTRUCTION = {"prompts": {"query": "Instruct: find what answers it\nQuery:", "document": ""}}

CAUSAL_EMBEDDERS: dict[str, Recipe] = {
    "qwen3-embedding": Recipe(encoder=QWEN3_EMBEDDING, modules=_last_token, options=INSTRUCTION),
    "gemma-embedding": Recipe(encoder=GEMMA_EMBEDDING, modules=_last_token),
}

RECIPES = EMBEDDERS | LANGUAGE_MODELS | CAUSAL_EMBEDDERS
NAMES: tuple[str, ...] = tuple(EMBEDDERS)


@contextmanager
def _seeded(name: str) -> Iterator[None]:
    """The same weights for the same name, without touching the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(name.encode()))
        yield


def make(name: str, dest: Path) -> Path:
    """Write the model `name` into the folder `dest / name` (replaced if there) and return that folder."""
    recipe = RECIPES[name]
    folder, scratch = dest / name, dest / f"{name}.tmp"
    for path in (folder, scratch):
        shutil.rmtree(path, ignore_errors=True)
    with _seeded(name):
        model, tokenizer = recipe.encoder.build()
        target = folder if recipe.plain else scratch
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        if not recipe.plain:
            first = Transformer(str(scratch), max_seq_length=recipe.max_seq_length)
            SentenceTransformer(modules=[first, *recipe.modules()], device="cpu", **recipe.options).save(
                str(folder), create_model_card=False
            )
            shutil.rmtree(scratch)
    if recipe.finish is not None:
        recipe.finish(folder)
    return folder


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.small_models", description=__doc__.split("\n")[0])
    parser.add_argument("dest", type=Path, help="folder to write the models into")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(RECIPES)} (default: all)")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(RECIPES)):
        parser.error(f"unknown model {', '.join(unknown)}; choose from {', '.join(RECIPES)}")
    options.dest.mkdir(parents=True, exist_ok=True)
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    for name in options.names or RECIPES:
        print(make(name, options.dest))


if __name__ == "__main__":
    main()
