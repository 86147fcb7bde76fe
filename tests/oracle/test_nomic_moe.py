"""NomicBert with experts, in the layout of nomic-embed-text-v2-moe, against a slow model in float64 written here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from nobiru.errors import ModelFolderError
from nobiru.folder.read import read_folder
from nobiru.models.nomic_moe import NomicMoeEncoder
from nobiru.models.registry import load_encoder
from nobiru.models.weights import FLOAT32, Precision
from nobiru.ops.layout import PackedLayout
from nobiru.ops.scratch import Scratch
from tests.small_architectures import unigram

CPU = torch.device("cpu")
HIDDEN, HEADS, INNER, LAYERS, EXPERTS, TOP_K, VOCAB = 48, 4, 40, 4, 5, 2, 128
LENGTHS = (1, 5, 5, 23, 64)
CONFIG: dict[str, Any] = {
    "activation_function": "gelu",
    "architectures": ["NomicBertModel"],
    "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
    "causal": False,
    "expert_choice_router": False,
    "ffn_div": 1,
    "layer_norm_epsilon": 1e-5,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "model_type": "nomic_bert",
    "moe_every_n_layers": 2,
    "moe_normalize_expert_weights": False,
    "moe_top_k": TOP_K,
    "n_embd": HIDDEN,
    "n_head": HEADS,
    "n_inner": INNER,
    "n_layer": LAYERS,
    "n_positions": 2048,
    "num_experts": EXPERTS,
    "num_shared_experts": 0,
    "pad_token_id": 1,
    "prenorm": False,
    "qkv_proj_bias": True,
    "rotary_emb_base": 100.0,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "type_vocab_size": 1,
    "use_rms_norm": None,
    "vocab_size": VOCAB,
}

torch.set_num_threads(1)


def make_tensors() -> dict[str, Tensor]:
    """Random weights under the names of the model's repository; bfloat16 holds them exactly."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}

    def add(name: str, *shape: int, scale: float = 0.2, mean: float = 0.0) -> None:
        tensors[name] = (torch.randn(shape, generator=generator) * scale + mean).bfloat16().float()

    def add_linear(name: str, num_out: int, num_in: int) -> None:
        add(f"{name}.weight", num_out, num_in)
        add(f"{name}.bias", num_out)

    def add_norm(name: str) -> None:
        add(f"{name}.weight", HIDDEN, mean=1.0)
        add(f"{name}.bias", HIDDEN)

    add("embeddings.word_embeddings.weight", VOCAB, HIDDEN, scale=1.0)
    add("embeddings.token_type_embeddings.weight", 1, HIDDEN)
    add_norm("emb_ln")
    for layer in range(LAYERS):
        prefix = f"encoder.layers.{layer}."
        add_linear(f"{prefix}attn.Wqkv", 3 * HIDDEN, HIDDEN)
        add_linear(f"{prefix}attn.out_proj", HIDDEN, HIDDEN)
        add_norm(f"{prefix}norm1")
        add_norm(f"{prefix}norm2")
        if layer % 2:
            add(f"{prefix}mlp.router.layer.weight", EXPERTS, HIDDEN)
            add(f"{prefix}mlp.experts.mlp.w1", EXPERTS * INNER, HIDDEN)
            add(f"{prefix}mlp.experts.mlp.w2", EXPERTS * INNER, HIDDEN)
            add(f"{prefix}mlp.experts.bias", HIDDEN)
        else:
            add_linear(f"{prefix}mlp.fc1", INNER, HIDDEN)
            add_linear(f"{prefix}mlp.fc2", HIDDEN, INNER)
    return tensors


