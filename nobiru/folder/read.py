"""A model folder as a `ModelFolder`: what Sentence Transformers 6.2 would make of the same files, or a refusal; and
folders with a decoder that Sentence Transformers did not write, which are language models.

Owns the order in which the files are read and the limits and prompts that come of them together. Reads JSON only;
weights belong to `nobiru.models`, tokenizer files to `nobiru.frontend`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nobiru.errors import ConfigError, ModelFolderError
from nobiru.folder.architecture import Architecture, read_architecture
from nobiru.folder.files import read_object, typed
from nobiru.folder.language_model import read_generation
from nobiru.folder.modules import read_entries, read_modules
from nobiru.folder.spec import SIMILARITY_NAMES, GenerationSpec, ModelFolder, ModuleSpec, PoolingSpec
from nobiru.folder.transformer import TransformerSettings, read_settings

# Tokenizers without a limit say 10**30 instead.
_NO_LIMIT = 10**9


def read_folder(path: Path, *, max_model_len: int | None = None) -> ModelFolder:
    """Read the folder that Sentence Transformers or `save_pretrained` wrote.

    A decoder without `modules.json` is a language model. Any other folder without it is taken as Sentence Transformers
    takes it: mean pooling, no normalization, no prompts. `max_model_len` replaces the folder's own limit and raises
    `ConfigError` when the model cannot take so many tokens. Whatever cannot be honoured raises `ModelFolderError`,
    which names file and field.
    """
    if not path.is_dir():
        raise ModelFolderError(
            f"{path} is {'not a folder' if path.exists() else 'missing'}; a model folder is expected"
        )
    if not (path / "modules.json").exists():
        return _plain_folder(path, max_model_len)
    entries = read_entries(path)
    transformer_path = entries[0].path
    settings = read_settings(transformer_path)
    architecture = read_architecture(transformer_path)
    modules, embedding_dim = read_modules(entries[1:], architecture.hidden_size)
    if architecture.is_causal:
        _refuse_causal_pooling(modules, architecture, entries[1].path / "config.json")
    prompts = _prompts(read_object(file := path / "config_sentence_transformers.json", required=False), file)
    return _folder(path, transformer_path, settings, architecture, modules, embedding_dim, prompts, max_model_len)


def _plain_folder(path: Path, max_model_len: int | None) -> ModelFolder:
    if not (path / "config.json").exists():
        raise ModelFolderError(f"{path} holds neither modules.json nor config.json; a model folder has one of them")
    architecture = read_architecture(path)
    if architecture.is_causal:
        return _language_model(path, architecture, max_model_len)
    tokenizer_file = path / "tokenizer_config.json"
    if "chat_template" in read_object(tokenizer_file, required=False) or (path / "chat_template.jinja").exists():
        raise ModelFolderError(
            f"{tokenizer_file}: without modules.json, Sentence Transformers would put every text into the chat "
            "template, which cannot be honoured. Remove it, or save the model with SentenceTransformer.save_pretrained"
        )
    modules = (PoolingSpec(),)
    prompts = {"prompts": {"query": "", "document": ""}}
    settings = TransformerSettings()
    return _folder(path, path, settings, architecture, modules, architecture.hidden_size, prompts, max_model_len)


def _language_model(path: Path, architecture: Architecture, max_model_len: int | None) -> ModelFolder:
    if not architecture.has_language_model_head:
        raise ModelFolderError(
            f"{path / 'config.json'}: field 'architectures' begins with {architecture.class_name!r}, a decoder that "
            "predicts no tokens. Served are decoders with a language model's head (…ForCausalLM), and embedding models "
            "that Sentence Transformers saved (with modules.json)"
        )
    generation = read_generation(path, architecture.config)
    return _folder(path, path, TransformerSettings(), architecture, (), 0, {}, max_model_len, generation)


def _refuse_causal_pooling(modules: tuple[ModuleSpec, ...], architecture: Architecture, file: Path) -> None:
    """A long text runs in several steps, and only the last of them sees all of it."""
    pooling = modules[0]
    assert isinstance(pooling, PoolingSpec), "read_entries puts the pooling first"
    if pooling.modes != ("lasttoken",):
        raise ModelFolderError(
            f"{file}: the pooling is {'+'.join(pooling.modes)}, but the architecture {architecture.model_type!r} "
            "attends causally; of such models, vectors of the last token can be served ('lasttoken')"
        )


def _folder(
    path: Path,
    transformer_path: Path,
    settings: TransformerSettings,
    architecture: Architecture,
    modules: tuple[ModuleSpec, ...],
    embedding_dim: int,
    prompts: Mapping[str, Any],
    max_model_len: int | None,
    generation: GenerationSpec | None = None,
) -> ModelFolder:
    return ModelFolder(
        path=path,
        transformer_path=transformer_path,
        config=architecture.config,
        model_type=architecture.model_type,
        modules=modules,
        max_model_len=_max_model_len(
            transformer_path, settings, architecture, max_model_len, generates=generation is not None
        ),
        hidden_size=architecture.hidden_size,
        embedding_dim=embedding_dim,
        vocab_size=architecture.vocab_size,
        lower_case=settings.lower_case,
        is_causal=architecture.is_causal,
        task="embed" if generation is None else "generate",
        generation=generation,
        **prompts,
    )


def _max_model_len(
    path: Path,
    settings: TransformerSettings,
    architecture: Architecture,
    explicit: int | None,
    *,
    generates: bool = False,
) -> int:
    """`explicit`, else the folder's limit; never more than the model has positions for.

    A language model takes as many tokens as it has positions, or as the tokenizer says if that is less. Sentence
    Transformers takes `max_seq_length` as it is, otherwise the smaller of the tokenizer's limit and
    `max_position_embeddings`; both may be more than RoBERTa's positions, which begin behind the padding index.
    """
    file = path / "tokenizer_config.json"
    limits = [settings.max_seq_length]
    if settings.max_seq_length is None:
        limits = [_tokenizer_limit(file), None if generates else architecture.max_position_embeddings]
    known = [limit for limit in (*limits, architecture.num_positions) if limit is not None]
    if explicit is not None:
        most = architecture.num_positions
        if most is None and known:
            most = max(*known, architecture.max_position_embeddings or 0)
        if most is not None and explicit > most:
            raise ConfigError(
                f"max_model_len is {explicit}, but {path} is a model of {most} positions; choose at most {most}",
                param="max_model_len",
            )
        return explicit
    if not known:
        raise ModelFolderError(
            f"{file}: field 'model_max_length' is missing, and the model sets no limit; give one as max_model_len"
        )
    return min(known)


def _tokenizer_limit(file: Path) -> int | None:
    fields = read_object(file, required=False)
    limit = fields.get("model_max_length", fields.get("max_len"))
    if limit is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, int | float) or limit < 1:
        raise ModelFolderError(f"{file}: field 'model_max_length' is {limit!r}; a positive integer is expected")
    return int(limit) if limit <= _NO_LIMIT else None


def _prompts(fields: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Prompts, default prompt and similarity; refuses what would change vectors and cannot be honoured."""
    model_type = typed(fields, "model_type", str, file, default="SentenceTransformer")
    if model_type != "SentenceTransformer":
        raise ModelFolderError(
            f"{file}: field 'model_type' is {model_type!r}; only 'SentenceTransformer' can be served"
        )
    if (size := fields.get("truncate_dim")) is not None:
        raise ModelFolderError(
            f"{file}: field 'truncate_dim' is {size!r}, which cannot be honoured. Remove it, and ask for "
            f"dimensions={size!r} instead (the shortened vectors are then normalized)"
        )
    prompts = {"query": "", "document": ""}  # Sentence Transformers knows these names in every model
    for name, prompt in typed(fields, "prompts", dict, file, default={}).items():
        if prompt is not None and not isinstance(prompt, str):
            raise ModelFolderError(f"{file}: field 'prompts.{name}' is {prompt!r}; a string is expected")
        prompts[name] = prompt or ""
    default = fields.get("default_prompt_name")
    if default is not None and not (isinstance(default, str) and default in prompts):
        raise ModelFolderError(
            f"{file}: field 'default_prompt_name' is {default!r}, which is none of the prompts {', '.join(prompts)}"
        )
    similarity = typed(fields, "similarity_fn_name", str, file, default="cosine")
    if similarity not in SIMILARITY_NAMES:
        raise ModelFolderError(
            f"{file}: field 'similarity_fn_name' is {similarity!r}; one of {', '.join(SIMILARITY_NAMES)} is expected"
        )
    return {"prompts": prompts, "default_prompt_name": default, "similarity": similarity}
