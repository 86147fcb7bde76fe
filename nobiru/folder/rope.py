"""Rotary positions as `config.json` describes them: the kind of scaling, its numbers, and how many tokens they carry.

Owns both spellings (`rope_theta` with `rope_scaling`, and `rope_parameters` since transformers 5) and what is refused.
Knows nothing of tensors: `nobiru.layers.rotary` makes the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nobiru.errors import ModelFolderError

DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Angles are position * frequency; frequencies follow from `theta` and, by `kind`, from `numbers`.

    `partial` is the part of a head's values that is rotated. `original_positions` is the length that the model was
    first trained for, None when the config does not say.
    """

    kind: str = "default"
    theta: float = DEFAULT_THETA
    partial: float = 1.0
    original_positions: int | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)


def read_rope(config: Mapping[str, Any], file: Path, *, max_position_embeddings: int | None = None) -> RopeSpec:
    """The rotary positions of `config`, read from `file`.

    Where layers differ (`rope_parameters` by layer type), those of full attention. Raises `ModelFolderError` for a
    number that is none.
    """
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    numbers = config.get(name) or {}
    if not isinstance(numbers, dict):
        raise ModelFolderError(f"{file}: field {name!r} is {numbers!r}; an object is expected")
    if isinstance(full := numbers.get("full_attention"), dict):
        numbers = full
    kind = numbers.get("rope_type", numbers.get("type", "default"))
    if not isinstance(kind, str):
        raise ModelFolderError(f"{file}: field '{name}.rope_type' is {kind!r}; a string is expected")
    numbers = {key: value for key, value in numbers.items() if value is not None}
    for key, value in numbers.items():
        if key in _NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            raise ModelFolderError(f"{file}: field '{name}.{key}' is {value!r}; a positive number is expected")
    theta = numbers.get("rope_theta", config.get("rope_theta", DEFAULT_THETA))
    partial = numbers.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    for key, value in (("rope_theta", theta), ("partial_rotary_factor", partial)):
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ModelFolderError(f"{file}: field {key!r} is {value!r}; a positive number is expected")
    original = config.get("original_max_position_embeddings", numbers.get("original_max_position_embeddings"))
    if kind in _SELF_SCALED and "factor" not in numbers and original and max_position_embeddings:
        numbers["factor"] = max_position_embeddings / original
    return RopeSpec(
        kind={"su": "longrope"}.get(kind, kind),
        theta=float(theta),
        partial=float(partial),
        original_positions=max_position_embeddings if original is None else int(original),
        numbers=numbers,
    )


# Kinds whose factor may follow from the two numbers of positions.
_SELF_SCALED = frozenset({"longrope", "su", "yarn"})
# fmt: off
_NUMBERS = frozenset({
    "attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "low_freq_factor", "mscale",
    "mscale_all_dim", "original_max_position_embeddings",
})
# fmt: on


def num_rotary_positions(rope: RopeSpec, max_position_embeddings: int) -> int:
    """How many tokens a text may have, given the config's number.

    As vLLM counts: linear scaling stretches that number, yarn the original one, llama3 changes nothing, because the
    number is the stretched one already. "dynamic" and "longrope" take other frequencies for longer texts, which would
    not fit the keys of the text's beginning in the cache: a text ends where they would change.
    """
    factor = rope.numbers.get("factor", 1.0)
    if rope.kind == "linear":
        return int(max_position_embeddings * factor)
    if rope.kind == "yarn":
        return int((rope.original_positions or max_position_embeddings) * factor)
    if rope.kind == "longrope":
        return rope.original_positions or max_position_embeddings
    return max_position_embeddings
