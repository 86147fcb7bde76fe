"""Whether a model folder is still the one that a server has started with.

Ranks that come later read the same folder, and part of their experts again while they serve. A folder that somebody
writes into meanwhile would give them parts of two models. Owns which files count: weights, and what says how to read
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from nobiru.errors import ModelFolderError

_WEIGHTS = (".safetensors", ".bin")
_PATTERNS = ("*.safetensors", "*.bin", "*.index.json", "config.json", "modules.json")


class FileState(msgspec.Struct, frozen=True, array_like=True):
    """One file: its path in the folder, its size, and when it was last written."""

    name: str
    num_bytes: int
    mtime_ns: int


def read_state(folder: Path) -> tuple[FileState, ...]:
    """The files of a folder and of those in it, by name. `ModelFolderError` if it cannot be looked into."""
    try:
        paths = sorted({path for pattern in _PATTERNS for path in folder.rglob(pattern)})
        found = [(path.relative_to(folder).as_posix(), path.stat()) for path in paths]
    except OSError as error:
        raise ModelFolderError(f"{folder} cannot be read: {error}") from None
    return tuple(FileState(name, stat.st_size, stat.st_mtime_ns) for name, stat in found)


def check_unchanged(folder: Path, before: Sequence[FileState], *, compare_times: bool = True) -> None:
    """`ModelFolderError` that names a file which is gone, new or different. On other machines, times are others."""
    now = {each.name: each for each in read_state(folder)}
    for each in before:
        found = now.pop(each.name, None)
        if found is None:
            raise _changed(folder, f"{each.name} is gone")
        if found.num_bytes != each.num_bytes:
            raise _changed(folder, f"{each.name} has {found.num_bytes} bytes, and had {each.num_bytes}")
        if compare_times and found.mtime_ns != each.mtime_ns:
            raise _changed(folder, f"{each.name} was written to")
    if now:
        raise _changed(folder, f"{min(now)} is new")


def num_weight_bytes(state: Sequence[FileState]) -> int:
    """Of all files with weights."""
    return sum(each.num_bytes for each in state if each.name.endswith(_WEIGHTS))


def _changed(folder: Path, what: str) -> ModelFolderError:
    return ModelFolderError(
        f"{folder} has changed since the server started: {what}. New ranks would compute something else than the "
        "present ones; put the files back, or start the server again"
    )
