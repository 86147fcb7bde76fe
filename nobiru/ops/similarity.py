"""Similarities between two sets of vectors, as sentence-transformers defines its `similarity_fn_name`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nobiru.request import Vectors

_CHUNK_VALUES = 1 << 24  # distances need [rows, M, D] differences: this many values at a time


def similarity(name: str, first: NDArray[np.float32], second: NDArray[np.float32]) -> Vectors:
    """[N, M] for vectors [N, D] and [M, D] (one vector [D] counts as one row). Higher is more similar:
    distances are negative. `ValueError` for an unknown name."""
    first_nd, second_md = np.atleast_2d(first).astype(np.float32), np.atleast_2d(second).astype(np.float32)
    if name == "dot":
        return first_nd @ second_md.T
    if name == "cosine":
        return _unit(first_nd) @ _unit(second_md).T
    if name not in ("euclidean", "manhattan"):
        raise ValueError(f"unknown similarity {name!r}")
    rows_per_chunk = max(1, _CHUNK_VALUES // max(1, second_md.size))
    chunks = []
    for begin in range(0, len(first_nd), rows_per_chunk):
        difference = first_nd[begin : begin + rows_per_chunk, None, :] - second_md[None, :, :]
        distance = np.abs(difference).sum(-1) if name == "manhattan" else np.sqrt(np.square(difference).sum(-1))
        chunks.append(-distance)
    return np.concatenate(chunks).astype(np.float32)


def _unit(vectors_nd: Vectors) -> Vectors:
    norms_n1 = np.linalg.norm(vectors_nd, axis=1, keepdims=True)
    unit: Vectors = vectors_nd / np.maximum(norms_n1, 1e-12)
    return unit
