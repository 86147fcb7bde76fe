"""Which part of a long text to tokenize when only its first or last tokens are wanted.

Owns where a text may be cut so that the tokens far enough from the cut are those of the whole text. Knows nothing of
tokenizers. Tokenizing 10 MB takes seconds; a piece of it, some ten thousand characters, milliseconds.
"""

from __future__ import annotations

import re

CHARS_PER_TOKEN = 8  # more than texts have on average, so that one piece nearly always is enough
MIN_PIECE_CHARS = 4096
GROWTH = 4
# Tokens next to a cut that may differ from those of the whole text: the beginning of a word of which the rest decides.
MARGIN_TOKENS = 256
_WINDOW_CHARS = 4096
_BOUNDARY = re.compile(r"(?<=\S)[ \n\r\t]")


def first_piece_chars(num_tokens: int) -> int:
    """How many characters to try first when `num_tokens` tokens are wanted."""
    return max(MIN_PIECE_CHARS, CHARS_PER_TOKEN * (num_tokens + MARGIN_TOKENS))


def cut_piece(text: str, num_chars: int, side: str) -> str:
    """About the first (side "right") or last ("left") `num_chars` characters, cut at a space behind a word.

    Where there is no space nearby, the first characters are cut anywhere: tokenization runs from left to right and
    differs near the cut only. The last ones are then not cut at all, for all tokens may depend on where they begin.
    """
    if num_chars >= len(text):
        return text
    if side == "right":
        end = num_chars
        for boundary in _BOUNDARY.finditer(text, max(1, num_chars - _WINDOW_CHARS), num_chars):
            end = boundary.start()
        return text[:end]
    start = len(text) - num_chars
    found = _BOUNDARY.search(text, start, min(len(text), start + _WINDOW_CHARS))
    return text if found is None else text[found.start() :]
