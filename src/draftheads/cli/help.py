"""``--help`` of a command: its options, one line each, basic ones first. ``--help-all``: all sentences about them."""

import inspect
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import docstring_parser
import tyro
from rich.console import Console
from rich.text import Text

_POSITIONAL = typing.get_args(tyro.conf.Positional[int])[1]
_NUMBERS = {int: "N", float: "X"}
_SETTING = "NAME=VALUE"
_WIDTH = 100  # of the text, where the terminal is wider
_NAMES = 29  # the widest first column


@dataclass(frozen=True)
class Option:
    """One option of a command."""

    name: str  # as in Python
    group: str  # heading; "" for a command's own options
    is_positional: bool
    values: str  # what to give, such as N or PATH
    choices: tuple[str, ...]  # the only values, if there are such
    text: str  # its documentation
    default: Any  # tyro.MISSING if it must be given
    hint: Any  # its type, with all annotations
    is_rare: bool = False  # given as --set NAME=VALUE

    @property
    def is_place(self) -> bool:
        """Whether it is one value without a name, which may also be given by its name."""
        return self.is_positional and "…" not in self.values

    @property
    def flag(self) -> str:
        """How it is written on a command line."""
        if self.is_positional:
            return self.values if self.default is tyro.MISSING else f"[{self.values}]"
        if self.is_rare:
            return f"{self.name}={self.values or 'on|off'}"
        name = self.name.replace("_", "-")
        return f"--{'[no-]' * (self.default is True)}{name}" + f" {self.values}" * bool(self.values)

    def line(self, *, whole: bool) -> str:
        """Its first sentence, or all of them, and its default."""
        text = self.text if whole else self.text.partition(". ")[0].rstrip(".")
        if self.choices:
            text += f"{' One of' if text.endswith('.') else ''}: {', '.join(self.choices)}"
        text += f" (or --{self.name.replace('_', '-')})" * self.is_place
        if self.default is tyro.MISSING:
            return f"{text} (required)"
        if self.default is None or self.default is False or self.default == ():
            return text
        words = " ".join(map(str, self.default)) if isinstance(self.default, tuple) else str(self.default)
        return f"{text} [{'on' if self.default is True else words}]"


def options_of(kind: Any, default: Any = None, rare: frozenset[str] = frozenset()) -> Iterator[Option]:
    """The options of a command's dataclass and of its groups; ``default`` is an instance with other defaults.

    ``RARE`` of a class names those of it and of its groups that are given as ``--set NAME=VALUE``.
    """
    rare = rare.union(getattr(kind, "RARE", ()))
    hints = typing.get_type_hints(kind, include_extras=True)
    documentation = documented(kind)
    for field in fields(kind):
        hint, marks = _bare(hints[field.name])
        value = _default(field) if default is None else getattr(default, field.name)
        if is_dataclass(hint):
            title = (hint.__doc__ or "").partition("\n")[0].rstrip(".")
            inner = options_of(hint, None if value is tyro.MISSING else value, rare)
            yield from (Option(**{**vars(option), "group": option.group or title}) for option in inner)
        else:
            positional = _POSITIONAL in marks
            shown = _values(hint, field.name, positional=positional)
            text = documentation.get(field.name, "")
            is_rare = field.name in rare
            yield Option(field.name, "", positional, shown, _choices(hint), text, value, hints[field.name], is_rare)


@cache
def documented(kind: type) -> dict[str, str]:
    """The text under each field of a dataclass, its base classes' included, in one line."""
    parsed = [docstring_parser.parse_from_object(base) for base in reversed(kind.__mro__[:-1])]
    return {field.arg_name: " ".join((field.description or "").split()) for doc in parsed for field in doc.params}


def print_help(console: Console, command: str, kind: Any, default: Any = None, *, whole: bool) -> None:
    """Usage, what the command does, and its options in groups; ``whole``: with all sentences about each option.

    ``kind`` and ``default`` are those of :func:`options_of`.
    """
    options = list(options_of(kind, default))
    places = " ".join(option.flag for option in options if option.is_positional)
    console.print(f"usage: draftheads {command} {places + ' ' if places else ''}[options]\n", markup=False)
    width = min(console.width, _WIDTH)
    description = inspect.cleandoc(kind.__doc__ or "")
    console.print(description if whole else description.partition("\n\n")[0], markup=False, width=width)
    basic = getattr(kind, "BASIC", None)
    groups: dict[str, list[Option]] = {"Arguments": [], "Options": []}
    rare = [option for option in options if option.is_rare]
    for option in options:
        if option.is_rare:
            continue
        is_basic = not option.group if basic is None else option.name in basic
        title = "Options" if is_basic else f"Advanced: {option.group.lower()}" if option.group else "Advanced"
        groups.setdefault("Arguments" if option.is_positional else title, []).append(option)
    if basic is not None:
        groups["Options"].sort(key=lambda option: basic.index(option.name))
    if rare and whole:
        groups["Settings for --set"] = rare
    column = min(_NAMES, max((len(option.flag) for group in groups.values() for option in group), default=0))
    for title, group in groups.items():
        rows = [(option.flag, option.line(whole=whole)) for option in group]
        if title == "Options":  # there is always one
            rows += [(f"--set {_SETTING} …", "Further settings; --help-all lists them")] if rare else []
            rows += [("--help, --help-all", "This list; with all that is known about each option")]
        _print_group(console, title, rows, column=column, width=width)


def _print_group(console: Console, title: str, rows: Sequence[tuple[str, str]], *, column: int, width: int) -> None:
    if not rows:
        return
    console.print(Text(f"\n{title}", style="bold"))
    indent = column + 4
    for flag, line in rows:
        first, *others = textwrap.wrap(
            line, max(20, width - indent), break_on_hyphens=False, break_long_words=False
        ) or [""]
        start = Text(f"  {flag:<{column}}  ", style="cyan")
        if len(flag) > column:  # it has a line of its own
            console.print(start, soft_wrap=True)
            start = Text(" " * indent)
        console.print(start.append(first, style="default"), soft_wrap=True)
        for other in others:
            console.print(Text(" " * indent + other), soft_wrap=True)


def _bare(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without ``Annotated``, and what it was annotated with."""
    if typing.get_origin(hint) is typing.Annotated:
        inner, *marks = typing.get_args(hint)
        bare, more = _bare(inner)
        return bare, (*marks, *more)
    return hint, ()


def _default(field: Any) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return tyro.MISSING if field.default is MISSING else field.default


def _choices(hint: Any) -> tuple[str, ...]:
    """The words that an option of that type accepts; none if it accepts others, too."""
    if typing.get_origin(hint) is typing.Literal:
        return tuple(map(str, typing.get_args(hint)))
    return tuple(word for kind in typing.get_args(hint) for word in _choices(kind))


def _values(hint: Any, name: str, *, positional: bool) -> str:
    """What to give for an option of that type.

    >>> _values(int | None, "top_k", positional=False), _values(tuple[str, ...], "prompt", positional=True)
    ('N', 'PROMPT …')
    """
    kind = typing.get_origin(hint)
    if kind in (typing.Union, types.UnionType):
        return _values(
            next(kind for kind in typing.get_args(hint) if kind is not type(None)), name, positional=positional
        )
    if kind is tuple:
        first, second = typing.get_args(hint)
        value = _values(first, name, positional=positional)
        return f"{value} …" if second is Ellipsis else f"{value} {value}"
    if kind is typing.Literal and not positional:
        return "NAME"
    if positional or hint is str:
        return name.upper() if positional else name.rpartition("_")[2].upper()
    return "" if hint is bool else "PATH" if hint is Path else _NUMBERS[hint]
