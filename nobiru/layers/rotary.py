"""Rotary position embeddings (Su et al. 2021, https://arxiv.org/abs/2104.09864) and the scalings of their frequencies.

Owns frequencies, the table of turns for all positions, and turning queries and keys. Values of a head are turned in
pairs. Files pair value i with i + D / 2; here the two lie side by side, so that a turn is one complex product.
`side_by_side` brings the rows of weights into that order when they are read; scores do not depend on it, because
queries and keys have the same.

Shape legend: T tokens, H heads, D values a head, P pairs of them (D / 2), M the model's limit of tokens, I input
values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nobiru.folder.rope import RopeSpec
from nobiru.ops.native.library import kernels_for

KINDS = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")


class Rotary:
    """The turns of positions up to `num_positions`."""

    def __init__(self, rope: RopeSpec, *, head_size: int, num_positions: int, device: torch.device) -> None:
        frequencies_P, scale = frequencies(rope, head_size)
        angles_MP = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies_P
        self._turns_MP = torch.complex(angles_MP.cos() * scale, angles_MP.sin() * scale).to(device)

    def turns_at(self, positions_T: Tensor) -> Tensor:
        """[T, 1, P] complex64: what `turn` takes, for tokens at these positions."""
        return self._turns_MP.index_select(0, positions_T)[:, None]


def turn(x_THD: Tensor, turns_T1P: Tensor) -> None:
    """Turn queries and keys in place; the arithmetic is float32 whatever the dtype."""
    kernels = kernels_for(x_THD)
    if kernels is not None and kernels.turn(x_THD, turns_T1P):
        return
    if x_THD.dtype == torch.float32:
        _turn(x_THD, turns_T1P)
        return
    exact_THD = x_THD.float()
    _turn(exact_THD, turns_T1P)
    x_THD.copy_(exact_THD)


def _turn(x_THD: Tensor, turns_T1P: Tensor) -> None:
    num_tokens, num_heads, head_size = x_THD.shape
    torch.view_as_complex(x_THD.view(num_tokens, num_heads, head_size // 2, 2)).mul_(turns_T1P)


def side_by_side(rows: Tensor, head_size: int) -> Tensor:
    """Weights [H * D, I], or biases [H * D], whose paired rows stand side by side in each head."""
    pairs = rows.view(-1, 2, head_size // 2, *rows.shape[1:])
    return pairs.transpose(1, 2).flatten(0, 2)


def frequencies(rope: RopeSpec, head_size: int) -> tuple[Tensor, float]:
    """The angle per position of each pair [P] in float32, and the factor on sines and cosines.

    `rope.kind` is one of `KINDS`, and `rope.numbers` has what it needs. "dynamic" has the default frequencies, and
    "longrope" those for short texts, up to the length where they would change; `nobiru.folder.rope` ends texts there.
    """
    exponents_P = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    frequencies_P = 1.0 / torch.pow(rope.theta, exponents_P)
    if rope.kind == "linear":
        return frequencies_P / rope.numbers["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(rope, frequencies_P), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, frequencies_P, head_size), _yarn_scale(rope)
    if rope.kind == "longrope":
        stretch_P = torch.tensor(rope.numbers["short_factor"], dtype=torch.float32)
        return frequencies_P / stretch_P, _longrope_scale(rope)
    assert rope.kind in ("default", "dynamic"), rope.kind
    return frequencies_P, 1.0


def _llama3(rope: RopeSpec, frequencies_P: Tensor) -> Tensor:
    """Long waves stretched by `factor`, short ones left alone, those between in between (as Llama 3.1 has it)."""
    assert rope.original_positions is not None
    low, high = rope.numbers["low_freq_factor"], rope.numbers["high_freq_factor"]
    turns_P = rope.original_positions * frequencies_P / (2 * math.pi)
    share_P = ((turns_P - low) / (high - low)).clamp(0.0, 1.0)
    return _mix(share_P, frequencies_P, frequencies_P / rope.numbers["factor"])


def _yarn(rope: RopeSpec, frequencies_P: Tensor, head_size: int) -> Tensor:
    """As llama3, with a ramp over pairs instead of wave lengths (Peng et al. 2023, https://arxiv.org/abs/2309.00071)."""
    assert rope.original_positions is not None

    def pair_that_turns(times: float) -> float:
        waves = rope.original_positions / (times * 2 * math.pi)  # type: ignore[operator]
        return head_size * math.log(waves) / (2 * math.log(rope.theta))

    first = pair_that_turns(rope.numbers.get("beta_fast", 32.0))
    last = pair_that_turns(rope.numbers.get("beta_slow", 1.0))
    if rope.numbers.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_size - 1)
    pairs_P = torch.arange(head_size // 2, dtype=torch.float32)
    share_P = ((pairs_P - first) / (last - first or 0.001)).clamp(0.0, 1.0)
    return _mix(share_P, frequencies_P / rope.numbers["factor"], frequencies_P)


def _mix(share_P: Tensor, first_P: Tensor, second_P: Tensor) -> Tensor:
    return share_P * first_P + (1 - share_P) * second_P


def _yarn_scale(rope: RopeSpec) -> float:
    def scale(multiplier: float) -> float:
        factor = rope.numbers["factor"]
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    if (given := rope.numbers.get("attention_factor")) is not None:
        return float(given)
    above, below = rope.numbers.get("mscale"), rope.numbers.get("mscale_all_dim")
    return scale(above) / scale(below) if above and below else scale(1.0)


def _longrope_scale(rope: RopeSpec) -> float:
    """Of a text that has its original length (Ding et al. 2024, https://arxiv.org/abs/2402.13753)."""
    assert rope.original_positions is not None
    if (given := rope.numbers.get("attention_factor")) is not None:
        return float(given)
    factor = rope.numbers["factor"]
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(rope.original_positions))
