"""From pooled vectors to those that callers get: the folder's modules, then what each sequence asks for.

Owns the modules behind pooling, and the last normalization, which is each sequence's choice. Knows nothing of models or
of where pooled vectors come from.

Shape legend: B sequences, D embedding size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nobiru.folder.spec import ModelFolder, NormalizeSpec, PoolingSpec
from nobiru.layers.modules import Module, build_module, normalize, weight_shapes
from nobiru.models.weights import read_module_weights
from nobiru.request import SequenceInput, Vectors


class Finisher:
    """`finisher(pooled, sequences)` gives the vector of each sequence."""

    def __init__(self, folder: ModelFolder, device: torch.device) -> None:
        self._modules = _build_modules(folder, device)
        self._ends_normalized = isinstance(folder.modules[-1], NormalizeSpec)

    def __call__(self, pooled_BD: Tensor, sequences: Sequence[SequenceInput]) -> list[Vectors]:
        """float32 [B, D] → one vector [D] (or [dimensions]) per sequence, in order."""
        vectors_BD = pooled_BD
        for module in self._modules:
            vectors_BD = module(vectors_BD)
        places: dict[tuple[bool, int | None], list[int]] = defaultdict(list)
        for place, wish in enumerate(sequences):
            normalized = wish.normalize
            if normalized is None:
                normalized = self._ends_normalized or wish.dimensions is not None
            places[normalized, wish.dimensions].append(place)
        results: list[Vectors] = [np.empty(0, dtype=np.float32)] * len(sequences)
        for (normalized, dimensions), chosen in places.items():
            part = vectors_BD if len(places) == 1 else vectors_BD[torch.tensor(chosen, device=vectors_BD.device)]
            part = part[:, :dimensions]
            rows = (normalize(part) if normalized else part).cpu().numpy()
            for row, place in zip(rows, chosen, strict=True):
                results[place] = row
        return results


def _build_modules(folder: ModelFolder, device: torch.device) -> list[Module]:
    """The modules behind pooling, without a last normalization: whether that runs is each sequence's choice."""
    specs = folder.modules[1:]
    if isinstance(folder.modules[-1], NormalizeSpec):
        specs = specs[:-1]
    modules: list[Module] = []
    for spec in specs:
        if isinstance(spec, NormalizeSpec):
            modules.append(normalize)
            continue
        assert not isinstance(spec, PoolingSpec), "folder.read allows one pooling, in first place"
        modules.append(build_module(spec, read_module_weights(spec.path, weight_shapes(spec), device)))
    return modules
