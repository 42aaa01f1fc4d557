"""The template: every part of a page is in its HTML, as text, and the page is one file that all browsers can show."""

from dataclasses import replace

import pytest

from draftheads.reports.page import Page, render
from draftheads.reports.plots import Bars, Table
from html_pages import check_page

PLOT = Bars(name="plot", title="A plot", caption="A caption.", x_label="x", groups=["two"], series={"hydra": [2.5]})
WHOLE = Page(
    title="Title",
    verdict="It is 1.50 ± 0.25 × as fast: see `draftheads info`.",
    note="A note.",
    numbers=[("2.5", "tokens per step")],
    texts=[("A text", [("learned", "learned"), (" read\n", "")])],
    plots=[PLOT],
    tables=[Table("Numbers", ["", "value"], [["one", 1], ["two", 2]], "Below the table.", best=1)],
    settings=[("seed", 7)],
    facts=[("Others", {"data": ["a.jsonl", "b.jsonl"], "recipe": None, "chain": False, "tree": [[0]]}.items())],
)


def test_every_part_of_a_page_is_in_its_html():
    html = render(WHOLE)
    check_page(html)
    for part in (
        "<title>Title</title>",
        '<h1>Title</h1>\n<p class="verdict">It is 1.50_±_0.25_× as fast: see <code>draftheads info</code>.</p>',
        '<p class="note">A note.</p>',
        "<div><dt>tokens per step</dt><dd>2.5</dd></div>",
        '<pre><span class="learned">learned</span><span> read\n</span></pre>',
        '<tr><td></td><th scope="col">value</th></tr>',
        '<tr><th scope="row"><div>one</div></th><td>1</td></tr>',
        '<tr class="best"><th scope="row"><div>two</div></th><td>2</td></tr>',
        "Below the table.",
        f'<source media="(prefers-color-scheme: dark)" srcset="{PLOT.uri("dark")}">\n<img alt="A plot; the numbers are',
        f'src="{PLOT.uri("light")}">\n</picture>\n<figcaption>A caption.</figcaption>',
        '<tr><th scope="row"><div>hydra</div></th><td>2.50</td></tr>',
        '<tr><th scope="row">seed</th><td>7</td></tr>',
        '<details class="card">\n<summary>Others</summary>',
        '<tr><th scope="row">data</th><td>a.jsonl, b.jsonl</td></tr>',
        '<tr><th scope="row">recipe</th><td>none</td></tr>',
        '<tr><th scope="row">chain</th><td>no</td></tr>',
        '<tr><th scope="row">tree</th><td>[[0]]</td></tr>',
    ):
        assert part in html.replace("\N{NO-BREAK SPACE}", "_")


def test_settings_that_differ_come_before_the_folded_ones():
    html = render(WHOLE)
    assert html.index("Settings that differ") < html.index('<th scope="row">seed') < html.index('<details class="card"')
    without_parts = render(Page("Title", "Answer"))
    check_page(without_parts)
    assert "Settings that differ" not in without_parts


def test_words_of_a_page_are_text_and_not_html():
    strange = '<script>a & "b"</script>'
    page = Page(
        *(strange, strange, strange, [(strange, strange)]),
        texts=[(strange, [(strange, "")])],
        plots=[replace(PLOT, title=strange, caption=strange, groups=[strange], series={strange: [1.0]})],
        tables=[Table(strange, [strange], [[strange]], strange)],
        settings=[(strange, strange)],
        facts=[(strange, [(strange, [strange])])],
    )
    html = render(page)
    assert html.count("<script") == 1
    assert html.count("&lt;script&gt;a &amp; &#34;b&#34;&lt;/script&gt;") == 25


@pytest.mark.parametrize(
    ("change", "by"),
    [
        ('<p class="verdict">', "<p>"),
        ("(prefers-color-scheme: dark)", "(min-width: 1px)"),
        ("overflow-x: auto", "overflow-x: visible"),
        ('<div class="wide"', "<div"),
        ("<details", '<details id="one1" style="background: url(http://x)"'),
        ('scope="row"', ""),
        ("</main>", '<script src="x.js"></script></main>'),
        ('src="data:', 'src="plot.svg?data:'),
        ("<caption>", "<p>"),
        ("<script>", "<script>alert(1);"),
        ("default-src 'none'", "default-src *"),
    ],
)
def test_the_check_of_pages_finds_what_is_missing(change: str, by: str):
    html = render(WHOLE)
    assert change in html
    with pytest.raises(AssertionError):
        check_page(html.replace(change, by))
