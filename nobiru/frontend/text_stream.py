"""From a child's deltas of tokens to deltas of text: end-of-text tokens, stop strings, why the text ended.

Owns what of the text a caller may see: neither a stop string nor what may become one. Knows nothing of HTTP and of the
engine. Uses `nobiru.frontend.detokenizer` for text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nobiru.frontend.detokenizer import Detokenizer
from nobiru.frontend.token_texts import TokenTexts
from nobiru.generation import FinishReason, GenerationDelta, SampledToken, SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDelta:
    """What a caller gets of one child. `text` may be empty while `tokens` are not, and the other way round.

    `tokens` include the one that ended the text. With a `finish_reason` it is the last delta; `stop_reason` is the stop
    string or one of the asked `stop_token_ids`, None when the model's own end of text or the limit ended it.
    `stopped_early` says that a stop string ended the text while the engine was going on.
    """

    child: int
    text: str
    tokens: Sequence[SampledToken]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    stopped_early: bool = False
    num_cached_tokens: int = 0

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


class TextStream:
    """The text of one child; `push` its deltas in order. `previous_id` is the prompt's last token."""

    def __init__(
        self, texts: TokenTexts, params: SamplingParams, *, child: int = 0, previous_id: int | None = None
    ) -> None:
        self._child = child
        self._asked_stop_ids = frozenset(params.stop_token_ids)
        self._shows_stop = params.include_stop_str_in_output
        self._detokenizer = Detokenizer(texts, previous_id=previous_id, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopStrings(params.stop, included=params.include_stop_str_in_output) if params.stop else None
        self._min_tokens = params.min_tokens
        self.num_tokens = 0
        self.finished = False

    def push(self, delta: GenerationDelta) -> TextDelta:
        """The text that the delta makes certain. After a `finish_reason`, nothing is to be pushed."""
        assert not self.finished, "a text that has ended does not go on"
        tokens: Sequence[SampledToken] = delta.tokens
        visible = tokens
        if delta.stop_token_id is not None and not self._shows_stop:
            visible = tokens[:-1]
        text, num_used = self._text_of(visible, ends=delta.finish_reason is not None)
        found = self._stops.found if self._stops is not None else None
        if found is not None:
            return self._ended(delta, text, tokens[:num_used], "stop", found)
        if delta.finish_reason is not None:
            asked = delta.stop_token_id if delta.stop_token_id in self._asked_stop_ids else None
            return self._ended(delta, text, tokens, delta.finish_reason, asked)
        self.num_tokens += len(tokens)
        return TextDelta(child=self._child, text=text, tokens=tokens, num_cached_tokens=delta.num_cached_tokens)

    def _text_of(self, tokens: Sequence[SampledToken], *, ends: bool) -> tuple[str, int]:
        """The text, and how many of the tokens it took to find a stop string."""
        if self._stops is None:
            text = self._detokenizer.push([token.token_id for token in tokens])
            return text + self._detokenizer.flush() if ends else text, len(tokens)
        pieces = []
        for index, token in enumerate(tokens, start=1):
            # Which token completes a stop string must not depend on how many of them came at once.
            piece = self._detokenizer.push([token.token_id])
            pieces.append(self._stops.push(piece, may_end=self.num_tokens + index > self._min_tokens))
            if self._stops.found is not None:
                return "".join(pieces), index
        if ends:
            may_end = self.num_tokens + len(tokens) > self._min_tokens
            pieces.append(self._stops.push(self._detokenizer.flush(), may_end=may_end))
            if self._stops.found is None:
                pieces.append(self._stops.flush())
        return "".join(pieces), len(tokens)

    def _ended(
        self,
        delta: GenerationDelta,
        text: str,
        tokens: Sequence[SampledToken],
        finish_reason: FinishReason,
        stop_reason: str | int | None,
    ) -> TextDelta:
        self.finished = True
        self.num_tokens += len(tokens)
        return TextDelta(
            child=self._child,
            text=text,
            tokens=tokens,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            stopped_early=delta.finish_reason is None,
            num_cached_tokens=delta.num_cached_tokens,
        )


class StopStrings:
    """Lets a text through up to the first stop string, in pieces of any size.

    The first one to be complete ends the text; of several that are complete with the same character, the longest. So
    the result does not depend on where pieces begin. `found` is the stop string, once there is one; `included` leaves
    it in the text. What may be the beginning of one is held back.
    """

    def __init__(self, stops: Sequence[str], *, included: bool = False) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._included = included
        self._longest = len(self._stops[0])
        self._held = ""  # may be the beginning of a stop string
        self.found: str | None = None

    def push(self, piece: str, *, may_end: bool = True) -> str:
        """What of the text is certain now. Without `may_end` no stop string may end in this piece."""
        if not piece:
            return ""
        start = len(self._held)
        text = self._held + piece
        if may_end and (match := self._first(text, start)) is not None:
            begin, stop = match
            self.found = stop
            return text[: begin + len(stop)] if self._included else text[:begin]
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """What was held back, when nothing more comes."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, start: int) -> tuple[int, str] | None:
        """Where the first stop string that ends behind `start` begins, and which it is."""
        matches = []
        for stop in self._stops:
            begin = text.find(stop, max(0, start - len(stop) + 1))
            if begin >= 0:
                matches.append((begin + len(stop), begin, stop))
        if not matches:
            return None
        _, begin, stop = min(matches)
        return begin, stop

    def _num_held(self, text: str) -> int:
        """The length of the longest end of `text` that a stop string begins with."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops if len(stop) > length):
                return length
        return 0
