"""The fields that both generation routes share: how tokens are chosen, when a text ends, what of it is returned.

Owns their names, which are vLLM's where OpenAI has none, and their JSON types. Their bounds are
`nobiru.generation.SamplingParams`' to say; what depends on the vocabulary is the frontend's, off the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from nobiru.errors import InvalidRequestError
from nobiru.generation import SamplingParams
from nobiru.serving.fields import Fields, shown, wrong

MAX_PRIORITY = 2**31 - 1
MAX_STOP_TOKEN_IDS = 1024
MAX_STOP_STRINGS = 16
MAX_LOGIT_BIASES = 1024
MAX_CACHE_SALT_CHARS = 1024

# Taken, because clients send them, and without effect.
IGNORED = ("user", "metadata", "store")
SAMPLING = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "include_stop_str_in_output"),
    *("skip_special_tokens", "priority", "cache_salt", "response_format", "guided_json", "structured_outputs"),
)
ANSWER = ("stream", "stream_options", "return_token_ids")
# What a text must conform to when any JSON object will do.
ANY_OBJECT = '{"type":"object","additionalProperties":true}'

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_INTEGERS = ("n", "top_k", "seed", "min_tokens")
_BOOLEANS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationLimits:
    """What of the server's options and the model bears on a request."""

    max_model_len: int
    priorities: bool
    sampling_defaults: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerOptions:
    """What a client wants to see of the texts. `top_logprobs` None means no log-probabilities."""

    stream: bool
    include_usage: bool
    return_token_ids: bool
    top_logprobs: int | None = None


def read_sampling(
    fields: Fields, limits: GenerationLimits, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """The options of a request; fields that are absent take the model's defaults, then OpenAI's.

    Raises `InvalidRequestError` that names the field at fault.
    """
    fields.string("user"), fields.object("metadata"), fields.boolean("store")
    given: dict[str, Any] = {
        **{name: fields.number(name) for name in _NUMBERS},
        **{name: fields.any_integer(name) for name in _INTEGERS},
        **{name: fields.boolean(name) for name in _BOOLEANS},
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "stop": _tuple(fields.strings("stop", max_length=MAX_STOP_STRINGS)),
        "stop_token_ids": _tuple(fields.integers("stop_token_ids", max_length=MAX_STOP_TOKEN_IDS)),
        "logit_bias": _logit_bias(fields),
        "json_schema": _json_schema(fields),
        "cache_salt": _cache_salt(fields),
        "priority": _priority(fields, limits.priorities),
    }
    present = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**{**limits.sampling_defaults, **present})


def read_answer_options(fields: Fields, *, top_logprobs: int | None) -> AnswerOptions:
    stream = fields.boolean("stream") is True
    options = fields.object("stream_options")
    if options is not None and not stream:
        raise InvalidRequestError("stream_options is only for streams; set stream to true", param="stream_options")
    usage = Fields(options or {}, ("include_usage",), within="stream_options").boolean("include_usage")
    return AnswerOptions(
        stream=stream,
        include_usage=usage is True,
        return_token_ids=fields.boolean("return_token_ids") is True,
        top_logprobs=top_logprobs,
    )


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)


def _priority(fields: Fields, priorities: bool) -> int:
    priority = fields.integer("priority", -MAX_PRIORITY, MAX_PRIORITY) or 0
    if priority and not priorities:
        raise wrong("priority", priority, "0 or absent: this server was started with --scheduling-policy fcfs")
    return priority


def _cache_salt(fields: Fields) -> str | None:
    salt = fields.string("cache_salt")
    if salt is not None and not 0 < len(salt) <= MAX_CACHE_SALT_CHARS:
        raise wrong("cache_salt", salt, f"a string of 1 to {MAX_CACHE_SALT_CHARS} characters")
    return salt


def _logit_bias(fields: Fields) -> dict[int, float] | None:
    """JSON has no integer keys: token ids come as strings."""
    value = fields.object("logit_bias")
    if value is None:
        return None
    if len(value) > MAX_LOGIT_BIASES:
        raise InvalidRequestError(
            f"logit_bias has {len(value)} entries; at most {MAX_LOGIT_BIASES} are possible", param="logit_bias"
        )
    biases = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10) or type(bias) not in (int, float):
            raise InvalidRequestError(
                f"logit_bias has the entry {shown(key)}: {shown(bias)}; it must map token ids to numbers",
                param="logit_bias",
            )
        biases[int(key)] = float(bias)
    return biases


def _json_schema(fields: Fields) -> str | None:
    """The one schema that a text must conform to, as JSON text, whatever the field it came in."""
    found = {
        "response_format": _from_response_format(fields.object("response_format")),
        "guided_json": _schema_text(fields.get("guided_json"), "guided_json"),
        "structured_outputs": _from_structured_outputs(fields.object("structured_outputs")),
    }
    schemas = {name: schema for name, schema in found.items() if schema is not None}
    if len(schemas) > 1:
        raise InvalidRequestError(f"{' and '.join(schemas)} exclude each other; give one", param=list(schemas)[1])
    return next(iter(schemas.values()), None)


def _from_response_format(value: dict[str, Any] | None) -> str | None:
    if value is None:
        return None
    name = "response_format"
    fields = Fields(value, ("type", "json_schema"), within=name)
    kind = fields.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        raise wrong(f"{name}.type", kind, '"text", "json_object" or "json_schema"')
    described = fields.object("json_schema")
    schema = Fields(described or {}, ("name", "description", "schema", "strict"), within=f"{name}.json_schema").get(
        "schema"
    )
    if schema is None:
        raise InvalidRequestError(f"{name}.json_schema.schema is missing", param=f"{name}.json_schema.schema")
    return _schema_text(schema, f"{name}.json_schema.schema")


def _from_structured_outputs(value: dict[str, Any] | None) -> str | None:
    if value is None:
        return None
    name = "structured_outputs"
    fields = Fields(value, ("json", "json_object"), within=name)
    wants_object = fields.boolean("json_object") is True
    schema = _schema_text(fields.get("json"), f"{name}.json")
    if (schema is None) != wants_object:
        raise InvalidRequestError(f"{name} must have one of json (a schema) and json_object (true)", param=name)
    return schema or ANY_OBJECT


def _schema_text(value: object, name: str) -> str | None:
    """A schema as JSON text; it may come as an object or as text already."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, dict | bool):
        raise wrong(name, value, "a JSON schema")
    return msgspec.json.encode(value).decode()
