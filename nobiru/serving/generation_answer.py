"""Texts as OpenAI's answers: whole, or as the chunks of a stream.

Owns the shapes on the wire, vLLM's additions to them included (`stop_reason`, `token_ids`, `prompt_token_ids`). Knows
nothing of HTTP and of where texts come from.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from nobiru.frontend.text_stream import TextDelta
from nobiru.frontend.token_texts import TokenTexts
from nobiru.generation import FinishReason, SampledToken
from nobiru.serving.logprobs import ChatLogprobs, CompletionLogprobs, chat_logprobs, completion_logprobs
from nobiru.serving.sampling_fields import AnswerOptions

Ids = list[int]


class CachedTokens(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    """Prompts count once, however many texts were made of them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


@dataclass(slots=True)
class Text:
    """One text as far as it goes; `index` is its place among the choices, `prompt` the prompt's among the prompts."""

    index: int
    prompt: int
    pieces: list[str] = field(default_factory=list)
    tokens: list[SampledToken] = field(default_factory=list)
    num_chars: int = 0
    num_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, delta: TextDelta, *, keep: bool) -> None:
        """Go on by `delta`; what it holds is kept for a whole answer, and only counted for a stream."""
        if keep:
            self.pieces.append(delta.text)
            self.tokens += delta.tokens
        self.num_chars += len(delta.text)
        self.num_tokens += len(delta.tokens)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def token_ids(self) -> Ids:
        return [token.token_id for token in self.tokens]


@dataclass(frozen=True, kw_only=True)
class AnswerHead:
    """What all chunks of an answer share. `prompt_ids` and `echoes` (texts put in front) have one entry a prompt."""

    request_id: str
    model: str
    options: AnswerOptions
    texts: TokenTexts
    prompt_ids: Sequence[Ids]
    echoes: Sequence[str] = ()
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def no_usage(self) -> UnsetType | None:
        """How chunks without usage say so: OpenAI's have the field only where usage was asked for."""
        return None if self.options.include_usage else UNSET


class Writer(Protocol):
    """Makes what is encoded as JSON."""

    def begin(self, text: Text) -> Any:
        """The chunk before a text's first, or None."""
        ...

    def chunk(self, text: Text, delta: TextDelta) -> Any:
        """The chunk for a delta, before `text` has it; None when there is nothing to tell."""
        ...

    def end(self, usage: Usage) -> Any:
        """The last chunk, for usage."""
        ...

    def whole(self, texts: Sequence[Text], usage: Usage) -> Any:
        """The answer that is not streamed."""
        ...


def is_silent(delta: TextDelta, options: AnswerOptions) -> bool:
    """Whether nothing a client asked for is in the delta: its text is held back."""
    if delta.text or delta.finish_reason is not None:
        return False
    return not (delta.tokens and (options.return_token_ids or options.top_logprobs is not None))


# ---- completions -----------------------------------------------------------------------------------------------------


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: Ids | UnsetType = UNSET
    prompt_token_ids: Ids | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletionWriter:
    """`POST /v1/completions`."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head

    def begin(self, text: Text) -> Completion | None:
        return None

    def chunk(self, text: Text, delta: TextDelta) -> Completion | None:
        is_first = text.num_tokens == 0
        echo = self._echo(text) if is_first else ""
        if not echo and is_silent(delta, self._head.options):
            return None
        return self._completion(
            [self._choice(text, echo + delta.text, delta.tokens, delta, offset=text.num_chars, with_prompt=is_first)],
            self._head.no_usage,
        )

    def end(self, usage: Usage) -> Completion:
        return self._completion([], usage)

    def whole(self, texts: Sequence[Text], usage: Usage) -> Completion:
        choices = [
            self._choice(text, self._echo(text) + text.text, text.tokens, text, offset=0, with_prompt=True)
            for text in texts
        ]
        return self._completion(choices, usage)

    def _choice(
        self,
        text: Text,
        shown: str,
        tokens: Sequence[SampledToken],
        end: TextDelta | Text,
        *,
        offset: int,
        with_prompt: bool,
    ) -> CompletionChoice:
        options = self._head.options
        with_ids = options.return_token_ids
        return CompletionChoice(
            index=text.index,
            text=shown,
            logprobs=None if options.top_logprobs is None else completion_logprobs(tokens, self._head.texts, offset),
            finish_reason=end.finish_reason,
            stop_reason=end.stop_reason,
            token_ids=[token.token_id for token in tokens] if with_ids else UNSET,
            prompt_token_ids=self._head.prompt_ids[text.prompt] if with_ids and with_prompt else UNSET,
        )

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        head = self._head
        return Completion(id=head.request_id, created=head.created, model=head.model, choices=choices, usage=usage)

    def _echo(self, text: Text) -> str:
        return self._head.echoes[text.prompt] if self._head.echoes else ""


# ---- chat ------------------------------------------------------------------------------------------------------------


class ChatMessage(msgspec.Struct):
    role: str
    content: str


class ChatDelta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: Ids | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: Ids | UnsetType = UNSET


class Chat(msgspec.Struct, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice] | list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: Ids | UnsetType = UNSET


class ChatWriter:
    """`POST /v1/chat/completions`."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head

    def begin(self, text: Text) -> Chat:
        """Says who speaks, before there is anything to read."""
        choice = ChatChunkChoice(index=text.index, delta=ChatDelta(role="assistant", content=""))
        return self._chunk([choice], self._head.no_usage, with_prompt=text.index == 0)

    def chunk(self, text: Text, delta: TextDelta) -> Chat | None:
        options = self._head.options
        if is_silent(delta, options):
            return None
        choice = ChatChunkChoice(
            index=text.index,
            delta=ChatDelta(content=delta.text) if delta.text or delta.finish_reason is None else ChatDelta(),
            logprobs=self._logprobs(delta.tokens),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if options.return_token_ids else UNSET,
        )
        return self._chunk([choice], self._head.no_usage)

    def end(self, usage: Usage) -> Chat:
        return self._chunk([], usage)

    def whole(self, texts: Sequence[Text], usage: Usage) -> Chat:
        head = self._head
        with_ids = head.options.return_token_ids
        choices = [
            ChatChoice(
                index=text.index,
                message=ChatMessage("assistant", text.text),
                logprobs=self._logprobs(text.tokens),
                finish_reason=text.finish_reason,
                stop_reason=text.stop_reason,
                token_ids=text.token_ids if with_ids else UNSET,
            )
            for text in texts
        ]
        return Chat(
            id=head.request_id,
            object="chat.completion",
            created=head.created,
            model=head.model,
            choices=choices,
            usage=usage,
            prompt_token_ids=head.prompt_ids[0] if with_ids else UNSET,
        )

    def _logprobs(self, tokens: Sequence[SampledToken]) -> ChatLogprobs | None:
        return None if self._head.options.top_logprobs is None else chat_logprobs(tokens, self._head.texts)

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None, *, with_prompt: bool = False
    ) -> Chat:
        head = self._head
        return Chat(
            id=head.request_id,
            object="chat.completion.chunk",
            created=head.created,
            model=head.model,
            choices=choices,
            usage=usage,
            prompt_token_ids=head.prompt_ids[0] if with_prompt and head.options.return_token_ids else UNSET,
        )
