"""On a CUDA device: the ragged attention kernel, groups, and whole models against the same model on the CPU.

Needs torch, numpy, safetensors and pytest only: the folders are written by hand, with random weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from nobiru.folder.spec import DenseSpec, ModelFolder, NormalizeSpec, PoolingSpec
from nobiru.ops import reference
from nobiru.ops.layout import PackedLayout
from nobiru.ops.packed_attention import packed_attention
from nobiru.request import SequenceInput
from nobiru.runner.runner import PoolingRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
HIDDEN, INTERMEDIATE, HEADS, LAYERS, VOCAB, POSITIONS = 128, 256, 4, 3, 300, 258
LENGTHS = [1, 2, 3, 3, 17, 17, 40, 41, 130, 200]


@pytest.mark.parametrize("head_size", [32, 64, 20])  # 20 is not a multiple of 8: groups
@pytest.mark.parametrize("window", [None, 1, 16, 150])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 5e-3), (torch.float32, 1e-4)])
def test_packed_attention(head_size: int, window: int | None, dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(head_size)
    qkv = torch.randn(sum(LENGTHS), 3, HEADS, head_size, generator=generator).to(dtype)
    q, k, v = qkv.unbind(1)
    expected = reference.attention(q, k, v, LENGTHS, scale=head_size**-0.5, window=window)
    layout = PackedLayout(np.array(LENGTHS, dtype=np.int64), "cuda")
    q, k, v = qkv.cuda().unbind(1)
    found = packed_attention(q, k, v, layout, scale=head_size**-0.5, window=window)
    torch.testing.assert_close(found.cpu().double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shared_key_heads(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(sum(LENGTHS), HEADS, 32, generator=generator).to(dtype)
    k, v = torch.randn(2, sum(LENGTHS), 2, 32, generator=generator).to(dtype).unbind(0)
    expected = reference.attention(q, k, v, LENGTHS, scale=0.2)
    layout = PackedLayout(np.array(LENGTHS, dtype=np.int64), "cuda")
    found = packed_attention(q.cuda(), k.cuda(), v.cuda(), layout, scale=0.2)
    torch.testing.assert_close(found.cpu().double(), expected, atol=3e-2, rtol=3e-2)


def test_bias() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, sum(LENGTHS), HEADS, 32, generator=generator).bfloat16().unbind(0)
    bias = torch.randn(HEADS, 256, 256, generator=generator).bfloat16()
    expected = reference.attention(q, k, v, LENGTHS, scale=0.2, bias_HMM=bias)
    layout = PackedLayout(np.array(LENGTHS, dtype=np.int64), "cuda")
    found = packed_attention(q.cuda(), k.cuda(), v.cuda(), layout, scale=0.2, bias_HMM=bias.cuda())
    torch.testing.assert_close(found.cpu().double(), expected, atol=5e-2, rtol=5e-2)


def sequences(**options: object) -> list[SequenceInput]:
    random = np.random.default_rng(0)
    return [
        SequenceInput(token_ids=random.integers(4, VOCAB, length).astype(np.int32), **options)  # type: ignore[arg-type]
        for length in random.permutation(LENGTHS)
    ]


def vectors(folder: ModelFolder, dtype: str, device: str, inputs: list[SequenceInput]) -> np.ndarray:
    runner = PoolingRunner.load(folder, dtype=dtype, device=device, max_model_len=folder.max_model_len)
    runner.warm_up()
    found = np.stack(runner.run(inputs))
    assert found.dtype == np.float32
    alone = np.stack([runner.run([each])[0] for each in inputs])
    assert np.abs(found - alone).max() <= (1e-5 if dtype == "float32" else 2e-2)
    return found


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "mpnet"])
@pytest.mark.parametrize(
    ("dtype", "min_cosine", "max_difference"),
    [("float32", 0.99999, 1e-4), ("bfloat16", 0.999, 0.02), ("float16", 0.999, 0.02), ("auto", 0.999, 0.02)],
)
def test_models_equal_the_cpu(
    family: str, dtype: str, min_cosine: float, max_difference: float, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path, family)
    inputs = sequences()
    expected = vectors(folder, "float32", "cpu", inputs)
    found = vectors(folder, dtype, "cuda", inputs)
    assert (found * expected).sum(axis=1).min() >= min_cosine
    assert np.abs(found - expected).max() <= max_difference


@pytest.mark.parametrize("modes", [("cls", "max", "mean"), ("mean_sqrt_len_tokens", "weightedmean", "lasttoken")])
def test_pooling_modes_with_skipped_tokens(modes: tuple[str, ...], tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "bert", PoolingSpec(modes=modes, include_prompt=False))
    inputs = [each for each in sequences(num_skipped_tokens=2) if each.token_ids.size > 2]
    expected = vectors(folder, "float32", "cpu", inputs)
    found = vectors(folder, "float32", "cuda", inputs)
    assert np.abs(found - expected).max() <= 1e-4


def write_folder(path: Path, family: str, pooling: PoolingSpec | None = None) -> ModelFolder:
    """A folder of one family: weights, `config.json`, pooling, a dense layer and normalization."""
    generator = torch.Generator().manual_seed(1)
    pooling = pooling or PoolingSpec()
    config = {
        "model_type": family,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": 2,
        "pad_token_id": 1,
    }
    (path / "config.json").write_text(json.dumps(config))
    save_file(
        {name: random_tensor(name, shape, generator) for name, shape in shapes(family)}, path / "model.safetensors"
    )
    dense = DenseSpec(
        path=path / "2_Dense",
        in_features=HIDDEN * len(pooling.modes),
        out_features=96,
        bias=True,
        activation="torch.nn.modules.activation.Tanh",
    )
    dense.path.mkdir()
    weights = {"linear.weight": (96, dense.in_features), "linear.bias": (96,)}
    save_file(
        {name: random_tensor(name, shape, generator) for name, shape in weights.items()},
        dense.path / "model.safetensors",
    )
    return ModelFolder(
        path=path,
        transformer_path=path,
        config=config,
        model_type=family,
        modules=(pooling, dense, NormalizeSpec()),
        max_model_len=256,
        hidden_size=HIDDEN,
        embedding_dim=96,
        vocab_size=VOCAB,
    )


def shapes(family: str) -> list[tuple[str, tuple[int, ...]]]:
    square, wide, flat = (HIDDEN, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN,)
    found: list[tuple[str, tuple[int, ...]]] = [
        ("embeddings.word_embeddings.weight", (VOCAB, HIDDEN)),
        ("embeddings.position_embeddings.weight", (POSITIONS, HIDDEN)),
        ("embeddings.LayerNorm.weight", flat),
        ("embeddings.LayerNorm.bias", flat),
    ]
    if family == "mpnet":
        found.append(("encoder.relative_attention_bias.weight", (32, HEADS)))
        attention, out, norm = "attention.attn.{}", "attention.attn.o", "attention.LayerNorm"
        projections = [attention.format(letter) for letter in "qkv"]
    else:
        found.append(("embeddings.token_type_embeddings.weight", (2, HIDDEN)))
        out, norm = "attention.output.dense", "attention.output.LayerNorm"
        projections = [f"attention.self.{name}" for name in ("query", "key", "value")]
    for layer in range(LAYERS):
        linear: dict[str, tuple[int, ...]] = dict.fromkeys((*projections, out), square)
        linear |= {"intermediate.dense": wide, "output.dense": (HIDDEN, INTERMEDIATE)}
        for name, shape in linear.items():
            found += [(f"encoder.layer.{layer}.{name}.weight", shape)]
            found += [(f"encoder.layer.{layer}.{name}.bias", shape[:1])]
        for name in (norm, "output.LayerNorm"):
            found += [(f"encoder.layer.{layer}.{name}.{part}", flat) for part in ("weight", "bias")]
    return found


def random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Large enough that attention is far from uniform."""
    if len(shape) == 1:
        return torch.randn(shape, generator=generator) * 0.1 + ("LayerNorm.weight" in name)
    return torch.randn(shape, generator=generator) * (0.5 if "embeddings" in name else 0.12)
