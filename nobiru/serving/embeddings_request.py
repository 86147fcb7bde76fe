"""The body of `POST /v1/embeddings` as values the pool and the engine take.

Owns which fields there are, their limits and the shapes of `input`. Whether ids are in the vocabulary and texts within
the model's limit is the frontend's to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nobiru.errors import InvalidRequestError
from nobiru.request import PoolingParams
from nobiru.serving.admission import estimate_tokens
from nobiru.serving.body import json_kind
from nobiru.serving.fields import Fields, wrong
from nobiru.serving.protocols import EmbeddingInput

KNOWN = (
    "input",
    "model",
    "encoding_format",
    "dimensions",
    "user",
    "priority",
    "truncate_prompt_tokens",
    "truncation_side",
    "prompt_name",
    "prompt",
    "normalize",
)
_MAX_PRIORITY = 2**31 - 1
_MAX_TRUNCATE = 2**31 - 1
_SHAPES = "a string, a list of strings, a list of token ids, or a list of lists of token ids"


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingsRequest:
    """`num_estimated_tokens` is a guess from the number of characters, exact for token ids."""

    input: EmbeddingInput
    num_estimated_tokens: int
    model: str | None
    base64: bool
    params: PoolingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLimits:
    """What of the server's options and the model bears on a request."""

    embedding_dim: int
    priorities: bool
    auto_truncate: bool


def parse_embeddings_request(body: Mapping[str, Any], limits: RequestLimits) -> EmbeddingsRequest:
    """Check every field. Raises `InvalidRequestError` that names the field at fault."""
    fields = Fields(body, KNOWN)
    fields.string("user")
    priority = fields.integer("priority", -_MAX_PRIORITY, _MAX_PRIORITY) or 0
    if priority and not limits.priorities:
        raise wrong("priority", priority, "0 or absent: this server was started with --scheduling-policy fcfs")
    truncate = fields.integer("truncate_prompt_tokens", 1, _MAX_TRUNCATE, besides=-1)
    params = PoolingParams(
        dimensions=fields.integer(
            "dimensions", 1, limits.embedding_dim, hint=f": this model's vectors have {limits.embedding_dim} values"
        ),
        normalize=fields.boolean("normalize"),
        prompt_name=fields.string("prompt_name"),
        prompt=fields.string("prompt"),
        truncate_prompt_tokens=-1 if truncate is None and limits.auto_truncate else truncate,
        truncation_side=fields.string("truncation_side", ("right", "left")) or "right",
        priority=priority,
    )
    return EmbeddingsRequest(
        model=fields.string("model"),
        base64=fields.string("encoding_format", ("float", "base64")) == "base64",
        params=params,
        input=fields.get("input"),
        num_estimated_tokens=_measure(fields.get("input")),
    )


def _measure(value: object) -> int:
    """Check the shape of `input` and guess its tokens."""
    if isinstance(value, str):
        return estimate_tokens(1, len(value))
    if value is None:
        raise InvalidRequestError(f"input is missing; give {_SHAPES}", param="input")
    if not isinstance(value, list):
        raise _wrong_shape(f"input is {json_kind(value)}")
    if not value:
        raise _wrong_shape("input is an empty list")
    types = set(map(type, value))
    if types == {str}:
        return estimate_tokens(len(value), sum(map(len, value)))
    if types == {int}:
        return len(value)
    if types == {list}:
        return sum(_measure_ids(ids, index) for index, ids in enumerate(value))
    raise _mixed(value)


def _measure_ids(ids: list[object], index: int) -> int:
    if not ids:
        raise _wrong_shape(f"input[{index}] is an empty list")
    if set(map(type, ids)) != {int}:
        position = next(number for number, item in enumerate(ids) if type(item) is not int)
        raise _wrong_shape(f"input[{index}][{position}] is {json_kind(ids[position])} and not a token id")
    return len(ids)


def _mixed(value: list[object]) -> InvalidRequestError:
    """The first item that is of no allowed type, or of another than the first item."""
    for index, item in enumerate(value):
        if type(item) not in (str, int, list):
            kind = "a fraction" if isinstance(item, float) else json_kind(item)
            return _wrong_shape(f"input[{index}] is {kind}")
        if type(item) is not type(value[0]):
            return _wrong_shape(
                f"input[0] is {json_kind(value[0])} and input[{index}] is {json_kind(item)}; do not mix them"
            )
    raise AssertionError("called for a list of one type")


def _wrong_shape(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{what}; input must be {_SHAPES}", param="input")
