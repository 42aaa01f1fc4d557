"""What holds for the HTML of every page."""

import base64
import hashlib
import re
from collections import Counter
from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "link", "input", "source"}


class Outline(HTMLParser):
    """Elements of a page. Fails where a tag is not closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], tuple[str, ...]]] = []  # tag, attributes, what it is inside
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), tuple(self._open)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), tuple(self._open)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


def check_page(html: str) -> None:
    """What holds for every page: the answer first, one file with one script, dark mode, tables that scroll."""
    outline = Outline(html)
    body = [(tag, attributes) for tag, attributes, inside in outline.found if "main" in inside]
    assert [tag for tag, _ in body[:2]] == ["h1", "p"]
    assert body[1][1].get("class") == "verdict", "the verdict is the first thing after the heading"
    # one file
    assert not re.search(r"https?:", html)
    before, script, after = re.split("<script>(.*)</script>", html, flags=re.DOTALL)
    assert not re.search(
        r"\b(src|srcset|action)=(?!\"data:)|url\((?!#)|@import|href=\"(?!#)|<script|<link", before + after
    )
    # no style sheet, script, image or font can be loaded, even if one slipped in; only this very script runs
    (policy,) = [found["content"] for tag, found, _ in outline.found if "http-equiv" in found]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    # colours
    assert "@media (prefers-color-scheme: dark)" in html
    (scheme,) = [found["content"] for _, found, _ in outline.found if found.get("name") == "color-scheme"]
    assert scheme == "light dark"
    # narrow screens
    assert 'name="viewport" content="width=device-width' in html
    assert re.search(r"\.wide \{[^}]*overflow-x: auto", html)
    tables = re.findall(r"(<[^>]*>)\s*<table>", html)
    assert all('class="wide"' in found and 'tabindex="0"' in found for found in tables)
    assert html.count("<table>") + html.count('<table class="facts">') == html.count("<table")
    # accessibility
    assert html.count("<caption>") == html.count("<table>")
    assert all("scope" in attributes for tag, attributes, _ in outline.found if tag == "th")
    drawings = [inside for tag, _, inside in outline.found if tag == "svg"]
    assert len(drawings) == html.count('<div class="plot" role="img" aria-label="')
    assert "currentColor" in html or not drawings, "letters and axes have the colour of the page"
    # ids are unique, and those that are used exist
    ids = Counter(attributes["id"] for _, attributes, _ in outline.found if "id" in attributes)
    assert all(count == 1 for count in ids.values())
    assert set(re.findall(r"#([\w-]{9,})", html)) <= set(ids)
