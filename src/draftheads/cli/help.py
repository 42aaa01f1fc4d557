"""``--help`` of a command: one line for each option. tyro's ``--help-verbose`` has all that is known about them."""

import inspect
import shutil
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any

import docstring_parser
import tyro

from draftheads.cli.main import Command

_POSITIONAL, _HIDDEN = (typing.get_args(mark[int])[1] for mark in (tyro.conf.Positional, tyro.conf.Suppress))
_VALUES = {int: "N", float: "X", Path: "PATH", bool: ""}
_WIDTH = 100  # of the text, where the terminal is wider
_COLUMN = 28  # of the flags
CONFIG_HELP = {
    "--config PATH": "A YAML file of options, such as learning_rate: 0.001",
    "--print-config": "Print all options as such a file, and end",
}
MODELS = ("model", "draft_model")  # options that name a model, which may be a file, too
_FOLDER, _FOLDER_OR_FILE = "a folder or a Hugging", "a folder, a GGUF file or a Hugging"
_OWN = "Options"  # heading of options without a group


@dataclass(frozen=True)
class Option:
    """One option of a command."""

    name: str  # as in Python
    group: str  # heading
    is_positional: bool
    hint: Any  # its type, without annotations
    text: str  # its documentation
    default: Any  # tyro.MISSING if it must be given

    @property
    def flag(self) -> str:
        """How it is written on a command line."""
        value = _value(self.hint, self.name)
        if self.is_positional:
            value = self.name.upper() + " …" * value.endswith("…")
            return value if self.default is tyro.MISSING else f"[{value}]"
        return f"--{'[no-]' * (self.default is True)}{self.name.replace('_', '-')} {value}".rstrip()

    @property
    def line(self) -> str:
        """Its first sentence, choices and default."""
        text = self.text.partition(". ")[0].rstrip(".")
        if choices := _choices(self.hint):
            text += f": {', '.join(choices)}"
        if self.default is tyro.MISSING:
            return f"{text} (required)"
        if self.default is None or self.default is False or self.default == ():
            return text
        words = " ".join(map(str, self.default)) if isinstance(self.default, tuple) else str(self.default)
        return f"{text} [{'on' if self.default is True else words}]"


def options_of(kind: Any, default: Any = None, group: str = "") -> Iterator[Option]:
    """The options of a command's dataclass and of its groups; ``default`` is an instance with other defaults."""
    hints, annotated = typing.get_type_hints(kind), typing.get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        hint, marks = hints[field.name], getattr(annotated[field.name], "__metadata__", ())
        value = field.default_factory() if field.default_factory is not MISSING else field.default
        value = getattr(default, field.name, tyro.MISSING if value is MISSING else value)
        if is_dataclass(hint):
            title = (hint.__doc__ or "").partition("\n")[0].rstrip(".")
            yield from options_of(hint, None if value is tyro.MISSING else value, group or title)
        elif _HIDDEN not in marks:
            helps = [mark.help for mark in marks if getattr(mark, "help", None)]  # of tyro.conf.arg
            text = next(iter(helps), documented(kind).get(field.name, ""))
            text = text.replace(_FOLDER, _FOLDER_OR_FILE) if field.name in MODELS else text
            yield Option(field.name, group or _OWN, _POSITIONAL in marks, hint, text, value)


@cache
def documented(kind: type) -> dict[str, str]:
    """The text under each field of a dataclass, its base classes' included, in one line."""
    parsed = [docstring_parser.parse_from_object(base) for base in reversed(kind.__mro__[:-1])]
    return {field.arg_name: " ".join((field.description or "").split()) for doc in parsed for field in doc.params}


def print_help(name: str, command: Command, kind: Any, default: Any = None) -> None:
    """Usage, what the command does, and its options in groups. ``kind`` and ``default`` are those of options_of."""
    groups: dict[str, dict[str, str]] = {"Arguments": {}, _OWN: {}}
    for option in options_of(kind, default):
        groups.setdefault("Arguments" if option.is_positional else option.group, {})[option.flag] = option.line
    if command.config:
        groups[_OWN] |= CONFIG_HELP
    groups[_OWN]["--help, --help-verbose"] = "This list; with all that is known about each option"
    first = [f"[{option.upper()}]" for option in command.first.split()]
    places = "".join(f"{word} " for word in (*groups["Arguments"], *first))
    width = min(shutil.get_terminal_size().columns, _WIDTH)
    description = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0]
    print(f"usage: draftheads {name} {places}[options]\n\n{textwrap.fill(description, width)}")
    for title, lines in groups.items():
        if lines:
            print(f"\n{title}")
        for flag, line in lines.items():
            start, indent = f"  {flag:<{_COLUMN}}  ", " " * (_COLUMN + 4)
            print(textwrap.fill(start + line, width, subsequent_indent=indent, break_on_hyphens=False))


def _choices(hint: Any) -> tuple[str, ...]:
    """The words that an option of that type accepts; none if it accepts others, too."""
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    return tuple(word for kind in typing.get_args(hint) for word in _choices(kind))


def _value(hint: Any, name: str) -> str:
    """What to give for an option of that type.

    >>> _value(int | None, "top_k"), _value(tuple[str, ...], "stop")
    ('N', 'STOP …')
    """
    kinds = [kind for kind in typing.get_args(hint) if kind not in (NoneType, ...)]
    if typing.get_origin(hint) is typing.Literal:
        return "NAME"
    if typing.get_origin(hint) is tuple:
        return f"{_value(kinds[0], name)} …"
    return _value(kinds[0], name) if kinds else _VALUES.get(hint, name.rpartition("_")[2].upper())
