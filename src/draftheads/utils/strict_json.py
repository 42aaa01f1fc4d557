"""Reads our own JSON files strictly: a known version, exactly these keys, values of these types.

Errors name the file, the place in it, the value found and the value expected.
"""

import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from draftheads.errors import CheckpointCorrupt, CheckpointMismatch

T = TypeVar("T")


def depth_of(value: Any) -> int:
    """Levels of lists and objects of a JSON value.

    >>> depth_of({"a": [1, {}]}), depth_of("x")
    (3, 0)
    """
    level, depth = [value], 0
    while level := [inner for inner in level if isinstance(inner, dict | list)]:
        depth += 1
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
    return depth


def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these keys and values, for ``json.loads``, which would keep the last value of a key.

    Raises:
        ValueError: a key is there twice.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def read_object(path: Path, *, newest: int) -> dict[str, Any]:
    """The JSON object of a file, whose ``format_version`` must lie in 1 … ``newest``."""
    try:
        value = json.loads(
            path.read_text(encoding="utf-8"), parse_constant=_number, parse_float=_number, object_pairs_hook=unique
        )
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8 is a ValueError as well
        raise CheckpointCorrupt(f"{path} cannot be read as JSON: {error}") from None
    version = _as_object(value, path).get("format_version")
    if type(version) is not int or version < 1:
        raise CheckpointCorrupt(
            f"{path}: format_version is {version!r}, not 1 … {newest}: is this a file of draftheads?"
        )
    if version > newest:
        raise CheckpointMismatch(
            f"{path}: format_version is {version} and this package reads up to {newest}: install a newer draftheads"
        )
    return _as_object(value, path)


def checked(value: Any, types_by_key: Mapping[str, Any], path: Path, place: str = "") -> dict[str, Any]:
    """``value``, if it is an object with exactly these keys and values of these types; else CheckpointCorrupt."""
    content, dot = _as_object(value, path, place), place and f"{place}."
    if missing := sorted(set(types_by_key) - set(content)):
        raise CheckpointCorrupt(f"{path}: {dot}{missing[0]} is missing")
    if unknown := sorted(set(content) - set(types_by_key)):
        known = ", ".join(sorted(types_by_key))
        raise CheckpointCorrupt(f"{path}: unknown key {dot}{unknown[0]}; known are {known}")
    for name, hint in types_by_key.items():
        if not matches(content[name], hint):
            raise CheckpointCorrupt(f"{path}: {dot}{name} is {content[name]!r}; it must be {in_words(hint)}")
    return content


def read_dataclass(kind: type[T], value: Any, path: Path, place: str) -> T:
    """An instance of a dataclass from an object with exactly its fields, which are :func:`checked`."""
    hints = typing.get_type_hints(kind)
    return kind(**checked(value, {field.name: hints[field.name] for field in fields(kind)}, path, place))  # type: ignore[arg-type]


def _number(text: str) -> float:
    """A finite number. Python's JSON accepts NaN and infinities, and turns 1e999 into one."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def _as_object(value: Any, path: Path, place: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointCorrupt(f"{path}: {place or 'it'} is {value!r}; it must be an object")
    return value


def matches(value: Any, hint: Any) -> bool:
    """Whether a JSON value has that type.

    >>> matches(None, int | None), matches(True, int), matches("own", typing.Literal["own", "shared"])
    (True, False, True)
    >>> matches([1, 2.5], list[float]), matches([[0], "x"], list[list[int]])
    (True, False)
    >>> matches({"a": [1]}, dict[str, typing.Any]), matches([], dict[str, typing.Any])
    (True, False)
    """
    kind = typing.get_origin(hint)
    if kind is typing.Literal:
        return value in typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        return any(matches(value, option) for option in typing.get_args(hint))
    if kind is list:
        return type(value) is list and all(matches(item, typing.get_args(hint)[0]) for item in value)
    if kind is dict:  # of any values
        return type(value) is dict
    return type(value) is hint or (hint is float and type(value) is int)


def in_words(hint: Any) -> str:
    """The name of a type in a message.

    >>> in_words(int | None), in_words(typing.Literal["own", "shared"]), in_words(list[int])
    ('int or null', "'own' or 'shared'", 'a list of int')
    """
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is dict:
        return "an object"
    if hint is bool:
        return "true or false"
    if not parts:
        return "null" if hint is types.NoneType else str(hint.__name__)
    if typing.get_origin(hint) is list:
        return f"a list of {in_words(parts[0])}"
    word = repr if typing.get_origin(hint) is typing.Literal else in_words
    return " or ".join(word(part) for part in parts)
