"""`Frontend.prepare`: shapes of `input`, options, prompts, truncation rules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_tokenizers import edit_json, small_tokenizer, write_folder, write_json

from nobiru.config import ServerConfig
from nobiru.errors import InvalidRequestError
from nobiru.folder.read import read_folder
from nobiru.frontend.frontend import Frontend
from nobiru.request import EncodedPrompts, PoolingParams
from nobiru.serving.start import make_frontend

LIMIT = 16
LONG = "the quick brown fox jumps over the lazy dog while the cat sleeps in the sun"


def folder_with(path: Path, *, include_prompt: bool = True, **prompts: Any) -> Path:
    folder = write_folder(path, limit=LIMIT)
    edit_json(folder / "1_Pooling" / "config.json", include_prompt=include_prompt)
    write_json(folder / "config_sentence_transformers.json", prompts)
    return folder


@pytest.fixture(scope="module")
def frontend(tmp_path_factory: pytest.TempPathFactory) -> Frontend:
    return Frontend(read_folder(folder_with(tmp_path_factory.mktemp("plain"))), auto_truncate=False)


def rows(encoded: EncodedPrompts) -> list[list[int]]:
    return [ids.tolist() for ids in np.split(encoded.token_ids, np.cumsum(encoded.lengths)[:-1])]


def ids_of(*texts: str) -> list[list[int]]:
    return [small_tokenizer("wordpiece").encode(text).ids for text in texts]


def refusal(frontend: Frontend, input: Any, **options: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        frontend.prepare(input, PoolingParams(**options))
    assert caught.value.status == 400
    return caught.value


class TestInput:
    def test_every_shape(self, frontend: Frontend) -> None:
        params = PoolingParams()
        assert rows(frontend.prepare("the fox", params)) == ids_of("the fox")
        assert rows(frontend.prepare(["the fox", ""], params)) == ids_of("the fox", "")
        assert rows(frontend.prepare([5, 6], params)) == [[5, 6]]
        assert rows(frontend.prepare([[5, 6], [7]], params)) == [[5, 6], [7]]
        assert rows(frontend.prepare((np.array([5, 6]), [7]), params)) == [[5, 6], [7]]
        assert rows(frontend.prepare(np.array([5, 6]), params)) == [[5, 6]]  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("input", "param", "words"),
        [
            ([], "input", "empty list"),
            (None, "input", "null"),
            (3, "input", "an integer"),
            ({"text": "a"}, "input", "an object"),
            ([None], "input[0]", "null"),
            ([True], "input[0]", "a boolean"),
            ([1.5], "input[0]", "a number"),
            (["a", None], "input[1]", "null"),
            (["a", 3], "input[1]", "an integer, but input[0] is a string"),
            ([3, "a"], "input[1]", "a string, but input[0] is an integer"),
            ([3, True], "input[1]", "a boolean, but input[0] is an integer"),
            ([[3], 3], "input[1]", "an integer, but input[0] is a list"),
            (["a", ["b"]], "input[1]", "a list, but input[0] is a string"),
            ([[]], "input[0]", "empty list"),
            ([["a"]], "input[0][0]", "'a'"),
            ([[[3]]], "input[0][0]", "[3]"),
            ([[3], [None]], "input[1][0]", "None"),
            ([3, -1], "input[1]", "-1"),
            (["a", "\ud800"], "input[1]", "surrogate"),
            ("\ud800", "input", "surrogate"),
        ],
    )
    def test_refusals(self, frontend: Frontend, input: Any, param: str, words: str) -> None:
        error = refusal(frontend, input)
        assert error.param == param
        assert error.message.startswith(param)
        assert words in error.message


class TestTruncation:
    def test_too_long_is_refused(self, frontend: Frontend) -> None:
        length = len(ids_of(LONG)[0])
        for input, name in (
            (LONG, "input"),
            (["fox", LONG], "input[1]"),
            ([7] * 17, "input"),
            ([[7] * 17], "input[0]"),
        ):
            error = refusal(frontend, input)
            assert (error.code, error.param) == ("context_length_exceeded", name)
            assert f"limit is {LIMIT}" in error.message
            assert f"{17 if not isinstance(input[-1], str) else length} tokens" in error.message

    def test_exactly_the_limit_is_not_too_long(self, frontend: Frontend) -> None:
        assert frontend.prepare([7] * LIMIT, PoolingParams()).num_tokens == LIMIT
        assert frontend.prepare("fox " * (LIMIT - 2), PoolingParams()).num_tokens == LIMIT

    @pytest.mark.parametrize("asked", [-1, LIMIT, 5, 2])
    @pytest.mark.parametrize("side", ["right", "left", None])
    def test_cutting(self, frontend: Frontend, asked: int, side: str | None) -> None:
        encoded = frontend.prepare(["fox", LONG], PoolingParams(truncate_prompt_tokens=asked, truncation_side=side))
        tokenizer = small_tokenizer("wordpiece")
        tokenizer.enable_truncation(LIMIT if asked == -1 else asked, direction=side or "right")
        assert rows(encoded) == [tokenizer.encode("fox").ids, tokenizer.encode(LONG).ids]
        assert encoded.truncated.tolist() == [asked == 2, True]

    def test_the_server_may_cut_by_itself(self, tmp_path: Path) -> None:
        frontend = make_frontend(read_folder(folder_with(tmp_path)), ServerConfig(auto_truncate=True))
        assert isinstance(frontend, Frontend)
        encoded = frontend.prepare(["fox", LONG], PoolingParams())
        assert encoded.lengths.tolist() == [3, LIMIT]
        assert frontend.prepare(["fox", LONG], PoolingParams(truncate_prompt_tokens=5)).lengths.tolist() == [3, 5]
        assert encoded.truncated.tolist() == [False, True]
        assert frontend.prepare([[7] * 20], PoolingParams()).truncated.tolist() == [True]

    @pytest.mark.parametrize("asked", [0, -2, 17, 1, True, 2.0, "5"])
    def test_refusals(self, frontend: Frontend, asked: Any) -> None:
        error = refusal(frontend, "fox", truncate_prompt_tokens=asked)
        assert error.param == "truncate_prompt_tokens"
        assert repr(asked) in error.message
        if asked == 17:
            assert f"limit is {LIMIT}" in error.message

    def test_the_tokenizers_own_side(self, tmp_path: Path) -> None:
        folder = folder_with(tmp_path)
        edit_json(folder / "tokenizer_config.json", truncation_side="left")
        frontend = Frontend(read_folder(folder), auto_truncate=True)
        tokenizer = small_tokenizer("wordpiece")
        for side in ("left", "right", None):
            tokenizer.enable_truncation(LIMIT, direction=side or "left")
            encoded = frontend.prepare(LONG, PoolingParams(truncation_side=side))
            assert rows(encoded) == [tokenizer.encode(LONG).ids]


class TestPrompts:
    @pytest.fixture
    def prompted(self, tmp_path: Path) -> Frontend:
        prompts = {"query": "a query: ", "none": ""}
        folder = folder_with(tmp_path, include_prompt=False, prompts=prompts, default_prompt_name="query")
        return Frontend(read_folder(folder), auto_truncate=True)

    @pytest.mark.parametrize(
        ("options", "prompt"),
        [
            ({}, "a query: "),
            ({"prompt_name": "query"}, "a query: "),
            ({"prompt_name": "none"}, ""),
            ({"prompt_name": "document"}, ""),
            ({"prompt": ""}, ""),
            ({"prompt": "the sun "}, "the sun "),
            ({"prompt": "the sun ", "prompt_name": "query"}, "the sun "),
        ],
    )
    def test_precedence_and_skipped_tokens(self, prompted: Frontend, options: dict[str, str], prompt: str) -> None:
        encoded = prompted.prepare(["fox", "the dog"], PoolingParams(**options))
        assert rows(encoded) == ids_of(f"{prompt}fox", f"{prompt}the dog")
        # The prompt alone, [CLS] included and [SEP] not.
        assert encoded.num_skipped_tokens == (len(ids_of(prompt)[0]) - 1 if prompt else 0)

    def test_never_in_front_of_token_ids(self, prompted: Frontend) -> None:
        for input in ([7, 8], [[7, 8]]):
            encoded = prompted.prepare(input, PoolingParams(prompt="the sun "))
            assert rows(encoded) == [[7, 8]]
            assert encoded.num_skipped_tokens == 0

    def test_pooled_prompts_skip_nothing(self, tmp_path: Path) -> None:
        frontend = Frontend(read_folder(folder_with(tmp_path, prompts={"query": "q: "})), auto_truncate=True)
        assert frontend.prepare("fox", PoolingParams(prompt_name="query")).num_skipped_tokens == 0

    def test_the_prompt_counts_towards_the_limit(self, prompted: Frontend) -> None:
        encoded = prompted.prepare(["fox " * 12], PoolingParams())
        assert encoded.truncated.tolist() == [True]
        assert encoded.lengths.tolist() == [LIMIT]

    def test_refusals(self, prompted: Frontend) -> None:
        error = refusal(prompted, "fox", prompt_name="nobody")
        assert error.param == "prompt_name"
        assert "'query', 'document', 'none'" in error.message
        assert refusal(prompted, "fox", prompt_name=3).param == "prompt_name"
        assert refusal(prompted, "fox", prompt=3).param == "prompt"
        assert refusal(prompted, "fox", prompt="\ud800").param == "prompt"


class TestOptions:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("dimensions", 0),
            ("dimensions", 9),
            ("dimensions", True),
            ("dimensions", "4"),
            ("truncation_side", "middle"),
            ("normalize", "yes"),
            ("normalize", 1),
            ("priority", 1.5),
            ("priority", True),
        ],
    )
    def test_refusals(self, frontend: Frontend, name: str, value: Any) -> None:
        error = refusal(frontend, "fox", **{name: value})
        assert error.param == name
        assert error.message.startswith(name)
        assert repr(value) in error.message

    def test_the_bounds_are_named(self, frontend: Frontend) -> None:
        assert "from 1 to 8" in refusal(frontend, "fox", dimensions=9).message
        frontend.prepare("fox", PoolingParams(dimensions=8, normalize=False, priority=-3))

    def test_a_limit_of_its_own(self, tmp_path: Path) -> None:
        frontend = Frontend(read_folder(folder_with(tmp_path)), auto_truncate=True, max_model_len=4)
        assert frontend.prepare(LONG, PoolingParams()).num_tokens == 4


def test_torch_and_transformers_stay_out() -> None:
    code = (
        "import sys, nobiru.frontend.pool, nobiru.folder.read;"
        "print([name for name in ('torch', 'transformers', 'huggingface_hub') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
