"""The functions between the two linear layers of a feed-forward block, by the names `config.json` uses.

Each works in place where torch can: the input is a fresh [T, I] projection, the largest tensor of a layer, and one more
of it would cost page faults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from nobiru.ops.native.library import kernels_for
from nobiru.ops.scratch import Buffer


@dataclass(frozen=True, slots=True)
class Activation:
    """`apply` may overwrite its argument. `fused` names it for oneDNN's fused linear layers: (operation, algorithm)."""

    apply: Callable[[Tensor], Tensor]
    fused: tuple[str, str] | None = None


def _gelu(x: Tensor) -> Tensor:
    return torch.ops.aten.gelu_(x)  # type: ignore[no-any-return]


def _gelu_tanh(x: Tensor) -> Tensor:
    return torch.ops.aten.gelu_(x, approximate="tanh")  # type: ignore[no-any-return]


_GELU = Activation(_gelu, ("gelu", "none"))
_GELU_TANH = Activation(_gelu_tanh, ("gelu", "tanh"))
_SILU = Activation(lambda x: F.silu(x, inplace=True), ("swish", ""))


def gated_product(gate_up_T2G: Tensor, activation: Activation, buffer: Buffer | None = None) -> Tensor:
    """activation(gate) * up, [T, G], in the buffer's memory if there is one; may overwrite its argument."""
    gate_TG, up_TG = gate_up_T2G.chunk(2, -1)
    kernels = kernels_for(gate_up_T2G) if activation is _SILU else None
    shape = up_TG.shape
    out_TG = torch.empty_like(up_TG) if buffer is None else buffer.take(*shape, dtype=up_TG.dtype)
    if kernels is not None and kernels.silu_product(gate_up_T2G, out_TG):
        return out_TG
    return torch.mul(activation.apply(gate_TG), up_TG, out=out_TG)


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "gelu": _GELU,
        "gelu_python": _GELU,
        "gelu_new": _GELU_TANH,
        "gelu_fast": _GELU_TANH,
        "gelu_accurate": _GELU_TANH,
        "gelu_pytorch_tanh": _GELU_TANH,
        "gelu_python_tanh": _GELU_TANH,
        "gelu_10": Activation(lambda x: _gelu(x).clamp_(-10.0, 10.0)),
        "quick_gelu": Activation(lambda x: x * torch.sigmoid(1.702 * x)),
        "linear": Activation(lambda x: x),
        "leaky_relu": Activation(lambda x: F.leaky_relu_(x)),
        "mish": Activation(lambda x: F.mish(x, inplace=True)),
        "relu": Activation(lambda x: x.relu_(), ("relu", "")),
        "relu2": Activation(lambda x: x.relu_().square_()),
        "relu6": Activation(lambda x: F.relu6(x, inplace=True)),
        "sigmoid": Activation(lambda x: x.sigmoid_()),
        "silu": _SILU,
        "swish": _SILU,
        "tanh": Activation(lambda x: x.tanh_()),
    }
)
