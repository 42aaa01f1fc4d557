"""One page of HTML: its parts, and the template that all kinds of pages share.

The page is one file without links to other files. Its only script sorts tables; browsers run no other, as the page's
policy has its digest. The same content gives the same bytes.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftheads.reports.plots import Figure, missing

_TEMPLATE, _SCRIPT = (Path(__file__).with_name(name) for name in ("page.html.j2", "sort.js"))


@dataclass(frozen=True)
class Table:
    """Numbers under column names; the first column holds the names of the rows."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""
    best: int | None = None  # index of the row in bold
    is_wide: bool = False  # whether it needs the whole width of a large screen


@dataclass(frozen=True)
class Piece:
    """A part of a text with the names of its CSS classes."""

    text: str
    classes: str = ""


@dataclass(frozen=True)
class Text:
    """A text that is shown as it is, in pieces."""

    title: str
    pieces: Sequence[Piece]


Facts = Iterable[tuple[str, Any]]  # names and values


@dataclass(frozen=True)
class Page:
    """What a page shows, from top to bottom. In sentences, `backquotes` mark commands."""

    title: str
    verdict: str  # the result in one sentence with numbers
    note: str = ""  # a paragraph below it
    numbers: Sequence[tuple[str, str]] = ()  # the most important ones in large type: values and names
    texts: Sequence[Text] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    settings: Sequence[tuple[str, Any]] = ()  # that differ from the defaults
    facts: Sequence[tuple[str, Facts]] = ()  # titles, each with names and values; shown folded
    where: str = ""  # the model and the machine, in files of plots


def render(page: Page) -> str:
    """The page as HTML."""
    try:
        from jinja2 import Environment, StrictUndefined  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise missing(error) from error
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["plain"] = _plain
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    script = _SCRIPT.read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return template.render(page=page, script=script, script_hash=f"sha256-{digest}") + "\n"


def _plain(value: Any) -> str:
    """A value from a record as text.

    >>> _plain(["a.jsonl", "b.jsonl"]), _plain(None), _plain(True), _plain(0.001)
    ('a.jsonl, b.jsonl', 'none', 'yes', '0.001')
    """
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list) and not any(isinstance(item, list | dict) for item in value):
        return ", ".join(map(_plain, value))
    return str(value)


def unbroken(words: str) -> str:
    return words.replace(" ", "\N{NO-BREAK SPACE}")


def unbroken_speed(sentence: str) -> str:
    """The sentence without a line break inside its speed."""
    return re.sub(r"[\d.]+ ± [\d.]+ ×", lambda speed: unbroken(speed[0]), sentence)
