"""Small architectures of `transformers` with random weights, and tokenizers trained on a few sentences, for tests.

Owns sizes, tokenizers of every kind, and a table of architectures. Weights are scaled so that attention and every layer
change the result; a mistake in one of them shows. Knows nothing of folders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
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


def randomize(model: torch.nn.Module) -> None:
    """Weights large enough that attention is far from uniform and no layer is near the identity."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0, 0.1)
            else:
                parameter.normal_(0.0, 0.5 if "embeddings" in name else 0.17)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1)


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
        randomize(model)
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
