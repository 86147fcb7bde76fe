"""The tokenizer: special tokens, cutting, long texts in pieces, token ids, threads."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import ODD_TEXTS, SENTENCES, edit_json, small_tokenizer, write_folder
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, processors

from nobiru.errors import InvalidRequestError, ModelFolderError
from nobiru.folder.read import read_folder
from nobiru.frontend import pieces
from nobiru.frontend.tokenizer import Tokenizer
from nobiru.request import EncodedPrompts

KINDS = ("wordpiece", "unigram", "byte_bpe")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("folders")
    return {kind: Tokenizer(read_folder(write_folder(root / kind, kind))) for kind in KINDS}


def rows(encoded: EncodedPrompts) -> list[list[int]]:
    assert encoded.token_ids.dtype == encoded.lengths.dtype == np.int32
    assert encoded.truncated.dtype == np.bool_
    return [ids.tolist() for ids in np.split(encoded.token_ids, np.cumsum(encoded.lengths)[:-1])]


def reference(kind: str, text: str, max_tokens: int | None = None, side: str = "right") -> list[int]:
    """The library's own truncation, one text at a time."""
    tokenizer = small_tokenizer(kind)
    if max_tokens is not None:
        tokenizer.enable_truncation(max_tokens, direction=side)
    return tokenizer.encode(text).ids


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_library(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    encoded = tokenizers[kind].encode(ODD_TEXTS)
    assert rows(encoded) == [reference(kind, text) for text in ODD_TEXTS]
    assert encoded.lengths.tolist() == [len(reference(kind, text)) for text in ODD_TEXTS]
    assert not encoded.truncated.any()
    assert encoded.num_skipped_tokens == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("max_tokens", [2, 3, 8])
def test_cutting_is_that_of_the_library(
    tokenizers: dict[str, Tokenizer], kind: str, side: str, max_tokens: int
) -> None:
    encoded = tokenizers[kind].encode(ODD_TEXTS, max_tokens=max_tokens, side=side)
    assert rows(encoded) == [reference(kind, text, max_tokens, side) for text in ODD_TEXTS]
    assert encoded.truncated.tolist() == [len(reference(kind, text)) > max_tokens for text in ODD_TEXTS]


def test_the_prompt_is_part_of_every_text(tokenizers: dict[str, Tokenizer]) -> None:
    encoded = tokenizers["wordpiece"].encode(["fox", ""], prompt_prefix="the quick ", max_tokens=9)
    assert rows(encoded) == [reference("wordpiece", "the quick fox", 9), reference("wordpiece", "the quick ", 9)]


def test_no_texts(tokenizers: dict[str, Tokenizer]) -> None:
    encoded = tokenizers["wordpiece"].encode([])
    assert encoded.token_ids.size == encoded.lengths.size == encoded.truncated.size == 0


def test_many_texts_take_several_calls(tokenizers: dict[str, Tokenizer]) -> None:
    texts = [f"{SENTENCES[index % 6]} {index}" for index in range(6000)]
    assert sum(map(len, texts)) > 262_144
    encoded = rows(tokenizers["wordpiece"].encode(texts, max_tokens=12))
    assert len(encoded) == 6000
    for index in (0, 1, 2999, 3743, 3744, 5999):
        assert encoded[index] == reference("wordpiece", texts[index], 12)


class TestLongTexts:
    """Only a piece of a long text is tokenized; the ids are those of the whole text."""

    words = st.one_of(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=12),
        st.sampled_from([*ODD_TEXTS, *SENTENCES, "\u0301", "▁", "x" * 120, "日" * 50, "a" * 99, "<mask>", "  "]),
    )

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("side", ["right", "left"])
    @settings(max_examples=25, deadline=None)
    @given(
        parts=st.lists(words, min_size=1, max_size=30),
        separator=st.sampled_from([" ", " ", "\n", "  \t", ""]),
        max_tokens=st.integers(2, 300),
    )
    def test_are_cut_as_if_tokenized_whole(
        self,
        tokenizers: dict[str, Tokenizer],
        kind: str,
        side: str,
        parts: list[str],
        separator: str,
        max_tokens: int,
    ) -> None:
        unit = separator.join(parts) + separator
        text = unit * (15_000 // max(1, len(unit)) + 1)  # empty if its unit is
        encoded = tokenizers[kind].encode([text, "short"], max_tokens=max_tokens, side=side)
        assert rows(encoded)[0] == reference(kind, text, max_tokens, side)
        assert rows(encoded)[1] == reference(kind, "short", max_tokens, side)
        assert encoded.truncated[0] == (len(reference(kind, text)) > max_tokens)

    def counted(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Characters of each text that reaches the library."""
        seen: list[int] = []
        encode = tokenizer._encode

        def counting(texts: Any) -> Any:
            seen.extend(map(len, texts))
            return encode(texts)

        monkeypatch.setattr(tokenizer, "_encode", counting)
        return seen

    @pytest.mark.parametrize("side", ["right", "left"])
    def test_stop_early(self, tokenizers: dict[str, Tokenizer], side: str, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = self.counted(tokenizers["wordpiece"], monkeypatch)
        tokenizers["wordpiece"].encode(["the quick fox " * 100_000], max_tokens=32, side=side)
        assert sum(seen) < 10_000

    def test_stop_early_where_they_are_refused(
        self, tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = self.counted(tokenizers["wordpiece"], monkeypatch)
        with pytest.raises(InvalidRequestError, match=r"input\[1\] has more than 32 tokens, but the limit is 32"):
            tokenizers["wordpiece"].encode(["short", "the quick fox " * 100_000], refuse_above=32)
        assert sum(seen) < 10_000

    def test_grow_until_there_are_enough_tokens(
        self, tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = self.counted(tokenizers["wordpiece"], monkeypatch)
        text = ("x" * 2000 + " ") * 400 + "the fox " * 1000  # each long word is one token
        ids = rows(tokenizers["wordpiece"].encode([text], max_tokens=32))[0]
        assert ids == reference("wordpiece", text, 32)
        assert len(seen) > 2
        assert seen == sorted(seen)

    def test_of_few_tokens_are_not_truncated(self, tokenizers: dict[str, Tokenizer]) -> None:
        text = "x" * 50_000
        encoded = tokenizers["wordpiece"].encode([text], max_tokens=32, refuse_above=None)
        assert rows(encoded)[0] == reference("wordpiece", text)
        assert not encoded.truncated[0]
        assert tokenizers["wordpiece"].encode([text], refuse_above=3).num_tokens == 3

    def test_without_pieces_where_tokens_reach_over_spaces(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        library = Library(models.Unigram([("<unk>", 0.0), ("a", -2.0), ("▁", -2.0), ("a▁a", -1.0)], 0))
        library.add_special_tokens(["<s>", "</s>", "<pad>", "<mask>"])
        library.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
        tokenizer = Tokenizer(read_folder(write_folder(tmp_path, "unigram", tokenizer=library)))
        seen = self.counted(tokenizer, monkeypatch)
        text = "a " * 20_000
        assert rows(tokenizer.encode([text], max_tokens=8))[0] == library.encode(text).ids[:8]
        assert seen == [40_000]


class TestPieces:
    def test_end_and_begin_behind_a_word(self) -> None:
        text = "one two  three four"
        assert pieces.cut_piece(text, 12, "right") == "one two"
        assert pieces.cut_piece(text, 7, "left") == " four"
        assert pieces.cut_piece(text, 99, "left") == text

    def test_without_spaces(self) -> None:
        assert pieces.cut_piece("x" * 10, 4, "right") == "xxxx"
        assert pieces.cut_piece("x" * 10, 4, "left") == "x" * 10


class TestRefusals:
    def test_too_long(self, tokenizers: dict[str, Tokenizer]) -> None:
        length = len(reference("wordpiece", SENTENCES[0]))
        assert tokenizers["wordpiece"].encode([SENTENCES[0]], refuse_above=length).num_tokens == length
        with pytest.raises(InvalidRequestError) as caught:
            tokenizers["wordpiece"].encode(["fox", SENTENCES[0]], refuse_above=length - 1)
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "input[1]"
        assert f"input[1] has {length} tokens, but the limit is {length - 1}" in caught.value.message

    @pytest.mark.parametrize(("text", "words"), [(3, "a int"), (None, "a NoneType"), (["a"], "a list")])
    def test_what_is_no_text(self, tokenizers: dict[str, Tokenizer], text: Any, words: str) -> None:
        with pytest.raises(InvalidRequestError, match=rf"input\[1\] is {words}"):
            tokenizers["wordpiece"].encode(["fine", text])

    def test_half_a_surrogate_pair(self, tokenizers: dict[str, Tokenizer]) -> None:
        with pytest.raises(InvalidRequestError, match=r"input\[2\].*character 2") as caught:
            tokenizers["wordpiece"].encode(["fine", "\U0001f600", "ab\ud83d"], prompt_prefix="p: ")
        assert caught.value.param == "input[2]"

    def test_texts_of_later_calls_have_their_own_number(self, tokenizers: dict[str, Tokenizer]) -> None:
        texts = ["the fox " * 20_000, "the fox " * 20_000, "fox", "fox fox fox fox"]
        with pytest.raises(InvalidRequestError, match=r"input\[3\]"):
            tokenizers["wordpiece"].encode(["x" * 300_000, *["fox"] * 2, texts[3]], refuse_above=4)


class TestTokenIds:
    def test_are_taken_as_they_are(self, tokenizers: dict[str, Tokenizer]) -> None:
        encoded = tokenizers["wordpiece"].from_token_ids([[7, 8, 9], [5], np.array([1, 2])])
        assert rows(encoded) == [[7, 8, 9], [5], [1, 2]]
        assert not encoded.truncated.any()

    def test_cutting_keeps_special_tokens(self, tokenizers: dict[str, Tokenizer]) -> None:
        tokenizer = tokenizers["wordpiece"]
        (first,), (last,) = tokenizer.prefix, tokenizer.suffix
        lists = [[first, 10, 11, 12, 13, last], [10, 11, 12, 13, 14], [first, 10, 11, 12, 13], [10, 11]]
        right = tokenizer.from_token_ids(lists, max_tokens=4)
        assert rows(right) == [[first, 10, 11, last], [10, 11, 12, 13], [first, 10, 11, 12], [10, 11]]
        assert right.truncated.tolist() == [True, True, True, False]
        left = tokenizer.from_token_ids(lists, max_tokens=4, side="left")
        assert rows(left) == [[first, 12, 13, last], [11, 12, 13, 14], [first, 11, 12, 13], [10, 11]]

    def test_cutting_as_the_text_is_cut(self, tokenizers: dict[str, Tokenizer]) -> None:
        for kind in KINDS:
            for side in ("right", "left"):
                ids = [reference(kind, text) for text in SENTENCES]
                encoded = tokenizers[kind].from_token_ids(ids, max_tokens=7, side=side)
                assert rows(encoded) == [reference(kind, text, 7, side) for text in SENTENCES]

    def test_too_long(self, tokenizers: dict[str, Tokenizer]) -> None:
        with pytest.raises(InvalidRequestError, match=r"input\[1\] has 5 tokens, but the limit is 4") as caught:
            tokenizers["wordpiece"].from_token_ids([[7], [7] * 5], refuse_above=4)
        assert caught.value.code == "context_length_exceeded"

    @pytest.mark.parametrize(
        ("lists", "name", "value"),
        [
            ([[1], [2, -1]], "input[1][1]", "-1"),
            ([[1], [2, 10**6]], "input[1][1]", "1000000"),
            ([[1, 2**80]], "input[0][1]", str(2**80)),
            ([[1, True]], "input[0][1]", "True"),
            ([[1, 2.0]], "input[0][1]", "2.0"),
            ([[1, "2"]], "input[0][1]", "'2'"),
            ([[1, None]], "input[0][1]", "None"),
            ([[1], []], "input[1]", "empty"),
        ],
    )
    def test_refusals(self, tokenizers: dict[str, Tokenizer], lists: Any, name: str, value: str) -> None:
        with pytest.raises(InvalidRequestError) as caught:
            tokenizers["wordpiece"].from_token_ids(lists)
        assert caught.value.param == name
        assert caught.value.message.startswith(name)
        assert value in caught.value.message

    def test_tokens_and_counts(self, tokenizers: dict[str, Tokenizer]) -> None:
        tokenizer = tokenizers["wordpiece"]
        assert tokenizer.tokens(tokenizer.encode(["the fox"]).token_ids.tolist()) == ["[CLS]", "the", "fox", "[SEP]"]
        assert tokenizer.tokens([10**6]) == [""]
        assert tokenizer.count("the fox") == 4
        assert tokenizer.num_special_tokens == 2


class TestFolders:
    def test_special_tokens_of_every_shape(self, tmp_path: Path) -> None:
        library = small_tokenizer("wordpiece")
        ids = [("[CLS]", library.token_to_id("[CLS]")), ("[SEP]", library.token_to_id("[SEP]"))]
        cls, sep = ids[0][1], ids[1][1]
        for template, prefix, suffix in (
            ("$A", (), ()),
            ("[CLS] $A", (cls,), ()),
            ("$A [SEP]", (), (sep,)),
            ("[CLS] [SEP] $A [SEP] [SEP]", (cls, sep), (sep, sep)),
        ):
            library.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
            folder = write_folder(tmp_path / template.replace(" ", ""), tokenizer=library)
            tokenizer = Tokenizer(read_folder(folder))
            assert (tokenizer.prefix, tokenizer.suffix) == (prefix, suffix)
            library.enable_truncation(6)
            assert rows(tokenizer.encode([SENTENCES[0]], max_tokens=6))[0] == library.encode(SENTENCES[0]).ids
            library.no_truncation()

    def test_special_tokens_in_the_middle_cannot_be_honoured(self, tmp_path: Path) -> None:
        library = small_tokenizer("wordpiece")
        ids = [("[SEP]", library.token_to_id("[SEP]"))]
        library.post_processor = processors.TemplateProcessing(single="$A [SEP] $A", special_tokens=ids)
        with pytest.raises(ModelFolderError, match="post_processor"):
            Tokenizer(read_folder(write_folder(tmp_path, tokenizer=library)))

    def test_more_tokens_than_embeddings(self, tmp_path: Path) -> None:
        library = small_tokenizer("wordpiece")
        folder = write_folder(tmp_path, tokenizer=library, config={"vocab_size": library.token_to_id("the")})
        tokenizer = Tokenizer(read_folder(folder))
        assert tokenizer.encode(["a"]).num_tokens == 3
        with pytest.raises(InvalidRequestError, match="'the'"):
            tokenizer.encode(["a", "the"])
        edit_json(folder / "config.json", vocab_size=2)
        with pytest.raises(ModelFolderError, match="vocab_size"):
            Tokenizer(read_folder(folder))

    def test_no_fast_tokenizer(self, tmp_path: Path) -> None:
        folder = write_folder(tmp_path)
        (folder / "tokenizer.json").write_text("{}")
        with pytest.raises(ModelFolderError, match=r"tokenizer\.json cannot be read"):
            Tokenizer(read_folder(folder))
        (folder / "tokenizer.json").unlink()
        (folder / "sentencepiece.bpe.model").touch()
        with pytest.raises(ModelFolderError, match="Save a fast tokenizer"):
            Tokenizer(read_folder(folder))

    def test_a_special_token_that_is_not_in_the_vocabulary(self, tmp_path: Path) -> None:
        config = {"tokenizer_class": "BertTokenizer", "cls_token": "[NOT THERE]"}
        with pytest.raises(ModelFolderError, match=r"\[NOT THERE\]"):
            Tokenizer(read_folder(write_folder(tmp_path, tokenizer_config=config)))


def test_threads_share_a_tokenizer(tokenizers: dict[str, Tokenizer]) -> None:
    """Different limits, sides and prompts at once; nothing of one call shows in another."""
    tokenizer = tokenizers["wordpiece"]
    failures: list[str] = []

    def work(max_tokens: int) -> None:
        side = "right" if max_tokens % 2 else "left"
        expected = [reference("wordpiece", text, max_tokens, side) for text in ODD_TEXTS]
        for _ in range(30):
            if rows(tokenizer.encode(ODD_TEXTS, max_tokens=max_tokens, side=side)) != expected:
                failures.append(f"{max_tokens} {side}")

    threads = [threading.Thread(target=work, args=(max_tokens,)) for max_tokens in range(3, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
