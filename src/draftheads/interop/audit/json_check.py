"""Whether a text is JSON of a schema. Knows the keywords that servers' grammars know; others are not checked."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "integer": (int,),
    "number": (int, float),
}
_LIMITS: dict[str, tuple[type | tuple[type, ...], Callable[[Any, Any], bool]]] = {
    "minimum": ((int, float), lambda value, limit: value >= limit),
    "maximum": ((int, float), lambda value, limit: value <= limit),
    "minLength": (str, lambda value, limit: len(value) >= limit),
    "maxLength": (str, lambda value, limit: len(value) <= limit),
    "minItems": (list, lambda value, limit: len(value) >= limit),
    "maxItems": (list, lambda value, limit: len(value) <= limit),
}


def json_problem(text: str, schema: Mapping[str, Any]) -> str | None:
    """Why a text is not JSON of the schema; None if it is.

    >>> schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    >>> json_problem('{"a": 1}', schema)
    >>> json_problem('{"a": "1"}', schema)
    'a is of another type than integer'
    >>> json_problem("{", schema)[:8]
    'not JSON'
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    return next(_problems(value, schema, ""), None)


def _problems(value: Any, schema: Any, place: str) -> Iterator[str]:
    """What is wrong with a value at a place such as ``words.0``."""
    name = place or "the value"
    if not isinstance(schema, Mapping):
        if schema is False:
            yield f"{name} is not allowed"
        return
    kinds = schema.get("type")
    names = [kinds] if isinstance(kinds, str) else list(kinds or ())
    if names and not any(_is_type(value, kind) for kind in names):
        yield f"{name} is of another type than {' or '.join(names)}"
        return
    yield from _of_value(value, schema, name)
    yield from _of_options(value, schema, place)
    if isinstance(value, dict):
        yield from _of_object(value, schema, place)
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _problems(item, schema.get("items", True), _below(place, str(number)))


def _of_value(value: Any, schema: Mapping[str, Any], name: str) -> Iterator[str]:
    if "const" in schema and not _same(value, schema["const"]):
        yield f"{name} is not {schema['const']!r}"
    if "enum" in schema and not any(_same(value, choice) for choice in schema["enum"]):
        yield f"{name} is none of {schema['enum']!r}"
    for keyword, (kind, holds) in _LIMITS.items():
        is_kind = isinstance(value, kind) and not isinstance(value, bool)
        if keyword in schema and is_kind and not holds(value, schema[keyword]):
            yield f"{name} breaks {keyword} {schema[keyword]}"


def _of_options(value: Any, schema: Mapping[str, Any], place: str) -> Iterator[str]:
    for options in (schema.get("anyOf"), schema.get("oneOf")):
        if options and all(next(_problems(value, option, place), None) for option in options):
            yield f"{place or 'the value'} is none of its options"
    for part in schema.get("allOf") or ():
        yield from _problems(value, part, place)


def _of_object(value: dict[str, Any], schema: Mapping[str, Any], place: str) -> Iterator[str]:
    properties = schema.get("properties") or {}
    for name in schema.get("required") or ():
        if name not in value:
            yield f"{_below(place, name)} is missing"
    others = schema.get("additionalProperties", True)
    for name, item in value.items():
        yield from _problems(item, properties.get(name, others), _below(place, name))


def _below(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _is_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool):  # in Python it is a number, too
        return kind == "boolean"
    is_whole = kind == "integer" and isinstance(value, float) and value.is_integer()
    return is_whole or isinstance(value, _TYPES.get(kind, (object,)))


def _same(value: Any, other: Any) -> bool:
    """Equality in JSON, where true is not 1."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
