"""Plots and their tables hold the values that they were given."""

import base64
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.image import imread

from draftheads.reports import plots
from draftheads.reports.plots import Bars, Curves, Plot, Style

WORDS = {"name": "plot", "title": "Title", "caption": "Caption.", "x_label": "x"}
RED = Style("#ff0000", "s", is_dashed=True)
CURVES = Curves(
    **WORDS,
    panels={"speed": {"a": [(1, 2.0, (1.0, 3.0)), (4, 8.0)], "b": [(2, 3.0, None, (1.5, 2.5))]}, "s": {"a": [(1, 7)]}},
    guide=[(1, 1), (4, 1)],
    styles={"a": RED},
    log=True,
)
BARS = Bars(
    **WORDS,
    groups=["chat", "code"],
    series={"a": [1.5, None], "b": [0.5, 2.0]},
    errors={"a": [0.25, None], "b": [0.125, 0.5]},
    styles={"a": RED},
)


def drawn(plot: Plot) -> Any:
    """A figure with the plot."""
    figure = Figure(layout="constrained")
    plot.draw(figure)
    figure.draw_without_rendering()  # fails with a warning where there is no room
    return figure


def points(line: Any) -> list[tuple[float, float]]:
    return list(zip(line.get_xdata(), line.get_ydata(), strict=True))


def test_curves_lie_in_panels_and_have_intervals_and_a_tick_at_each_value():
    above, below = drawn(CURVES).axes
    guide, first, second = above.lines
    assert [points(line) for line in above.lines] == [[(1, 1), (4, 1)], [(1, 2), (4, 8)], [(2, 3)]]
    assert [line.get_label() for line in (first, second)] == ["a", "b"]
    assert [points(line) for line in below.lines] == [[(1, 7)]]
    spans = [lines.get_segments()[0].tolist() for lines in above.collections]
    assert spans == [[[1, 1], [1, 3]], [[1.5, 3], [2.5, 3]]]
    assert (first.get_color(), first.get_marker(), first.get_markerfacecolor()) == ("#ff0000", "s", "none")
    assert [line.is_dashed() for line in (guide, first, second)] == [True, True, False]
    assert [ax.get_ylabel() for ax in (above, below)] == ["speed", "s"]
    assert above.get_ylim() == (0, pytest.approx(8.4))
    assert below.get_xlabel() == "x"
    assert [label.get_text() for label in below.get_xticklabels()] == ["1", "2", "4"]


def test_the_table_of_curves_has_a_row_for_each_point():
    table = CURVES.table()
    assert table.columns == ["", "x", "speed", "s"]
    assert table.rows == [
        ["a", "1", "2.00 (1.00-3.00)", "7"], ["a", "4", "8.00", ""], ["b", "2 (1.50-2.50)", "3.00", ""]
    ]  # fmt: skip
    assert table.note == ""


def test_a_long_curve_has_no_markers_and_some_points_in_the_table_the_last_one_too():
    plot = Curves(**WORDS, panels={"y": {"long": [(x, float(x)) for x in range(1000)]}}, top=500.0)
    (ax,) = drawn(plot).axes
    assert len(points(ax.lines[0])) == 1000
    assert ax.lines[0].get_marker() == ""
    assert ax.get_ylim() == (0, 500)
    table = plot.table()
    assert table.note == "Of long curves, the table has some points."
    assert len(table.rows) == 100
    assert table.rows[-2:] == [["long", "989", "989.00"], ["long", "999", "999.00"]]


def test_steps_are_whole_numbers():
    (ax,) = drawn(Curves(**WORDS, panels={"y": {"a": [(0, 1.0), (1, 2.0), (2, 3.0)]}})).axes
    assert all(float(tick).is_integer() for tick in ax.get_xticks())


def test_groups_have_a_bar_of_each_series_and_a_line_at_1():
    (ax,) = drawn(BARS).axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["chat", "code"]
    one, other = (each for each in ax.containers if isinstance(each, BarContainer))
    assert [[bar.get_width() for bar in bars] for bars in (one, other)] == [[1.5, 0], [0.5, 2]]
    centres = [[bar.get_y() + bar.get_height() / 2 for bar in bars] for bars in (one, other)]
    assert centres == [pytest.approx([-0.2, 0.8]), pytest.approx([0.2, 1.2])]
    spans = [line.get_segments() for each in ax.containers if isinstance(each, ErrorbarContainer) for line in each[2]]
    assert [[(left[0], right[0]) for left, right in each] for each in spans] == [
        [(1.25, 1.75), (0, 0)],
        [(0.375, 0.625), (1.5, 2.5)],
    ]
    assert one[0].get_facecolor() == (1, 0, 0, 1)
    assert [bool(bars[0].get_hatch()) for bars in (one, other)] == [True, False]
    assert ax.get_xlim() == (0, 2.5), "the axis ends where the data ends"
    assert points(ax.lines[0]) == [(1, 0), (1, 1)]
    assert BARS.table()[1:3] == (
        ["", "chat", "code"], [["a", "1.50 ± 0.25", ""], ["b", "0.50 ± 0.12", "2.00 ± 0.50"]]
    )  # fmt: skip


