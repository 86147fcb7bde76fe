"""A folder that somebody writes into is not the one the server has started with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nobiru.errors import ModelFolderError
from nobiru.folder.state import check_unchanged, num_weight_bytes, read_state


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "2_Dense").mkdir()
    (tmp_path / "2_Dense" / "model.safetensors").write_bytes(b"y" * 10)
    (tmp_path / "README.md").write_text("about it")
    return tmp_path


def test_what_is_not_read_may_change(folder: Path) -> None:
    before = read_state(folder)
    assert [each.name for each in before] == ["2_Dense/model.safetensors", "config.json", "model.safetensors"]
    assert num_weight_bytes(before) == 110
    (folder / "README.md").write_text("more about it")
    check_unchanged(folder, before)


def test_every_change_is_named(folder: Path) -> None:
    before = read_state(folder)
    weights = folder / "2_Dense" / "model.safetensors"
    later_ns = os.stat(weights).st_mtime_ns + 1
    os.utime(weights, ns=(later_ns, later_ns))
    with pytest.raises(
        ModelFolderError, match=r"has changed since the server started: 2_Dense/model\.safetensors was wr"
    ):
        check_unchanged(folder, before)
    check_unchanged(folder, before, compare_times=False)
    weights.write_bytes(b"y" * 11)
    with pytest.raises(ModelFolderError, match=r"2_Dense/model\.safetensors has 11 bytes, and had 10"):
        check_unchanged(folder, before, compare_times=False)
    weights.unlink()
    with pytest.raises(ModelFolderError, match=r"2_Dense/model\.safetensors is gone"):
        check_unchanged(folder, before)


def test_a_new_file_of_weights_is_a_change(folder: Path) -> None:
    before = read_state(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelFolderError, match=r"model\.safetensors\.index\.json is new"):
        check_unchanged(folder, before)
