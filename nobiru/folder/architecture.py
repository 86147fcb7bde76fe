"""What `config.json` says about the model: its sizes, how many positions it has, whether it attends causally, and
whether it can be served at all.

Owns the names that architectures use for the same number. Imports nothing of transformers: whether an installed
version knows an architecture is answered by looking for its folder.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nobiru.errors import ModelFolderError
from nobiru.folder.files import read_object, typed
from nobiru.folder.rope import num_rotary_positions, read_rope

_HIDDEN_SIZE_NAMES = ("hidden_size", "dim", "d_model", "n_embd", "emb_dim")
_VOCAB_SIZE_NAMES = ("vocab_size", "n_words", "n_token")
_POSITIONS_NAMES = ("max_position_embeddings", "n_positions")
# Further names for the length that a decoder was trained for; some of them have no position table.
_DECODER_POSITIONS_NAMES = ("max_seq_len", "seq_length", "max_sequence_length", "n_ctx")
# Absolute positions that start behind the padding index, as RoBERTa has them.
# fmt: off
_OFFSET_POSITIONS = frozenset({
    "camembert", "data2vec-text", "ibert", "lilt", "longformer", "luke", "mpnet", "roberta",
    "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
})
# fmt: on
_DEFAULT_PADDING_INDEX = 1
_FIXED_PADDING_INDEX = frozenset({"mpnet"})  # whatever pad_token_id says
_DEFAULT_POSITIONS = dict.fromkeys(("bert", "camembert", "distilbert", "mpnet", "roberta", "xlm-roberta"), 512)
# One of these keys, or position_embedding_type, tells positions that are computed and not looked up in a table.
# fmt: off
_COMPUTED_POSITION_KEYS = frozenset({
    "alibi_starting_size", "global_rope_theta", "rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base",
    "rotary_emb_fraction",
})
# fmt: on
_COMPUTED_POSITION_TYPES = frozenset({"alibi", "rope", "rotary"})
_RELATIVE_POSITIONS = frozenset({"longt5", "mt5", "switch_transformers", "t5", "umt5", "xlnet"})
# Their max_position_embeddings includes the factor of rope_scaling, whatever its kind.
_ALREADY_SCALED = ("gemma3",)
# Families whose models are decoders, whatever class a folder names; others say so by `is_decoder` or by their class.
# fmt: off
_DECODERS = frozenset({
    "apertus", "arcee", "baichuan", "biogpt", "bitnet", "bloom", "codegen", "cohere", "cohere2", "cwm", "dbrx",
    "deepseek_v2", "deepseek_v3", "diffllama", "doge", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "falcon",
    "flex_olmo", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neo",
    "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe", "granitemoeshared", "helium", "hunyuan_v1_dense",
    "hunyuan_v1_moe", "jetmoe", "lfm2", "llama", "llama4_text", "mamba", "mamba2", "minimax", "ministral",
    "ministral3", "mistral", "mixtral", "modernbert-decoder", "mpt", "nanochat", "nemotron", "olmo", "olmo2", "olmo3",
    "olmoe", "openai-gpt", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "qwen3_next", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma", "xglm",
})
_HEADS = ("ForCausalLM", "LMHeadModel")
# fmt: on


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """`max_position_embeddings` is the config's number, `num_positions` how many tokens the model can take.

    Both are None where there is no such number; an encoder with rotary or relative positions has no end. `is_causal`
    says that a token attends to those before it only. `class_name` is the model class that the folder was saved from,
    empty when it does not say.
    """

    config: Mapping[str, Any]
    model_type: str
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int | None
    num_positions: int | None
    is_causal: bool = False
    class_name: str = ""

    @property
    def has_language_model_head(self) -> bool:
        """Whether the folder's class predicts tokens; one that names no class is taken to."""
        return not self.class_name or self.class_name.endswith(_HEADS)