def slow_model(tensors: dict[str, Tensor], token_ids_t: Tensor) -> Tensor:
    """Hidden states of one text, [t, C], a token, a head and an expert at a time."""
    w = {name: tensor.double() for name, tensor in tensors.items()}

    def linear(name: str, x_tC: Tensor) -> Tensor:
        return x_tC @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(name: str, x_tC: Tensor) -> Tensor:
        return F.layer_norm(x_tC, (HIDDEN,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    def rotate(x_tD: Tensor) -> Tensor:
        half = x_tD.shape[1] // 2
        frequencies = torch.tensor([100.0 ** (-2 * i / (2 * half)) for i in range(half)], dtype=torch.float64)
        angles = torch.arange(len(x_tD), dtype=torch.float64)[:, None] * frequencies
        a, b = x_tD[:, :half], x_tD[:, half:]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), 1)

    def experts(prefix: str, x_tC: Tensor) -> Tensor:
        scores_tE = (x_tC @ w[f"{prefix}router.layer.weight"].T).softmax(-1)
        rows = []
        for x_C, scores_E in zip(x_tC, scores_tE, strict=True):
            row_C = w[f"{prefix}experts.bias"]
            for expert in scores_E.argsort(descending=True)[:TOP_K].tolist():
                own = slice(expert * INNER, (expert + 1) * INNER)
                hidden_F = F.gelu(w[f"{prefix}experts.mlp.w1"][own] @ x_C)
                row_C = row_C + scores_E[expert] * (hidden_F @ w[f"{prefix}experts.mlp.w2"][own])
            rows.append(row_C)
        return torch.stack(rows)

    types = w["embeddings.token_type_embeddings.weight"]
    x_tC = norm("emb_ln", w["embeddings.word_embeddings.weight"][token_ids_t] + types[0])
    for layer in range(LAYERS):
        prefix = f"encoder.layers.{layer}."
        q, k, v = (part.split(HIDDEN // HEADS, 1) for part in linear(f"{prefix}attn.Wqkv", x_tC).chunk(3, 1))
        heads = []
        for head in range(HEADS):
            scores = rotate(q[head]) @ rotate(k[head]).T / (HIDDEN // HEADS) ** 0.5
            heads.append(scores.softmax(-1) @ v[head])
        x_tC = norm(f"{prefix}norm1", x_tC + linear(f"{prefix}attn.out_proj", torch.cat(heads, 1)))
        mlp = f"{prefix}mlp."
        fed = experts(mlp, x_tC) if layer % 2 else linear(f"{mlp}fc2", F.gelu(linear(f"{mlp}fc1", x_tC)))
        x_tC = norm(f"{prefix}norm2", x_tC + fed)
    return x_tC


@pytest.fixture
def path(tmp_path: Path) -> Path:
    unigram().save_pretrained(tmp_path)
    save_file(make_tensors(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_hidden_states(path: Path, dtype: torch.dtype, tolerance: float) -> None:
    encoder = load_encoder(read_folder(path), Precision(weights=dtype, compute=dtype), CPU)
    assert isinstance(encoder, NomicMoeEncoder)
    generator = np.random.default_rng(0)
    texts = [torch.from_numpy(generator.integers(0, VOCAB, length)) for length in LENGTHS]
    with torch.inference_mode():
        found_TC = encoder.forward(torch.cat(texts), PackedLayout(np.array(LENGTHS)), Scratch())
        again_TC = encoder.forward(torch.cat(texts), PackedLayout(np.array(LENGTHS)))
    expected_TC = torch.cat([slow_model(make_tensors(), text) for text in texts])
    difference_TC = (found_TC.double() - expected_TC).abs()
    # In half precision a token may go to another expert; most do not.
    assert float(difference_TC.max() if dtype == torch.float32 else difference_TC.mean()) <= tolerance
    assert torch.equal(found_TC, again_TC)


@pytest.mark.parametrize(
    ("field", "value"),
    [("prenorm", True), ("moe_normalize_expert_weights", True), ("num_shared_experts", 1), ("moe_top_k", 6)],
)
def test_what_cannot_be_honoured_is_named(path: Path, field: str, value: object) -> None:
    (path / "config.json").write_text(json.dumps(CONFIG | {field: value}))
    with pytest.raises(ModelFolderError, match=field):
        load_encoder(read_folder(path), FLOAT32, CPU)


def test_missing_experts_are_named(path: Path) -> None:
    tensors = make_tensors()
    del tensors["encoder.layers.3.mlp.experts.mlp.w2"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelFolderError, match=r"layers\.3\.mlp\.experts\.mlp\.w2"):
        load_encoder(read_folder(path), FLOAT32, CPU)
