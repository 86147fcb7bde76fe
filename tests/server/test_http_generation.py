"""Completions and chat completions that are not streamed: shapes, options, refusals, clients that leave."""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from server.generation_fakes import EOS, LIMIT, NUM_CACHED, generation_server, ids_of, text_of
from server.http_fakes import ServerProcess, running_server

CHAT = [{"role": "user", "content": "@say the answer"}]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with generation_server(served_model_names=["tiny", "alias"]) as started:
        yield started


def post(server: ServerProcess, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def complete(server: ServerProcess, **body: Any) -> dict[str, Any]:
    answer = post(server, **body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def chat(server: ServerProcess, **body: Any) -> dict[str, Any]:
    answer = post(server, "/v1/chat/completions", **{"messages": CHAT, **body})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def refusal(server: ServerProcess, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    answer = post(server, path, **body)
    assert answer.status_code == 400, answer.text
    return dict(answer.json()["error"])


def status(server: ServerProcess) -> dict[str, Any]:
    return dict(httpx.get(f"{server.url}/elastic/status").json())


def last(server: ServerProcess) -> dict[str, Any]:
    """What the engine was asked last."""
    return dict(status(server)["last"])


def metric(server: ServerProcess, name: str) -> float:
    for line in httpx.get(f"{server.url}/metrics").text.splitlines():
        if line.startswith(name + " "):
            return float(line.rpartition(" ")[2])
    return 0.0


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain until {what}"
        time.sleep(0.01)


def test_a_completion(server: ServerProcess) -> None:
    body = complete(server, prompt="@say hello fox", model="alias", max_tokens=40)
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", "alias")
    assert abs(body["created"] - time.time()) < 60
    [choice] = body["choices"]
    assert choice == {
        **{"index": 0, "text": "hello fox", "logprobs": None, "finish_reason": "stop", "stop_reason": None},
    }
    num_prompt, num_text = len(ids_of("@say hello fox")), len(ids_of("hello fox")) + 1
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_text,
        "total_tokens": num_prompt + num_text,
        "prompt_tokens_details": {"cached_tokens": NUM_CACHED},
    }


def test_a_chat_completion(server: ServerProcess) -> None:
    body = chat(server)
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    [choice] = body["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "the answer"},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert body["usage"]["completion_tokens"] == len(ids_of("the answer")) + 1
    assert last(server)["prompt"] == "<s>user: @say the answer</s>>"
    assert last(server)["max_tokens"] == LIMIT - body["usage"]["prompt_tokens"]


def test_texts_end_at_the_limit(server: ServerProcess) -> None:
    assert complete(server, prompt="@say a", ignore_eos=True)["usage"]["completion_tokens"] == 16  # OpenAI's default
    body = complete(server, prompt="@say a", ignore_eos=True, max_tokens=5)
    assert body["usage"]["completion_tokens"] == 5
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("aaaaa", "length")
    whole = chat(server, ignore_eos=True)
    assert whole["usage"]["total_tokens"] == LIMIT
    error = refusal(server, prompt="@say a", max_tokens=LIMIT)
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    assert str(LIMIT) in error["message"]


@pytest.mark.parametrize(
    "prompts", [["@say a", "@say bc", "@say def"], [ids_of("@say a"), ids_of("@say bc"), ids_of("@say def")]]
)
def test_several_prompts_and_texts(server: ServerProcess, prompts: Any) -> None:
    body = complete(server, prompt=prompts, n=2, return_token_ids=True)
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert [choice["text"] for choice in body["choices"]] == ["a#0", "a#1", "bc#0", "bc#1", "def#0", "def#1"]
    for number, choice in enumerate(body["choices"]):
        assert choice["prompt_token_ids"] == ids_of(["@say a", "@say bc", "@say def"][number // 2])
        assert choice["token_ids"] == [*ids_of(choice["text"]), EOS]
    assert body["usage"]["prompt_tokens"] == sum(len(ids_of(text)) for text in ("@say a", "@say bc", "@say def"))
    assert body["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in body["choices"])
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 3 * NUM_CACHED


def test_token_ids_of_a_chat(server: ServerProcess) -> None:
    body = chat(server, return_token_ids=True)
    assert text_of(body["prompt_token_ids"]) == "<s>user: @say the answer</s>>"
    assert body["choices"][0]["token_ids"] == [*ids_of("the answer"), EOS]


def test_stop_strings_and_tokens(server: ServerProcess) -> None:
    before = status(server)["stopped"]
    body = complete(server, prompt="@say one two three four", stop="thr", max_tokens=50)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one two ", "stop", "thr")
    assert status(server)["stopped"] == before + 1
    shown = chat(server, stop=["zzz", "ans"], include_stop_str_in_output=True)["choices"][0]
    assert (shown["message"]["content"], shown["stop_reason"]) == ("the ans", "ans")
    token = ids_of("one two three")[1]
    stopped = complete(server, prompt="@say one two three", stop_token_ids=[token])["choices"][0]
    assert (stopped["stop_reason"], stopped["finish_reason"]) == (token, "stop")
    assert status(server)["open"] == 0


def test_echo(server: ServerProcess) -> None:
    assert complete(server, prompt="@say hi", echo=True)["choices"][0]["text"] == "@say hihi"
    assert complete(server, prompt=[ids_of("@say a")], echo=True)["choices"][0]["text"] == "@say aa"


def test_completion_logprobs(server: ServerProcess) -> None:
    ids = [*ids_of("the fox"), EOS]
    logprobs = complete(server, prompt="@say the fox", logprobs=2)["choices"][0]["logprobs"]
    texts = [text_of([token]) for token in ids]
    assert logprobs["tokens"] == texts
    assert logprobs["token_logprobs"] == [-0.5 * (index + 1) for index in range(len(ids))]
    assert [len(top) for top in logprobs["top_logprobs"]] == [2] * len(ids)
    assert all(
        top[text] == lp
        for top, text, lp in zip(logprobs["top_logprobs"], texts, logprobs["token_logprobs"], strict=True)
    )
    assert logprobs["text_offset"] == [sum(map(len, texts[:index])) for index in range(len(ids))]
    alone = complete(server, prompt="@say the fox", logprobs=0)["choices"][0]["logprobs"]
    assert alone["top_logprobs"] == [{text: lp} for text, lp in zip(texts, logprobs["token_logprobs"], strict=True)]


def test_chat_logprobs(server: ServerProcess) -> None:
    content = chat(server, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    ids = [*ids_of("the answer"), EOS]
    assert [entry["token"] for entry in content] == [text_of([token]) for token in ids]
    assert [bytes(entry["bytes"]).decode() for entry in content] == [text_of([token]) for token in ids]
    assert [entry["logprob"] for entry in content] == [-0.5 * (index + 1) for index in range(len(ids))]
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * len(ids)
    assert content[0]["top_logprobs"][0] == {key: content[0][key] for key in ("token", "logprob", "bytes")}
    assert [entry["top_logprobs"] for entry in chat(server, logprobs=True)["choices"][0]["logprobs"]["content"]] == [
        [] for _ in ids
    ]


def test_options_reach_the_engine(server: ServerProcess) -> None:
    complete(server, prompt="@say a")
    given = last(server)["params"]
    assert given["temperature"] == 0.5  # the folder's
    assert 0 <= given["seed"] < 2**63
    options: dict[str, Any] = {
        **{"temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "seed": 11, "repetition_penalty": 1.5},
        **{"presence_penalty": 1, "frequency_penalty": -1, "min_tokens": 2, "priority": 3, "cache_salt": "s"},
        **{"skip_special_tokens": False},
    }
    complete(server, prompt="@say a", logit_bias={"5": -100, "7": 1.5}, stop=["x"], **options, user="u", best_of=1)
    given = last(server)["params"]
    assert {name: given[name] for name in options} == options
    assert given["logit_bias"] == {"5": -100, "7": 1.5}
    assert given["stop"] == ["x"]
    assert last(server)["stop_token_ids"] == [EOS]


@pytest.mark.parametrize(
    ("field", "schema"),
    [
        ({"response_format": {"type": "json_object"}}, {"type": "object", "additionalProperties": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string"}}}},
            {"type": "string"},
        ),
        ({"guided_json": {"type": "integer"}}, {"type": "integer"}),
        ({"guided_json": '{"type": "integer"}'}, {"type": "integer"}),
        ({"structured_outputs": {"json": {"type": "null"}}}, {"type": "null"}),
        ({"structured_outputs": {"json_object": True}}, {"type": "object", "additionalProperties": True}),
        ({"response_format": {"type": "text"}}, None),
    ],
)
def test_guided_json(server: ServerProcess, field: dict[str, Any], schema: Any) -> None:
    pytest.importorskip("xgrammar")
    for ask in (lambda: complete(server, prompt="@say a", **field), lambda: chat(server, **field)):
        ask()
        given = last(server)["params"]["json_schema"]
        assert (json.loads(given) if given else None) == schema


def test_chat_templates_get_their_variables(server: ServerProcess) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    chat(server, tools=[tool, tool], chat_template_kwargs={"mood": " (glad)"})
    assert last(server)["prompt"] == "<s>user (glad): @say the answer</s>2 tools>"
    chat(server, tools=[tool], tool_choice="none")
    assert last(server)["prompt"] == "<s>user: @say the answer</s>>"
    chat(server, add_generation_prompt=False)
    assert last(server)["prompt"] == "<s>user: @say the answer</s>"
    body = chat(server, messages=[*CHAT, {"role": "assistant", "content": "so @say far"}], continue_final_message=True)
    assert last(server)["prompt"] == "<s>user: @say the answer</s><s>assistant: so @say far"
    assert body["choices"][0]["message"]["content"] == "far"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [[5], [10**6]]}, "prompt[1][0]"),
        ({"prompt": [5, -1]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": "fox " * LIMIT}, "prompt"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 129}, "n"),
        ({"prompt": ["a"] * 300, "n": 100}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "temperature": True}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "top_k": 1.5}, "top_k"),
        ({"prompt": "a", "stop": 5}, "stop"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stop": ["a", 5]}, "stop[1]"),
        ({"prompt": "a", "stop": ["x"] * 17}, "stop"),
        ({"prompt": "a", "stop_token_ids": [10**6]}, "stop_token_ids[0]"),
        ({"prompt": "a", "stop_token_ids": ["5"]}, "stop_token_ids[0]"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"5": "1"}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"99999": 1}}, "logit_bias"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "logprobs": 1, "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
        ({"prompt": "a", "seed": 2**64}, "seed"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "a", "guided_json": "{"}, "json_schema"),
        ({"prompt": "a", "guided_json": [1]}, "guided_json"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format.type"),
        ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"prompt": "a", "response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json"),
        ({"prompt": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"prompt": "a", "max_token": 5}, "max_token"),
        ({"prompt": "a", "messages": []}, "messages"),
    ],
)
def test_completions_refused(server: ServerProcess, body: Any, param: str) -> None:
    error = refusal(server, **body)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert status(server)["open"] == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "martian", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "fox " * LIMIT}]}, "messages"),
        ({"messages": CHAT, "tool_choice": "required"}, "tool_choice"),
        ({"messages": CHAT, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"messages": CHAT, "tools": {"a": 1}}, "tools"),
        ({"messages": CHAT, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": CHAT, "logprobs": 2}, "logprobs"),
        ({"messages": CHAT, "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"messages": CHAT, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs.tools"),
        (
            {"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"messages": CHAT, "functions": []}, "functions"),
        ({"messages": CHAT, "chat_template": "x"}, "chat_template"),
    ],
)
def test_chats_refused(server: ServerProcess, body: Any, param: str) -> None:
    assert refusal(server, "/v1/chat/completions", **body)["param"] == param


def test_a_wrong_model(server: ServerProcess) -> None:
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": CHAT})):
        assert post(server, path, model="other", **body).status_code == 404


def test_priorities_need_the_priority_policy() -> None:
    with generation_server(policy="fcfs") as server:
        assert refusal(server, prompt="a", priority=1)["param"] == "priority"
        assert complete(server, prompt="@say a", priority=0)["choices"][0]["text"] == "a"


def test_failures_of_the_engine(server: ServerProcess) -> None:
    failed = post(server, prompt="@fail")
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "inference_failed")
    late = post(server, prompt="@failafter some words")
    assert (late.status_code, late.json()["error"]["code"]) == (500, "inference_failed")
    several = post(server, prompt=["@say a", "@fail", "@slow 30 b"])
    assert (several.status_code, several.json()["error"]["code"]) == (500, "inference_failed")
    bug = post(server, prompt=["@say a", "@bug"])
    assert (bug.status_code, bug.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in bug.text
    assert status(server)["open"] == 0


@pytest.mark.parametrize("body", [{"prompt": "@hang"}, {"prompt": ["@hang", "@slow 5 a"], "n": 2}])
def test_a_client_that_leaves_frees_its_work(server: ServerProcess, body: dict[str, Any]) -> None:
    before = status(server)
    coded = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(coded), coded)
        )
        wait_until(lambda: status(server)["open"] > before["open"], "the engine works")
    wait_until(lambda: status(server)["open"] == 0, "nothing is open")
    assert status(server)["aborted"] > before["aborted"]
    wait_until(
        lambda: metric(server, 'nobiru_requests_total{route="/v1/completions",status="499"}') >= 1, "a 499 is counted"
    )


def test_metrics(server: ServerProcess) -> None:
    names = {
        "first": "nobiru_time_to_first_token_seconds_count",
        "gaps": "nobiru_inter_token_seconds_count",
        "texts": "nobiru_time_per_output_token_seconds_count",
        "tokens": "nobiru_generated_tokens_total",
        "stop": 'nobiru_request_success_total{finish_reason="stop"}',
        "length": 'nobiru_request_success_total{finish_reason="length"}',
    }
    before = {key: metric(server, name) for key, name in names.items()}
    seconds = metric(server, "nobiru_time_to_first_token_seconds_sum")
    complete(server, prompt="@slow 0.02 a", ignore_eos=True, max_tokens=4)
    complete(server, prompt="@say a", n=2)
    change = {key: metric(server, name) - before[key] for key, name in names.items()}
    num_texts = len(ids_of("a#0")) + 1
    assert change["tokens"] == 4 + 2 * num_texts
    assert (change["first"], change["stop"], change["length"], change["texts"]) == (3, 2, 1, 3)
    assert change["gaps"] >= 3
    assert 0.02 < metric(server, "nobiru_time_to_first_token_seconds_sum") - seconds < 10
    text = httpx.get(f"{server.url}/metrics").text
    for name in ("kv_cache_usage_ratio", "running_sequences", "waiting_sequences", "preemptions_total"):
        assert f"nobiru_{name} " in text


def test_the_model_s_card(server: ServerProcess) -> None:
    card = httpx.get(f"{server.url}/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"], card["task"]) == ("tiny", LIMIT, "generate")
    assert "embedding_dim" not in card


