"""The body of `POST /v1/embeddings` as values the pool and the engine take.

Owns which fields there are and their JSON types. What `input` may hold is the frontend's to say, off the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nobiru.errors import InvalidRequestError
from nobiru.request import PoolingParams
from nobiru.serving.admission import estimate_tokens
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
# Beyond, only their total is looked at: this runs on the event loop.
_MAX_TEXTS_TO_LOOK_AT = 20_000
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
    max_model_len: int
    priorities: bool


def parse_embeddings_request(body: Mapping[str, Any], limits: RequestLimits) -> EmbeddingsRequest:
    """Check every field. Raises `InvalidRequestError` that names the field at fault."""
    fields = Fields(body, KNOWN)
    fields.string("user")
    priority = fields.integer("priority", -_MAX_PRIORITY, _MAX_PRIORITY) or 0
    if priority and not limits.priorities:
        raise wrong("priority", priority, "0 or absent: this server was started with --scheduling-policy fcfs")
    params = PoolingParams(
        dimensions=fields.integer(
            "dimensions", 1, limits.embedding_dim, hint=f": this model's vectors have {limits.embedding_dim} values"
        ),
        normalize=fields.boolean("normalize"),
        prompt_name=fields.string("prompt_name"),
        prompt=fields.string("prompt"),
        truncate_prompt_tokens=fields.integer("truncate_prompt_tokens", 1, _MAX_TRUNCATE, besides=-1),
        truncation_side=fields.string("truncation_side", ("right", "left")),
        priority=priority,
    )
    value = fields.get("input")
    if value is None:
        raise InvalidRequestError(f"input is missing; give {_SHAPES}", param="input")
    return EmbeddingsRequest(
        model=fields.string("model"),
        base64=fields.string("encoding_format", ("float", "base64")) == "base64",
        params=params,
        input=value,
        num_estimated_tokens=_estimate(value, limits.max_model_len),
    )


def _estimate(value: object, max_model_len: int) -> int:
    """A guess of the tokens in `input`, whatever it is: what makes no sense is refused by the frontend.

    No text is computed with more than `max_model_len`; a guess above that would have others refused for nothing.
    """
    if isinstance(value, str):
        return min(estimate_tokens(1, len(value)), max_model_len)
    if not isinstance(value, list) or not value:
        return 0
    if not isinstance(value[0], str | list):
        return len(value)
    try:
        num_items = sum(map(len, value))  # characters or ids; a body may hold millions of them
    except TypeError:
        return 0
    if isinstance(value[0], list):
        return num_items
    if len(value) > _MAX_TEXTS_TO_LOOK_AT:
        return estimate_tokens(len(value), num_items)
    return sum(min(estimate_tokens(1, len(text)), max_model_len) for text in value)
