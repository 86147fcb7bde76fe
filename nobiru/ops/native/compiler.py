"""Compiles `kernels.c` for the processor at hand.

Owns the compiler's command and the folder where results are kept. Compiling takes some seconds, once per machine: the
result is kept in the user's cache folder under a name that depends on the source, the command and the processor. A
folder that others could write to is not used.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from nobiru import env, machine

_SOURCE = Path(__file__).with_name("kernels.c")
_HEADERS = tuple(
    _SOURCE.with_name(f"{name}.h")
    for name in (
        "parallel",
        "experts",
        "tiles",
        "tiles_attention",
        "pairs",
        "pairs_attention",
        "pairs_prefill",
        "encoder_attention",
        "encoder_layers",
        "encoder_ends",
        "expert_layers",
        "expert_routes",
        "decoder_layers",
    )
)
_OPTIONS = ("-O3", "-march=native", "-pthread", "-fno-math-errno", "-shared", "-fPIC", "-std=gnu11")
_COMPILER_TIMEOUT_S = 60.0


def compiled() -> ctypes.CDLL:
    """The library, from the cache folder or made now; OSError or SubprocessError say what is missing."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    flags = machine.cpu_flags()
    command = (compiler or "gcc", *_OPTIONS)
    sources = [file.read_text(encoding="utf-8") for file in (_SOURCE, *_HEADERS)]
    facts = "\n".join((*sources, *command, platform.machine(), *sorted(flags)))
    name = f"kernels-{hashlib.sha256(facts.encode()).hexdigest()[:24]}.so"
    kept_in = env.cache_folder()
    folder = None if kept_in is None else _own_folder(kept_in / "native")
    if folder is not None and (folder / name).is_file():
        return ctypes.CDLL(str(folder / name))
    if compiler is None:
        raise OSError("there is no C compiler (gcc or cc)")
    with tempfile.TemporaryDirectory(prefix="nobiru-") as scratch:
        target = Path(scratch) / name
        _compile([*command, f"-I{_SOURCE.parent}", str(_SOURCE), "-o", str(target), "-lm"])
        if folder is None:
            return ctypes.CDLL(str(target))  # stays mapped when the file is gone
        # Into place in one step: another process may be doing the same.
        beside = folder / f"{name}.{os.getpid()}"
        shutil.copyfile(target, beside)
        beside.replace(folder / name)
    return ctypes.CDLL(str(folder / name))


def _compile(command: list[str]) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILER_TIMEOUT_S, check=False)
    if finished.returncode:
        first = finished.stderr.strip().splitlines()[:1] or ["no message"]
        raise OSError(f"the compiler failed ({finished.returncode}): {first[0]}")


def _own_folder(folder: Path) -> Path | None:
    """The folder, made if it is not there; None unless it is this user's alone to write to."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError:
        return None
    is_own = found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return folder if is_own and os.access(folder, os.W_OK) else None
