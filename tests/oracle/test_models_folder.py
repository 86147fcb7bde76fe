"""Weights and configurations that cannot be honoured: loading fails and names file, field or tensor."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nobiru.errors import ModelFolderError
from nobiru.folder.read import read_folder
from nobiru.folder.spec import ModelFolder
from nobiru.models.registry import load_encoder
from nobiru.models.weights import FLOAT32, ModelWeights
from nobiru.ops.layout import PackedLayout
from nobiru.runner.runner import PoolingRunner
from tests.small_models import make

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make("bert-dense-tanh", tmp_path)


def load(path: Path) -> PoolingRunner:
    folder = read_folder(path)
    return PoolingRunner.load(folder, dtype="float32", device="cpu", max_model_len=folder.max_model_len)


def change_weights(file: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def change_config(path: Path, **fields: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


QUERY = "encoder.layer.1.attention.self.query.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(QUERY), f"lack tensor '{QUERY}'"),
        (lambda tensors: tensors.update({"encoder.layer.3.output.dense.bias": torch.ones(4)}), "unexpected tensor"),
        (lambda tensors: tensors.update({"embeddings.extra": torch.ones(4)}), r"unexpected tensor 'embeddings\.extra'"),
        (lambda tensors: tensors.update({QUERY: torch.ones(64, 32)}), r"shape \[64, 32\].*implies \[64, 64\]"),
        (lambda tensors: tensors.update({QUERY: torch.ones(64, 64).int()}), "floating point is expected"),
        (lambda tensors: tensors.pop("embeddings.word_embeddings.weight"), r"no tensor 'embeddings\.word_embeddings"),
    ],
)
def test_wrong_tensors(folder: Path, change: Callable[[Tensors], object], message: str) -> None:
    change_weights(folder / "model.safetensors", change)
    with pytest.raises(ModelFolderError, match=message):
        load(folder)


def test_heads_and_old_buffers_are_ignored(folder: Path) -> None:
    def add(tensors: Tensors) -> None:
        for name in ("cls.predictions.bias", "pooler.extra", "classifier.weight", "qa_outputs.weight"):
            tensors[name] = torch.ones(2)
        tensors["embeddings.position_ids"] = torch.arange(98)[None]

    change_weights(folder / "model.safetensors", add)
    load(folder)


def test_two_encoders_in_one_file(folder: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["teacher.embeddings.word_embeddings.weight"] = torch.ones(2, 2)

    change_weights(folder / "model.safetensors", add)
    with pytest.raises(ModelFolderError, match=r"several models: '', 'teacher\.'"):
        load(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "softsign"}, r"config\.json: field 'hidden_act' is 'softsign'; known are"),
        ({"position_embedding_type": "relative_key"}, "field 'position_embedding_type' is 'relative_key'"),
        ({"is_decoder": True}, "the pooling is mean, but the architecture 'bert' attends causally"),
        ({"add_cross_attention": True}, "'add_cross_attention'"),
        ({"num_attention_heads": 5}, "'num_attention_heads' is 5; it must divide hidden_size, 64"),
        ({"num_hidden_layers": "3"}, "'num_hidden_layers' is '3'"),
        ({"layer_norm_eps": "small"}, "'layer_norm_eps' is 'small'"),
        ({"intermediate_size": 0}, "'intermediate_size' is 0"),
        ({"num_hidden_layers": 2}, "unexpected tensor"),
        ({"quantization_config": {"bits": 4}}, "'quantization_config'"),
    ],
)
def test_configurations_that_cannot_be_honoured(folder: Path, fields: dict[str, object], message: str) -> None:
    change_config(folder, **fields)
    with pytest.raises(ModelFolderError, match=message):
        load(folder)


def test_module_weights_must_fit(folder: Path) -> None:
    file = folder / "2_Dense" / "model.safetensors"
    change_weights(file, lambda tensors: tensors.pop("linear.bias"))
    with pytest.raises(ModelFolderError, match=r"2_Dense: the weights lack tensor 'linear\.bias'"):
        load(folder)
    change_weights(file, lambda tensors: tensors.update({"linear.bias": torch.ones(3), "more": torch.ones(1)}))
    with pytest.raises(ModelFolderError, match="2_Dense: unexpected tensor 'more'"):
        load(folder)
    change_weights(file, lambda tensors: tensors.pop("more"))
    with pytest.raises(ModelFolderError, match=r"'linear\.bias' has shape \[3\]"):
        load(folder)


def test_damaged_and_missing_files(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelFolderError, match=r"model\.safetensors is damaged"):
        load(folder)
    file.unlink()
    with pytest.raises(ModelFolderError, match="no weights found"):
        load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"not a checkpoint")
    with pytest.raises(ModelFolderError, match=r"pytorch_model\.bin"):
        load(folder)


class Trap:
    """Unpickling this would write a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (str(self.target),)


@pytest.mark.parametrize("as_zip", [True, False])
def test_pickled_code_is_not_run(folder: Path, tmp_path: Path, as_zip: bool) -> None:
    (folder / "model.safetensors").unlink()
    target = tmp_path / "ran"
    file = folder / "pytorch_model.bin"
    if as_zip:
        torch.save({"embeddings.word_embeddings.weight": Trap(target)}, file)
    else:
        file.write_bytes(pickle.dumps({"x": Trap(target)}, protocol=2))
    with pytest.raises(ModelFolderError, match="plain tensors"):
        load(folder)
    assert not target.exists()


