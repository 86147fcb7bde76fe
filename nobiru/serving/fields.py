"""Checking the fields of a JSON object one by one, with messages that name field, limit and value.

Owns the wording. Knows no particular request.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from nobiru.errors import InvalidRequestError

_MAX_SHOWN = 60


class Fields:
    """Access to `body`, where null equals absent. Raises `InvalidRequestError` for a field that is not `known`."""

    def __init__(self, body: Mapping[str, Any], known: Collection[str], *, within: str = "") -> None:
        """`within` names the object that `body` is the value of, if it is not the whole body."""
        self._values = {name: value for name, value in body.items() if value is not None}
        if unknown := [name for name in body if name not in known]:
            raise _unknown(unknown, known, within)

    def get(self, name: str) -> Any:
        """The unchecked value, or None."""
        return self._values.get(name)

    def string(self, name: str, choices: Sequence[str] | None = None) -> str | None:
        """A string, one of `choices` if given."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise wrong(name, value, "a string" if choices is None else f"one of {_listed(choices)}")
        if choices is not None and value not in choices:
            raise wrong(name, value, f"one of {_listed(choices)}")
        return value

    def boolean(self, name: str) -> bool | None:
        """true or false."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, bool):
            raise wrong(name, value, "true or false")
        return value

    def integer(self, name: str, least: int, most: int, *, besides: int | None = None, hint: str = "") -> int | None:
        """An integer from `least` to `most`, or equal to `besides`. Booleans and 1.0 are not integers."""
        value = self._values.get(name)
        if value is None:
            return None
        if type(value) is not int or not (least <= value <= most or value == besides):
            other = f"{besides} or " if besides is not None else ""
            raise wrong(name, value, f"{other}an integer from {least} to {most}{hint}")
        return value

    def any_integer(self, name: str) -> int | None:
        """An integer whose bounds someone else knows."""
        value = self._values.get(name)
        if value is not None and type(value) is not int:
            raise wrong(name, value, "an integer")
        return value

    def number(self, name: str) -> float | None:
        """A number whose bounds someone else knows."""
        value = self._values.get(name)
        if value is not None and type(value) not in (int, float):
            raise wrong(name, value, "a number")
        return value

    def integers(self, name: str, *, max_length: int) -> list[int] | None:
        """A list of integers."""
        return self._items(name, int, "a list of integers", max_length)

    def strings(self, name: str, *, max_length: int) -> list[str] | None:
        """A list of strings, or one string."""
        if isinstance(self._values.get(name), str):
            return [self._values[name]]
        return self._items(name, str, "a string or a list of strings", max_length)

    def objects(self, name: str, *, max_length: int) -> list[dict[str, Any]] | None:
        """A list of objects."""
        return self._items(name, dict, "a list of objects", max_length)

    def object(self, name: str) -> dict[str, Any] | None:
        """An object with any fields."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, dict):
            raise wrong(name, value, "an object")
        return value

    def _items(self, name: str, kind: type, must_be: str, max_length: int) -> list[Any] | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise wrong(name, value, must_be)
        if len(value) > max_length:
            raise InvalidRequestError(f"{name} has {len(value)} entries; at most {max_length} are possible", param=name)
        for index, item in enumerate(value):
            if type(item) is not kind:
                raise InvalidRequestError(
                    f"{name}[{index}] is {shown(item)}; {name} must be {must_be}", param=f"{name}[{index}]"
                )
        return value


def wrong(name: str, value: object, must_be: str) -> InvalidRequestError:
    """The error for a field's value."""
    return InvalidRequestError(f"{name} is {shown(value)}; it must be {must_be}", param=name)


def shown(value: object) -> str:
    """A value as a client wrote it, shortened."""
    text = msgspec.json.encode(value).decode(errors="replace")
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def _listed(choices: Sequence[str]) -> str:
    return ", ".join(f'"{choice}"' for choice in choices)


def _unknown(names: Sequence[str], known: Collection[str], within: str) -> InvalidRequestError:
    parts = []
    for name in names[:8]:
        near = difflib.get_close_matches(name, known, n=1)
        parts.append(shown(name) + (f' (did you mean "{near[0]}"?)' if near else ""))
    if len(names) > len(parts):
        parts.append(f"and {len(names) - len(parts)} more")
    kind = "unknown field" if len(names) == 1 else "unknown fields"
    place = f" in {within}" if within else ""
    message = f"{kind} {', '.join(parts)}{place}; known are {', '.join(sorted(known))}"
    param = f"{within}.{names[0]}" if within else names[0]
    return InvalidRequestError(message, param=param[:_MAX_SHOWN], code="unknown_field")
