"""Model folders: what is read, in which spelling, and what is refused with file and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_tokenizers import edit_json, write_folder, write_json

from nobiru.errors import ConfigError, ModelFolderError
from nobiru.folder.read import read_folder
from nobiru.folder.spec import POOLING_MODES, DenseSpec, LayerNormSpec, NormalizeSpec, PoolingSpec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model")


def set_modules(folder: Path, *modules: tuple[str, str]) -> None:
    lines = [{"idx": i, "name": str(i), "path": path, "type": name} for i, (name, path) in enumerate(modules)]
    write_json(folder / "modules.json", lines)


def add_module(folder: Path, name: str, config: dict[str, Any] | None, *, package: str = "models") -> None:
    lines = json.loads((folder / "modules.json").read_text())
    path = f"{len(lines)}_{name}"
    lines.append({"idx": len(lines), "name": path, "path": path, "type": f"sentence_transformers.{package}.{name}"})
    write_json(folder / "modules.json", lines)
    if config is not None:
        write_json(folder / path / "config.json", config)


def refusal(folder: Path) -> str:
    with pytest.raises(ModelFolderError) as caught:
        read_folder(folder)
    return caught.value.message


class TestModules:
    def test_the_plain_case(self, folder: Path) -> None:
        read = read_folder(folder)
        assert read.name == "model"
        assert read.transformer_path == folder
        assert read.model_type == "bert"
        assert read.modules == (PoolingSpec(modes=("mean",), include_prompt=True), NormalizeSpec())
        assert (read.hidden_size, read.embedding_dim, read.max_model_len) == (8, 8, 32)
        assert read.vocab_size == read.config["vocab_size"]

    @pytest.mark.parametrize(
        "package",
        ["models", "sentence_transformer.modules", "base.modules", "models.Pooling"],
    )
    def test_every_spelling_of_the_package(self, folder: Path, package: str) -> None:
        set_modules(
            folder,
            (f"sentence_transformers.{package}.Transformer", ""),
            (f"sentence_transformers.{package}.pooling.Pooling", "1_Pooling"),
        )
        assert read_folder(folder).modules == (PoolingSpec(),)

    def test_a_transformer_in_a_subfolder(self, folder: Path) -> None:
        (folder / "0_Transformer").mkdir()
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            (folder / name).rename(folder / "0_Transformer" / name)
        edit_json(folder / "0_Transformer" / "sentence_bert_config.json", max_seq_length=20)
        edit_json(folder / "sentence_bert_config.json", max_seq_length=7)  # not the Transformer's folder
        set_modules(
            folder,
            ("sentence_transformers.models.Transformer", "0_Transformer"),
            ("sentence_transformers.models.Pooling", "1_Pooling"),
        )
        read = read_folder(folder)
        assert read.transformer_path == folder / "0_Transformer"
        assert read.max_model_len == 20

    def test_the_whole_chain(self, folder: Path) -> None:
        edit_json(folder / "1_Pooling" / "config.json", pooling_mode=["cls", "mean"], include_prompt=False)
        set_modules(
            folder,
            ("sentence_transformers.base.modules.transformer.Transformer", ""),
            ("sentence_transformers.sentence_transformer.modules.pooling.Pooling", "1_Pooling"),
        )
        add_module(folder, "Dropout", {"dropout": 0.1})
        identity = "torch.nn.modules.linear.Identity"
        dense = {"in_features": 16, "out_features": 5, "bias": False, "activation_function": identity}
        add_module(folder, "Dense", dense | {"use_residual": True, "module_input_name": "sentence_embedding"})
        add_module(folder, "LayerNorm", {"dimension": 5})
        add_module(folder, "Normalize", None)
        read = read_folder(folder)
        assert read.embedding_dim == 5
        assert read.pooling == PoolingSpec(modes=("cls", "mean"), include_prompt=False)
        assert read.modules[1:] == (
            DenseSpec(
                path=folder / "3_Dense",
                in_features=16,
                out_features=5,
                bias=False,
                activation=identity,
                use_residual=True,
            ),
            LayerNormSpec(path=folder / "4_LayerNorm", dimension=5),
            NormalizeSpec(),
        )

    def test_dense_has_the_defaults_of_sentence_transformers(self, folder: Path) -> None:
        add_module(folder, "Dense", {"in_features": 8, "out_features": 4})
        dense = read_folder(folder).modules[-1]
        assert isinstance(dense, DenseSpec)
        assert dense.bias
        assert dense.activation == "torch.nn.modules.activation.Tanh"

    @pytest.mark.parametrize(
        ("modules", "words"),
        [
            ([], "none"),
            ([("Pooling", "1_Pooling")], "exactly one Transformer"),
            ([("Transformer", "")], "exactly one Pooling"),
            ([("Transformer", ""), ("Normalize", "n"), ("Pooling", "1_Pooling")], "right behind"),
            ([("Transformer", ""), ("Transformer", ""), ("Pooling", "1_Pooling")], "exactly one Transformer"),
            ([("Transformer", ""), ("Pooling", "1_Pooling"), ("Pooling", "1_Pooling")], "exactly one Pooling"),
            ([("Transformer", ""), ("WordWeights", "w")], "WordWeights"),
            ([("Transformer", ""), ("Pooling", "../elsewhere")], "out of the folder"),
            ([("Transformer", ""), ("Pooling", "/elsewhere")], "out of the folder"),
        ],
    )
    def test_orders_that_cannot_be_honoured(self, folder: Path, modules: list[tuple[str, str]], words: str) -> None:
        set_modules(folder, *((f"sentence_transformers.models.{name}", path) for name, path in modules))
        message = refusal(folder)
        assert str(folder / "modules.json") in message
        assert words in message

    @pytest.mark.parametrize("name", ["modeling_mine.Pooling", "Pooling", "sentence_transformers_fork.models.Pooling"])
    def test_code_from_the_folder(self, folder: Path, name: str) -> None:
        set_modules(folder, ("sentence_transformers.models.Transformer", ""), (name, "1_Pooling"))
        message = refusal(folder)
        assert repr(name) in message
        assert "code from the folder" in message

    @pytest.mark.parametrize(
        ("name", "config", "field"),
        [
            ("Dense", {"in_features": 9, "out_features": 4}, "in_features"),
            ("Dense", {"out_features": 4}, "in_features"),
            ("Dense", {"in_features": 8, "out_features": 0}, "out_features"),
            ("Dense", {"in_features": 8, "out_features": "4"}, "out_features"),
            (
                "Dense",
                {"in_features": 8, "out_features": 4, "module_input_name": "token_embeddings"},
                "module_input_name",
            ),
            ("Dense", {"in_features": 8, "out_features": 4, "module_output_name": "other"}, "module_output_name"),
            ("Dense", {"in_features": 8, "out_features": 4, "activation_function": "mine.Gelu"}, "activation_function"),
            ("Dense", {"in_features": 8, "out_features": 4, "activation_function": "torch.nn.Bilinear"}, "activation"),
            ("Dense", {"in_features": 8, "out_features": 4, "activation_function": "torch.nnx.Tanh"}, "activation"),
            ("Dense", {"in_features": 8, "out_features": 4, "surprise": 1}, "surprise"),
            ("LayerNorm", {"dimension": 9}, "dimension"),
            ("LayerNorm", {}, "dimension"),
            ("Normalize", {"module_input_name": "token_embeddings"}, "module_input_name"),
        ],
    )
    def test_module_settings_that_cannot_be_honoured(
        self, folder: Path, name: str, config: dict[str, Any], field: str
    ) -> None:
        add_module(folder, name, config)
        message = refusal(folder)
        assert str(folder / f"3_{name}" / "config.json") in message
        assert field in message


class TestPooling:
    def modes(self, folder: Path, **fields: Any) -> tuple[str, ...]:
        write_json(folder / "1_Pooling" / "config.json", {"embedding_dimension": 8, **fields})
        return read_folder(folder).pooling.modes

    @pytest.mark.parametrize("mode", POOLING_MODES)
    def test_every_mode_as_a_name_and_in_a_list(self, folder: Path, mode: str) -> None:
        assert self.modes(folder, pooling_mode=mode) == (mode,)
        assert self.modes(folder, pooling_mode=[mode]) == (mode,)

    def test_a_list_keeps_its_order(self, folder: Path) -> None:
        assert self.modes(folder, pooling_mode=["mean", "cls"]) == ("mean", "cls")
        assert read_folder(folder).embedding_dim == 16

    def test_flags_of_older_versions_have_a_fixed_order(self, folder: Path) -> None:
        flags = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}
        assert self.modes(folder, **flags) == ("cls", "mean", "lasttoken")
        assert self.modes(folder, pooling_mode_cls_token=False, pooling_mode_mean_tokens=False) == ("mean",)
        assert self.modes(folder) == ("mean",)

    def test_the_mode_beats_the_flags(self, folder: Path) -> None:
        assert self.modes(folder, pooling_mode="max", pooling_mode_cls_token=True) == ("max",)

    def test_the_older_name_of_the_size(self, folder: Path) -> None:
        write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 8})
        assert read_folder(folder).embedding_dim == 8

    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({"embedding_dimension": 7}, "embedding_dimension"),
            ({"word_embedding_dimension": 7}, "word_embedding_dimension"),
            ({}, "word_embedding_dimension"),
            ({"embedding_dimension": 8, "pooling_mode": "median"}, "pooling_mode"),
            ({"embedding_dimension": 8, "pooling_mode": ["mean", "median"]}, "pooling_mode"),
            ({"embedding_dimension": 8, "pooling_mode": []}, "pooling_mode"),
            ({"embedding_dimension": 8, "pooling_mode_sum": True}, "pooling_mode_sum"),
            ({"embedding_dimension": 8, "include_prompt": "no"}, "include_prompt"),
        ],
    )
    def test_refusals(self, folder: Path, fields: dict[str, Any], field: str) -> None:
        file = write_json(folder / "1_Pooling" / "config.json", fields)
        message = refusal(folder)
        assert str(file) in message
        assert field in message

    def test_a_missing_and_a_damaged_file(self, folder: Path) -> None:
        file = folder / "1_Pooling" / "config.json"
        file.write_text("{", encoding="utf-8")
        assert str(file) in refusal(folder)
        file.write_text("[]", encoding="utf-8")
        assert "an object is expected" in refusal(folder)
        file.unlink()
        assert f"{file} is missing" in refusal(folder)


class TestLimit:
    def limit(self, folder: Path, *, explicit: int | None = None, **config: Any) -> int:
        edit_json(folder / "config.json", **config)
        return read_folder(folder, max_model_len=explicit).max_model_len

    def test_max_seq_length_beats_the_tokenizer(self, folder: Path) -> None:
        edit_json(folder / "sentence_bert_config.json", max_seq_length=100, do_lower_case=True)
        assert self.limit(folder) == 100
        assert read_folder(folder).lower_case

    def test_null_max_seq_length_leaves_it_to_the_tokenizer(self, folder: Path) -> None:
        write_json(folder / "sentence_bert_config.json", {"max_seq_length": None})
        assert self.limit(folder) == 32

    @pytest.mark.parametrize("name", ["sentence_roberta_config.json", "sentence_xlnet_config.json"])
    def test_older_names_of_the_file(self, folder: Path, name: str) -> None:
        edit_json(folder / name, max_seq_length=17)
        assert self.limit(folder) == 17

    def test_tokenizer_arguments_beat_max_seq_length(self, folder: Path) -> None:
        edit_json(folder / "sentence_bert_config.json", max_seq_length=17, tokenizer_args={"model_max_length": 19})
        assert self.limit(folder) == 19

    def test_a_tokenizer_without_a_limit_takes_the_positions(self, folder: Path) -> None:
        edit_json(folder / "tokenizer_config.json", model_max_length=10**30)
        assert self.limit(folder) == 512
        edit_json(folder / "tokenizer_config.json", model_max_length=None)
        assert self.limit(folder, max_position_embeddings=40) == 40

    def test_never_more_than_the_model_has_positions(self, folder: Path) -> None:
        edit_json(folder / "sentence_bert_config.json", max_seq_length=9999)
        assert self.limit(folder) == 512

    @pytest.mark.parametrize(
        ("model_type", "pad_token_id", "positions"),
        [("roberta", 1, 512), ("xlm-roberta", 3, 510), ("mpnet", 0, 512), ("camembert", None, 512), ("bert", 1, 514)],
    )
    def test_positions_begin_behind_the_padding_index(
        self, folder: Path, model_type: str, pad_token_id: int | None, positions: int
    ) -> None:
        edit_json(folder / "sentence_bert_config.json", max_seq_length=9999)
        config = {"model_type": model_type, "pad_token_id": pad_token_id, "max_position_embeddings": 514}
        assert self.limit(folder, **config) == positions

    def test_rotary_positions_have_no_end(self, folder: Path) -> None:
        edit_json(folder / "sentence_bert_config.json", max_seq_length=8192)
        config = {
            "model_type": "nomic_bert",
            "rope_parameters": {"rope_theta": 1000.0},
            "max_position_embeddings": 2048,
        }
        assert self.limit(folder, **config) == 8192
        assert self.limit(folder, explicit=8192) == 8192
        with pytest.raises(ConfigError, match=r"8193.*8192"):
            self.limit(folder, explicit=8193)

    def test_an_explicit_limit_wins_up_to_the_positions(self, folder: Path) -> None:
        assert self.limit(folder, explicit=5) == 5
        assert self.limit(folder, explicit=512) == 512
        with pytest.raises(ConfigError, match=r"513.*512"):
            self.limit(folder, explicit=513)

    def test_no_limit_at_all(self, folder: Path) -> None:
        edit_json(folder / "tokenizer_config.json", model_max_length=None)
        edit_json(folder / "config.json", model_type="xlnet", max_position_embeddings=-1)
        assert "model_max_length" in refusal(folder)
        assert read_folder(folder, max_model_len=77).max_model_len == 77

    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({"max_seq_length": "128"}, "max_seq_length"),
            ({"max_seq_length": 0}, "max_seq_length"),
            ({"transformer_task": "fill-mask"}, "transformer_task"),
            ({"module_output_name": "sentence_embedding"}, "module_output_name"),
            ({"modality_config": {"text": {"method": "forward", "method_output_name": "logits"}}}, "modality_config"),
            ({"modality_config": {"message": {}}}, "modality_config"),
            ({"query_expansion": {"strategy": "fixed", "length": 32}}, "query_expansion"),
            ({"query_length": 32}, "query_length"),
            ({"processing_kwargs": {"text": {"max_length": 3}}}, "processing_kwargs.text"),
            ({"model_args": {"rope_factor": 2}}, "model_args.rope_factor"),
            ({"tokenizer_args": {"add_prefix_space": True}}, "tokenizer_args.add_prefix_space"),
            ({"config_kwargs": {"hidden_act": "relu"}}, "config_kwargs.hidden_act"),
            ({"surprise": 1}, "surprise"),
        ],
    )
    def test_settings_that_cannot_be_honoured(self, folder: Path, fields: dict[str, Any], field: str) -> None:
        file = write_json(folder / "sentence_bert_config.json", fields)
        message = refusal(folder)
        assert str(file) in message
        assert field in message

    def test_settings_that_change_no_vector(self, folder: Path) -> None:
        text = {"method": "forward", "method_output_name": "last_hidden_state"}
        fields = {
            "modality_config": {"text": text},
            "module_output_name": "token_embeddings",
            "transformer_task": "feature-extraction",
            "unpad_inputs": False,
            "query_expansion": None,
            "model_args": {"torch_dtype": "float16", "attn_implementation": "sdpa"},
        }
        write_json(folder / "sentence_bert_config.json", fields)
        assert self.limit(folder) == 32


class TestArchitecture:
    def test_names_of_the_sizes(self, folder: Path) -> None:
        edit_json(folder / "config.json", model_type="distilbert", hidden_size=None, dim=8)
        assert read_folder(folder).hidden_size == 8

    @pytest.mark.parametrize("field", ["model_type", "hidden_size", "vocab_size"])
    def test_missing_fields(self, folder: Path, field: str) -> None:
        edit_json(folder / "config.json", **{field: None})
        message = refusal(folder)
        assert str(folder / "config.json") in message
        assert field in message

    def test_defaults_of_an_old_config(self, folder: Path) -> None:
        edit_json(folder / "config.json", max_position_embeddings=None)
        edit_json(folder / "tokenizer_config.json", model_max_length=None)
        assert read_folder(folder).max_model_len == 512

    @pytest.mark.parametrize(
        "config", [{"model_type": "llama"}, {"is_decoder": True}, {"architectures": ["NewForCausalLM"]}]
    )
    def test_embedding_models_that_attend_causally(self, folder: Path, config: dict[str, Any]) -> None:
        edit_json(folder / "config.json", **config)
        message = refusal(folder)
        assert f"{folder / '1_Pooling' / 'config.json'}: the pooling is mean" in message
        assert "lasttoken" in message
        edit_json(folder / "1_Pooling" / "config.json", pooling_mode="lasttoken")
        read = read_folder(folder)
        assert (read.task, read.is_causal, read.generation) == ("embed", True, None)
        assert read.pooling.modes == ("lasttoken",)
        edit_json(folder / "1_Pooling" / "config.json", pooling_mode=["lasttoken", "mean"])
        assert "lasttoken+mean" in refusal(folder)

    @pytest.mark.parametrize("config", [{"is_causal": False}, {"use_bidirectional_attention": True}])
    def test_decoders_made_encoders(self, folder: Path, config: dict[str, Any]) -> None:
        edit_json(folder / "config.json", model_type="llama", **config)
        read = read_folder(folder)
        assert (read.model_type, read.task, read.is_causal) == ("llama", "embed", False)
        (folder / "modules.json").unlink()
        assert read_folder(folder).task == "embed"

    def test_remote_code_where_transformers_has_none(self, folder: Path) -> None:
        auto_map = {"AutoModel": "modeling_new.NewModel"}
        edit_json(folder / "config.json", model_type="new", auto_map=auto_map)
        assert "auto_map" in refusal(folder)
        edit_json(folder / "config.json", model_type="nomic_bert", auto_map=auto_map)
        assert read_folder(folder).model_type == "nomic_bert"

    def test_adapters(self, folder: Path) -> None:
        edit_json(folder / "adapter_config.json", base_model_name_or_path="x")
        assert "Merge it" in refusal(folder)


class TestPrompts:
    def test_names_that_every_model_has(self, folder: Path) -> None:
        read = read_folder(folder)
        assert read.prompts == {"query": "", "document": ""}
        assert read.default_prompt_name is None
        assert read.similarity == "cosine"

    def test_prompts_of_the_folder(self, folder: Path) -> None:
        fields = {
            "prompts": {"query": "q: ", "other": None},
            "default_prompt_name": "query",
            "similarity_fn_name": "dot",
        }
        write_json(folder / "config_sentence_transformers.json", fields)
        read = read_folder(folder)
        assert read.prompts == {"query": "q: ", "document": "", "other": ""}
        assert read.default_prompt_name == "query"
        assert read.similarity == "dot"

    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({"default_prompt_name": "nobody"}, "default_prompt_name"),
            ({"default_prompt_name": ["query"]}, "default_prompt_name"),
            ({"prompts": {"query": 3}}, "prompts.query"),
            ({"prompts": ["query"]}, "prompts"),
            ({"similarity_fn_name": "maxsim"}, "similarity_fn_name"),
            ({"truncate_dim": 4}, "truncate_dim"),
            ({"model_type": "CrossEncoder"}, "model_type"),
        ],
    )
    def test_refusals(self, folder: Path, fields: dict[str, Any], field: str) -> None:
        file = write_json(folder / "config_sentence_transformers.json", fields)
        message = refusal(folder)
        assert str(file) in message
        assert field in message


class TestPlainFolders:
    def test_mean_pooling_and_nothing_else(self, folder: Path) -> None:
        (folder / "modules.json").unlink()
        write_json(folder / "sentence_bert_config.json", {"max_seq_length": 7})  # read with modules.json only
        write_json(folder / "config_sentence_transformers.json", {"default_prompt_name": "query"})
        read = read_folder(folder)
        assert read.modules == (PoolingSpec(),)
        assert read.max_model_len == 32
        assert read.default_prompt_name is None

    def test_a_chat_template(self, folder: Path) -> None:
        (folder / "modules.json").unlink()
        edit_json(folder / "tokenizer_config.json", chat_template="{{ messages }}")
        assert "chat template" in refusal(folder)

    def test_what_is_no_model_folder(self, tmp_path: Path) -> None:
        assert "missing" in refusal(tmp_path / "nowhere")
        file = write_json(tmp_path / "file.json", {})
        assert "not a folder" in refusal(file)
        assert "neither modules.json nor config.json" in refusal(tmp_path)
