"""Stop strings, stop tokens and what a text's end is called."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import small_tokenizer
from tokenizers import Tokenizer, decoders

from nobiru.frontend.text_stream import StopStrings, TextDelta, TextStream
from nobiru.frontend.token_texts import TokenTexts
from nobiru.generation import FinishReason, GenerationDelta, SampledToken, SamplingParams

EOS = 2  # "</s>" of the small tokenizer


@functools.cache
def tokenizer() -> Tokenizer:
    """Byte-level; the ids of single characters are those of `ids_of`."""
    made = small_tokenizer("byte_bpe")
    made.decoder = decoders.ByteLevel()
    return made


@functools.cache
def texts() -> TokenTexts:
    return TokenTexts(tokenizer())


def ids_of(text: str) -> list[int]:
    """One token per byte."""
    alphabet = {texts().bytes_of(token): token for token in range(tokenizer().get_vocab_size())}
    return [alphabet[bytes([byte])] for byte in text.encode()]


def delta(ids: Sequence[int], finish: FinishReason | None = None, stop_token: int | None = None) -> GenerationDelta:
    return GenerationDelta(
        child=0,
        first_index=0,
        tokens=[SampledToken(token) for token in ids],
        finish_reason=finish,
        stop_token_id=stop_token,
    )


def run(
    params: SamplingParams, ids: Sequence[int], *, size: int = 1, finish: FinishReason = "length", **end: int
) -> tuple[str, TextDelta, list[TextDelta]]:
    """Push `ids` in pieces of `size`, the last with `finish`; the text, the last delta, all deltas."""
    stream, out = TextStream(texts(), params), []
    pieces = [ids[start : start + size] for start in range(0, len(ids), size)]
    for index, piece in enumerate(pieces):
        is_last = index == len(pieces) - 1
        out.append(stream.push(delta(piece, finish if is_last else None, end.get("stop_token") if is_last else None)))
        if out[-1].finish_reason:
            break
    return "".join(each.text for each in out), out[-1], out


def slow(text: str, stops: Sequence[str], *, included: bool = False, after: int = 0) -> tuple[str, str | None]:
    """The definition: the text up to its first end at which some stop string is complete."""
    for end in range(after + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if included else end - len(stop)], stop
    return text, None


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any),
    included=st.booleans(),
    after=st.integers(0, 8),
)
def test_stop_strings_in_pieces_of_any_size(
    text: str, stops: list[str], sizes: list[int], included: bool, after: int
) -> None:
    cutter, out, start, turn = StopStrings(stops, included=included), "", 0, 0
    pieces = [text[:after]]
    start = after
    while start < len(text):
        pieces.append(text[start : start + sizes[turn % len(sizes)]])
        start += sizes[turn % len(sizes)]
        turn += 1
    for index, piece in enumerate(pieces):
        out += cutter.push(piece, may_end=index > 0)
        assert slow(text, stops, included=included, after=after)[0].startswith(out)
        if cutter.found is not None:
            break
    else:
        out += cutter.flush()
    assert (out, cutter.found) == slow(text, stops, included=included, after=after)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    cutter = StopStrings(["\n\nEND", "###"])
    assert [cutter.push(piece) for piece in ("one", " #", "two\n", "\nEN", "d", "##")] == [
        *("one", " ", "#two", "", "\n\nENd", ""),
    ]
    assert cutter.flush() == "##"


@settings(max_examples=150, deadline=None)
@given(
    text=st.text("abé\U0001f600", max_size=20),
    stops=st.lists(st.text("abé\U0001f600", min_size=1, max_size=3), max_size=3),
    size=st.integers(1, 9),
    included=st.booleans(),
    min_tokens=st.integers(0, 6),
)
def test_a_text_is_the_same_however_its_tokens_come(
    text: str, stops: list[str], size: int, included: bool, min_tokens: int
) -> None:
    params = SamplingParams(
        stop=tuple(stops), include_stop_str_in_output=included, min_tokens=min_tokens, max_tokens=1000
    )
    ids = ids_of(text)
    if not ids:
        return
    one, large = run(params, ids), run(params, ids, size=size)
    assert one[0] == large[0]
    assert one[1].finish_reason == large[1].finish_reason
    assert one[1].stop_reason == large[1].stop_reason
    assert [t for d in one[2] for t in d.token_ids] == [t for d in large[2] for t in d.token_ids]


@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_stop_string_across_tokens(size: int) -> None:
    ids = ids_of("one two STOP three")
    text, last, out = run(SamplingParams(stop=("STOP",)), ids, size=size)
    assert (text, last.finish_reason, last.stop_reason) == ("one two ", "stop", "STOP")
    assert [t for d in out for t in d.token_ids] == ids[: len("one two STOP")]
    assert last.stopped_early == (size != 100)  # with 100, the engine had ended it with the same delta
    shown, last, _ = run(SamplingParams(stop=("STOP",), include_stop_str_in_output=True), ids, size=size)
    assert (shown, last.stop_reason) == ("one two STOP", "STOP")


def test_min_tokens_keep_stop_strings_away() -> None:
    ids = ids_of("xx.yy.zz.")
    for min_tokens, expected in {0: "xx", 2: "xx", 3: "xx.yy", 6: "xx.yy.zz", 9: "xx.yy.zz."}.items():
        params = SamplingParams(stop=(".",), min_tokens=min_tokens)
        assert run(params, ids)[0] == expected
        assert run(params, ids, size=4)[0] == expected


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("included", [False, True])
def test_a_stop_token_counts_but_is_not_read(asked: bool, included: bool) -> None:
    [dot] = ids_of(".")
    params = SamplingParams(stop_token_ids=(dot,) if asked else (), include_stop_str_in_output=included)
    text, last, out = run(params, ids_of("ab."), finish="stop", stop_token=dot)
    assert text == ("ab." if included else "ab")
    assert (last.finish_reason, last.stop_reason) == ("stop", dot if asked else None)
    assert [t for d in out for t in d.token_ids] == ids_of("ab.")
    assert not last.stopped_early


@pytest.mark.parametrize("skip", [True, False])
def test_end_of_text_is_never_shown_unless_asked_for(skip: bool) -> None:
    params = SamplingParams(skip_special_tokens=skip)
    assert run(params, [*ids_of("ab"), EOS], finish="stop", stop_token=EOS)[0] == "ab"
    both = SamplingParams(skip_special_tokens=skip, include_stop_str_in_output=True)
    assert run(both, [*ids_of("ab"), EOS], finish="stop", stop_token=EOS)[0] == ("ab" if skip else "ab</s>")


def test_what_is_held_back_comes_at_the_end() -> None:
    half = ids_of("é")[:1]
    text, last, out = run(SamplingParams(stop=("zzz",)), [*ids_of("azz"), *half])
    assert (text, last.finish_reason) == ("azz\ufffd", "length")
    assert [each.text for each in out] == ["a", "", "", "zz\ufffd"]


def test_a_stop_string_in_the_last_text_counts() -> None:
    stop = "\ufffd"
    text, last, _ = run(SamplingParams(stop=(stop,)), [*ids_of("a"), *ids_of("é")[:1]])
    assert (text, last.finish_reason, last.stop_reason, last.stopped_early) == ("a", "stop", stop, False)


def test_an_empty_last_delta() -> None:
    stream = TextStream(texts(), SamplingParams(stop=("bc",)), child=3)
    assert stream.push(delta(ids_of("ab"))).text == "a"
    last = stream.push(delta([], "length"))
    assert (last.text, last.finish_reason, last.child) == ("b", "length", 3)
    assert stream.finished
    assert stream.num_tokens == 2
