"""The body of `POST /v1/chat/completions` as values the pool and the engine take.

Owns which fields there are and their JSON types. What messages may hold is the frontend's to say, off the event loop.
Tools are shown to the model by its template; what it answers is text, and no calls are read out of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nobiru.errors import InvalidRequestError
from nobiru.frontend.pool import num_chat_chars
from nobiru.generation import MAX_LOGPROBS, SamplingParams
from nobiru.serving.admission import estimate_generation
from nobiru.serving.fields import Fields, wrong
from nobiru.serving.sampling_fields import (
    ANSWER,
    IGNORED,
    SAMPLING,
    AnswerOptions,
    GenerationLimits,
    read_answer_options,
    read_sampling,
)

CHAT = (
    *("messages", "tools", "tool_choice", "documents", "add_generation_prompt", "continue_final_message"),
    *("add_special_tokens", "chat_template_kwargs"),
)
KNOWN = (
    *("model", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "truncate_prompt_tokens"),
    *(*CHAT, *SAMPLING, *ANSWER, *IGNORED),
)
MAX_MESSAGES = 65_536
MAX_TOOLS = 1024
MAX_DOCUMENTS = 1024
_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """`prepare_options` are arguments of `GenerationFrontend.prepare_chat`, `num_estimated_tokens` is a guess."""

    messages: list[dict[str, Any]]
    model: str | None
    params: SamplingParams
    answer: AnswerOptions
    prepare_options: dict[str, Any]
    num_estimated_tokens: int


def parse_chat_request(body: Mapping[str, Any], limits: GenerationLimits) -> ChatRequest:
    """Check every field. Raises `InvalidRequestError` that names the field at fault."""
    fields = Fields(body, KNOWN)
    top_logprobs = _top_logprobs(fields)
    max_tokens = _max_tokens(fields)
    params = read_sampling(fields, limits, max_tokens=max_tokens, logprobs=top_logprobs)
    messages = read_messages(fields)
    return ChatRequest(
        messages=messages,
        model=fields.string("model"),
        params=params,
        answer=read_answer_options(fields, top_logprobs=top_logprobs),
        prepare_options={
            **read_template_options(fields),
            "add_special_tokens": fields.boolean("add_special_tokens") is True,
            "truncate_prompt_tokens": fields.integer("truncate_prompt_tokens", 1, _MAX_TOKENS, besides=-1),
        },
        num_estimated_tokens=estimate_generation(
            num_characters=num_chat_chars(messages),
            num_texts=params.n,
            max_tokens=max_tokens or limits.max_model_len,
            max_model_len=limits.max_model_len,
        ),
    )


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    messages = fields.objects("messages", max_length=MAX_MESSAGES)
    if not messages:
        raise InvalidRequestError("messages is missing or empty; give at least one message", param="messages")
    return messages


def read_template_options(fields: Fields) -> dict[str, Any]:
    """What `GenerationFrontend.render_chat` takes beside messages."""
    continues = fields.boolean("continue_final_message") is True
    prompted = fields.boolean("add_generation_prompt")
    choice = fields.get("tool_choice")
    if choice not in (None, "none", "auto"):
        raise wrong(
            "tool_choice",
            choice,
            '"none" or "auto": tools are shown to the model, but its answer is text that cannot be made a tool call',
        )
    tools = fields.objects("tools", max_length=MAX_TOOLS)
    return {
        "tools": None if choice == "none" or not tools else tools,
        "documents": fields.objects("documents", max_length=MAX_DOCUMENTS),
        # Going on with a message excludes beginning another one, so that one of the two fields is enough.
        "add_generation_prompt": not continues if prompted is None else prompted,
        "continue_final_message": continues,
        "template_kwargs": fields.object("chat_template_kwargs"),
    }


def _max_tokens(fields: Fields) -> int | None:
    """`max_completion_tokens` is what OpenAI calls `max_tokens` now."""
    older = fields.integer("max_tokens", 1, _MAX_TOKENS)
    newer = fields.integer("max_completion_tokens", 1, _MAX_TOKENS)
    if older is not None and newer is not None and older != newer:
        raise InvalidRequestError(
            f"max_tokens is {older} and max_completion_tokens is {newer}; they mean the same, so give one of them",
            param="max_tokens",
        )
    return older if newer is None else newer


def _top_logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs") is True
    number = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if number is not None and not wanted:
        if number == 0:
            return None
        raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return (number or 0) if wanted else None
