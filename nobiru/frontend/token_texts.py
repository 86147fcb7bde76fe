"""What each token adds to a text, as bytes.

Owns the reading of a tokenizer's decoder: which tokens are bytes, which are special. A token need not be text by
itself: with byte-level vocabularies it may be a part of a character. Knows nothing of sequences;
`nobiru.frontend.detokenizer` puts tokens together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# How many tokens of the vocabulary are tried when looking for one that is plain text.
_MAX_ANCHORS = 50_000


class TokenTexts:
    """The tokens of one tokenizer; made once per model, used by any number of threads.

    `is_byte_level` tells that the text of tokens is that of their joined bytes. `byte_ids` are the tokens that stand
    for one byte each, where a decoder turns runs of them into text (`ByteFallback`); `special_ids` are those that
    `skip_special_tokens` leaves out. `anchor` is a token (or none) of plain letters, to put in front of tokens that go
    on with a text: decoders treat the first token of a text in their own ways.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        steps = [step["type"] for step in _decoder_steps(tokenizer.decoder)]
        self._tokenizer = tokenizer
        self.special_ids = frozenset(
            identifier for identifier, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self.is_byte_level = steps == ["ByteLevel"]
        self._byte_of_char = _byte_of_char() if "ByteLevel" in steps else {}
        self._byte_of_id = _byte_tokens(tokenizer) if "ByteFallback" in steps else {}
        self.byte_ids = frozenset(self._byte_of_id)
        self.anchor = self._find_anchor()
        self._anchor_text = self.decode(self.anchor)
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """What a token adds to a text that has begun; nothing for an id the tokenizer does not know."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._find_bytes(token_id)
        return known

    def text_of(self, token_id: int) -> str:
        """The same as text, with U+FFFD for bytes that are no characters by themselves."""
        return self.bytes_of(token_id).decode(errors="replace")

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole sequence, special tokens included."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def _find_bytes(self, token_id: int) -> bytes:
        if (byte := self._byte_of_id.get(token_id)) is not None:
            return bytes([byte])
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_of_char:
            found = [self._byte_of_char.get(character) for character in token]
            return token.encode() if None in found else bytes(byte for byte in found if byte is not None)
        return self.decode([*self.anchor, token_id]).removeprefix(self._anchor_text).encode()

    def _find_anchor(self) -> tuple[int, ...]:
        for identifier in range(min(self._tokenizer.get_vocab_size(), _MAX_ANCHORS)):
            if identifier not in self.special_ids and (text := self.decode([identifier])).isalpha() and text.isascii():
                return (identifier,)
        return ()


def _decoder_steps(decoder: Any) -> Iterator[dict[str, Any]]:
    if decoder is None:
        return
    state = json.loads(decoder.__getstate__())
    yield from state["decoders"] if state["type"] == "Sequence" else [state]


def _byte_tokens(tokenizer: Tokenizer) -> dict[int, int]:
    found = ((identifier, _BYTE_TOKEN.fullmatch(token)) for token, identifier in tokenizer.get_vocab().items())
    return {identifier: int(match[1], 16) for identifier, match in found if match}


def _byte_of_char() -> dict[str, int]:
    """How byte-level vocabularies write bytes: printable Latin-1 characters as they are, others from U+0100 on.

    The alphabet is GPT-2's (`bytes_to_unicode`).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of_char = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    assert set(byte_of_char) == set(pre_tokenizers.ByteLevel.alphabet()), "the library's alphabet is GPT-2's"
    return byte_of_char
