"""Rotary positions against `transformers`, with the numbers of models in the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from nobiru.folder.rope import read_rope
from nobiru.layers.rotary import Rotary, side_by_side, turn

HEAD_SIZE = 128
CPU = torch.device("cpu")
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "Llama 3.1": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "Qwen2.5 with yarn": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    "yarn with a small base": {"rope_type": "yarn", "rope_theta": 30.0, "factor": 2.0, "beta_slow": 0.5},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turned_queries_have_the_same_scores(name: str, dtype: torch.dtype) -> None:
    """Values lie in another order here, so scores are compared."""
    positions = 40_000
    config = transformers.LlamaConfig(
        hidden_size=2 * HEAD_SIZE,
        num_attention_heads=2,
        max_position_embeddings=positions,
        rope_parameters=dict(CASES[name]),
    )
    rope = read_rope({"rope_parameters": CASES[name]}, Path("config.json"), max_position_embeddings=positions)
    rotary = Rotary(rope, head_size=HEAD_SIZE, num_positions=positions, device=CPU)
    generator = torch.Generator().manual_seed(0)
    places_T = torch.tensor([0, 1, 7, 8191, 8192, 20_000, 39_990, 39_999])
    q_THD, k_THD = (torch.randn(8, 2, HEAD_SIZE, generator=generator) for _ in range(2))

    reference = LlamaRotaryEmbedding(config)
    cos, sin = reference(q_THD, places_T[None])
    their_q, their_k = apply_rotary_pos_emb(q_THD[None], k_THD[None], cos, sin, unsqueeze_dim=2)
    expected = torch.einsum("thd,shd->hts", their_q[0], their_k[0])

    turns_T1P = rotary.turns_at(places_T)
    ours = []
    for x_THD in (q_THD, k_THD):
        paired = torch.stack([side_by_side(x_D, HEAD_SIZE).view_as(x_D) for x_D in x_THD.flatten(0, 1)])
        turned = paired.view_as(x_THD).to(dtype)
        turn(turned, turns_T1P)
        assert turned.dtype == dtype
        ours.append(turned.float())
    found = torch.einsum("thd,shd->hts", *ours)
    tolerance = 1e-4 if dtype == torch.float32 else 0.5
    assert float((found - expected).abs().max()) <= tolerance
    assert float(expected.abs().max()) > 10


def test_rows_side_by_side() -> None:
    """The pairs (0, 2) and (1, 3) of each of two heads with four values."""
    assert side_by_side(torch.arange(8), 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    rows = torch.arange(24).view(8, 3)
    assert torch.equal(side_by_side(rows, 4), rows[[0, 2, 1, 3, 4, 6, 5, 7]])
