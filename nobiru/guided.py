"""Whether a JSON schema can guide generation; light enough for the process that takes requests.

Owns the bounds of a schema and the list of what guided generation does not enforce: a schema that asks for it is
refused, because the text might not conform. Knows nothing of tokens; `nobiru.runner.grammar` compiles schemas.

Keywords are those of JSON Schema 2020-12 (https://json-schema.org/draft/2020-12). Three liberties are taken. Objects
and arrays hold only what the schema names unless `additionalProperties` or `items` say otherwise, properties come in
the schema's order, and `oneOf` is read as `anyOf`. As the specification allows, unknown keywords say nothing.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from nobiru.errors import InvalidRequestError

MAX_SCHEMA_CHARS = 65_536
MAX_SCHEMA_DEPTH = 64
MAX_COUNT = 100_000

_MISSING_LIBRARY = "json_schema needs the library xgrammar, which is not installed: pip install 'nobiru[guided]'"

_SCHEMA_KEYWORDS = ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "propertyNames")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMA_OBJECTS = ("properties", "patternProperties", "$defs", "definitions")

_CHOICES = frozenset({"$ref", "anyOf", "oneOf", "allOf", "enum", "const"})
_OF_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_OF_STRINGS = frozenset({"minLength", "maxLength", "pattern", "format"})
_OF_OBJECTS = frozenset(
    {"properties", "required", "minProperties", "maxProperties", "additionalProperties", "unevaluatedProperties"}
    | {"patternProperties", "propertyNames"}
)
_OF_ARRAYS = frozenset({"items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"})
_ASSERTIONS = _CHOICES | _OF_NUMBERS | _OF_STRINGS | _OF_OBJECTS | _OF_ARRAYS | {"type"}
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NOT_ENFORCED = frozenset(
    {"not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas"}
    | {"dependencies", "additionalItems", "$dynamicRef", "$recursiveRef"}
)
# Of each of these, at most one keyword at a time is enforced.
_EXCLUSIVE = (
    ({"pattern"}, {"format"}, {"minLength", "maxLength"}),
    ({"multipleOf"}, _OF_NUMBERS - {"multipleOf"}),
    ({"patternProperties"}, {"properties"}, {"propertyNames"}),
    ({"patternProperties"}, {"additionalProperties"}, {"unevaluatedProperties"}),
)
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}
# What a pattern may not produce by itself, because a JSON string cannot hold it as it is.
_ESCAPED_IN_JSON = frozenset(map(chr, range(0x20))) | {'"', "\\"}
_CONTROL_ESCAPES = frozenset("nrtfv0c")
_PATTERN_PART = re.compile(
    r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\u\{([0-9A-Fa-f]+)\}|\\(.)|(\(\?[=!<])|(.)", re.DOTALL
)


def check_schema(text: str) -> None:
    """Raise `InvalidRequestError` unless `text` is a JSON schema, as JSON text, that a text can be made to conform to.

    What only a compilation shows (a reference to nothing, say) is found by the rank.
    """
    if importlib.util.find_spec("xgrammar") is None:
        _refuse_with(_MISSING_LIBRARY)
    schema = _parse(text)
    for path, found in _schemas(schema, "", 0):
        _check_one(path, found)


def _parse(text: str) -> Any:
    if len(text) > MAX_SCHEMA_CHARS:
        _refuse_with(f"json_schema has {len(text)} characters; at most {MAX_SCHEMA_CHARS} are allowed")
    try:
        text.encode()
        schema = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"json_schema is not valid JSON: {error}", param="json_schema") from error
    return schema


def _schemas(schema: Any, path: str, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object that is a schema, with its JSON pointer. True and False are schemas too, with nothing to check."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        _refuse(path, f"is {_shown(schema)}; a schema is an object, true or false")
    if depth > MAX_SCHEMA_DEPTH:
        _refuse_with(f"json_schema is nested more than {MAX_SCHEMA_DEPTH} levels deep")
    yield path, schema
    for name in _SCHEMA_KEYWORDS:
        if name in schema:
            yield from _schemas(schema[name], f"{path}/{name}", depth + 1)
    for name in _SCHEMA_LISTS:
        children = schema.get(name, [])
        if not isinstance(children, list):
            _refuse(f"{path}/{name}", f"is {_shown(children)}; a list of schemas is expected")
        for number, child in enumerate(children):
            yield from _schemas(child, f"{path}/{name}/{number}", depth + 1)
    for name in _SCHEMA_OBJECTS:
        members = schema.get(name, {})
        if not isinstance(members, dict):
            _refuse(f"{path}/{name}", f"is {_shown(members)}; an object of schemas is expected")
        for key, child in members.items():
            pointer = key.replace("~", "~0").replace("/", "~1")
            yield from _schemas(child, f"{path}/{name}/{pointer}", depth + 1)


def _check_one(path: str, schema: dict[str, Any]) -> None:
    present = frozenset(schema) & _ASSERTIONS
    if refused := sorted(frozenset(schema) & _NOT_ENFORCED):
        _refuse(path, f"uses {refused[0]!r}, which guided generation does not enforce")
    if schema.get("uniqueItems"):
        _refuse(path, "uses 'uniqueItems', which guided generation does not enforce")
    _check_choices(path, schema, present)
    _check_types(path, schema, present)
    _check_values(path, schema)
    for groups in _EXCLUSIVE:
        if len(together := [sorted(present & group)[0] for group in groups if present & group]) > 1:
            _refuse(path, f"uses {together[0]!r} and {together[1]!r}, which are not enforced together")
    if isinstance(required := schema.get("required"), list):
        properties = schema.get("properties", {})
        for name in required:
            if not isinstance(name, str) or name not in properties:
                _refuse(path, f"requires {_shown(name)}, which is not in 'properties'")
    for pattern in (schema.get("pattern"), *schema.get("patternProperties", ())):
        if isinstance(pattern, str):
            _check_pattern(path, pattern)


def _check_choices(path: str, schema: dict[str, Any], present: frozenset[str]) -> None:
    for choice in sorted(present & _CHOICES):
        allowed = {"type"} if choice in ("enum", "const") else set()
        if others := sorted(present - {choice} - allowed):
            _refuse(path, f"uses {choice!r} and {others[0]!r}, which are not enforced together")
    if len(schema.get("allOf", ())) > 1:
        _refuse(path, "uses 'allOf' with more than one schema, which is not enforced")
    reference = schema.get("$ref", "#")
    if reference != "#" and not (isinstance(reference, str) and reference.startswith("#/")):
        _refuse(path, f"refers to {_shown(reference)}; only references within the schema ('#/…') are followed")


def _check_types(path: str, schema: dict[str, Any], present: frozenset[str]) -> None:
    named = schema.get("type", [])
    types = [named] if isinstance(named, str) else named
    if not isinstance(types, list) or not all(isinstance(name, str) and name in _TYPES for name in types):
        _refuse(path, f"has the type {_shown(named)}; it must be of {', '.join(_TYPES)}, or a list of them")
    for keywords, suitable in ((_OF_NUMBERS, {"number", "integer"}), (_OF_STRINGS, {"string"})):
        if (found := sorted(present & keywords)) and not suitable & set(types):
            _refuse(path, f"uses {found[0]!r}, which is enforced only beside a 'type' that it is for")
    for keywords, needed, signs in (
        (_OF_OBJECTS, "object", {"properties"}),
        (_OF_ARRAYS, "array", {"items", "prefixItems"}),
    ):
        if (found := sorted(present & keywords)) and needed not in types and (types or not present & signs):
            _refuse(path, f"uses {found[0]!r}, which is enforced only beside 'type': {needed!r}")
    if "multipleOf" in present and ("number" in types or type(schema["multipleOf"]) is not int):
        _refuse(path, "uses 'multipleOf', which is enforced for the type 'integer' and an integer only")


def _check_values(path: str, schema: dict[str, Any]) -> None:
    for name in _COUNTS:
        if name in schema and (type(count := schema[name]) is not int or not 0 <= count <= MAX_COUNT):
            _refuse(f"{path}/{name}", f"is {_shown(schema[name])}; it must be an integer from 0 to {MAX_COUNT}")
    named = schema.get("type")
    if named is None:
        return
    kinds = tuple(kind for name in ([named] if isinstance(named, str) else named) for kind in _TYPES[name])
    values = schema.get("enum", [])
    if not isinstance(values, list):
        _refuse(f"{path}/enum", f"is {_shown(values)}; a list is expected")
    for value in [*values, *([schema["const"]] if "const" in schema else [])]:
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            _refuse(path, f"allows the value {_shown(value)}, which is not of the type {_shown(named)}")


def _check_pattern(path: str, pattern: str) -> None:
    """Refuse what would be left out of a pattern, and characters that would end up in a JSON string unescaped."""
    in_class = is_negated = False
    previous = ""
    for part in _PATTERN_PART.finditer(pattern):
        hexadecimal, escaped, lookaround, plain = part[1] or part[2] or part[3], part[4], part[5], part[6]
        if lookaround and not in_class:
            _refuse(path, f"has the pattern {_shown(pattern)}; looking ahead or behind is not enforced")
        if plain == "[" and not in_class:
            in_class, is_negated = True, pattern[part.end() : part.end() + 1] == "^"
        elif plain == "]":
            in_class = is_negated = False
        produced = chr(min(int(hexadecimal, 16), 0x10FFFF)) if hexadecimal else escaped or plain
        unescaped = produced in _ESCAPED_IN_JSON or (escaped is not None and escaped in _CONTROL_ESCAPES)
        is_range = in_class and (previous == "-" or pattern[part.end() : part.end() + 1] == "-")
        if unescaped and not is_negated and not is_range:
            _refuse(path, f"has the pattern {_shown(pattern)}; {part[0]!r} cannot stand in a JSON string as it is")
        previous = part[0]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"


def _refuse(path: str, what: str) -> NoReturn:
    _refuse_with(f"json_schema{path and ' at '}{path} {what}")


def _refuse_with(message: str) -> NoReturn:
    raise InvalidRequestError(message, param="json_schema")
