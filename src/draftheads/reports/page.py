"""One page of HTML: its parts, and the template that all kinds of pages share.

The page is one file that asks no server for anything. Its only script sorts tables; browsers run no other, as the
page's policy has its digest. The same content gives the same bytes.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftheads.reports.plots import Plot, Table, missing

_TEMPLATE, _SCRIPT = (Path(__file__).with_name(name) for name in ("page.html.j2", "sort.js"))


Pieces = Sequence[tuple[str, str]]  # parts of a text with the names of their CSS classes
Facts = Iterable[tuple[str, Any]]  # names and values


@dataclass(frozen=True)
class Page:
    """What a page shows, from top to bottom. In sentences, `backquotes` mark commands."""

    title: str
    verdict: str  # the result in one sentence with numbers
    note: str = ""  # a paragraph below it
    numbers: Sequence[tuple[str, str]] = ()  # the most important ones in large type: values and names
    texts: Sequence[tuple[str, Pieces]] = ()  # titles, and texts that are shown as they are
    plots: Sequence[Plot] = ()
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
    environment.filters |= {"plain": _plain, "unbroken": _unbroken}
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


def _unbroken(sentence: str) -> str:
    """Without a line break inside its speed."""
    return re.sub(r"[\d.]+ (± [\d.]+ )?×", lambda speed: speed[0].replace(" ", "\N{NO-BREAK SPACE}"), sentence)
