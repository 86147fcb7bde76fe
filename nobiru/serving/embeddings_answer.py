"""Vectors as the body of an embeddings answer, in OpenAI's shape.

Owns how vectors become text: floats are written so that float32 values come back exactly; base64 holds little-endian
float32. Knows nothing of HTTP. Shape legend: N sequences, D values of a vector.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterator

import msgspec
import numpy as np

from nobiru.request import EncodedPrompts, Vectors

# One slice is made in about a millisecond.
MAX_VALUES_PER_SLICE = 24_576

_json = msgspec.json.Encoder()


class _Item(msgspec.Struct):
    index: int
    embedding: list[float] | str
    object: str = "embedding"


def num_vectors_per_slice(embedding_dim: int) -> int:
    return max(1, MAX_VALUES_PER_SLICE // embedding_dim)


def write_answer(vectors_ND: Vectors, prompts: EncodedPrompts, *, model: str, base64: bool) -> Iterator[bytes]:
    """The answer's JSON, piece by piece; a piece holds `num_vectors_per_slice` vectors."""
    step = num_vectors_per_slice(vectors_ND.shape[1])
    yield b'{"object":"list","data":['
    for start in range(0, len(vectors_ND), step):
        items = _json.encode(_items(vectors_ND[start : start + step], start, base64))[1:-1]
        yield b"," + items if start else items
    yield b"]," + _json.encode(_summary(prompts, model))[1:]


def _items(vectors_ND: Vectors, start: int, base64: bool) -> list[_Item]:
    if not base64:
        return [_Item(index, values) for index, values in enumerate(vectors_ND.tolist(), start)]
    rows_ND = np.ascontiguousarray(vectors_ND, dtype="<f4")
    return [
        _Item(index, binascii.b2a_base64(row_D.data, newline=False).decode("ascii"))
        for index, row_D in enumerate(rows_ND, start)
    ]


def _summary(prompts: EncodedPrompts, model: str) -> dict[str, object]:
    """What follows the vectors; `truncated` names the inputs that were cut, if any."""
    cut = {"truncated": np.flatnonzero(prompts.truncated).tolist()} if prompts.truncated.any() else {}
    usage = {"prompt_tokens": prompts.num_tokens, "total_tokens": prompts.num_tokens}
    return {"model": model, **cut, "usage": usage}
