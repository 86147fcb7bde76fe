"""Vectors as text: exact float32 in both formats, whatever the number of slices."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from nobiru.request import EncodedPrompts, Vectors
from nobiru.serving.embeddings_answer import num_vectors_per_slice, write_answer


def answer(vectors_ND: Vectors, *, as_base64: bool, truncated: list[int] | None = None) -> dict[str, Any]:
    cut = np.zeros(len(vectors_ND), dtype=np.bool_)
    cut[truncated or []] = True
    prompts = EncodedPrompts(
        token_ids=np.zeros(3 * len(vectors_ND), dtype=np.int32),
        lengths=np.full(len(vectors_ND), 3, dtype=np.int32),
        truncated=cut,
    )
    return json.loads(b"".join(write_answer(vectors_ND, prompts, model="m", base64=as_base64)))


def hard_vectors(num: int, dim: int) -> Vectors:
    vectors_ND = np.random.default_rng(0).standard_normal((num, dim)).astype(np.float32)
    vectors_ND[0, :4] = [np.float32(1e-45), np.float32(3.4028235e38), -0.0, np.float32(1) / np.float32(3)]
    return vectors_ND


@pytest.mark.parametrize(("num", "dim"), [(1, 384), (3, 8), (200, 384), (7, 8192)])
@pytest.mark.parametrize("as_base64", [False, True])
def test_float32_values_come_back_exactly(num: int, dim: int, as_base64: bool) -> None:
    vectors_ND = hard_vectors(num, dim)
    body = answer(vectors_ND, as_base64=as_base64)
    rows = [
        np.frombuffer(base64.b64decode(item["embedding"]), dtype="<f4")
        if as_base64
        else np.array(item["embedding"], dtype=np.float32)
        for item in body["data"]
    ]
    assert [item["index"] for item in body["data"]] == list(range(num))
    assert np.stack(rows).tobytes() == vectors_ND.tobytes()


def test_views_with_strides_are_written_right() -> None:
    vectors_ND = hard_vectors(4, 16)[:, ::2]
    row = answer(vectors_ND, as_base64=True)["data"][1]["embedding"]
    assert np.frombuffer(base64.b64decode(row), dtype="<f4").tolist() == vectors_ND[1].tolist()


def test_the_shape_is_openai_s() -> None:
    body = answer(hard_vectors(2, 4), as_base64=False)
    assert body["object"] == "list"
    assert body["model"] == "m"
    assert {item["object"] for item in body["data"]} == {"embedding"}
    assert body["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    assert "truncated" not in body


def test_cut_inputs_are_named() -> None:
    assert answer(hard_vectors(5, 4), as_base64=False, truncated=[1, 4])["truncated"] == [1, 4]


def test_slices_are_bounded_in_values() -> None:
    assert num_vectors_per_slice(384) == 64
    assert num_vectors_per_slice(10**6) == 1
    prompts = EncodedPrompts(
        token_ids=np.zeros(300, dtype=np.int32),
        lengths=np.ones(300, dtype=np.int32),
        truncated=np.zeros(300, dtype=np.bool_),
    )
    pieces = list(write_answer(hard_vectors(300, 384), prompts, model="m", base64=False))
    assert len(pieces) == 2 + -(-300 // 64)
