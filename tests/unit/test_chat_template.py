"""Chat templates: what messages may hold, what a template may say, and how it fails."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nobiru.errors import InvalidRequestError, ModelFolderError
from nobiru.frontend import chat
from nobiru.frontend.chat import ChatTemplate, plain_messages

PLAIN = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
USER = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: Any = USER, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **options)


def test_variables_and_special_tokens() -> None:
    assert render("{{ bos_token }}" + PLAIN) == "<s>[user] Hi\n>"
    assert render(PLAIN, add_generation_prompt=False) == "[user] Hi\n"
    assert render("{{ mood }} {{ eos_token }}", variables={"mood": "glad"}) == "glad </s>"
    assert render("{{ bos_token }}", variables={"bos_token": "<b>"}) == "<b>"
    assert render("{{ tools | length }}{{ documents[0].text }}", tools=[{}, {}], documents=[{"text": "d"}]) == "2d"
    assert render("{{ tools is none }}") == "True"


def test_text_parts_are_joined_and_others_refused() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"
    for part in ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, "text", {"text": "x"}):
        with pytest.raises(InvalidRequestError) as caught:
            render(PLAIN, [*USER, {"role": "user", "content": [part]}])
        assert caught.value.param == "messages[1].content[0]"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        (None, "messages"),
        (["hello"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([*USER, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_wrong_messages_are_named(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(PLAIN, messages)
    assert caught.value.param == param


def test_messages_are_copied() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"}]
    before = json.dumps(messages)
    [plain] = plain_messages(messages)
    assert json.dumps(messages) == before
    assert plain["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert "content" not in plain
    assert (plain["reasoning_content"], plain["thinking"]) == ("hm", "hm")


def test_a_template_can_refuse_messages() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert (caught.value.code, caught.value.param, caught.value.status) == ("chat_template_error", "messages", 400)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 5 }}",
        "{{ missing.field }}",
        "{{ messages[7].content }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_whatever_goes_wrong_in_a_template_is_a_refusal(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template"):
        render(source)


def test_a_template_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{{ j }} {% endfor %}{% endfor %}"
    monkeypatch.setattr(chat, "MAX_RENDER_S", 0.05)
    with pytest.raises(InvalidRequestError, match="more than"):
        render(loop)
    monkeypatch.setattr(chat, "MAX_RENDER_S", 60.0)
    monkeypatch.setattr(chat, "MAX_RENDERED_CHARS", 1000)
    with pytest.raises(InvalidRequestError, match="1000 characters"):
        render(loop)


def test_a_source_that_is_no_template() -> None:
    with pytest.raises(ModelFolderError, match="line 2"):
        ChatTemplate("{{ bos_token }}\n{% for %}", {})


def test_going_on_with_the_last_message() -> None:
    messages = [*USER, {"role": "assistant", "content": "The answer "}]
    options: Any = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(PLAIN, messages, **options) == "[user] Hi\n[assistant] The answer "
    trimmed = PLAIN.replace("m['content']", "m['content'] | trim")
    assert render(trimmed, messages, **options) == "[user] Hi\n[assistant] The answer"
    with pytest.raises(InvalidRequestError, match="leaves out the last message"):
        render("{{ messages[0].content }}", messages, **options)
    with pytest.raises(InvalidRequestError, match="at most one"):
        render(PLAIN, messages, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="no content"):
        render(PLAIN, [{"role": "assistant", "tool_calls": []}], **options)


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt"])
def test_variables_cannot_replace_fields(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(PLAIN, variables={name: 1})
    assert caught.value.param == f"chat_template_kwargs.{name}"
