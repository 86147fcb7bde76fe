"""The body of an embeddings request: what is accepted, and how refusals name what is wrong."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from nobiru.errors import InvalidRequestError
from nobiru.request import PoolingParams
from nobiru.serving.body import parse_object
from nobiru.serving.embeddings_request import EmbeddingsRequest, RequestLimits, parse_embeddings_request

MAX_MODEL_LEN = 2000


def parse(body: dict[str, Any], *, dim: int = 384, priorities: bool = True) -> EmbeddingsRequest:
    limits = RequestLimits(embedding_dim=dim, max_model_len=MAX_MODEL_LEN, priorities=priorities)
    return parse_embeddings_request(body, limits)


def refusal(body: dict[str, Any], **limits: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as refused:
        parse(body, **limits)
    return refused.value


def test_every_field_arrives() -> None:
    asked = parse(
        {
            "input": ["a", "b"],
            "model": "m",
            "encoding_format": "base64",
            "dimensions": 7,
            "user": "u",
            "priority": -3,
            "truncate_prompt_tokens": 12,
            "truncation_side": "left",
            "prompt_name": "query",
            "prompt": "",
            "normalize": False,
        }
    )
    assert (asked.input, asked.model, asked.base64) == (["a", "b"], "m", True)
    assert asked.params == PoolingParams(
        dimensions=7,
        normalize=False,
        prompt_name="query",
        prompt="",
        truncate_prompt_tokens=12,
        truncation_side="left",
        priority=-3,
    )


def test_null_equals_absent() -> None:
    names = ("model", "encoding_format", "dimensions", "user", "priority", "truncate_prompt_tokens")
    names += ("truncation_side", "prompt_name", "prompt", "normalize")
    assert parse({"input": "a", **dict.fromkeys(names)}) == parse({"input": "a"})
    assert parse({"input": "a"}).params == PoolingParams()


@pytest.mark.parametrize(
    ("value", "num_tokens"),
    [
        ("", 2),
        ("x" * 400, 102),
        (["x" * 40, "y" * 40], 24),
        ([1, 2, 3], 3),
        ([[1, 2], [3]], 3),
        ([0] * 1000, 1000),
        (5, 0),
        ({"text": "a"}, 0),
        (["x" * 400, None], 0),
        ([], 0),
    ],
)
def test_tokens_are_estimated_whatever_the_input(value: Any, num_tokens: int) -> None:
    assert parse({"input": value}).num_estimated_tokens == num_tokens


@pytest.mark.parametrize("body", [{}, {"input": None}])
def test_a_missing_input_is_named(body: dict[str, Any]) -> None:
    error = refusal(body)
    assert error.param == "input"
    assert "missing" in error.message


@pytest.mark.parametrize("value", [0, -1, "x", 1.5, True, 10**9, [8], 385, 2**70])
def test_wrong_dimensions_name_the_model_s_size(value: Any) -> None:
    error = refusal({"input": "a", "dimensions": value})
    assert error.param == "dimensions"
    assert "from 1 to 384" in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("encoding_format", "hex"),
        ("encoding_format", ""),
        ("encoding_format", 7),
        ("truncate_prompt_tokens", -2),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", True),
        ("truncate_prompt_tokens", "x"),
        ("truncation_side", "middle"),
        ("normalize", 1),
        ("normalize", "true"),
        ("prompt", 5),
        ("prompt_name", ["query"]),
        ("user", 5),
        ("model", 5),
        ("model", ["m"]),
        ("priority", 0.0),
        ("priority", True),
        ("priority", 2**40),
    ],
)
def test_wrong_values_are_named(name: str, value: Any) -> None:
    error = refusal({"input": "a", name: value})
    assert error.param == name
    assert error.message.startswith(f"{name} is ")
    assert "must be" in error.message


def test_long_values_are_shown_shortened() -> None:
    assert len(refusal({"input": "a", "encoding_format": "x" * 10_000}).message) < 200


def test_priority_needs_the_priority_policy() -> None:
    assert "fcfs" in refusal({"input": "a", "priority": 1}, priorities=False).message
    assert parse({"input": "a", "priority": 0}, priorities=False).params.priority == 0


def test_unknown_fields_are_named_with_what_was_meant() -> None:
    error = refusal({"input": "a", "dimension": 5, "no_such_field": 1})
    assert '"dimension" (did you mean "dimensions"?)' in error.message
    assert '"no_such_field"' in error.message
    assert (error.param, error.code) == ("dimension", "unknown_field")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is empty"),
        (b"hello", "not valid JSON"),
        (b'{"a": 1,}', "not valid JSON"),
        (b'{"a": 1} {"a": 1}', "not valid JSON"),
        (b'{"a": NaN}', "not valid JSON"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "out of range"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        (b"[1, 2]", "the body is a list"),
        (b"null", "the body is null"),
        (b'"text"', "the body is a string"),
    ],
)
def test_unreadable_bodies(body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refused:
        parse_object(body)
    assert refused.value.code == "invalid_json"


@pytest.mark.parametrize("end", [b"]}", b"]"])
def test_a_large_body_leaves_the_garbage_collector_on(end: bytes) -> None:
    body = b'{"input":[' + b"[5]," * 400_000 + b"[5]" + end
    try:
        assert len(parse_object(body)["input"]) == 400_001
    except InvalidRequestError:
        assert end == b"]"
    assert gc.isenabled()


def test_a_byte_order_mark_is_no_obstacle() -> None:
    assert parse_object(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


@pytest.mark.parametrize(("num_texts", "num_tokens"), [(1, 2000), (3, 6000), (20_001, 20_001 * 25_002)])
def test_no_text_is_estimated_above_the_limit_unless_there_are_too_many_to_look_at(
    num_texts: int, num_tokens: int
) -> None:
    assert parse({"input": ["x" * 100_000] * num_texts}).num_estimated_tokens == num_tokens