def test_a_language_model_makes_no_embeddings(server: ServerProcess) -> None:
    error = refusal(server, "/v1/embeddings", input="a")
    assert (error["code"], error["param"]) == ("model_does_not_embed", "model")


def test_an_embedding_model_generates_no_text() -> None:
    with running_server() as server:
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": CHAT}),
            ("/tokenize", {"messages": CHAT}),
        ):
            assert refusal(server, path, **body)["code"] == "model_does_not_generate"
        assert httpx.post(f"{server.url}/detokenize", json={"tokens": [1, 3 + 97, 2]}).json() == {"prompt": "a"}
        card = httpx.get(f"{server.url}/v1/models").json()["data"][0]
        assert (card["embedding_dim"], card["task"]) == (384, "embed")


def test_tokenize_and_back(server: ServerProcess) -> None:
    def tokenized(**body: Any) -> dict[str, Any]:
        answer = post(server, "/tokenize", **body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    assert tokenized(prompt="the fox")["tokens"] == ids_of("the fox")
    body = tokenized(messages=CHAT, return_token_strs=True)
    assert text_of(body["tokens"]) == "<s>user: @say the answer</s>>"
    assert (body["count"], len(body["token_strs"])) == (len(body["tokens"]),) * 2
    assert text_of(tokenized(messages=CHAT, add_generation_prompt=False)["tokens"]).endswith("</s>")
    back = post(server, "/detokenize", tokens=body["tokens"]).json()
    assert back == {"prompt": "<s>user: @say the answer</s>>"}
    for wrong in ({}, {"tokens": "a"}, {"tokens": [1.5]}, {"tokens": [-1]}, {"tokens": [2**40]}, {"ids": [1]}):
        assert post(server, "/detokenize", **wrong).status_code == 400
    assert post(server, "/tokenize", messages=CHAT, prompt="a").status_code == 400


def test_every_field_is_described(server: ServerProcess) -> None:
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    for path in ("/v1/completions", "/v1/chat/completions", "/detokenize"):
        body = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        known = refusal(server, path, no_such_field=1)["message"].rpartition("known are ")[2].split(", ")
        assert set(body["properties"]) - {"suffix"} == set(known) - {"suffix"}


@pytest.mark.parametrize("n", [1, 3])
def test_openai_s_client_needs_no_change(server: ServerProcess, n: int) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="anything", max_retries=0)
    suffixes = [""] if n == 1 else [f"#{child}" for child in range(n)]
    completion = client.completions.create(model="tiny", prompt="@say a fox", n=n, max_tokens=20, logprobs=1)
    assert [choice.text for choice in completion.choices] == [f"a fox{suffix}" for suffix in suffixes]
    assert completion.choices[0].logprobs is not None
    assert completion.choices[0].logprobs.token_logprobs is not None
    assert math.isclose(completion.choices[0].logprobs.token_logprobs[0], -0.5)
    answer = client.chat.completions.create(
        model="tiny",
        messages=CHAT,
        n=n,
        logprobs=True,
        top_logprobs=1,
        extra_body={"top_k": 5},  # type: ignore[arg-type]
    )
    assert [choice.message.content for choice in answer.choices] == [f"the answer{suffix}" for suffix in suffixes]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == NUM_CACHED
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="tiny", messages=CHAT, temperature=-1)  # type: ignore[arg-type]
