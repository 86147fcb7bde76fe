"""Chat templates: from messages to the text that the model is prompted with.

Owns the Jinja environment in which `transformers` renders templates, and what messages may hold. A template comes with
the model's folder, from whoever made the model, and runs sandboxed. Knows nothing of tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nobiru.errors import InvalidRequestError, ModelFolderError

Message = Mapping[str, Any]

MAX_RENDERED_CHARS = 64 * 2**20
MAX_RENDER_S = 20.0
# What reasoning is called in messages; the first is what most templates read.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
# Put behind the message to go on with, to find its end in the rendered text; the space shows whether it was trimmed.
_MARK = "\ue000nobiru-continue\ue000 "


class ChatTemplate:
    """One model's template, `source`; `special_tokens` are variables in it (`bos_token`, …).

    Raises `ModelFolderError` when the source is no template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelFolderError(f"the chat template cannot be read: line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. `continue_final_message` leaves the last message open, so that the model goes on with it.

        `variables` are further ones of the template. Raises `InvalidRequestError`, also for what the template says
        with `raise_exception`.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt are both true; at most one of them can be",
                param="continue_final_message",
            )
        if taken := _RESERVED.intersection(variables or {}):
            name = min(taken)
            raise InvalidRequestError(
                f"chat_template_kwargs.{name} cannot be set; there is a field for it",
                param=f"chat_template_kwargs.{name}",
            )
        chat = plain_messages(messages)
        if continue_final_message:
            _mark_end(chat)
        text = self._render(
            self._special_tokens
            | dict(variables or {})
            | {
                "messages": chat,
                "tools": tools,
                "documents": documents,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return _cut_at_mark(text) if continue_final_message else text

    def _render(self, variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        num_chars, deadline_s = 0, time.monotonic() + MAX_RENDER_S
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > MAX_RENDERED_CHARS or time.monotonic() > deadline_s:
                    raise InvalidRequestError(
                        f"the chat template makes more than {MAX_RENDERED_CHARS} characters of these messages, or "
                        f"takes more than {MAX_RENDER_S:g} s for them",
                        param="messages",
                    )
        except InvalidRequestError:
            raise
        except Exception as error:  # a template is a program: it may fail in any way on messages it did not expect
            raise InvalidRequestError(
                f"the model's chat template refuses the messages: {str(error) or type(error).__name__}",
                param="messages",
                code="chat_template_error",
            ) from error
        return "".join(pieces)


def plain_messages(messages: object) -> list[dict[str, Any]]:
    """Messages as templates expect them, checked and copied.

    Null fields are left out, text parts are joined by line ends, arguments of tool calls become objects. Raises
    `InvalidRequestError` that names the message.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequestError("messages must be a list of at least one message", param="messages")
    return [_plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain_message(message: object, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{name} must be an object with role and content", param=name)
    plain = {key: value for key, value in message.items() if value is not None}
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{name}.role is {role!r}; it must be a string", param=f"{name}.role")
    if "content" in plain:
        plain["content"] = _plain_content(plain["content"], f"{name}.content")
    elif role != "assistant":
        raise InvalidRequestError(f"{name}.content is missing", param=f"{name}.content")
    if "tool_calls" in plain:
        plain["tool_calls"] = _plain_tool_calls(plain["tool_calls"], f"{name}.tool_calls")
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _plain_content(content: object, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidRequestError(f"{name} must be a string or a list of text parts", param=name)
    texts = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidRequestError(
                f'{name}[{index}] is of type {kind!r}; this model takes {{"type": "text", "text": …}} only',
                param=f"{name}[{index}]",
            )
        texts.append(text)
    return "\n".join(texts)


def _plain_tool_calls(calls: object, name: str) -> list[dict[str, Any]]:
    """OpenAI's clients send arguments as JSON text; templates expect the object."""
    if not isinstance(calls, list | tuple) or not all(
        isinstance(call, Mapping) and isinstance(call.get("function", {}), Mapping) for call in calls
    ):
        raise InvalidRequestError(f"{name} must be a list of objects", param=name)
    plain = []
    for index, call in enumerate(calls):
        function = dict(call.get("function", {}))
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                function["arguments"] = json.loads(arguments) if arguments.strip() else {}
            except ValueError as error:
                field = f"{name}[{index}].function.arguments"
                raise InvalidRequestError(f"{field} is not valid JSON: {error}", param=field) from error
        plain.append({**call, "function": function} if function else dict(call))
    return plain


def _mark_end(chat: list[dict[str, Any]]) -> None:
    if "content" not in chat[-1]:
        raise InvalidRequestError(
            "continue_final_message is true, but the last message has no content to go on with", param="messages"
        )
    chat[-1]["content"] += _MARK


def _cut_at_mark(text: str) -> str:
    end = text.rfind(_MARK.strip())
    if end < 0:
        raise InvalidRequestError(
            "the model's chat template leaves out the last message, so continue_final_message cannot be honoured",
            param="continue_final_message",
        )
    # Templates that trim messages have taken the mark's space; then the message's own end is to be trimmed too.
    return text[:end] if text.startswith(_MARK, end) else text[:end].rstrip()


# ---- the environment -------------------------------------------------------------------------------------------------


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}`, which marks for training what the model says: here, just its inside."""

    tags = {"generation"}  # noqa: RUF012  # declared so by Jinja

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(lineno)


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as `transformers.PreTrainedTokenizerBase.apply_chat_template` sets it up."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
