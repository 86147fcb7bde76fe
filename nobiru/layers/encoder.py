"""A stack of BERT's encoder layers, by the fastest means there are: kernels of our own, or torch layer by layer.

Owns the choice between them, and what int8 weights mean where no kernel multiplies them: the same rounded weights in
the dtype of arithmetic.

* On CPUs the kernels of `nobiru.ops.native.encoder` take all layers in one call, for float32 and, where the processor
  has instructions for it, bfloat16 and int8. They read the fused projection as it lies, and keep sums, residuals and
  normalizations in float32.
* Without them, for sizes that they do not take, and on CUDA: `PostNormBlock` for each layer.

Shape legend: T tokens, R of them that are asked for, C hidden size, H heads, M the model's limit of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nobiru.layers.activation import ACTIVATIONS, Activation
from nobiru.layers.block import BlockWeights, PostNormBlock
from nobiru.layers.linear import Linear, make_linear
from nobiru.ops.layout import PackedLayout
from nobiru.ops.native import threads
from nobiru.ops.native.encoder import (
    Arithmetic,
    ArrangedLayer,
    EncoderKernels,
    EncoderShape,
    choose_arithmetic,
    load_encoder_kernels,
)
from nobiru.ops.packed_attention import attention_path
from nobiru.ops.quantize import rounded_rows
from nobiru.ops.scratch import Scratch

# The kernels' names of activations, by those of oneDNN.
_NATIVE_ACTIVATIONS = {
    ("gelu", "none"): "gelu",
    ("gelu", "tanh"): "gelu_tanh",
    ("relu", ""): "relu",
    ("swish", ""): "silu",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockShape:
    """What all layers of a stack have in common."""

    width: int
    inner: int
    num_heads: int
    activation: Activation


class Layers(Protocol):
    """Layers that are appended one by one, then called with hidden states [T, C].

    `attention` and `arithmetic` say in words how they compute. With `has_own_threads` a call spreads itself over the
    cores; else several threads may call at once.
    """

    attention: str
    arithmetic: str
    has_own_threads: bool

    def append(self, weights: BlockWeights) -> None: ...

    def set_bias(self, bias_HMM: Tensor | None) -> None:
        """What all layers add to the scores of attention."""

    def __call__(
        self,
        hidden_TC: Tensor,
        layout: PackedLayout,
        scratch: Scratch | None,
        rows_R: NDArray[np.int64] | None = None,
    ) -> Tensor:
        """Hidden states [T, C] behind the last layer.

        With `rows_R`, int64 and ascending, only these tokens' need be right: others may end at its attention.
        """


def make_layers(shape: BlockShape, *, dtype: torch.dtype, device: torch.device, in_int8: bool) -> Layers:
    """Layers without weights yet. `dtype` is that of arithmetic; with `in_int8` matrices are rounded to eight bits."""
    kernels = load_encoder_kernels() if device.type == "cpu" else None
    activation = _native_activation(shape.activation)
    if kernels is not None and activation is not None:
        head_size = shape.width // shape.num_heads
        sizes = (shape.width, shape.inner)
        arithmetic = choose_arithmetic(dtype, sizes, kernels.instructions, quantized=in_int8)
        if arithmetic is not None and kernels.attends(dtype, head_size):
            native = EncoderShape(
                width=shape.width,
                inner=shape.inner,
                num_heads=shape.num_heads,
                activation=activation,
                arithmetic=arithmetic,
                dtype=dtype,
            )
            return NativeLayers(kernels, native)
    return TorchLayers(shape, dtype=dtype, device=device, in_int8=in_int8)


def _native_activation(activation: Activation) -> str | None:
    if activation is ACTIVATIONS["linear"]:
        return "none"
    return None if activation.fused is None else _NATIVE_ACTIVATIONS.get(activation.fused)


class NativeLayers:
    """The kernels of `nobiru.ops.native`."""

    has_own_threads = True
    attention = "packed, native"

    def __init__(self, kernels: EncoderKernels, shape: EncoderShape) -> None:
        self._kernels = kernels
        self._shape = shape
        self._layers: list[ArrangedLayer] = []
        self._bias_HMM: Tensor | None = None
        self.arithmetic = "vectors" if shape.arithmetic == Arithmetic.FLOATS else shape.arithmetic.name.lower()

    def append(self, weights: BlockWeights) -> None:
        arrange, by = self._kernels.arrange, self._shape.arithmetic
        self._layers.append(
            ArrangedLayer(
                qkv=arrange(*weights.qkv, by),
                out=arrange(*weights.attention_out, by),
                up=arrange(*weights.up, by),
                down=arrange(*weights.down, by),
                attention_norm=weights.attention_norm.in_float32(),
                output_norm=weights.output_norm.in_float32(),
            )
        )

    def set_bias(self, bias_HMM: Tensor | None) -> None:
        self._bias_HMM = None if bias_HMM is None else bias_HMM.float().contiguous()

    def __call__(
        self,
        hidden_TC: Tensor,
        layout: PackedLayout,
        scratch: Scratch | None,
        rows_R: NDArray[np.int64] | None = None,
    ) -> Tensor:
        return self._kernels.encode(
            self._shape,
            self._layers,
            hidden_TC,
            layout.bounds,
            bias_HMM=self._bias_HMM,
            num_threads=threads.num_threads(),
            rows_R=rows_R,
        )


class TorchLayers:
    """`PostNormBlock`s, one after the other."""

    has_own_threads = False

    def __init__(self, shape: BlockShape, *, dtype: torch.dtype, device: torch.device, in_int8: bool) -> None:
        self._shape = shape
        self._device = device
        self._dtype = dtype
        self._in_int8 = in_int8
        self._blocks: list[PostNormBlock] = []
        self._bias_HMM: Tensor | None = None
        self.arithmetic = "torch"
        self.attention = self._attention_path()

    def append(self, weights: BlockWeights) -> None:
        self._blocks.append(
            PostNormBlock(
                num_heads=self._shape.num_heads,
                qkv=self._linear(weights.qkv),
                attention_out=self._linear(weights.attention_out),
                attention_norm=weights.attention_norm,
                up=self._linear(weights.up, self._shape.activation),
                down=self._linear(weights.down),
                output_norm=weights.output_norm,
            )
        )

    def set_bias(self, bias_HMM: Tensor | None) -> None:
        self._bias_HMM = bias_HMM
        self.attention = self._attention_path()

    def __call__(
        self,
        hidden_TC: Tensor,
        layout: PackedLayout,
        scratch: Scratch | None,
        rows_R: NDArray[np.int64] | None = None,
    ) -> Tensor:
        *others, last = self._blocks
        for block in others:
            hidden_TC = block(hidden_TC, layout, scratch, self._bias_HMM)
        if rows_R is None:
            return last(hidden_TC, layout, scratch, self._bias_HMM)
        rows = layout.to_device(rows_R)
        return hidden_TC.index_copy_(0, rows, last(hidden_TC, layout, scratch, self._bias_HMM, rows))

    def _linear(self, weights: tuple[Tensor, Tensor], activation: Activation | None = None) -> Linear:
        weight_OI, bias_O = weights
        return make_linear(rounded_rows(weight_OI) if self._in_int8 else weight_OI, bias_O, activation)

    def _attention_path(self) -> str:
        head_size = self._shape.width // self._shape.num_heads
        return attention_path(self._device, self._dtype, head_size, has_bias=self._bias_HMM is not None)
