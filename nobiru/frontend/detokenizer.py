"""From a sequence's tokens, as they come, to its text.

Owns which text is certain: a character of which some bytes are missing is held back. The pieces joined are the text
that the tokenizer makes of all tokens at once. Knows nothing of stop strings; `nobiru.frontend.text_stream` does.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from nobiru.frontend.token_texts import TokenTexts

REPLACEMENT = "\ufffd"
# The window of tokens that are decoded again with each new one is moved when it is longer; what stays of it are tokens
# that decoders look back at, and the bytes of a character that is not complete.
_MAX_WINDOW_TOKENS = 24
_NUM_KEPT_TOKENS = 5


class Detokenizer:
    """The text of one sequence, in about the same time for each token, however long it gets.

    `previous_id` is the last token of the prompt. A text that goes on from an ordinary token keeps its leading space,
    so that it can be put behind the prompt; one that begins, or stands behind a special token, loses it where the
    tokenizer's decoder says so. With `skip_special_tokens`, these add nothing.
    """

    def __init__(self, texts: TokenTexts, *, previous_id: int | None = None, skip_special_tokens: bool = True) -> None:
        self._skipped = texts.special_ids if skip_special_tokens else frozenset[int]()
        continues = previous_id is not None and previous_id not in texts.special_ids
        self._stream = _ByteStream(texts) if texts.is_byte_level else _WindowStream(texts, continues=continues)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now and was not before."""
        if self._skipped:
            token_ids = [token for token in token_ids if token not in self._skipped]
        return self._stream.push(token_ids) if token_ids else ""

    def flush(self) -> str:
        """The rest, when no more tokens come: U+FFFD for what did not become a character."""
        return self._stream.flush()


class _ByteStream:
    """Byte-level vocabularies: the text is that of the joined bytes."""

    def __init__(self, texts: TokenTexts) -> None:
        self._bytes_of = texts.bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._bytes_of, token_ids)))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """Any decoder that turns more tokens into more text: decodes the last tokens, and gives what is new in it.

    Two things are uncertain. A last U+FFFD may be the beginning of a character. A run of byte tokens is text as a whole
    or, when one byte is wrong, U+FFFD for each of them, so its end decides. Nothing is decoded before.
    """

    def __init__(self, texts: TokenTexts, *, continues: bool) -> None:
        self._decode = texts.decode
        self._byte_ids = texts.byte_ids
        self._window = list(texts.anchor) if continues else []
        self._num_done = len(self._certain())  # characters of the window's text that were given

    def push(self, token_ids: Sequence[int]) -> str:
        self._window += token_ids
        if token_ids[-1] in self._byte_ids:
            return ""
        text = self._certain()
        new = text[self._num_done :]
        self._num_done = max(self._num_done, len(text))
        if len(self._window) > _MAX_WINDOW_TOKENS:
            self._window = self._window[-_NUM_KEPT_TOKENS:]
            self._num_done = len(self._certain())
        return new

    def flush(self) -> str:
        text = self._decode(self._window)
        new = text[self._num_done :]
        self._num_done = max(self._num_done, len(text))
        return new

    def _certain(self) -> str:
        return self._decode(self._window).removesuffix(REPLACEMENT)
