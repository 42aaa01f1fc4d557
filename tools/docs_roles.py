"""A hook of mkdocs: docstrings refer to code as ``:func:`~draftheads.loading.load```; pages show ``load``."""

import re
from typing import Any

_ROLE = re.compile(r":(?:class|data|func|meth|mod):<code>(~?)([\w.]+)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """Replaces the roles in a page; mkdocs calls this function."""
    return _ROLE.sub(lambda match: f"<code>{_shown(match[2], short=bool(match[1]))}</code>", html)


def _shown(name: str, *, short: bool) -> str:
    return name.rpartition(".")[2] if short else name
