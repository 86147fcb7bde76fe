"""Weights in eight bits, with one scale for each output.

Shape legend: I input values, O output values.
"""

from __future__ import annotations

import torch
from torch import Tensor


def quantize_rows(weight_OI: Tensor, most: int = 127) -> tuple[Tensor, Tensor]:
    """int8 integers [O, I] from -most to most and float32 scales [O]: weight = integer * scale, rounded to nearest."""
    weight_OI = weight_OI.float()
    largest_O = weight_OI.abs().amax(1)
    scales_O = torch.where(largest_O > 0, largest_O / most, 1.0)
    return (weight_OI / scales_O[:, None]).round_().to(torch.int8), scales_O


def rounded_rows(weight_OI: Tensor) -> Tensor:
    """The weights that `quantize_rows` stands for, in the dtype they came in."""
    quantized_OI, scales_O = quantize_rows(weight_OI)
    return (quantized_OI.float() * scales_O[:, None]).to(weight_OI.dtype)
