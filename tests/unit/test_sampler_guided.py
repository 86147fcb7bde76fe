"""Which JSON schemas are accepted, and what the refusals say."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from nobiru.errors import InvalidRequestError
from nobiru.guided import MAX_SCHEMA_CHARS, MAX_SCHEMA_DEPTH, check_schema


def refusal(schema: Any) -> str:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    with pytest.raises(InvalidRequestError) as caught:
        check_schema(text)
    assert caught.value.param == "json_schema"
    return caught.value.message


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        {"type": "object"},
        {"type": ["string", "null"], "maxLength": 5},
        {"type": "integer", "multipleOf": 5, "title": "Fives", "default": 5},
        {"enum": [1, "a", None]},
        {"type": "string", "const": "x", "description": "what Pydantic makes of a Literal"},
        {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}], "default": None, "$defs": {"A": {"type": "boolean"}}},
        {"type": "object", "properties": {"a": {}, "not": {}, "if": {"type": "string"}}, "required": ["a", "not"]},
        {"properties": {"$ref": {"type": "string"}}, "additionalProperties": False},
        {"type": "object", "patternProperties": {"^[a-z]+$": {"type": "number"}}},
        {"type": "string", "pattern": r'^[^"\\]*$'},
        {"type": "string", "pattern": r"^\d{3}-[\w.]+\.(?:com|org)$"},
        {"type": "string", "pattern": r"^[\x00-\x7f]\x41[!-~]$"},
        {"type": "array", "prefixItems": [{"type": "integer"}], "items": False},
        {"type": "array", "items": {}, "uniqueItems": False},
        {"const": {"not": 1, "$ref": [{"pattern": '"'}]}},
        {"type": "object", "x-order": ["a"], "examples": [{"not": 1}]},
        nested(MAX_SCHEMA_DEPTH),
    ],
)
def test_accepted(schema: Any) -> None:
    check_schema(json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ('{"const": NaN}', "NaN"),
        ('{"const": "\ud800"}', "not valid JSON"),
        ("[" * 50_000, "not valid JSON"),
        ("1" * 5000, "not valid JSON"),
        (" " * (MAX_SCHEMA_CHARS + 1), f"{MAX_SCHEMA_CHARS + 1} characters; at most {MAX_SCHEMA_CHARS}"),
        (nested(MAX_SCHEMA_DEPTH + 1), f"{MAX_SCHEMA_DEPTH} levels"),
        ([], "is []"),
        (None, "is None"),
        ({"items": 3}, "/items is 3"),
        ({"anyOf": {}}, "/anyOf is {}"),
        ({"properties": []}, "/properties is []"),
        ({"properties": {"a/b": {"items": [{}]}}}, "/properties/a~1b/items is [{}]"),
        ({"not": {}}, "'not'"),
        ({"properties": {"a": {"if": {}}}}, "at /properties/a uses 'if'"),
        ({"$defs": {"a": {"dependentRequired": {}}}}, "at /$defs/a uses 'dependentRequired'"),
        ({"type": "array", "items": {}, "uniqueItems": True}, "'uniqueItems'"),
        ({"type": "array", "items": {}, "contains": {}}, "'contains'"),
        ({"$ref": "#/$defs/a", "minimum": 5}, "'$ref' and 'minimum'"),
        ({"type": "object", "anyOf": [{}]}, "'anyOf' and 'type'"),
        ({"allOf": [{}, {}]}, "'allOf' with more than one"),
        ({"$ref": "https://example.org/schema"}, "within the schema"),
        ({"$ref": "#anchor"}, "within the schema"),
        ({"type": "text"}, "has the type 'text'"),
        ({"type": ["string", 3]}, "has the type"),
        ({"minLength": 3}, "beside a 'type'"),
        ({"type": "string", "minimum": 3}, "'minimum'"),
        ({"required": []}, "'type': 'object'"),
        ({"type": "array", "minProperties": 3}, "'type': 'object'"),
        ({"type": "object", "items": {}}, "'type': 'array'"),
        ({"type": "object", "properties": {"a": {}}, "required": ["a", "b"]}, "requires 'b'"),
        ({"type": "number", "multipleOf": 2}, "'multipleOf'"),
        ({"type": "integer", "multipleOf": 2.5}, "'multipleOf'"),
        ({"type": "integer", "multipleOf": 2, "minimum": 4}, "'multipleOf' and 'minimum'"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "'pattern' and 'maxLength'"),
        ({"type": "string", "pattern": "a", "format": "date"}, "'pattern' and 'format'"),
        ({"type": "object", "properties": {}, "patternProperties": {}}, "'patternProperties' and 'properties'"),
        ({"type": "object", "additionalProperties": True, "patternProperties": {}}, "'patternProperties' and 'addi"),
        ({"type": "string", "maxLength": -1}, "/maxLength is -1"),
        ({"type": "string", "maxLength": 1.5}, "/maxLength is 1.5"),
        ({"type": "array", "minItems": 10**9}, "/minItems is 1000000000"),
        ({"type": "integer", "enum": [1, "a"]}, "allows the value 'a'"),
        ({"type": "integer", "enum": [True]}, "allows the value True"),
        ({"type": "null", "const": 0}, "allows the value 0"),
        ({"type": "string", "enum": "a"}, "/enum is 'a'"),
        ({"type": "string", "pattern": "(?=a)b"}, "ahead or behind"),
        ({"type": "string", "pattern": "(?<!a)b"}, "ahead or behind"),
        ({"type": "string", "pattern": '^"$'}, "as it is"),
        ({"type": "string", "pattern": r"^\\$"}, "as it is"),
        ({"type": "string", "pattern": r"^\"$"}, "as it is"),
        ({"type": "string", "pattern": r"^\n$"}, "as it is"),
        ({"type": "string", "pattern": "^\t$"}, "as it is"),
        ({"type": "string", "pattern": r"^\x22$"}, "as it is"),
        ({"type": "string", "pattern": r"^\u005C$"}, "as it is"),
        ({"type": "string", "pattern": r'^[a"]$'}, "as it is"),
        ({"type": "object", "patternProperties": {'^"$': {}}}, "as it is"),
        ({"type": "object", "propertyNames": {"type": "string", "pattern": '"'}}, "at /propertyNames has the pattern"),
    ],
)
def test_refused(schema: Any, part: str) -> None:
    assert part in refusal(schema)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'nobiru[guided]'" in refusal({})


def test_checking_imports_nothing_heavy() -> None:
    code = (
        "import sys; from nobiru.guided import check_schema; check_schema('{}')\n"
        "print([name for name in ('torch', 'transformers', 'xgrammar', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
