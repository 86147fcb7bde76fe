"""Reads single experts from a folder, in the two layouts that checkpoints have.

Owns the names: tensors of each expert (`experts.3.gate_proj.weight`), or one tensor for all of a layer
(`experts.gate_up_proj`, [E, 2 I, C], as transformers 5 holds them in memory). An expert is read when it is asked for,
and nothing else is; so a rank never holds experts that are not its own.

Shape legend: E experts, C hidden size, I intermediate size, A = 2 I rows of gate and up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nobiru.models.pace import Pace
from nobiru.models.weights import ModelWeights, StoredTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertNames:
    """What the parts of one expert are called."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class StoredExperts:
    """The experts of one layer in their files, whose tensors' names begin with `prefix` ("layers.3.mlp.").

    Several threads may read at once.
    """

    def __init__(
        self,
        weights: ModelWeights,
        prefix: str,
        names: ExpertNames,
        *,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
    ) -> None:
        """Tensors that are not there count as missing in `weights`."""
        self._num_experts = num_experts
        self._fused: tuple[StoredTensor | None, StoredTensor | None] | None = None
        self._parts: list[tuple[StoredTensor | None, ...]] = []
        wide, narrow = (intermediate_size, hidden_size), (hidden_size, intermediate_size)
        if weights.has(f"{prefix}experts.gate_up_proj"):
            self._fused = (
                weights.claim(f"{prefix}experts.gate_up_proj", num_experts, 2 * intermediate_size, hidden_size),
                weights.claim(f"{prefix}experts.down_proj", num_experts, *narrow),
            )
            return
        shapes = {names.gate: wide, names.up: wide, names.down: narrow}
        for expert in range(num_experts):
            claims = [weights.claim(f"{prefix}experts.{expert}.{part}.weight", *size) for part, size in shapes.items()]
            self._parts.append(tuple(claims))

    @property
    def dtype(self) -> torch.dtype:
        """The smallest dtype that holds all these tensors exactly."""
        tensors = self._fused or [tensor for parts in self._parts for tensor in parts]
        dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    @property
    def stored_bytes(self) -> int:
        """What one expert takes in the files."""
        if self._fused is not None:
            return sum(tensor.num_bytes for tensor in self._fused if tensor is not None) // self._num_experts
        return sum(tensor.num_bytes for tensor in self._parts[0] if tensor is not None)

    def read(self, expert: int, *, pace: Pace | None = None) -> tuple[Tensor, Tensor]:
        """gate and up [A, C], and down [C, I], in the file's dtype, on the CPU."""
        if self._fused is not None:
            gate_up, down = self._fused
            assert gate_up is not None and down is not None
            one = (expert, expert + 1)
            return gate_up.rows(*one, pace=pace)[0], down.rows(*one, pace=pace)[0]
        tensors = [tensor.rows(pace=pace) for tensor in self._parts[expert] if tensor is not None]
        gate_IC, up_IC, down_CI = tensors
        return torch.cat((gate_IC, up_IC)), down_CI
