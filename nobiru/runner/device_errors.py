"""What an exception from the device means: out of memory, or a device that cannot go on."""

from __future__ import annotations

import torch


def is_out_of_memory(error: Exception) -> bool:
    """Whether half the batch may work. The CPU allocator raises a plain RuntimeError, told by its text."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def is_fatal(error: Exception) -> bool:
    """Whether every later call on the device would fail too, as after a device-side assertion."""
    return isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)


def free_memory() -> None:
    """Give cached blocks back to the device."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
