"""Decoders' weights and configurations: what is tied, what may be missing, and what is refused with file and field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nobiru.errors import ModelFolderError
from nobiru.folder.read import read_folder
from nobiru.models.registry import CausalModel, load_causal
from nobiru.models.weights import FLOAT32
from nobiru.ops.paged_layout import PagedLayout
from tests.oracle.test_decoders import Steps, assert_close
from tests.small_models import LANGUAGE_MODELS, make

CPU = torch.device("cpu")
IDS = torch.arange(3, 40)
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make("llama-biases", tmp_path)


def load(path: Path) -> CausalModel:
    return load_causal(read_folder(path), FLOAT32, CPU)


def change_weights(path: Path, change: Callable[[Tensors], object]) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def change_config(path: Path, **fields: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def assert_like_transformers(path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(IDS[None], use_cache=False).logits[0]
    folder = read_folder(path)
    assert_close(Steps(load(path), folder, [IDS]).run(20, 1), [expected])


class TestHeads:
    def test_of_its_own(self, folder: Path) -> None:
        assert_like_transformers(folder)
        change_weights(folder, lambda tensors: tensors.update({"lm_head.weight": -tensors["lm_head.weight"]}))
        assert_like_transformers(folder)

    def test_a_folder_that_says_tied_and_has_two(self, folder: Path) -> None:
        change_config(folder, tie_word_embeddings=True)
        assert_like_transformers(folder)

    def test_a_folder_that_says_tied_and_has_the_same_twice(self, folder: Path) -> None:
        change_config(folder, tie_word_embeddings=True)
        change_weights(
            folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
        )
        assert_like_transformers(folder)

    def test_a_folder_without_one_is_tied(self, folder: Path) -> None:
        change_weights(folder, lambda tensors: tensors.pop("lm_head.weight"))
        untied = Steps(load(folder), read_folder(folder), [IDS]).run(20, 1)
        change_config(folder, tie_word_embeddings=True)
        assert_close(untied, Steps(load(folder), read_folder(folder), [IDS]).run(20, 1))
        assert_like_transformers(folder)

    def test_an_embedding_model_needs_none(self, tmp_path: Path) -> None:
        model = load(make("qwen3-embedding", tmp_path))
        with pytest.raises(AssertionError, match="has no head"):
            model.logits(torch.zeros(1, 64))


def test_names_without_a_prefix(folder: Path) -> None:
    def strip(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    before = Steps(load(folder), read_folder(folder), [IDS]).run(20, 1)
    change_weights(folder, strip)
    assert_close(Steps(load(folder), read_folder(folder), [IDS]).run(20, 1), before, 0.0)


QUERY = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(f"{QUERY}.weight"), r"lack tensor 'layers\.1\.self_attn\.q_proj\.weight'"),
        (lambda tensors: tensors.pop(f"{QUERY}.bias"), r"lack tensor 'layers\.1\.self_attn\.q_proj\.bias'"),
        (lambda tensors: tensors.update({f"{QUERY}.weight": torch.ones(64, 64)}), r"\[64, 64\].*implies \[96, 64\]"),
        (lambda tensors: tensors.update({"model.layers.3.mlp.up_proj.bias": torch.ones(2)}), "unexpected tensor"),
        (lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(24)}), r"q_norm\.weight"),
        (lambda tensors: tensors.update({"lm_head.bias": torch.ones(2)}), r"unexpected tensor 'lm_head\.bias'"),
        (lambda tensors: tensors.pop("model.embed_tokens.weight"), r"no tensor 'embed_tokens\.weight'"),
    ],
)
def test_wrong_tensors(folder: Path, change: Callable[[Tensors], object], message: str) -> None:
    change_weights(folder, change)
    with pytest.raises(ModelFolderError, match=message):
        load(folder)


def rope(rope_type: str, **numbers: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": rope_type, **numbers}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_key_value_heads": 3}, "'num_key_value_heads' is 3; it must divide num_attention_heads, 4"),
        ({"head_dim": 17}, "'head_dim' is 17; rotary positions need an even number"),
        ({"hidden_act": "softsign"}, "'hidden_act' is 'softsign'; known are"),
        ({"attention_bias": "yes"}, "'attention_bias' is 'yes'; true or false is expected"),
        ({"attention_bias": False}, "unexpected tensor"),
        ({"num_hidden_layers": 2}, "unexpected tensor"),
        ({"rms_norm_eps": "small"}, "'rms_norm_eps' is 'small'"),
        ({"quantization_config": {"bits": 4}}, "'quantization_config'"),
        (rope("proportional"), "'proportional' is not served"),
        (rope("default", partial_rotary_factor=0.5), "all values of a head are turned"),
        (rope("linear"), "the kind 'linear' needs factor"),
        (rope("llama3", factor=8), "'llama3' needs low_freq_factor and high_freq_factor"),
        (rope("longrope", factor=4, short_factor=[1.0] * 7), "'short_factor'.*12 numbers"),
        (rope("longrope", factor=4, short_factor=[0.0] * 12), "'short_factor'.*12 numbers"),
    ],
)
def test_configurations_that_cannot_be_honoured(folder: Path, fields: dict[str, object], message: str) -> None:
    change_config(folder, **fields)
    with pytest.raises(ModelFolderError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["full_attention"] * 2}, "'layer_types' is .* one for each of the 3 layers"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "'layer_types'"),
        ({"sliding_window": "wide"}, "'sliding_window' is 'wide'"),
    ],
)
def test_windows_that_cannot_be_honoured(tmp_path: Path, fields: dict[str, object], message: str) -> None:
    path = make("qwen2", tmp_path)
    change_config(path, **fields)
    with pytest.raises(ModelFolderError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("uses_window", "layer_types"),
    [(False, None), (True, None), (True, ["sliding_attention", "full_attention", "sliding_attention"])],
)
def test_which_layers_have_a_window(tmp_path: Path, uses_window: bool, layer_types: list[str] | None) -> None:
    path = make("qwen2", tmp_path)
    change_config(path, layer_types=layer_types, use_sliding_window=uses_window, sliding_window=5)
    assert_like_transformers(path)


# --- the fallback -------------------------------------------------------------------------------------------------


def save(path: Path, model: transformers.PreTrainedModel) -> Path:
    model.save_pretrained(path)
    return path


COMMON: dict[str, Any] = {"vocab_size": 200, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
COMMON |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("Mamba", {"state_size": 4}, "'mamba', a decoder that cannot be served"),
        (
            "GptOss",
            {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 16},
            "'gpt_oss', .* with s_aux cannot run",
        ),
        ("Bloom", {}, "'bloom', a decoder that cannot be served"),
        ("GPTNeo", {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]}, "'gpt_neo'"),
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "'lfm2', a decoder that cannot be served"),
    ],
)
def test_decoders_that_do_not_run_over_the_cache(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    config = getattr(transformers, f"{family}Config")(**(COMMON | changes))
    path = save(tmp_path / "model", getattr(transformers, f"{family}ForCausalLM")(config).eval())
    with pytest.raises(ModelFolderError, match=message) as caught:
        load_causal(read_folder(path, max_model_len=128), FLOAT32, CPU)
    assert str(path / "config.json") in caught.value.message


def test_an_encoder_decoder(tmp_path: Path) -> None:
    config = transformers.BartConfig(
        vocab_size=200, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32, decoder_ffn_dim=32
    )
    config.architectures = ["BartForCausalLM"]
    path = save(tmp_path / "model", transformers.BartForConditionalGeneration(config))
    change_config(path, architectures=["BartForCausalLM"])
    with pytest.raises(ModelFolderError, match="'bart', an encoder-decoder"):
        load(path)


def test_an_architecture_that_transformers_does_not_know(folder: Path) -> None:
    change_config(folder, model_type="newest", architectures=["NewestForCausalLM"])
    with pytest.raises(ModelFolderError, match="cannot load model_type 'newest'"):
        load(folder)


def test_a_window_that_attention_is_not_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a window may be longer than what a trial tries out."""
    path = make("phi3", tmp_path)
    change_config(path, sliding_window=200)
    load(path)
    modeling = transformers.models.phi3.modeling_phi3
    original = modeling.ALL_ATTENTION_FUNCTIONS.get_interface

    def without_window(name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = original(name, default)
        return lambda *tensors, sliding_window=None, **options: function(*tensors, **options)

    monkeypatch.setattr(modeling.ALL_ATTENTION_FUNCTIONS, "get_interface", without_window, raising=False)
    with pytest.raises(ModelFolderError, match="window is not passed to the attention function"):
        load(path)


def test_attention_within_chunks(tmp_path: Path) -> None:
    path = make("gemma", tmp_path)
    change_config(path, attention_chunk_size=100)
    with pytest.raises(ModelFolderError, match="up to max_model_len=100"):
        load(path)
    load_causal(read_folder(path, max_model_len=100), FLOAT32, CPU)


def test_every_wrong_result_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial tries windows, caps, the KV cache's places, and the scaling of logits."""
    import nobiru.models.causal_fallback as module

    path = make("gemma2", tmp_path)
    original = module.paged_attention

    for wrong in ({"window": None}, {"softcap": None}, {"scale": 1.0}):
        monkeypatch.setattr(
            module, "paged_attention", lambda *tensors, wrong=wrong, **options: original(*tensors, **(options | wrong))
        )
        with pytest.raises(ModelFolderError, match="its results differ"):
            load(path)
    monkeypatch.setattr(module, "paged_attention", original)
    monkeypatch.setattr(
        PagedLayout, "positions_T", property(lambda layout: torch.arange(layout.num_tokens)), raising=True
    )
    with pytest.raises(ModelFolderError, match="its results differ"):
        load(path)


def test_all_small_language_models_are_generators(tmp_path: Path) -> None:
    for name in ("qwen3", "gpt2", "llama-sharded"):
        folder = read_folder(make(name, tmp_path))
        assert name in LANGUAGE_MODELS
        assert (folder.task, folder.is_causal, folder.max_model_len) == ("generate", True, 256)
