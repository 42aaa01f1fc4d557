"""The template: every part of a page is in its HTML, as text, and the page is one file that all browsers can show."""

import re
from dataclasses import replace
from typing import Any

import pytest
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from draftheads.reports.page import COLOURS, Page, Plot, Point, Style, Table, render
from html_pages import check_page

BARS = Plot("bars", "A plot", "x", "A caption.", {"": {"hydra": [Point("two", 2.5)]}}, kind="bars")
WHOLE = Page(
    title="Title",
    verdict="It is 1.50 ± 0.25 × as fast: see `draftheads info`.",
    note="A note.",
    numbers=[("2.5", "tokens per step")],
    texts=[("A text", [("learned", "learned"), (" read\n", "")])],
    plots=[BARS],
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
        f'<div class="plot" role="img" aria-label="A plot; the numbers are in the table below">{BARS.svg()}</div>',
        "<figcaption>A caption.</figcaption>",
        '<tr><th scope="row"><div>hydra</div></th><td>two</td><td>2.50</td></tr>',
        '<tr><th scope="row">seed</th><td>7</td></tr>',
        '<details class="card">\n<summary>Others</summary>',
        '<tr><th scope="row">data</th><td>a.jsonl, b.jsonl</td></tr>',
        '<tr><th scope="row">recipe</th><td>none</td></tr>',
        '<tr><th scope="row">chain</th><td>no</td></tr>',
        '<tr><th scope="row">tree</th><td>[[0]]</td></tr>',
    ):
        assert part in html.replace("\N{NO-BREAK SPACE}", "_")
    assert html.index("Settings that differ") < html.index('<th scope="row">seed') < html.index('<details class="card"')
    check_page(without_parts := render(Page("Title", "Answer")))
    assert "Settings that differ" not in without_parts


def test_words_of_a_page_are_text_and_not_html():
    strange = '<script>a & "b"</script>'
    page = Page(
        *(strange, strange, strange, [(strange, strange)]),
        texts=[(strange, [(strange, "")])],
        plots=[replace(BARS, title=strange, caption=strange, panels={"": {strange: [Point(strange, 1.0)]}})],
        tables=[Table(strange, [strange], [[strange]], strange)],
        settings=[(strange, strange)],
        facts=[(strange, [(strange, [strange])])],
    )
    html = render(page)
    assert html.count("<script") == 1
    assert html.count("&lt;script&gt;a &amp; &#34;b&#34;&lt;/script&gt;") == 25


# --- plots ---

SPEED = {"a": [Point(1, 2.0, (1.0, 3.0)), Point(4, 8.0)], "b": [Point(2, 3.0, None, (1.5, 2.5))]}
PANELS = {"speed": SPEED, "s": {"a": [Point(1, 7)]}}
DASHED: dict[str, Any] = {"styles": {"a": Style(5, is_dashed=True)}}
CURVES = Plot("curves", "Title", "x", "Caption.", PANELS, guide=[(1, 1), (4, 1)], log=True, **DASHED)
BY_GROUP = {"a": [Point("chat", 1.5, (1.25, 1.75))], "b": [Point("chat", 0.5), Point("code", 2.0, (1.5, 2.5))]}
GROUPS = replace(BARS, panels={"": BY_GROUP}, **DASHED)


def drawn(plot: Plot) -> Any:
    """A figure with the plot."""
    figure = Figure(layout="constrained")
    plot.draw(figure)
    figure.draw_without_rendering()  # fails with a warning where there is no room
    return figure


def segments(ax: Any) -> list[Any]:
    return [segment.tolist() for lines in ax.collections for segment in lines.get_segments()]


def test_curves_lie_in_panels_and_have_intervals_and_a_tick_at_each_value():
    above, below = drawn(CURVES).axes
    first, second, guide = ([*zip(*line.get_data(), strict=True)] for line in above.lines)
    assert (first, second, guide) == ([(1, 2), (4, 8)], [(2, 3)], [(1, 1), (4, 1)])
    assert [tuple(each.get_data()) for each in below.lines] == [(pytest.approx([1]), pytest.approx([7]))]
    assert [[1, 1], [1, 3]] in segments(above)
    assert [[1.5, 3], [2.5, 3]] in segments(above)
    dashed = above.lines[0]
    assert (dashed.get_color(), dashed.get_markerfacecolor(), dashed.is_dashed()) == (COLOURS[5], "none", True)
    assert [ax.get_ylabel() for ax in (above, below)] == ["speed", "s"]
    assert above.get_ylim() == (0, pytest.approx(8.4))
    assert below.get_xlabel() == "x"
    assert CURVES.table()[1:3] == (
        ["", "x", "speed", "s"],
        [["a", "1", "2.00 (1.00-3.00)", "7"], ["a", "4", "8.00", ""], ["b", "2 (1.50-2.50)", "3.00", ""]],
    )


