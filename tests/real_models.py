"""Trained models that tests use where they are present, and skip without.

`NOBIRU_SHARED` and `NOBIRU_MODELS` name the folders they lie in; by default those beside the project.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_BESIDE = Path(__file__).parents[2]


def stories260k() -> Path:
    """A Llama of 260,000 parameters with a SentencePiece vocabulary of 512 tokens."""
    return _present(Path(os.environ.get("NOBIRU_SHARED") or _BESIDE / "shared") / "models" / "stories260K")


def smollm2() -> Path:
    """SmolLM2-135M-Instruct: a byte-level vocabulary and a chat template."""
    return _present(Path(os.environ.get("NOBIRU_MODELS") or _BESIDE / "models") / "smollm2-135m")


def _present(folder: Path) -> Path:
    if not (folder / "tokenizer.json").exists():
        pytest.skip(f"the model {folder.name} is not here")
    return folder
