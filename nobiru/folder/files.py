"""Reading the JSON files of a model folder.

Owns what a damaged or missing file, or a field of the wrong type, sounds like. Knows nothing of what the fields mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from nobiru.errors import ModelFolderError

T = TypeVar("T")

_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "an integer",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def read_json(path: Path) -> Any:
    """The content of a JSON file; `ModelFolderError` names the file when it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFolderError(f"{path} is missing") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFolderError(f"{path} cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise ModelFolderError(f"{path} is not valid JSON: {error}") from error


def read_object(path: Path, *, required: bool = True) -> dict[str, Any]:
    """The object in a JSON file; {} for a missing file that is not `required`."""
    if not required and not path.exists():
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise ModelFolderError(f"{path} holds {_kind(content)}; an object is expected")
    return content


def typed(fields: Mapping[str, Any], name: str, kind: type[T], path: Path, default: T | None = None) -> T:
    """The field `name` of the object read from `path`; the default, unless None, stands for an absent or null one."""
    value = fields.get(name)
    if value is None:
        if default is None:
            raise ModelFolderError(f"{path}: field {name!r} is missing")
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ModelFolderError(f"{path}: field {name!r} is {value!r}; {_KINDS[kind]} is expected")
    return value


def refuse_unknown(fields: Mapping[str, Any], known: frozenset[str], path: Path, owner: str) -> None:
    """Fields that Sentence Transformers does not know are refused: what they ask for would be ignored."""
    if unknown := sorted(set(fields) - known):
        raise ModelFolderError(
            f"{path}: {owner} has no field {', '.join(map(repr, unknown))}; known are {', '.join(sorted(known))}"
        )


def _kind(value: object) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
