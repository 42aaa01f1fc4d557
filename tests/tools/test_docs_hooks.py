"""Roles of docstrings are plain code in the documentation."""

import runpy
from pathlib import Path

TOOLS = Path(__file__).parents[2] / "tools"


def test_a_role_becomes_the_name_in_it():
    hook = runpy.run_path(str(TOOLS / "docs_roles.py"))["on_page_content"]
    page = "see :func:<code>~draftheads.loading.load</code>, :class:<code>Tree</code>"
    assert hook(page) == "see <code>load</code>, <code>Tree</code>"
    assert hook("<p>a: <code>load</code></p>") == "<p>a: <code>load</code></p>"
