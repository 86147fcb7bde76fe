"""Folders of language models: what ends a text, which defaults and templates count, how long texts may be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_tokenizers import edit_json, write_folder, write_json

from nobiru.errors import ConfigError, ModelFolderError
from nobiru.folder.read import read_folder
from nobiru.folder.spec import GenerationSpec, ModelFolder
from nobiru.generation import SamplingParams


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "eos_token_id": 2}
    path = write_folder(tmp_path / "model", "byte_bpe", config=config, limit=10**30)
    (path / "modules.json").unlink()
    return path


def generation(folder: Path) -> GenerationSpec:
    read = read_folder(folder)
    assert read.generation is not None
    return read.generation


def refusal(folder: Path) -> str:
    with pytest.raises(ModelFolderError) as caught:
        read_folder(folder)
    return caught.value.message


def test_the_plain_case(folder: Path) -> None:
    read = read_folder(folder)
    assert (read.task, read.is_causal, read.modules, read.embedding_dim) == ("generate", True, (), 0)
    assert (read.hidden_size, read.max_model_len, read.prompts) == (8, 512, {})
    assert read.pooling.include_prompt, "no part of a prompt is skipped"
    assert generation(folder) == GenerationSpec(
        eos_token_ids=(2,),
        special_tokens={
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "sep_token": "</s>",
            "pad_token": "<pad>",
            "cls_token": "<s>",
            "mask_token": "<mask>",
        },
    )


@pytest.mark.parametrize(
    "class_name", ["LlamaForSequenceClassification", "LlamaModel", "LlamaForTokenClassification", "Qwen3RewardModel"]
)
def test_decoders_that_predict_no_tokens(folder: Path, class_name: str) -> None:
    edit_json(folder / "config.json", architectures=[class_name])
    message = refusal(folder)
    assert str(folder / "config.json") in message
    assert class_name in message


def test_a_model_of_images_too(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="gemma3", hidden_size=None, text_config={"hidden_size": 8})
    assert "'text_config'" in refusal(folder)


def test_a_folder_that_names_no_class(folder: Path) -> None:
    edit_json(folder / "config.json", architectures=None)
    assert read_folder(folder).task == "generate"


class TestEndOfText:
    @pytest.mark.parametrize(
        ("general", "of_generation", "ids"),
        [
            (2, None, (2,)),
            ([4, 2, 4], None, (4, 2)),
            (2, [1, 2], (1, 2)),
            (2, 7, (7,)),
            (None, None, ()),
            (None, 0, (0,)),
        ],
    )
    def test_generation_config_beats_config(
        self, folder: Path, general: object, of_generation: object, ids: tuple[int, ...]
    ) -> None:
        edit_json(folder / "config.json", eos_token_id=general)
        if of_generation is not None:
            write_json(folder / "generation_config.json", {"eos_token_id": of_generation})
        assert generation(folder).eos_token_ids == ids

    @pytest.mark.parametrize("value", ["</s>", [1, None], True, -1, 1.5])
    def test_refusals(self, folder: Path, value: object) -> None:
        file = write_json(folder / "generation_config.json", {"eos_token_id": value})
        message = refusal(folder)
        assert str(file) in message
        assert "eos_token_id" in message


class TestSamplingDefaults:
    @pytest.mark.parametrize("do_sample", [{}, {"do_sample": True}, {"do_sample": False}])
    def test_fields_that_are_set(self, folder: Path, do_sample: dict[str, Any]) -> None:
        fields = {"temperature": 0.6, "top_k": 20, "top_p": None, "max_new_tokens": 9, "repetition_penalty": 1.05}
        write_json(folder / "generation_config.json", fields | do_sample)
        assert generation(folder).sampling_defaults == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}

    def test_whatever_a_folder_may_say_a_request_may_ask_for(self, folder: Path) -> None:
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        for values in ((0, -1, 1e-9, 0.0, 1e-9), (100.0, 2**31, 1, 1.0, 100)):
            fields = dict(zip(names, values, strict=True))
            write_json(folder / "generation_config.json", fields)
            SamplingParams(**generation(folder).sampling_defaults)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("name", "value"),
        [("temperature", -1), ("top_k", 0.5), ("top_p", "0.9"), ("min_p", 2), ("repetition_penalty", 0)],
    )
    def test_refusals(self, folder: Path, name: str, value: object) -> None:
        file = write_json(folder / "generation_config.json", {name: value})
        message = refusal(folder)
        assert str(file) in message
        assert f"'{name}' is {value!r}" in message


class TestChatTemplate:
    def test_a_file_of_its_own_wins(self, folder: Path) -> None:
        edit_json(folder / "tokenizer_config.json", chat_template="of the tokenizer")
        assert generation(folder).chat_template == "of the tokenizer"
        (folder / "chat_template.jinja").write_text("of its own: {{ messages }}\n", encoding="utf-8")
        assert generation(folder).chat_template == "of its own: {{ messages }}\n"

    def test_of_several_the_default(self, folder: Path) -> None:
        named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
        edit_json(folder / "tokenizer_config.json", chat_template=named)
        assert generation(folder).chat_template == "plain"
        edit_json(folder / "tokenizer_config.json", chat_template=named[:1])
        assert generation(folder).chat_template is None

    def test_refusals(self, folder: Path) -> None:
        edit_json(folder / "tokenizer_config.json", chat_template=3)
        assert "chat_template" in refusal(folder)
        (folder / "chat_template.jinja").write_bytes(b"\xff\xfe\xff")
        assert str(folder / "chat_template.jinja") in refusal(folder)

    def test_special_tokens_in_every_spelling(self, folder: Path) -> None:
        token = {"content": "<|end|>", "lstrip": False, "special": True}
        write_json(folder / "tokenizer_config.json", {"eos_token": token, "bos_token": None})
        write_json(folder / "special_tokens_map.json", {"pad_token": "<|pad|>", "bos_token": "<s>", "unk_token": {}})
        assert generation(folder).special_tokens == {"eos_token": "<|end|>", "pad_token": "<|pad|>"}


class TestLimit:
    def read(self, folder: Path, *, explicit: int | None = None, **config: Any) -> ModelFolder:
        edit_json(folder / "config.json", **config)
        return read_folder(folder, max_model_len=explicit)

    @pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
    @pytest.mark.parametrize(
        ("rope", "limit"),
        [
            ({"rope_type": "default"}, 512),
            ({"rope_type": "linear", "factor": 2.5}, 1280),
            ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}, 512),
            ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
            ({"rope_type": "yarn", "factor": 4.0}, 2048),
            ({"rope_type": "dynamic", "factor": 4.0}, 512),
            ({"rope_type": "longrope", "original_max_position_embeddings": 128}, 128),
            ({"full_attention": {"rope_type": "linear", "factor": 2}, "sliding_attention": {"factor": 9}}, 1024),
        ],
    )
    def test_rope_scaling(self, folder: Path, spelling: str, rope: dict[str, Any], limit: int) -> None:
        assert self.read(folder, **{spelling: rope}).max_model_len == limit
        assert self.read(folder, explicit=limit).max_model_len == limit
        with pytest.raises(ConfigError, match=f"{limit + 1}.*{limit}"):
            self.read(folder, explicit=limit + 1)

    def test_the_older_name_of_the_kind(self, folder: Path) -> None:
        assert self.read(folder, rope_scaling={"type": "linear", "factor": 2}).max_model_len == 1024

    def test_a_number_that_includes_the_factor(self, folder: Path) -> None:
        rope = {"rope_type": "linear", "factor": 8.0}
        assert self.read(folder, model_type="gemma3_text", rope_scaling=rope).max_model_len == 512

    def test_a_sliding_window_is_no_limit(self, folder: Path) -> None:
        assert self.read(folder, model_type="mistral", sliding_window=16, rope_theta=10000.0).max_model_len == 512

    def test_a_tokenizer_with_a_lower_limit(self, folder: Path) -> None:
        edit_json(folder / "tokenizer_config.json", model_max_length=100)
        assert self.read(folder).max_model_len == 100
        assert self.read(folder, explicit=512).max_model_len == 512

    def test_names_that_older_decoders_have(self, folder: Path) -> None:
        config = {"max_position_embeddings": None, "architectures": ["BloomForCausalLM"]}
        assert self.read(folder, model_type="bloom", seq_length=2048, **config).max_model_len == 2048
        assert self.read(folder, model_type="gpt2", n_positions=1024, **config).max_model_len == 1024

    def test_no_limit_at_all(self, folder: Path) -> None:
        edit_json(folder / "config.json", max_position_embeddings=None)
        assert "model_max_length" in refusal(folder)
        assert self.read(folder, explicit=77).max_model_len == 77

    @pytest.mark.parametrize(
        ("config", "field"),
        [
            ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "rope_scaling.factor"),
            ({"rope_parameters": {"rope_type": "yarn", "factor": 0}}, "rope_parameters.factor"),
            ({"rope_parameters": {"rope_type": 3}}, "rope_parameters.rope_type"),
            ({"rope_scaling": [4]}, "rope_scaling"),
            ({"rope_theta": "big"}, "rope_theta"),
        ],
    )
    def test_refusals(self, folder: Path, config: dict[str, Any], field: str) -> None:
        edit_json(folder / "config.json", **config)
        message = refusal(folder)
        assert str(folder / "config.json") in message
        assert f"'{field}'" in message

    def test_causal_embedding_models_are_cut_as_sentence_transformers_does(self, folder: Path) -> None:
        write_json(folder / "1_Pooling" / "config.json", {"embedding_dimension": 8, "pooling_mode": "lasttoken"})
        lines = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
            for i, (name, path) in enumerate([("Transformer", ""), ("Pooling", "1_Pooling")])
        ]
        (folder / "modules.json").write_text(json.dumps(lines))
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
        assert self.read(folder, rope_scaling=yarn).max_model_len == 512
        assert self.read(folder, explicit=2048).max_model_len == 2048
        with pytest.raises(ConfigError, match=r"2049.*2048"):
            self.read(folder, explicit=2049)
        edit_json(folder / "tokenizer_config.json", model_max_length=40)
        assert self.read(folder).max_model_len == 40
        edit_json(folder / "sentence_bert_config.json", max_seq_length=60)
        assert self.read(folder).max_model_len == 60