def test_a_long_curve_has_no_markers_and_some_points_in_the_table_the_last_one_too():
    plot = replace(CURVES, panels={"y": {"long": [Point(x, float(x)) for x in range(1000)]}}, log=False, top=500.0)
    (ax,) = drawn(plot).axes
    assert ax.lines[0].get_marker() == ""
    assert ax.get_ylim() == (0, 500)
    table = plot.table()
    assert len(table.rows) == 100
    assert table.rows[-2:] == [["long", "989", "989.00"], ["long", "999", "999.00"]]


def test_groups_have_a_bar_of_each_series_and_a_line_at_1():
    (ax,) = drawn(GROUPS).axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["chat", "code"]
    one, other = (each for each in ax.containers if isinstance(each, BarContainer))
    assert [[bar.get_width() for bar in bars] for bars in (one, other)] == [[1.5], [0.5, 2]]
    centres = [[bar.get_y() + bar.get_height() / 2 for bar in bars] for bars in (one, other)]
    assert centres == [pytest.approx([-0.2]), pytest.approx([0.2, 1.2])]
    assert [bool(bars[0].get_hatch()) for bars in (one, other)] == [True, False]
    assert ax.get_xlim() == (0, 2.5), "the axis ends where the data ends"
    assert ax.lines[-1].get_xdata() == [1, 1]
    assert GROUPS.table().rows == [
        ["a", "chat", "1.50 (1.25-1.75)"], ["b", "chat", "0.50"], ["b", "code", "2.00 (1.50-2.50)"]
    ]  # fmt: skip


def test_bars_of_one_group_have_their_names_and_numbers_beside_them():
    names = ["head-" * 20 + "last", "hydra"]
    bars = {name: [Point("all", 1.5, (1.25, 1.75) if name != "hydra" else None)] for name in names}
    figure = drawn(replace(BARS, panels={"": bars}))
    (ax,) = figure.axes
    long, short = (label.get_text() for label in ax.get_yticklabels())
    assert re.fullmatch("….{10,30}head-last", long)
    assert short == "hydra"
    assert [text.get_text() for text in ax.texts] == ["1.50 (1.25-1.75)", "1.50"]
    assert ax.get_position().width > 0.4
    assert figure.legends == []


def test_stacks_have_parts_one_after_the_other_and_their_sum():
    parts = {"draft": [Point("a", 2.0), Point("b", 3.0)], "verify": [Point("a", 10.0), Point("b", 20.0)]}
    (ax,) = drawn(replace(BARS, panels={"": parts}, kind="stacks")).axes
    draft, verify = ax.containers
    assert [(bar.get_x(), bar.get_width()) for bar in (*draft, *verify)] == [(0, 2), (0, 3), (2, 10), (3, 20)]
    assert [text.get_text() for text in ax.texts] == ["12.0", "23.0"]
    assert ax.get_xlim() == (0, 23)


def test_a_legend_of_long_labels_lies_within_the_figure():
    series = {f"a long name {number}": [Point("one", 1.0), Point("two", 2.0)] for number in range(7)}
    figure = Figure(figsize=(5.2, 1), layout="constrained")
    replace(BARS, panels={"": series}).draw(figure)
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width


@pytest.mark.parametrize("curves", [{}, {"a": []}])
@pytest.mark.parametrize("plot", [CURVES, replace(CURVES, guide=()), BARS, replace(BARS, kind="stacks")])
def test_a_plot_of_nothing_is_still_a_plot(plot: Plot, curves: dict[str, Any]):
    plot = replace(plot, panels={"speed": curves})
    assert plot.svg().startswith("<svg")
    assert plot.table().rows == []


@pytest.mark.parametrize("plot", [CURVES, BARS])
def test_a_drawing_has_the_colour_of_its_page_and_no_background(plot: Plot):
    svg = plot.svg()
    assert svg == plot.svg(), "the same bytes each time"
    assert "currentColor" in svg
    assert not re.search("#000000|fill: (#ffffff|white|black)", svg)
    words = replace(plot, panels={"": {"$a$ <b>": [Point(1, 1.5)], "b": [Point(1, 1.5)]}}, guide=()).svg()
    assert ">$a$ &lt;b&gt;</text>" in words, "names are no formulas"
