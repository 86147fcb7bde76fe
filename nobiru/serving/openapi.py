"""What /docs says of the bodies that the routes read themselves."""

from __future__ import annotations

from typing import Any

_TEXT = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _described(body: dict[str, Any] | None, answer: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "responses": {
            "200": {"description": "Success", "content": _json(answer)},
            "4XX": {"description": "The request cannot be served as it is", "content": _json(_ERROR)},
            "5XX": {"description": "The server cannot serve it now", "content": _json(_ERROR)},
        }
    }
    if body is not None:
        described["requestBody"] = {"required": True, "content": _json(body)}
    return described


_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

EMBEDDINGS = _described(
    {
        "type": "object",
        "required": ["input"],
        "additionalProperties": False,
        "properties": {
            "input": {
                "description": "A text, several texts, token ids, or several lists of token ids",
                "anyOf": [
                    _TEXT,
                    {"type": "array", "items": _TEXT, "minItems": 1},
                    _IDS,
                    {"type": "array", "items": _IDS, "minItems": 1},
                ],
            },
            "model": {"type": "string", "description": "One of /v1/models; may be left out"},
            "encoding_format": {"enum": ["float", "base64"], "default": "float"},
            "dimensions": {"type": "integer", "minimum": 1, "description": "Keep the first values and normalize again"},
            "user": _TEXT,
            "priority": {"type": "integer", "default": 0, "description": "Lower values are served first"},
            "truncate_prompt_tokens": {
                "type": "integer",
                "minimum": -1,
                "description": "Cut each text to that many tokens, special tokens included; -1: to the model's limit",
            },
            "truncation_side": {"enum": ["right", "left"], "default": "right"},
            "prompt_name": {"type": "string", "description": "A key of the model's prompts"},
            "prompt": {"type": "string", "description": 'A text to put in front of each input; "" for none'},
            "normalize": {"type": "boolean", "description": "Left out: as the model's own modules do"},
        },
    },
    {
        "type": "object",
        "properties": {
            "object": {"const": "list"},
            "data": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "object": {"const": "embedding"},
                        "index": {"type": "integer"},
                        "embedding": {"anyOf": [{"type": "array", "items": {"type": "number"}}, _TEXT]},
                    },
                },
            },
            "model": _TEXT,
            "truncated": {
                "type": "array",
                "items": {"type": "integer"},
                "description": "Indices of the inputs that were cut, if any",
            },
            "usage": {
                "type": "object",
                "properties": {"prompt_tokens": {"type": "integer"}, "total_tokens": {"type": "integer"}},
            },
        },
    },
)

TOKENIZE = _described(
    {
        "type": "object",
        "required": ["prompt"],
        "additionalProperties": False,
        "properties": {
            "prompt": {"type": "string", "description": "The text to tokenize"},
            "model": _TEXT,
            "add_special_tokens": {"type": "boolean", "default": True},
            "return_token_strs": {"type": "boolean", "default": False},
        },
    },
    {
        "type": "object",
        "properties": {
            "count": {"type": "integer"},
            "max_model_len": {"type": "integer"},
            "tokens": {"type": "array", "items": {"type": "integer"}},
            "token_strs": {"type": ["array", "null"], "items": _TEXT},
        },
    },
)

MODEL: dict[str, Any] = {
    "parameters": [{"name": "model_id", "in": "path", "required": True, "schema": _TEXT}],
}
