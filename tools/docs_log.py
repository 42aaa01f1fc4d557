"""A hook of mkdocs: LOG.md lies beside docs/, so links to it lead to the page that shows it, ``log.md``."""

from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replaces the links in a page; mkdocs calls this function, and then checks the headings that links name."""
    return markdown.replace("](../LOG.md", "](log.md")
