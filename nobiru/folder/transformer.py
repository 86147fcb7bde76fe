"""The Transformer's own settings, `sentence_bert_config.json` and its older names.

Owns which settings are honoured, which cannot change a text's vector, and which are refused. Knows nothing of the
architecture: `nobiru.folder.architecture` reads `config.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nobiru.errors import ModelFolderError
from nobiru.folder.files import read_object, refuse_unknown, typed

_FILES = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
_MODEL_ARGUMENTS = ("model_args", "model_kwargs")
_TOKENIZER_ARGUMENTS = ("tokenizer_args", "processor_kwargs")
_CONFIG_ARGUMENTS = ("config_args", "config_kwargs")
# Choices of speed, memory and precision, which are ours to make, and a key that Sentence Transformers drops too.
# fmt: off
_HARMLESS = frozenset({
    "add_pooling_layer", "attn_implementation", "device_map", "dtype", "low_cpu_mem_usage", "padding_side",
    "torch_dtype", "trust_remote_code", "use_cache", "use_fast", "use_safetensors",
})
# fmt: on
# Settings that would change a text's vector when they are not null, empty or false.
_REFUSED = ("query_expansion", "query_length", "document_length", "tokenizer_name_or_path")
_FIELDS = frozenset(
    {
        "do_lower_case",
        "max_seq_length",
        "modality_config",
        "module_output_name",
        "processing_kwargs",
        "transformer_task",
        "unpad_inputs",
        *_MODEL_ARGUMENTS,
        *_TOKENIZER_ARGUMENTS,
        *_CONFIG_ARGUMENTS,
        *_REFUSED,
    }
)
_TEXT = {"method": "forward", "method_output_name": "last_hidden_state"}


@dataclass(frozen=True, kw_only=True)
class TransformerSettings:
    """`max_seq_length` in tokens, None when the tokenizer and the architecture decide."""

    max_seq_length: int | None = None
    lower_case: bool = False


def read_settings(path: Path) -> TransformerSettings:
    """The settings in the Transformer's folder; the defaults when there is no file or an empty one."""
    for name in _FILES:
        if fields := read_object(path / name, required=False):
            return _settings(fields, path / name)
    return TransformerSettings()


def _settings(fields: Mapping[str, Any], file: Path) -> TransformerSettings:
    refuse_unknown(fields, _FIELDS, file, "Transformer")
    task = fields.get("transformer_task") or "feature-extraction"
    if task != "feature-extraction":
        raise ModelFolderError(
            f"{file}: field 'transformer_task' is {task!r}; only 'feature-extraction' can be honoured"
        )
    output = fields.get("module_output_name") or "token_embeddings"
    if output != "token_embeddings":
        raise ModelFolderError(
            f"{file}: field 'module_output_name' is {output!r}; only 'token_embeddings' can be honoured"
        )
    modalities = typed(fields, "modality_config", dict, file, default={"text": _TEXT})
    if modalities != {"text": _TEXT}:
        raise ModelFolderError(
            f"{file}: field 'modality_config' is {modalities!r}; only texts can be served, by {{'text': {_TEXT!r}}}"
        )
    for name in _REFUSED:
        if fields.get(name) is not None:
            raise ModelFolderError(f"{file}: field {name!r} is {fields[name]!r}; it cannot be honoured, only null can")
    processing = typed(fields, "processing_kwargs", dict, file, default={})
    for name in ("text", "common"):
        if processing.get(name):
            raise ModelFolderError(
                f"{file}: field 'processing_kwargs.{name}' is {processing[name]!r}; it cannot be honoured"
            )
    limit = _arguments(fields, file).get("model_max_length", fields.get("max_seq_length"))
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ModelFolderError(f"{file}: field 'max_seq_length' is {limit!r}; a positive integer or null is expected")
    return TransformerSettings(
        max_seq_length=limit, lower_case=typed(fields, "do_lower_case", bool, file, default=False)
    )


def _arguments(fields: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """What is left of the keyword arguments for model, tokenizer and config once the harmless ones are gone."""
    left: dict[str, Any] = {}
    for group in (_MODEL_ARGUMENTS, _TOKENIZER_ARGUMENTS, _CONFIG_ARGUMENTS):
        allowed = _HARMLESS | {"model_max_length"} if group is _TOKENIZER_ARGUMENTS else _HARMLESS
        for name in group:
            for key, value in typed(fields, name, dict, file, default={}).items():
                if key not in allowed:
                    raise ModelFolderError(f"{file}: field '{name}.{key}' is {value!r}; it cannot be honoured")
                if key == "model_max_length":
                    left[key] = value
    return left
