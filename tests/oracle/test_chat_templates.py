"""Chat templates against `transformers`, for templates of the kinds that models in the field have."""

from __future__ import annotations

from typing import Any

import pytest
from real_models import smollm2
from small_tokenizers import small_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nobiru.folder.read import read_folder
from nobiru.frontend.chat import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_TOOLS = """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last_query_index=messages|length - 1, multi_step=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string %}
        {%- set ns.multi_step = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role in ["user", "system"] %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query_index and reasoning %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- (message.content or '').lstrip('\\n') }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set tool_call = tool_call.function if tool_call.function else tool_call %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
HEADERS = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
INST = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
BLOCKS = """
{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    <turn {{ message.role }}>
    {% generation %}
    {{ message.content }}
    {% endgeneration %}
    {% if loop.index0 > 4 %}{% break %}{% endif %}
{% endfor %}
{{ {'b': '<é>', 'a': [1, 2.5, none, true]} | tojson }}
{{ {'b': 1, 'a': {}} | tojson(indent=2, sort_keys=true) }}
{{ strftime_now('%Y') | length }}
"""
TEMPLATES = {"chatml": CHATML, "tools": WITH_TOOLS, "headers": HEADERS, "inst": INST, "blocks": BLOCKS}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "What's the weather in <city> & around?",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Zürich", "東京"]}}},
        },
    }
]
TURNS = [
    {"role": "user", "content": "Hello <b>you</b>  "},
    {"role": "assistant", "content": "\n Hi & welcome. \n"},
    {"role": "user", "content": "東京の天気は。 'quoted' \"twice\""},
]
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": TURNS[:1],
    "three": TURNS,
    "system": [{"role": "system", "content": " Be brief. "}, *TURNS],
    "tool": [
        *TURNS,
        {
            "role": "assistant",
            "reasoning_content": "\nthink\n",
            "tool_calls": [
                {"type": "function", "function": {"name": "weather", "arguments": {"city": "東京", "n": 1.0}}}
            ],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
    ],
    "thought": [TURNS[0], {"role": "assistant", "content": "done", "reasoning": "why"}],
}
OPTIONS: list[dict[str, Any]] = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": False},
    {"add_generation_prompt": True, "enable_thinking": False, "date_string": "1 Jan 2026"},
    {"add_generation_prompt": True, "tools": TOOLS},
    {"add_generation_prompt": False, "continue_final_message": True},
]


def reference(template: str, chat: list[dict[str, Any]], options: dict[str, Any]) -> str | None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=small_tokenizer("byte_bpe"), **SPECIAL)
    try:
        return str(tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False, **options))
    except Exception:  # templates and transformers refuse in many ways
        return None


def ours(template: str, chat: list[dict[str, Any]], options: dict[str, Any]) -> str | None:
    named = {
        name: options[name] for name in ("add_generation_prompt", "continue_final_message", "tools") if name in options
    }
    variables = {name: value for name, value in options.items() if name not in named}
    try:
        return ChatTemplate(template, SPECIAL).render(chat, variables=variables, **named)
    except ValueError:
        return None


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options)))
def test_rendered_as_transformers_renders(name: str, chat: str, options: dict[str, Any]) -> None:
    expected = reference(TEMPLATES[name], CHATS[chat], options)
    assert ours(TEMPLATES[name], CHATS[chat], options) == expected


def test_the_comparison_is_of_texts() -> None:
    """Most combinations render: a comparison of refusals alone would show nothing."""
    texts = [reference(source, chat, OPTIONS[0]) for source in TEMPLATES.values() for chat in CHATS.values()]
    assert sum(text is not None for text in texts) > len(texts) / 2
    assert len({text for text in texts if text is not None}) > len(TEMPLATES)


def test_a_real_model_s_template() -> None:
    folder = smollm2()
    spec = read_folder(folder).generation
    assert spec is not None
    assert spec.chat_template is not None
    template = ChatTemplate(spec.chat_template, spec.special_tokens)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for chat in (CHATS["one"], CHATS["three"], CHATS["system"]):
        expected = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert template.render(chat) == expected
