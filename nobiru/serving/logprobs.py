"""Log-probabilities in the shapes of OpenAI's two generation routes.

Owns how a token is written: as text, or as its bytes where these are no characters by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from nobiru.frontend.token_texts import TokenTexts
from nobiru.generation import SampledToken

# JSON has no infinity; tokens that could not be chosen have this instead.
LEAST_LOGPROB = -9999.0


class CompletionLogprobs(msgspec.Struct):
    """Lists of equal length, one entry a token; `text_offset` is where the token begins in the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChosenLogprob]


def completion_logprobs(tokens: Sequence[SampledToken], texts: TokenTexts, offset: int) -> CompletionLogprobs:
    """Of tokens behind `offset` characters. The chosen token is among the top ones, as a further one if need be."""
    out = CompletionLogprobs([], [], [], [])
    for token in tokens:
        text = token_text(texts, token.token_id)
        logprob = finite(token.logprob)
        out.tokens.append(text)
        out.token_logprobs.append(logprob)
        # Several ids may look alike; the most likely one, which comes first, is kept.
        top = {text: logprob}
        for token_id, other in token.top or ():
            top.setdefault(token_text(texts, token_id), finite(other))
        out.top_logprobs.append(top)
        out.text_offset.append(offset)
        offset += len(texts.text_of(token.token_id))
    return out


def chat_logprobs(tokens: Sequence[SampledToken], texts: TokenTexts) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ChosenLogprob(
                token=token_text(texts, token.token_id),
                logprob=finite(token.logprob),
                bytes=list(texts.bytes_of(token.token_id)),
                top_logprobs=[
                    TokenLogprob(token_text(texts, token_id), finite(logprob), list(texts.bytes_of(token_id)))
                    for token_id, logprob in token.top or ()
                ],
            )
            for token in tokens
        ]
    )


def token_text(texts: TokenTexts, token_id: int) -> str:
    r"""A token's text; one that is no text by itself is written as "bytes:\xe4\xbd", as OpenAI does."""
    raw = texts.bytes_of(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def finite(logprob: float | None) -> float:
    return LEAST_LOGPROB if logprob is None else max(logprob, LEAST_LOGPROB)
