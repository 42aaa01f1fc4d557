"""The documentation shows roles of docstrings as plain code."""

import runpy
from pathlib import Path

hook = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "docs_roles.py"))


def test_a_role_becomes_the_name_in_it():
    page = "see :func:<code>~draftheads.loading.load</code>, :class:<code>Tree</code>"
    assert hook["on_page_content"](page) == "see <code>load</code>, <code>Tree</code>"


def test_other_code_is_not_changed():
    assert hook["on_page_content"]("<p>a: <code>load</code></p>") == "<p>a: <code>load</code></p>"