def test_legacy_torch_files_are_read(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    load(folder)


def test_shards_that_are_not_there(tmp_path: Path) -> None:
    folder = make("bert-sharded", tmp_path)
    next(iter(folder.glob("model-00002*"))).unlink()
    with pytest.raises(ModelFolderError, match=r"names the file model-00002-of-00003\.safetensors, which is not there"):
        load(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "../outside.safetensors"}}))
    with pytest.raises(ModelFolderError, match=r"'weight_map\.x' is '\.\./outside\.safetensors'"):
        load(folder)


def test_weights_do_not_keep_the_file(folder: Path) -> None:
    """Another process may replace the file while the model serves; nothing may be a view of it."""
    weights = ModelWeights(
        folder,
        anchor="embeddings.word_embeddings.weight",
        roots=("embeddings", "encoder"),
        precision=FLOAT32,
        device=CPU,
    )
    table = weights.take_table("embeddings.word_embeddings.weight", 400, 64)
    matrix = weights.take(QUERY, 64, 64)
    before = table.clone(), matrix.clone()
    file = folder / "model.safetensors"
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        opened.write(bytes(file.stat().st_size // 2))
    assert torch.equal(table, before[0]) and torch.equal(matrix, before[1])


def fallback_folder(path: Path, model: transformers.PreTrainedModel, template: ModelFolder) -> ModelFolder:
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    return replace(template, path=path, transformer_path=path, config=config, model_type=config["model_type"])


def test_decoders_are_refused(folder: Path, tmp_path: Path) -> None:
    config = transformers.BioGptConfig(
        vocab_size=400, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    decoder = fallback_folder(tmp_path / "decoder", transformers.BioGptModel(config), read_folder(folder))
    with pytest.raises(ModelFolderError, match=r"'model_type' is 'biogpt', whose attention is causal.*is_decoder"):
        load_encoder(decoder, FLOAT32, CPU)


def test_encoder_decoders_are_refused(folder: Path, tmp_path: Path) -> None:
    config = transformers.BartConfig(
        vocab_size=400, d_model=64, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=64, decoder_ffn_dim=64
    )
    both = fallback_folder(tmp_path / "both", transformers.BartModel(config), read_folder(folder))
    with pytest.raises(ModelFolderError, match="'bart', an encoder-decoder"):
        load_encoder(both, FLOAT32, CPU)


def test_the_encoder_of_t5_is_served(folder: Path, tmp_path: Path) -> None:
    config = transformers.T5Config(
        vocab_size=400, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4, pad_token_id=0
    )
    t5 = fallback_folder(tmp_path / "t5", transformers.T5ForConditionalGeneration(config).eval(), read_folder(folder))
    assert load_encoder(t5, FLOAT32, CPU).attention.startswith("padded")


def test_convolutions_run_without_padding(folder: Path, tmp_path: Path) -> None:
    """Padding would change the results of tokens near it; Sentence Transformers' own depend on the batch there."""
    torch.manual_seed(0)
    config = transformers.ConvBertConfig(
        vocab_size=400, hidden_size=64, embedding_size=32, num_hidden_layers=2, num_attention_heads=4, head_ratio=2
    )
    convbert = fallback_folder(tmp_path / "convbert", transformers.ConvBertModel(config).eval(), read_folder(folder))
    encoder = load_encoder(convbert, FLOAT32, CPU)
    assert encoder.attention.startswith("groups of equal lengths")
    ids = torch.randint(1, 400, (2 + 3 + 3 + 9,))
    with torch.inference_mode():
        together = encoder.forward(ids, PackedLayout(np.array([2, 3, 3, 9])))
        for start, end in ((0, 2), (2, 5), (5, 8), (8, 17)):
            alone = encoder.forward(ids[start:end], PackedLayout(np.array([end - start])))
            torch.testing.assert_close(together[start:end], alone, atol=1e-5, rtol=1e-5)


def test_models_that_need_more_than_token_ids(folder: Path, tmp_path: Path) -> None:
    config = transformers.LiltConfig(
        vocab_size=400, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64
    )
    lilt = fallback_folder(tmp_path / "lilt", transformers.LiltModel(config), read_folder(folder))
    with pytest.raises(ModelFolderError, match="'lilt', which does not run on token ids alone"):
        load_encoder(lilt, FLOAT32, CPU)


def test_fallback_weights_must_be_complete(folder: Path, tmp_path: Path) -> None:
    config = transformers.ElectraConfig(
        vocab_size=400, embedding_size=32, hidden_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    electra = fallback_folder(tmp_path / "electra", transformers.ElectraModel(config), read_folder(folder))
    change_weights(electra.path / "model.safetensors", lambda tensors: tensors.pop(QUERY))
    with pytest.raises(ModelFolderError, match=f"lack tensor '{QUERY}'"):
        load_encoder(electra, FLOAT32, CPU)


def test_unknown_architectures_are_explained(folder: Path) -> None:
    change_config(folder, model_type="no-such-architecture")
    with pytest.raises(ModelFolderError, match="no-such-architecture"):
        load(folder)
