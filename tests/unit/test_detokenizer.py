"""Incremental detokenization against decoding everything at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_models import stories260k
from small_tokenizers import SENTENCES, byte_fallback_tokenizer, small_tokenizer
from tokenizers import Tokenizer, decoders

from nobiru.frontend.detokenizer import Detokenizer
from nobiru.frontend.token_texts import TokenTexts

TEXTS = (
    "Hello world, this is a test.",
    "  two spaces and 日本語の文章 and back",
    "👩‍👩‍👧‍👦🇯🇵 emoji 👍🏽 end",
    "Straße ﬁ ½ \ufffd literal replacement",
    "tabs\tnewlines\n\n and  runs",
)
KINDS = ("wordpiece", "unigram", "byte_bpe", "byte_fallback", "byte_in_sequence")


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    if kind == "byte_fallback":
        return byte_fallback_tokenizer()
    if kind == "byte_in_sequence":
        tokenizer = small_tokenizer("byte_bpe")
        tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
        return tokenizer
    tokenizer = small_tokenizer(kind)
    tokenizer.decoder = {
        "wordpiece": decoders.WordPiece(),
        "unigram": decoders.Metaspace(),
        "byte_bpe": decoders.ByteLevel(),
    }[kind]
    return tokenizer


@functools.cache
def texts_of(kind: str) -> TokenTexts:
    return TokenTexts(tokenizer_of(kind))


def chunks(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """`ids` cut into pieces of `sizes`, over and over."""
    pieces, start, turn = [], 0, 0
    while start < len(ids):
        pieces.append(list(ids[start : start + sizes[turn % len(sizes)]]))
        start += sizes[turn % len(sizes)]
        turn += 1
    return pieces


def streamed(kind: str, ids: Sequence[int], sizes: Sequence[int] = (1,), *, skip: bool = False) -> list[str]:
    detokenizer = Detokenizer(texts_of(kind), skip_special_tokens=skip)
    return [*(detokenizer.push(piece) for piece in chunks(ids, sizes)), detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_joined_are_the_text_of_all_tokens(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 2), max_size=120))
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    skip = data.draw(st.booleans())
    assert "".join(streamed(kind, ids, sizes, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=60) | st.sampled_from(TEXTS))
def test_no_piece_of_a_real_text_holds_half_a_character(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    pieces = streamed(kind, ids)
    assert "".join(pieces) == whole
    assert sum(piece.count("\ufffd") for piece in pieces) == whole.count("\ufffd")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_what_is_certain_comes_at_once(kind: str, text: str) -> None:
    """At no time is more held back than the bytes of one character, or one run of byte tokens."""
    texts, tokenizer = texts_of(kind), tokenizer_of(kind)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    detokenizer, given_text = Detokenizer(texts, skip_special_tokens=False), ""
    for index, token in enumerate(ids, start=1):
        given_text += detokenizer.push([token])
        whole = tokenizer.decode(ids[:index], skip_special_tokens=False)
        assert whole.startswith(given_text)
        if token not in texts.byte_ids:
            assert given_text in (whole, whole[:-1])
            assert given_text == whole or whole.endswith("\ufffd")


@pytest.mark.parametrize("kind", ["byte_fallback", "unigram", "wordpiece"])
def test_a_text_that_goes_on_keeps_its_leading_space(kind: str) -> None:
    tokenizer, texts = tokenizer_of(kind), texts_of(kind)
    prompt = tokenizer.encode("The quick", add_special_tokens=False).ids
    ids = tokenizer.encode("brown fox", add_special_tokens=False).ids
    behind = Detokenizer(texts, previous_id=prompt[-1])
    assert behind.push(ids) + behind.flush() == " brown fox"
    for previous in (None, tokenizer.token_to_id("<s>" if kind != "wordpiece" else "[CLS]")):
        begins = Detokenizer(texts, previous_id=previous)
        assert begins.push(ids) + begins.flush() == "brown fox"


@pytest.mark.parametrize("kind", ["byte_bpe", "byte_in_sequence", "byte_fallback", "unigram"])
@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_tokens_joined_are_the_text(kind: str, text: str) -> None:
    tokenizer, texts = tokenizer_of(kind), texts_of(kind)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    joined = b"".join(map(texts.bytes_of, ids)).decode()
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    assert joined in (whole, f" {whole}")  # decoders strip the first space of a text


def test_text_of_a_token() -> None:
    texts, tokenizer = texts_of("byte_fallback"), tokenizer_of("byte_fallback")
    assert texts.text_of(tokenizer.token_to_id("</s>")) == "</s>"
    assert texts.bytes_of(tokenizer.token_to_id("<0xE4>")) == b"\xe4"
    assert texts.text_of(tokenizer.token_to_id("<0xE4>")) == "\ufffd"
    assert texts.bytes_of(10**6) == b""
    word = texts_of("wordpiece")
    assert word.text_of(tokenizer_of("wordpiece").token_to_id("##s")) == "s"


def test_byte_tokens_that_are_no_characters() -> None:
    tokenizer = tokenizer_of("byte_fallback")
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "你".encode() + b"\xe4"]
    assert streamed("byte_fallback", ids) == ["", "", "", "", "\ufffd" * 4]
    assert "".join(streamed("byte_fallback", ids[:3])) == "你"


def test_time_per_token_does_not_grow() -> None:
    """Counted, not measured: how many tokens the library decodes for one more token."""
    texts = texts_of("unigram")
    counted: list[int] = []
    decode = texts.decode

    class Counting(TokenTexts):
        def __init__(self) -> None:
            self.__dict__ |= texts.__dict__

        def decode(self, token_ids: Sequence[int]) -> str:
            counted.append(len(token_ids))
            return decode(token_ids)

    detokenizer = Detokenizer(Counting())
    for token in tokenizer_of("unigram").encode(SENTENCES[0] * 40, add_special_tokens=False).ids:
        detokenizer.push([token])
    assert len(counted) > 400
    assert max(counted) <= 25


def test_a_story_of_the_tiny_model() -> None:
    tokenizer = Tokenizer.from_file(str(stories260k() / "tokenizer.json"))
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode("Once upon a time 你好 there was a café.", add_special_tokens=False).ids
    detokenizer = Detokenizer(texts)
    pieces = [*(detokenizer.push([token]) for token in ids), detokenizer.flush()]
    assert "".join(pieces) == "Once upon a time 你好 there was a café."
    assert any(piece.startswith("你好") for piece in pieces)
