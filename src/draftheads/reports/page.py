"""One page of HTML: its parts, and the template that all kinds of pages share.

Knows jinja2; knows nothing of what is reported. The page is one file without links to other files. The same content
gives the same bytes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftheads.errors import MissingDependency

_TEMPLATE = Path(__file__).with_name("page.html.j2")


@dataclass(frozen=True)
class Table:
    """Numbers under column names; the first column holds the names of the rows."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """A plot as SVG with the sentence below it."""

    svg: str
    caption: str


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


@dataclass(frozen=True)
class Page:
    """What a page shows, from top to bottom."""

    title: str
    answer: str  # the result in one sentence
    note: str = ""  # a paragraph below the answer
    texts: Sequence[Text] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    facts: Sequence[tuple[str, Iterable[tuple[str, Any]]]] = ()  # titles, each with names and values; shown folded


def render(page: Page) -> str:
    """The page as HTML.

    Raises:
        MissingDependency: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, StrictUndefined  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise missing(error) from error
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(page=page) + "\n"


def missing(error: ImportError) -> MissingDependency:
    """The error that names the package to install."""
    return MissingDependency(f"the report needs {error.name}", pip_install="'draftheads[report]'")
