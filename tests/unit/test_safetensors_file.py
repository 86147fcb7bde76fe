"""Reading parts of tensors from a safetensors file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nobiru.errors import ModelFolderError
from nobiru.models.safetensors_file import SafetensorsFile

TENSORS = {
    "a": torch.arange(24.0).view(4, 3, 2),
    "b": torch.randn(5, 7).bfloat16(),
    "whole": torch.randn(3),
    "numbers": torch.arange(4),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    return file


def test_rows_of_tensors(path: Path) -> None:
    file = SafetensorsFile(path)
    for name in ("a", "b", "whole"):
        tensor = TENSORS[name]
        assert (file.shape(name), file.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(file.rows(name, 0, len(tensor)), tensor)
        assert torch.equal(file.rows(name, 1, 3), tensor[1:3])


def test_integers_are_no_weights(path: Path) -> None:
    with pytest.raises(ModelFolderError, match="'numbers' has dtype I64"):
        SafetensorsFile(path).rows("numbers", 0, 1)


def test_a_replaced_file_still_gives_what_it_had(path: Path) -> None:
    file = SafetensorsFile(path)
    save_file({"a": torch.zeros(1)}, path.with_name("other"))
    path.with_name("other").replace(path)
    assert torch.equal(file.rows("a", 3, 4), TENSORS["a"][3:])


def test_a_file_changed_in_place_is_refused(path: Path) -> None:
    file = SafetensorsFile(path)
    with path.open("r+b") as opened:
        opened.seek(-1, 2)
        opened.write(b"\1")
    os.utime(path, ns=(1, 1))
    with pytest.raises(ModelFolderError, match="was changed since it was opened"):
        file.rows("a", 0, 1)


def test_a_file_cut_short_is_refused(path: Path) -> None:
    file = SafetensorsFile(path)
    os.truncate(path, path.stat().st_size - sum(tensor.nbytes for tensor in TENSORS.values()))
    with pytest.raises(ModelFolderError, match="damaged"):
        file.rows("a", 0, 4)


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x08" + bytes(7) + b"no JSON!", b"\x40" + bytes(7) + b"{}"])
def test_what_is_no_such_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelFolderError, match=str(path)):
        SafetensorsFile(path)
    with pytest.raises(ModelFolderError, match="cannot be read"):
        SafetensorsFile(tmp_path / "absent")
