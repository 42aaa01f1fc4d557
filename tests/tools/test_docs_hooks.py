"""The documentation's links to LOG.md lead to the page that shows it, and roles of docstrings are plain code."""

import runpy
from pathlib import Path

TOOLS = Path(__file__).parents[2] / "tools"


def test_a_link_to_an_entry_of_the_log_leads_to_its_page():
    hook = runpy.run_path(str(TOOLS / "docs_log.py"))["on_page_markdown"]
    assert hook("[date](../LOG.md#entry) and [log](../LOG.md)") == "[date](log.md#entry) and [log](log.md)"
    assert hook("LOG.md, [page](train.md)") == "LOG.md, [page](train.md)"


def test_a_role_becomes_the_name_in_it():
    hook = runpy.run_path(str(TOOLS / "docs_roles.py"))["on_page_content"]
    page = "see :func:<code>~draftheads.loading.load</code>, :class:<code>Tree</code>"
    assert hook(page) == "see <code>load</code>, <code>Tree</code>"
    assert hook("<p>a: <code>load</code></p>") == "<p>a: <code>load</code></p>"