def read_architecture(path: Path) -> Architecture:
    """The model in the Transformer's folder `path`; refuses adapters and remote code."""
    if (adapter := path / "adapter_config.json").exists():
        raise ModelFolderError(
            f"{adapter} makes this an adapter, which cannot be served by itself. Merge it into its base model first: "
            "model.transformers_model.merge_and_unload() and model.save_pretrained(FOLDER)"
        )
    file = path / "config.json"
    config = read_object(file)
    model_type = typed(config, "model_type", str, file)
    _refuse_remote_code(config, model_type, file)
    if isinstance(config.get("text_config"), dict) and config.get("hidden_size") is None:
        raise ModelFolderError(
            f"{file}: field 'text_config' says that {model_type!r} is a model of more than text, such as images; only "
            "texts can be served"
        )
    architectures = config.get("architectures") or [""]
    class_name = str(architectures[0]) if isinstance(architectures, list) else ""
    is_causal = _is_causal(config, model_type, class_name)
    positions = _number(config, _POSITIONS_NAMES + (_DECODER_POSITIONS_NAMES if is_causal else ()), file)
    if positions is None:
        positions = _DEFAULT_POSITIONS.get(model_type)
    return Architecture(
        config=config,
        model_type=model_type,
        hidden_size=_required(config, _HIDDEN_SIZE_NAMES, file),
        vocab_size=_required(config, _VOCAB_SIZE_NAMES, file),
        max_position_embeddings=positions,
        num_positions=_num_positions(config, model_type, positions, file, is_causal=is_causal),
        is_causal=is_causal,
        class_name=class_name,
    )


def _num_positions(
    config: Mapping[str, Any], model_type: str, positions: int | None, file: Path, *, is_causal: bool
) -> int | None:
    if positions is None or model_type in _RELATIVE_POSITIONS:
        return None
    if any(config.get(key) is not None for key in _COMPUTED_POSITION_KEYS):
        if not is_causal:
            return None
        if model_type.startswith(_ALREADY_SCALED):
            return positions
        return num_rotary_positions(read_rope(config, file, max_position_embeddings=positions), positions)
    if config.get("position_embedding_type") in _COMPUTED_POSITION_TYPES:
        return None
    if model_type in {"deberta", "deberta-v2"} and config.get("position_biased_input") is False:
        return None
    if model_type not in _OFFSET_POSITIONS:
        return positions
    padding_index = config.get("pad_token_id")
    if not isinstance(padding_index, int) or model_type in _FIXED_PADDING_INDEX:
        padding_index = _DEFAULT_PADDING_INDEX
    return positions - padding_index - 1


def _refuse_remote_code(config: Mapping[str, Any], model_type: str, file: Path) -> None:
    """Code in the folder (`auto_map`) is not needed for an architecture that transformers knows by now."""
    if config.get("auto_map") and not _known_to_transformers(model_type):
        raise ModelFolderError(
            f"{file}: field 'auto_map' says that the architecture {model_type!r} needs code from the model's folder. "
            "nobiru runs no code from model folders, and the installed transformers has no such architecture"
        )


def _known_to_transformers(model_type: str) -> bool:
    package = importlib.util.find_spec("transformers")
    places = package.submodule_search_locations if package is not None else None
    module_name = model_type.replace("-", "_")
    return module_name.isidentifier() and any((Path(place) / "models" / module_name).is_dir() for place in places or ())


def _is_causal(config: Mapping[str, Any], model_type: str, class_name: str) -> bool:
    if config.get("use_bidirectional_attention") is True or config.get("is_causal") is False:
        return False
    return config.get("is_decoder") is True or model_type in _DECODERS or class_name.endswith(_HEADS)


def _required(config: Mapping[str, Any], names: tuple[str, ...], file: Path) -> int:
    number = _number(config, names, file)
    if number is None:
        raise ModelFolderError(f"{file}: field {names[0]!r} is missing")
    return number


def _number(config: Mapping[str, Any], names: tuple[str, ...], file: Path) -> int | None:
    """The first of `names` that is set; -1 says that there is no limit (XLNet)."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
            raise ModelFolderError(f"{file}: field {name!r} is {value!r}; a positive integer is expected")
        return None if value == -1 else value
    return None
