"""From prompts and options to requests: lengths, special tokens, end-of-text tokens, seeds, refusals."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_models import smollm2, stories260k
from small_tokenizers import edit_json, small_tokenizer, write_folder
from tokenizers import decoders

from nobiru.errors import InvalidRequestError, ModelFolderError
from nobiru.folder.read import read_folder
from nobiru.frontend.frontend import Frontend
from nobiru.frontend.generation import GenerationFrontend
from nobiru.frontend.pool import TokenizerPool
from nobiru.generation import GenerationRequest, SamplingParams
from nobiru.request import PoolingParams

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
LIMIT = 24
VOCAB_SIZE = 500


def language_model(path: Path, *, template: str | None = TEMPLATE, around: bool = True) -> Path:
    tokenizer = small_tokenizer("byte_bpe")
    tokenizer.decoder = decoders.ByteLevel()
    if not around:
        tokenizer.post_processor = None
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "vocab_size": VOCAB_SIZE,
        "eos_token_id": 2,
    }
    write_folder(path, "byte_bpe", tokenizer=tokenizer, config=config, limit=LIMIT)
    edit_json(path / "tokenizer_config.json", chat_template=template)
    edit_json(path / "generation_config.json", eos_token_id=[2, 7], temperature=0.6)
    (path / "modules.json").unlink()
    return path


@pytest.fixture(scope="module")
def frontend(tmp_path_factory: pytest.TempPathFactory) -> GenerationFrontend:
    return GenerationFrontend(read_folder(language_model(tmp_path_factory.mktemp("models") / "tiny")))


def prepare(frontend: GenerationFrontend, prompt: Any, *, options: Any = None, **params: Any) -> GenerationRequest:
    return frontend.prepare(prompt, SamplingParams(**params), request_id="r", **(options or {}))


def refused(frontend: GenerationFrontend, prompt: Any, *, options: Any = None, **params: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        prepare(frontend, prompt, options=options, **params)
    assert caught.value.param
    return caught.value


def test_texts_and_token_ids(frontend: GenerationFrontend) -> None:
    bare = frontend.tokenizer.encode(["the fox"]).token_ids[1:-1].tolist()
    request = prepare(frontend, "the fox")
    assert request.prompt_token_ids.tolist() == [*frontend.tokenizer.prefix, *bare, *frontend.tokenizer.suffix]
    plain = prepare(frontend, "the fox", options={"add_special_tokens": False})
    assert plain.prompt_token_ids.tolist() == bare
    for ids in ([5, 6, 7], np.array([5, 6, 7])):
        same = prepare(frontend, ids)
        assert (same.prompt_token_ids.tolist(), same.prompt_token_ids.dtype) == ([5, 6, 7], np.int32)


def test_how_long_a_text_may_get(frontend: GenerationFrontend) -> None:
    assert prepare(frontend, [5] * 4).max_tokens == LIMIT - 4
    assert prepare(frontend, [5] * 4, options={"default_max_tokens": 16}).max_tokens == 16
    assert prepare(frontend, [5] * 20, options={"default_max_tokens": 16}).max_tokens == 4
    assert prepare(frontend, [5] * 20, max_tokens=4).max_tokens == 4
    assert prepare(frontend, [5] * (LIMIT - 1)).max_tokens == 1
    error = refused(frontend, [5] * 20, max_tokens=5)
    assert (error.param, error.code) == ("max_tokens", "context_length_exceeded")
    assert "maximum context length is 24 tokens" in error.message
    assert "choose at most 4" in error.message
    assert refused(frontend, [5] * 20, min_tokens=6).param == "min_tokens"


@pytest.mark.parametrize("prompt", [[5] * LIMIT, [5] * 5000, "fox " * LIMIT, "fox " * 100_000])
def test_prompts_that_leave_no_room_are_refused(frontend: GenerationFrontend, prompt: Any) -> None:
    error = refused(frontend, prompt)
    assert (error.param, error.code) == ("prompt", "context_length_exceeded")
    assert "24" in error.message


def test_prompts_without_tokens_are_refused(frontend: GenerationFrontend, tmp_path: Path) -> None:
    assert refused(frontend, []).param == "prompt"
    assert prepare(frontend, "").prompt_token_ids.size == 2
    assert refused(frontend, "", options={"add_special_tokens": False}).message.startswith("prompt has 0 tokens")
    bare = GenerationFrontend(read_folder(language_model(tmp_path / "bare", around=False)))
    assert refused(bare, "").message.startswith("prompt has 0 tokens")


@pytest.mark.parametrize("prompt", [[5, VOCAB_SIZE], [-1], [1.5], [True], ["a"], [[5]], [2**70], 5, None, {"a": 1}])
def test_prompts_that_are_none(frontend: GenerationFrontend, prompt: Any) -> None:
    assert refused(frontend, prompt).param.startswith("prompt")  # type: ignore[union-attr]


def test_a_text_that_cannot_be_encoded(frontend: GenerationFrontend) -> None:
    assert refused(frontend, "a\ud800").param == "prompt"


def test_truncation_keeps_the_end(frontend: GenerationFrontend) -> None:
    ids = list(range(10, 50))
    assert prepare(frontend, ids, options={"truncate_prompt_tokens": 3}).prompt_token_ids.tolist() == [47, 48, 49]
    whole = prepare(frontend, ids, max_tokens=10, options={"truncate_prompt_tokens": -1})
    assert whole.prompt_token_ids.tolist() == ids[-14:]
    text = prepare(frontend, "fox " * 50 + "end", options={"truncate_prompt_tokens": 6}).prompt_token_ids.tolist()
    assert len(text) == 6
    assert text[0] == frontend.tokenizer.prefix[0]
    assert frontend.tokenizer.decode(text[1:-1]).endswith("end")
    bare = {"truncate_prompt_tokens": 6, "add_special_tokens": False}
    assert prepare(frontend, "fox " * 50 + "end", options=bare).prompt_token_ids.size == 6
    for wrong in (0, -2, True, LIMIT, "5"):
        assert refused(frontend, ids, options={"truncate_prompt_tokens": wrong}).param == "truncate_prompt_tokens"


def test_what_ends_a_text(frontend: GenerationFrontend) -> None:
    assert prepare(frontend, "a").stop_token_ids == (2, 7)
    assert prepare(frontend, "a", stop_token_ids=(9, 2)).stop_token_ids == (9, 2, 7)
    assert prepare(frontend, "a", stop_token_ids=(9,), ignore_eos=True).stop_token_ids == (9,)


def test_seeds(frontend: GenerationFrontend) -> None:
    assert prepare(frontend, "a", seed=5).params.seed == 5
    seeds = {prepare(frontend, "a").params.seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(isinstance(seed, int) and 0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"stop_token_ids": (VOCAB_SIZE,)}, "stop_token_ids[0]"),
        ({"stop_token_ids": (1, -1)}, "stop_token_ids[1]"),
        ({"stop_token_ids": (True,)}, "stop_token_ids[0]"),
        ({"stop_token_ids": tuple(range(400)) * 3}, "stop_token_ids"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
        ({"logit_bias": {5: 101.0}}, "logit_bias"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias"),
        ({"json_schema": "{"}, "json_schema"),
    ],
)
def test_options_the_model_does_not_allow(frontend: GenerationFrontend, params: Any, param: str) -> None:
    assert refused(frontend, "a", **params).param == param
    with pytest.raises(InvalidRequestError):
        frontend.prepare_chat([{"role": "user", "content": "a"}], SamplingParams(**params), request_id="r")


def test_chats(frontend: GenerationFrontend, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "fox"}]
    request = frontend.prepare_chat(messages, SamplingParams(), request_id="r")
    text = frontend.tokenizer.decode(request.prompt_token_ids.tolist())
    assert text == "<s>user: fox</s>>"
    assert request.prompt_token_ids.tolist().count(frontend.tokenizer.prefix[0]) == 1  # only the template's own
    goes_on = frontend.prepare_chat(
        [*messages, {"role": "assistant", "content": "quick"}],
        SamplingParams(),
        request_id="r",
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert frontend.tokenizer.decode(goes_on.prompt_token_ids.tolist()) == "<s>user: fox</s><s>assistant: quick"
    with pytest.raises(InvalidRequestError) as caught:
        frontend.prepare_chat([{"role": "user", "content": "fox " * 99}], SamplingParams(), request_id="r")
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")
    silent = GenerationFrontend(read_folder(language_model(tmp_path / "silent", template=None)))
    with pytest.raises(InvalidRequestError, match="has no chat template") as caught:
        silent.prepare_chat(messages, SamplingParams(), request_id="r")
    assert caught.value.code == "no_chat_template"


def test_streams_of_text(frontend: GenerationFrontend) -> None:
    assert len(frontend.text_streams(prepare(frontend, "a", n=3))) == 3


def test_each_pool_does_what_its_model_is_for(frontend: GenerationFrontend, tmp_path: Path) -> None:
    embedding = Frontend(read_folder(write_folder(tmp_path / "encoder")), auto_truncate=False)

    async def scenario() -> None:
        generates, embeds = TokenizerPool(frontend), TokenizerPool(embedding)
        params, messages = SamplingParams(), [{"role": "user", "content": "fox"}]
        assert (await generates.prepare_generation("fox", params, request_id="a")).request_id == "a"
        assert (await generates.prepare_chat(messages, params, request_id="b")).request_id == "b"
        assert (await embeds.prepare("fox", PoolingParams())).num_tokens > 0
        with pytest.raises(InvalidRequestError) as caught:
            await generates.prepare("fox", PoolingParams())
        assert caught.value.code == "model_does_not_embed"
        for refused in (
            embeds.prepare_generation("fox", params, request_id="a"),
            embeds.prepare_chat(messages, params, request_id="b"),
        ):
            with pytest.raises(InvalidRequestError) as caught:
                await refused
            assert caught.value.code == "model_does_not_generate"
        assert (generates.num_queued_chars, embeds.num_queued_chars) == (0, 0)
        generates.close()
        embeds.close()

    asyncio.run(scenario())
    with pytest.raises(ModelFolderError, match="not a language model"):
        GenerationFrontend(embedding.folder)


def test_the_tiny_model_s_prompts_begin_with_bos() -> None:
    frontend = GenerationFrontend(read_folder(stories260k()))
    assert prepare(frontend, "Once upon a time").prompt_token_ids.tolist()[0] == 1
    assert prepare(frontend, "").prompt_token_ids.tolist() == [1]
    assert prepare(frontend, "a").stop_token_ids == (1, 2)


def test_smollm2_s_prompts_are_bare() -> None:
    frontend = GenerationFrontend(read_folder(smollm2()))
    assert prepare(frontend, "Hello 12345 world").prompt_token_ids.tolist() == [19556, 216, 33, 34, 35, 36, 37, 905]
    chat = frontend.prepare_chat([{"role": "user", "content": "Hi"}], SamplingParams(), request_id="r")
    text = frontend.tokenizer.decode(chat.prompt_token_ids.tolist())
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>assistant\n")
    assert chat.prompt_token_ids.tolist()[0] == frontend.tokenizer.encode(["<|im_start|>"]).token_ids.tolist()[0]
