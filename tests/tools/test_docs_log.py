"""The documentation's links to LOG.md lead to the page that shows it."""

import runpy
from pathlib import Path

hook = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "docs_log.py"))


def test_a_link_to_an_entry_leads_to_its_page():
    page = "[date](../LOG.md#entry) and [log](../LOG.md)"
    assert hook["on_page_markdown"](page) == "[date](log.md#entry) and [log](log.md)"


def test_other_text_is_not_changed():
    assert hook["on_page_markdown"]("LOG.md, [page](train.md)") == "LOG.md, [page](train.md)"
