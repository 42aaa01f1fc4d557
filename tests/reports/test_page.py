"""The template: every part of a page is in its HTML, as text."""

import re

from draftheads.reports.page import Figure, Page, Piece, Table, Text, render


def test_every_part_of_a_page_is_in_its_html() -> None:
    html = render(
        Page(
            title="Title",
            answer="It works.",
            note="A note.",
            texts=[Text("A text", [Piece("learned", "learned"), Piece(" read\n")])],
            tables=[Table("Numbers", ["name", "value"], [["one", 1]], "Below the table.")],
            figures=[Figure("<svg></svg>", "A caption.")],
            facts=[("Settings", {"seed": 0}.items())],
        )
    )
    for part in (
        "<title>Title</title>",
        '<p class="answer">It works.</p>',
        "<p>A note.</p>",
        '<pre><span class="learned">learned</span><span> read\n</span></pre>',
        "<tr><th>name</th><th>value</th></tr>",
        "<tr><td>one</td><td>1</td></tr>",
        "Below the table.",
        "<figure><svg></svg><figcaption>A caption.</figcaption></figure>",
        "<summary>Settings</summary>",
        "<tr><th>seed</th><td>0</td></tr>",
    ):
        assert part in html


def test_words_of_a_page_are_text_and_not_html() -> None:
    strange = "<script>a & b</script>"
    table = Table(strange, [strange], [[strange]], strange)
    html = render(
        Page(
            strange,
            strange,
            strange,
            texts=[Text(strange, [Piece(strange)])],
            tables=[table],
            figures=[Figure("", strange)],
            facts=[(strange, [(strange, strange)])],
        )
    )
    assert "<script" not in html
    assert html.count("&lt;script&gt;a &amp; b&lt;/script&gt;") == 14


def test_a_page_loads_nothing_from_elsewhere_and_follows_dark_mode() -> None:
    html = render(Page("Title", "Answer"))
    assert not re.search(r"src=|href=|url\(|@import", html)
    assert "prefers-color-scheme: dark" in html
