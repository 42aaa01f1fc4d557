"""Hooks of mkdocs: what docstrings call ``:func:`~draftheads.loading.load``` is shown as ``load``.

Links of a page to files beside ``docs/`` are for readers of the repository: the built manual has their words only.
"""

import re
from typing import Any

_ROLE = re.compile(r":(?:class|data|func|meth|mod):<code>(~?)([\w.]+)</code>")
_OUTSIDE = re.compile(r"\[([^\[\]]+)\]\((?:\.\./)+(?:examples|packages|research)/[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replaces links to files of the repository by their words; mkdocs calls this function."""
    return _OUTSIDE.sub(r"\1", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Replaces the roles in a page; mkdocs calls this function."""
    return _ROLE.sub(lambda match: f"<code>{_shown(match[2], short=bool(match[1]))}</code>", html)


def _shown(name: str, *, short: bool) -> str:
    return name.rpartition(".")[2] if short else name
