"""The modules of Sentence Transformers behind pooling, in float32 on one vector per sequence.

Owns their arithmetic and the names of their weights. Knows nothing of files: weights come by name.

Shape legend: B sequences, I values before a module, O values behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from nobiru.errors import ModelFolderError
from nobiru.folder.spec import DenseSpec, LayerNormSpec

Module = Callable[[Tensor], Tensor]
ShapeTable = Mapping[str, tuple[int, ...]]

_LAYER_NORM_EPS = 1e-5  # that of torch.nn.LayerNorm, which Sentence Transformers uses as it is


def normalize(x_BO: Tensor) -> Tensor:
    """Unit length; a vector of zeros stays as it is."""
    return F.normalize(x_BO, p=2.0, dim=-1)


def weight_shapes(spec: DenseSpec | LayerNormSpec) -> ShapeTable:
    """The names and shapes of the tensors in the module's folder."""
    if isinstance(spec, LayerNormSpec):
        return {"norm.weight": (spec.dimension,), "norm.bias": (spec.dimension,)}
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (spec.out_features, spec.in_features)}
    if spec.bias:
        shapes["linear.bias"] = (spec.out_features,)
    if spec.use_residual and spec.in_features != spec.out_features:
        shapes["residual.weight"] = (spec.out_features, spec.in_features)
    return shapes


def build_module(spec: DenseSpec | LayerNormSpec, weights: Mapping[str, Tensor]) -> Module:
    """The module as a function [B, I] → [B, O]."""
    if isinstance(spec, LayerNormSpec):
        weight, bias = weights["norm.weight"], weights["norm.bias"]
        return lambda x_BI: F.layer_norm(x_BI, weight.shape, weight, bias, _LAYER_NORM_EPS)
    return Dense(spec, weights)


class Dense:
    """`activation(x @ W.T + b)`, plus x (or its projection) with a residual connection."""

    def __init__(self, spec: DenseSpec, weights: Mapping[str, Tensor]) -> None:
        self._weight_OI = weights["linear.weight"]
        self._bias_O = weights.get("linear.bias")
        self._activation = _activation(spec)
        self._use_residual = spec.use_residual
        self._residual_OI = weights.get("residual.weight")

    def __call__(self, x_BI: Tensor) -> Tensor:
        y_BO: Tensor = self._activation(F.linear(x_BI, self._weight_OI, self._bias_O))
        if not self._use_residual:
            return y_BO
        return y_BO + (x_BI if self._residual_OI is None else F.linear(x_BI, self._residual_OI))


def _activation(spec: DenseSpec) -> torch.nn.Module:
    package, _, class_name = spec.activation.rpartition(".")
    found = getattr(torch.nn, class_name, None) if f"{package}.".startswith("torch.nn.") else None
    if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
        raise ModelFolderError(
            f"{spec.path / 'config.json'}: field 'activation_function' is {spec.activation!r}; a class of torch.nn is "
            "expected"
        )
    try:
        return found()
    except TypeError as error:
        raise ModelFolderError(
            f"{spec.path / 'config.json'}: field 'activation_function' is {spec.activation!r}, which cannot be made "
            f"without arguments: {error}"
        ) from None
