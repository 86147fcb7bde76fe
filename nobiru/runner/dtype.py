"""Which device and dtypes a model runs with, decided from facts about the machine.

Owns the meaning of "auto" and of a dtype that the device has no fast arithmetic for. `gather_facts` reads the machine;
the decisions are pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nobiru import machine
from nobiru.errors import ConfigError
from nobiru.models.weights import Precision

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Instruction sets that multiply in the dtype; torch computes with them when the processor has one.
_CPU_FLAGS = {
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16"}),
    "float16": frozenset({"avx512_fp16", "amx_fp16"}),
}
_BFLOAT16_CAPABILITY = (8, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """`cpu_flags` as `/proc/cpuinfo` names them; `cuda_capability` (major, minor) of the device that would be used,
    None without one."""

    cpu_flags: frozenset[str] = frozenset()
    cuda_capability: tuple[int, int] | None = None


def gather_facts() -> DeviceFacts:
    """What this machine has."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    return DeviceFacts(cpu_flags=machine.cpu_flags(), cuda_capability=capability)


def resolve_device(requested: str, facts: DeviceFacts) -> str:
    """The device, cpu or cuda; `ConfigError` for one that is not there."""
    if requested == "auto":
        return "cpu" if facts.cuda_capability is None else "cuda"
    if requested == "cuda" and facts.cuda_capability is None:
        raise ConfigError(
            f"device is 'cuda', but torch {torch.__version__} sees no CUDA device; use device='cpu' or 'auto'",
            param="device",
        )
    if requested not in ("cpu", "cuda"):
        raise ConfigError(f"device is {requested!r}; choose from auto, cpu, cuda", param="device")
    return requested


def resolve_precision(requested: str, device: str, facts: DeviceFacts) -> Precision:
    """`auto`: bfloat16 where the device computes it fast, float16 on older CUDA devices, else float32.

    A dtype without fast arithmetic rounds the weights and computes in float32, which is at least as exact.
    """
    name = _automatic(device, facts) if requested == "auto" else requested
    if name not in _DTYPES:
        raise ConfigError(f"dtype is {requested!r}; choose from auto, {', '.join(_DTYPES)}", param="dtype")
    fast = name == "float32" or _is_fast(name, device, facts)
    return Precision(weights=_DTYPES[name], compute=_DTYPES[name] if fast else torch.float32)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _automatic(device: str, facts: DeviceFacts) -> str:
    if _is_fast("bfloat16", device, facts):
        return "bfloat16"
    return "float16" if device == "cuda" else "float32"


def _is_fast(name: str, device: str, facts: DeviceFacts) -> bool:
    if device == "cpu":
        return not _CPU_FLAGS[name].isdisjoint(facts.cpu_flags)
    return name == "float16" or (facts.cuda_capability or (0, 0)) >= _BFLOAT16_CAPABILITY
