"""Linear layers, in the arrangement of weights that the device computes fastest.

* float32 on CPUs, and every CUDA device: `torch.nn.functional.linear`. Its matrix products (MKL) reached 150 to 180
  GFLOP/s on a 2-core AVX2 machine for 384 → 1536 and back, at 512 to 4096 tokens; oneDNN with prepacked weights reached
  145 to 165.
* bfloat16 and float16 on CPUs: oneDNN with weights packed once at load time and the activation fused, because the plain
  path packs the weight matrix again for each product. Used if the processor has the instructions and a trial agrees
  with the plain path; otherwise the plain path.
* Decoders on CPUs, in float32 and, with AVX512's instructions, bfloat16: kernels of our own (`nobiru.ops.native`) where
  there is a C compiler. One core of a Zen 4 reads weights at 25 GB/s for one row, where torch reads 12, and reaches 105
  and 213 GFLOP/s in the two dtypes for 600 rows, where MKL reaches 90 and oneDNN 200. float32 weights that bfloat16
  holds exactly are stored as bfloat16.

Shape legend: T tokens, I input values, O output values.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nobiru.layers.activation import Activation
from nobiru.ops.native.decoder import scores
from nobiru.ops.native.library import Kernels, load_kernels
from nobiru.ops.scratch import Buffer


class Linear(Protocol):
    def __call__(self, x_TI: Tensor, buffer: Buffer | None = None) -> Tensor:
        """x [T, I] → activation(x @ weight.T + bias) [T, O], in the buffer's memory if there is one and it can be."""


# oneDNN chooses the arrangement of weights for about this many tokens; others work too.
_PACK_FOR_TOKENS = 512


def make_linear(
    weight_OI: Tensor, bias_O: Tensor | None, activation: Activation | None = None, *, natively: bool = False
) -> Linear:
    """The linear layer of these weights, with the activation behind it.

    `natively` prefers the kernels of `nobiru.ops.native`, where there are any.
    """
    kernels = load_kernels() if natively and weight_OI.device.type == "cpu" else None
    if kernels is None or not (weight_OI.dtype == torch.float32 or _fits_pairs(weight_OI, kernels)):
        return _make_linear(weight_OI, bias_O, activation)
    return NativeLinear(kernels, weight_OI, bias_O, activation)


def _fits_pairs(weight_OI: Tensor, kernels: Kernels) -> bool:
    return weight_OI.dtype == torch.bfloat16 and kernels.multiplies_pairs and weight_OI.shape[1] % 2 == 0


def _make_linear(weight_OI: Tensor, bias_O: Tensor | None, activation: Activation | None) -> Linear:
    if weight_OI.device.type == "cpu" and weight_OI.dtype in (torch.bfloat16, torch.float16):
        packed = _packed(weight_OI, bias_O, activation)
        if packed is not None:
            return packed
    return PlainLinear(weight_OI, bias_O, activation)


class PlainLinear:
    """The linear layer of torch, then the activation in place."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, activation: Activation | None) -> None:
        self._weight_OI = weight_OI
        self._bias_O = bias_O
        self._activation = activation

    def __call__(self, x_TI: Tensor, buffer: Buffer | None = None) -> Tensor:
        if buffer is None:
            y_TO = F.linear(x_TI, self._weight_OI, self._bias_O)
        else:
            out_TO = buffer.take(x_TI.shape[0], self._weight_OI.shape[0], dtype=x_TI.dtype)
            if self._bias_O is None:
                y_TO = torch.mm(x_TI, self._weight_OI.mT, out=out_TO)
            else:
                y_TO = torch.addmm(self._bias_O, x_TI, self._weight_OI.mT, out=out_TO)
        return y_TO if self._activation is None else self._activation.apply(y_TO)


class PackedLinear:
    """oneDNN's linear layer with weights packed once and the activation fused where it can be."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, activation: Activation | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _PACK_FOR_TOKENS)
        self._bias_O = bias_O
        fused = None if activation is None else activation.fused
        self._operation, self._algorithm = fused or ("none", "")
        self._activation = activation if fused is None else None

    def __call__(self, x_TI: Tensor, buffer: Buffer | None = None) -> Tensor:
        y_TO: Tensor = torch.ops.mkldnn._linear_pointwise(
            x_TI, self._packed, self._bias_O, self._operation, [], self._algorithm
        )
        return y_TO if self._activation is None else self._activation.apply(y_TO)


class NativeLinear:
    """The kernels of `nobiru.ops.native`."""

    def __init__(
        self, kernels: Kernels, weight_OI: Tensor, bias_O: Tensor | None, activation: Activation | None
    ) -> None:
        self._kernels = kernels
        self._activation = activation
        in_pairs = weight_OI.dtype == torch.bfloat16
        halved_OI = weight_OI.to(torch.bfloat16)
        stored_OI = halved_OI if in_pairs or torch.equal(halved_OI.to(weight_OI.dtype), weight_OI) else weight_OI
        self.weight = kernels.pack(stored_OI, bias_O, in_pairs=in_pairs)

    def in_float32(self, x_TI: Tensor, buffer: Buffer | None = None) -> Tensor:
        """The same without the activation, and not rounded to the dtype of x."""
        assert self._activation is None
        y_TO = scores(self._kernels, x_TI, self.weight, buffer)
        return self(x_TI).float() if y_TO is None else y_TO

    def __call__(self, x_TI: Tensor, buffer: Buffer | None = None) -> Tensor:
        shape = x_TI.shape[0], self.weight.num_out
        y_TO = torch.empty(shape, dtype=x_TI.dtype) if buffer is None else buffer.take(*shape, dtype=x_TI.dtype)
        self._kernels.linear(x_TI, self.weight, y_TO)
        return y_TO if self._activation is None else self._activation.apply(y_TO)


def packing_is_supported(dtype: torch.dtype) -> bool:
    """Whether this build of torch and this processor have oneDNN's linear layers for `dtype`."""
    checks = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    operators = torch.ops.mkldnn
    needed = ("_reorder_linear_weight", "_linear_pointwise", checks.get(dtype, ""))
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not all(name and hasattr(operators, name) for name in needed):
        return False
    return bool(getattr(operators, checks[dtype])())


def _packed(weight_OI: Tensor, bias_O: Tensor | None, activation: Activation | None) -> PackedLinear | None:
    """The packed layer, or None where it cannot be made or its result is not that of the plain one."""
    if not packing_is_supported(weight_OI.dtype):
        return None
    try:
        packed = PackedLinear(weight_OI, bias_O, activation)
        generator = torch.Generator().manual_seed(0)
        sample_TI = torch.randn(4, weight_OI.shape[1], generator=generator).to(weight_OI.dtype)
        found, expected = packed(sample_TI), PlainLinear(weight_OI, bias_O, activation)(sample_TI)
    except RuntimeError:  # operators that are not a stable interface: absent, renamed or refusing this shape
        return None
    scale = expected.abs().max().clamp(min=1e-6)
    return packed if bool((found - expected).abs().max() <= 0.05 * scale) else None
