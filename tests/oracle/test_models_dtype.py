"""Which device and dtype is chosen, from facts about a machine."""

from __future__ import annotations

import pytest
import torch

from nobiru.errors import ConfigError
from nobiru.runner.dtype import DeviceFacts, dtype_name, resolve_device, resolve_precision

PLAIN = DeviceFacts(cpu_flags=frozenset({"avx2", "fma"}))
BF16 = DeviceFacts(cpu_flags=frozenset({"avx2", "avx512_bf16"}))
AMX = DeviceFacts(cpu_flags=frozenset({"amx_tile", "amx_bf16"}))
HOPPER = DeviceFacts(cuda_capability=(9, 0))
AMPERE = DeviceFacts(cuda_capability=(8, 0))
TURING = DeviceFacts(cuda_capability=(7, 5))


@pytest.mark.parametrize(
    ("requested", "device", "facts", "weights", "compute"),
    [
        ("auto", "cpu", PLAIN, "float32", "float32"),
        ("auto", "cpu", BF16, "bfloat16", "bfloat16"),
        ("auto", "cpu", AMX, "bfloat16", "bfloat16"),
        ("auto", "cpu", HOPPER, "float32", "float32"),
        ("auto", "cuda", HOPPER, "bfloat16", "bfloat16"),
        ("auto", "cuda", AMPERE, "bfloat16", "bfloat16"),
        ("auto", "cuda", TURING, "float16", "float16"),
        ("bfloat16", "cpu", PLAIN, "bfloat16", "float32"),
        ("float16", "cpu", PLAIN, "float16", "float32"),
        ("float16", "cpu", BF16, "float16", "float32"),
        ("float32", "cpu", BF16, "float32", "float32"),
        ("bfloat16", "cuda", TURING, "bfloat16", "float32"),
        ("float16", "cuda", HOPPER, "float16", "float16"),
        ("float32", "cuda", HOPPER, "float32", "float32"),
    ],
)
def test_precision(requested: str, device: str, facts: DeviceFacts, weights: str, compute: str) -> None:
    precision = resolve_precision(requested, device, facts)
    assert (dtype_name(precision.weights), dtype_name(precision.compute)) == (weights, compute)


def test_device() -> None:
    assert resolve_device("auto", PLAIN) == "cpu"
    assert resolve_device("auto", TURING) == "cuda"
    assert resolve_device("cpu", HOPPER) == "cpu"
    with pytest.raises(ConfigError, match="sees no CUDA device"):
        resolve_device("cuda", PLAIN)


@pytest.mark.parametrize("requested", ["int8", "float64", "half"])
def test_unknown_dtypes(requested: str) -> None:
    with pytest.raises(ConfigError, match=f"dtype is '{requested}'"):
        resolve_precision(requested, "cpu", PLAIN)


def test_names() -> None:
    assert dtype_name(torch.bfloat16) == "bfloat16"