def test_bars_of_one_group_have_their_names_and_numbers_beside_them():
    names = ["head-" * 20 + "last", "hydra"]
    plot = Bars(**WORDS, groups=["all"], series={name: [1.5] for name in names}, errors={names[0]: [0.25]})
    figure = drawn(plot)
    (ax,) = figure.axes
    long, short = (label.get_text() for label in ax.get_yticklabels())
    assert re.fullmatch("….{10,30}head-last", long)
    assert short == "hydra"
    assert [text.get_text() for text in ax.texts] == ["1.50 ± 0.25", "1.50"]
    assert ax.get_position().width > 0.4
    assert figure.legends == []


def test_stacks_have_parts_one_after_the_other_and_their_sum():
    plot = Bars(**WORDS, groups=["a", "b"], series={"draft": [2.0, 3.0], "verify": [10.0, 20.0]}, is_stacked=True)
    (ax,) = drawn(plot).axes
    draft, verify = ax.containers
    assert [(bar.get_x(), bar.get_width()) for bar in (*draft, *verify)] == [(0, 2), (0, 3), (2, 10), (3, 20)]
    assert [text.get_text() for text in ax.texts] == ["12.0", "23.0"]
    assert ax.get_xlim() == (0, 23)
    assert plot.table().rows == [["draft", "2.00", "3.00"], ["verify", "10.00", "20.00"]]


def test_a_legend_of_long_labels_lies_within_the_figure():
    series = {f"a long name {number}": [1.0, 2.0] for number in range(7)}
    figure = Figure(figsize=(5.2, 1), layout="constrained")
    Bars(**WORDS, groups=["one", "two"], series=series).draw(figure)
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width


@pytest.mark.parametrize(
    "plot",
    [
        Curves(**WORDS, panels={"speed": {}}),
        Curves(**WORDS, panels={"speed": {"a": []}}, log=True),
        Bars(**WORDS, groups=[], series={}),
        Bars(**WORDS, groups=[], series={"drafting": []}, is_stacked=True),
    ],
)
def test_a_plot_of_nothing_is_still_a_plot(plot: Plot):
    assert svg_of(plot, "light").startswith("<?xml")
    assert plot.table().rows in ([], [["drafting"]])


def svg_of(plot: Plot, scheme: str) -> str:
    return base64.b64decode(plot.uri(scheme).removeprefix("data:image/svg+xml;base64,")).decode()


@pytest.mark.parametrize("plot", [CURVES, replace(BARS, styles={})])
def test_an_image_has_the_colours_of_its_page_and_no_background(plot: Plot):
    assert plot.uri("light") == plot.uri("light"), "the same bytes each time"
    for scheme, ink in plots.INKS.items():
        svg = svg_of(plot, scheme)
        assert ink in svg
        assert not re.search("#000000|fill: (#ffffff|white|black)", svg)
        assert contrast(ink, CARDS[scheme]) > 7
    assert not set(plots.INKS.values()) <= set(re.findall(r"#\w{6}", svg))


def test_names_of_heads_are_words_and_not_formulas():
    svg = svg_of(Bars(**WORDS, groups=["all"], series={"$a$ <b>": [1.5]}), "dark")
    assert ">$a$ &lt;b&gt;</text>" in svg


def test_files_of_a_plot_stand_alone_and_are_black_on_white():
    files = CURVES.files("a model, a machine")
    assert files == CURVES.files("a model, a machine"), "the same bytes each time"
    svg = files["plot.svg"].decode()
    assert ET.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"  # noqa: S314 - our own
    assert "fill: #ffffff" in svg
    assert not any(ink in svg for ink in plots.INKS.values())
    assert all(f">{words}</text>" in svg for words in ("Title", "a model, a machine", "speed"))
    image = imread(io.BytesIO(files["plot.png"]))
    assert image.shape[1] == 5.2 * 200, "200 dots per inch"
    assert image[0, 0].tolist() == [1, 1, 1, 1]
    assert image[..., :3].min() < 0.05


_PAGE = Path(plots.__file__).with_name("page.html.j2").read_text()
_FOUND = (f"#{card * 2 if len(card) == 3 else card}" for card in re.findall(r"--card: #(\w+)", _PAGE))
CARDS = dict(zip(("light", "dark"), _FOUND, strict=True))


def test_colours_are_readable_on_light_and_dark_cards():
    """Contrast of at least 3, as WCAG asks for graphics."""
    assert all(contrast(colour, card) >= 3 for colour in plots.COLOURS for card in CARDS.values())


def contrast(one: str, other: str) -> float:
    """Of two colours such as #ffffff, from 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
