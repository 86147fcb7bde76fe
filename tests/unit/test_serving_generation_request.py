"""Bodies of the generation routes: whatever they hold, they are understood or refused with the field's name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nobiru.errors import InvalidRequestError
from nobiru.serving import chat_request, completions_request
from nobiru.serving.chat_request import parse_chat_request
from nobiru.serving.completions_request import parse_completions_request
from nobiru.serving.sampling_fields import GenerationLimits

LIMITS = GenerationLimits(max_model_len=100, priorities=True, sampling_defaults={"temperature": 0.7, "top_k": 40})
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(["a", "text", "json_object", "json_schema", "auto", "none", 1, 0, -1, 0.5]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "json", "json_schema", "schema", "include_usage", "role", "content", "5", "x"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


def parsed_or_refused(parse: Any, body: dict[str, Any]) -> Any:
    """The request, or None when it is refused with the name of a field; anything else that is raised is a bug."""
    refused: list[InvalidRequestError] = []
    try:
        return parse(body, LIMITS)
    except InvalidRequestError as error:
        refused.append(error)
    assert refused[0].param
    return None


@settings(max_examples=400, deadline=None)
@given(body=st.dictionaries(st.sampled_from(completions_request.KNOWN), JSON, max_size=5), prompt=JSON)
def test_any_completion_body(body: dict[str, Any], prompt: Any) -> None:
    whole = {"prompt": "a", **body, **({"prompt": prompt} if prompt else {})}
    asked = parsed_or_refused(parse_completions_request, whole)
    if asked is not None:
        assert 0 < len(asked.prompts) == len(asked.names)
        assert asked.num_estimated_tokens > 0


@settings(max_examples=400, deadline=None)
@given(body=st.dictionaries(st.sampled_from(chat_request.KNOWN), JSON, max_size=5))
def test_any_chat_body(body: dict[str, Any]) -> None:
    whole = {"messages": [{"role": "user", "content": "x"}], **body}
    asked = parsed_or_refused(parse_chat_request, whole)
    if asked is not None:
        assert asked.messages
        assert asked.num_estimated_tokens > 0


def test_defaults_are_the_model_s_then_openai_s() -> None:
    params = parse_completions_request({"prompt": "a"}, LIMITS).params
    assert (params.temperature, params.top_k, params.top_p, params.n, params.max_tokens) == (0.7, 40, 1.0, 1, None)
    given_zero = parse_chat_request({"messages": [{"role": "user"}], "temperature": 0, "top_k": None}, LIMITS).params
    assert (given_zero.temperature, given_zero.top_k) == (0, 40)


def test_estimates_are_bounded_by_what_can_be() -> None:
    def estimate(**body: Any) -> int:
        return parse_completions_request({"prompt": "a", **body}, LIMITS).num_estimated_tokens

    assert estimate(max_tokens=5) == 2 + 5
    assert estimate(max_tokens=5, n=3) == 2 + 15
    assert estimate(prompt="x" * 10_000, max_tokens=5) == 100 + 5
    assert estimate(prompt=[[1, 2, 3], [4]], max_tokens=5) == (2 + 3 + 5) + (2 + 1 + 5)
    assert estimate(max_tokens=10**6) == 2 + 100
    wide = GenerationLimits(max_model_len=10**6, priorities=True, sampling_defaults={})
    chat = parse_chat_request({"messages": [{"role": "user", "content": "x" * 400}]}, wide)
    assert chat.num_estimated_tokens == 2 + 100 + 256  # few texts get as long as they may


@pytest.mark.parametrize("parse", [parse_completions_request, parse_chat_request])
def test_unknown_fields_are_named_with_a_hint(parse: Any) -> None:
    with pytest.raises(InvalidRequestError, match='"temprature" \\(did you mean "temperature"\\?\\)') as caught:
        parse({"prompt": "a", "messages": [], "temprature": 1}, LIMITS)
    assert caught.value.code == "unknown_field"
