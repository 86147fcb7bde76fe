"""What a language model's folder says about generating text: where texts end, how they are sampled, how chats look.

Owns `generation_config.json` and the parts of the tokenizer's files that are not about tokenization. Follows
`transformers` for which file wins, and vLLM for what becomes a default of a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nobiru.errors import ModelFolderError
from nobiru.folder.files import read_object
from nobiru.folder.spec import GenerationSpec

# The least and the most that a request may ask for, see `nobiru.generation.SamplingParams`.
_SAMPLING_FIELDS = {
    "temperature": (0.0, 100.0),
    "top_k": (-1, 2**31),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-9, 100.0),
}
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_generation(path: Path, config: Mapping[str, Any]) -> GenerationSpec:
    """The language model in `path`, whose `config.json` is `config`; `ModelFolderError` names file and field."""
    file = path / "generation_config.json"
    fields = read_object(file, required=False)
    eos_token_ids = _token_ids(fields, file) or _token_ids(config, path / "config.json")
    tokenizer_file = path / "tokenizer_config.json"
    tokenizer = read_object(tokenizer_file, required=False)
    return GenerationSpec(
        eos_token_ids=eos_token_ids,
        sampling_defaults=_sampling_defaults(fields, file),
        chat_template=_chat_template(path / "chat_template.jinja", tokenizer, tokenizer_file),
        special_tokens=_special_tokens(tokenizer, read_object(path / "special_tokens_map.json", required=False)),
    )


def _token_ids(fields: Mapping[str, Any], file: Path) -> tuple[int, ...]:
    """`eos_token_id`, an id or a list of them."""
    value = fields.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0 for token_id in ids):
        raise ModelFolderError(f"{file}: field 'eos_token_id' is {value!r}; a token id or a list of them is expected")
    return tuple(dict.fromkeys(ids))


def _sampling_defaults(fields: Mapping[str, Any], file: Path) -> dict[str, float]:
    """The fields that are set, whatever `do_sample` says.

    `transformers` ignores them unless `do_sample` is true, because its own default is greedy. A request's default is to
    sample at temperature 1, so the folder's numbers are the better ones even where it leaves `do_sample` out; vLLM
    takes them in the same way.
    """
    defaults: dict[str, float] = {}
    for name, (least, most) in _SAMPLING_FIELDS.items():
        value = fields.get(name)
        if value is None:
            continue
        kinds = int if name == "top_k" else int | float
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
            raise ModelFolderError(f"{file}: field {name!r} is {value!r}; it must be from {least:g} to {most:g}")
        defaults[name] = value
    return defaults


def _chat_template(file: Path, tokenizer: Mapping[str, Any], tokenizer_file: Path) -> str | None:
    """The template in a file of its own, else the tokenizer's, of several the one named "default"."""
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFolderError(f"{file} cannot be read: {error}") from error
    template = tokenizer.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelFolderError(
            f"{tokenizer_file}: field 'chat_template' is {template!r}; a string is expected, or a list of objects with "
            "name and template"
        )
    return template


def _special_tokens(tokenizer: Mapping[str, Any], older: Mapping[str, Any]) -> dict[str, str]:
    """The tokens' texts; `older` is where they stood before `tokenizer_config.json` had them."""
    texts = {}
    for name in _SPECIAL_TOKENS:
        token = tokenizer[name] if name in tokenizer else older.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            texts[name] = text
    return texts
