"""What /docs says of the bodies that the routes read themselves."""

from __future__ import annotations

from typing import Any

from nobiru.generation import MAX_CHILDREN, MAX_LOGPROBS, MAX_STOPS

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

_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": _TEXT,
            "content": {
                "anyOf": [
                    _TEXT,
                    {
                        "type": "array",
                        "items": {"type": "object", "properties": {"type": {"const": "text"}, "text": _TEXT}},
                    },
                ]
            },
        },
    },
}
_TEMPLATE = {
    "tools": {"type": "array", "items": {"type": "object"}, "description": "Shown to the model by its chat template"},
    "tool_choice": {"enum": ["none", "auto"], "description": "No calls are read out of what the model answers"},
    "documents": {"type": "array", "items": {"type": "object"}},
    "add_generation_prompt": {"type": "boolean", "default": True},
    "continue_final_message": {"type": "boolean", "default": False, "description": "Go on with the last message"},
    "add_special_tokens": {"type": "boolean", "default": False},
    "chat_template_kwargs": {"type": "object", "description": "Further variables of the chat template"},
}
_SCHEMA = {"type": "object", "description": "A JSON schema that the text will conform to"}
_SAMPLING: dict[str, Any] = {
    "n": {"type": "integer", "minimum": 1, "maximum": MAX_CHILDREN, "default": 1},
    "temperature": {"type": "number", "minimum": 0, "default": 1, "description": "0 takes the most likely token"},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1, "default": 1},
    "top_k": {"type": "integer", "minimum": -1, "default": 0, "description": "0 or -1: all tokens"},
    "min_p": {"type": "number", "minimum": 0, "maximum": 1, "default": 0},
    "seed": {"type": "integer", "description": "The same seed gives the same text, whatever else is being served"},
    "stop": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": MAX_STOPS}]},
    "stop_token_ids": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    "ignore_eos": {"type": "boolean", "default": False},
    "min_tokens": {"type": "integer", "minimum": 0, "default": 0},
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "default": 1},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2, "default": 0},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2, "default": 0},
    "logit_bias": {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
    "include_stop_str_in_output": {"type": "boolean", "default": False},
    "skip_special_tokens": {"type": "boolean", "default": True},
    "response_format": {
        "type": "object",
        "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}, "json_schema": {"type": "object"}},
    },
    "guided_json": _SCHEMA,
    "structured_outputs": {"type": "object", "properties": {"json": _SCHEMA, "json_object": {"const": True}}},
    "truncate_prompt_tokens": {
        "type": "integer",
        "minimum": -1,
        "description": "Keep the last tokens of the prompt; -1: as many as leave room for the output",
    },
    "priority": {"type": "integer", "default": 0, "description": "Lower values are served first"},
    "cache_salt": {"type": "string", "description": "Prefixes are cached among requests with the same salt only"},
    "stream": {"type": "boolean", "default": False},
    "stream_options": {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
    "return_token_ids": {"type": "boolean", "default": False},
    "user": _TEXT,
    "metadata": {"type": "object"},
    "store": {"type": "boolean"},
}
_USAGE = {
    "type": "object",
    "properties": {
        "prompt_tokens": {"type": "integer"},
        "completion_tokens": {"type": "integer"},
        "total_tokens": {"type": "integer"},
        "prompt_tokens_details": {"type": "object", "properties": {"cached_tokens": {"type": "integer"}}},
    },
}


def _generated(kind: str, content: dict[str, Any]) -> dict[str, Any]:
    """An answer with choices."""
    choice = {
        "index": {"type": "integer"},
        **content,
        "logprobs": {"type": ["object", "null"]},
        "finish_reason": {"enum": ["stop", "length"]},
        "stop_reason": {"type": ["string", "integer", "null"], "description": "The stop string or token id"},
        "token_ids": {"type": "array", "items": {"type": "integer"}},
    }
    return {
        "type": "object",
        "properties": {
            "id": _TEXT,
            "object": {"const": kind},
            "created": {"type": "integer"},
            "model": _TEXT,
            "choices": {"type": "array", "items": {"type": "object", "properties": choice}},
            "usage": _USAGE,
        },
    }


COMPLETIONS = _described(
    {
        "type": "object",
        "required": ["prompt"],
        "additionalProperties": False,
        "properties": {
            "model": {"type": "string", "description": "One of /v1/models; may be left out"},
            "prompt": {
                "description": "A text, several texts, token ids, or several lists of token ids",
                "anyOf": [
                    _TEXT,
                    {"type": "array", "items": _TEXT, "minItems": 1},
                    _IDS,
                    {"type": "array", "items": _IDS, "minItems": 1},
                ],
            },
            "max_tokens": {"type": "integer", "minimum": 1, "default": 16},
            "logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS},
            "echo": {"type": "boolean", "default": False, "description": "Begin the text with the prompt"},
            "best_of": {"type": "integer", "description": "As n"},
            "add_special_tokens": {"type": "boolean", "default": True},
            **_SAMPLING,
        },
    },
    _generated("text_completion", {"text": _TEXT}),
)

CHAT = _described(
    {
        "type": "object",
        "required": ["messages"],
        "additionalProperties": False,
        "properties": {
            "model": {"type": "string", "description": "One of /v1/models; may be left out"},
            "messages": _MESSAGES,
            "max_completion_tokens": {"type": "integer", "minimum": 1, "description": "Left out: the model's limit"},
            "max_tokens": {"type": "integer", "minimum": 1, "description": "The same"},
            "logprobs": {"type": "boolean", "default": False},
            "top_logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS},
            **_TEMPLATE,
            **_SAMPLING,
        },
    },
    _generated(
        "chat.completion",
        {"message": {"type": "object", "properties": {"role": {"const": "assistant"}, "content": _TEXT}}},
    ),
)

TOKENIZE = _described(
    {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "prompt": {"type": "string", "description": "The text to tokenize"},
            "messages": {**_MESSAGES, "description": "Or a chat, for a language model"},
            "model": _TEXT,
            "return_token_strs": {"type": "boolean", "default": False},
            **_TEMPLATE,
            "add_special_tokens": {"type": "boolean", "description": "By default true for a text, false for a chat"},
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

DETOKENIZE = _described(
    {
        "type": "object",
        "required": ["tokens"],
        "additionalProperties": False,
        "properties": {"tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}}, "model": _TEXT},
    },
    {"type": "object", "properties": {"prompt": _TEXT}},
)

MODEL: dict[str, Any] = {
    "parameters": [{"name": "model_id", "in": "path", "required": True, "schema": _TEXT}],
}
