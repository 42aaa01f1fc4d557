"""Plots hold the values that they were given."""

import io
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.image import imread

from draftheads.reports import plots
from report_records import LOG, VALIDATION

PLAIN = {"plain decoding": [(0, 1), (1, 1)]}  # a line over the whole width


def drawn(draw: Callable[..., None], *arguments: Any, **named: Any) -> Any:
    """The only axes of a figure that was drawn on."""
    figure = Figure()
    draw(figure, *arguments, **named)
    (ax,) = figure.axes
    return ax


def points(line: Any) -> list[tuple[float, float]]:
    return list(zip(line.get_xdata(), line.get_ydata(), strict=True))


def lines(ax: Any) -> dict[str, list[tuple[float, float]]]:
    """Points of the lines in the legend, by their labels."""
    handles, labels = ax.get_legend_handles_labels()
    return {label: points(handle) for handle, label in zip(handles, labels, strict=True)}


def test_losses_are_a_moving_mean_per_head_and_dots_of_held_out_text():
    ax = drawn(plots.draw_losses, LOG, VALIDATION)
    assert lines(ax) == {
        "head 1": [(10, 4), (20, 3), (30, 2)],
        "head 2": [(10, 5), (20, 4), (30, 3)],
        "training": [],
        "held-out": [],
    }
    dots = [line for line in ax.lines if line.get_marker() == "o" and len(line.get_xdata())]
    assert [points(line) for line in dots] == [[(0, 4), (30, 1)], [(0, 5), (30, 5)]]
    assert [line.get_color() for line in ax.lines[:4:2]] == [line.get_color() for line in dots]
    assert ax.get_ylim()[0] == 0


def test_training_losses_are_smoothed_over_a_twentieth_of_the_log():
    log = [{"step": step, "head_losses": [float(step % 2)]} for step in range(40)]
    drawn_points = lines(drawn(plots.draw_losses, log, []))["head 1"]
    assert drawn_points[:3] == [(0, 0.0), (1, 0.5), (2, 0.5)]


def test_an_early_spike_of_the_loss_does_not_flatten_the_rest():
    log = [{"step": step, "head_losses": [100.0 if step < 3 else 2.0]} for step in range(40)]
    assert plots.loss_limit(log, []) == 4
    assert drawn(plots.draw_losses, log, []).get_ylim() == (0, 4)
    late = [{"step": step, "head_losses": [100.0 if step == 30 else 2.0]} for step in range(40)]
    assert plots.loss_limit(late, []) is None, "only early losses are cut off"
    assert drawn(plots.draw_losses, late, []).get_ylim()[1] > 50
    assert plots.loss_limit(log[:1], []) is None


def test_acceptance_is_top1_accuracy_of_each_head_in_percent():
    ax = drawn(plots.draw_acceptance, VALIDATION)
    assert lines(ax) == {"head 1": [(0, 12.5), (30, 42.5)], "head 2": [(0, 6.25), (30, 6.25)]}
    assert ax.get_ylim()[0] == 0
    tiny = drawn(plots.draw_acceptance, [{"step": 0, "top1": [0.001]}, {"step": 9, "top1": [0.002]}])
    assert tiny.get_ylim() == (0, 10), "noise is not magnified"


def test_tokens_per_step_are_those_of_chain_and_tree():
    ax = drawn(plots.draw_tokens_per_step, VALIDATION)
    assert lines(ax) == {"tree": [(0, 1.75), (30, 31.75)], "chain": [(0, 1.5), (30, 1.5)], **PLAIN}
    assert ax.get_ylim() == (0, 1.05 * 31.75)


def test_speedups_have_a_curve_and_a_dot_for_each_number_of_requests():
    curves = [("1 request", [1.0, 1.5, 1.25]), ("8 requests", [1.0, 0.5, 0.25])]
    ax = drawn(plots.draw_speedups, curves, [(2, 1.5), (1, 1.0)])
    assert lines(ax) == {
        "1 request": [(1, 1), (2, 1.5), (3, 1.25)],
        "8 requests": [(1, 1), (2, 0.5), (3, 0.25)],
        **PLAIN,
    }
    dots = [points(line) for line in ax.lines if line.get_marker() == "o"]
    assert dots == [[(2, 1.5)], [(1, 1.0)]]
    assert ax.get_ylim()[0] == 0


def test_tree_sizes_start_at_one_node_and_have_bands_of_one_error():
    ax = drawn(plots.draw_tree_sizes, [("static", [1.0, 1.5], [0.0, 0.25]), ("growing", [1.0], [0.0])])
    assert lines(ax) == {"static": [(1, 1), (2, 1.5)], "growing": [(1, 1)], **PLAIN}
    assert ax.get_ylim()[0] == 0
    band = ax.collections[0].get_paths()[0].vertices.tolist()
    assert {(1.0, 1.0), (2.0, 1.25), (2.0, 1.75)} == {(x, y) for x, y in band}


def test_calibration_has_dots_in_percent_and_bars_of_counts():
    figure = Figure()
    bins = [(0.25, 0.5, 100.0), (0.5, 1.0, 29.0), (0.75, 0.25, 30.0)]
    plots.draw_calibration(figure, [("before", bins), ("after", [])], min_count=30)
    shares, counts = figure.axes
    before, after = shares.containers
    assert points(before.lines[0]) == [(25, 50), (75, 25)], "too few draft tokens for a dot"
    assert len(after.lines[0].get_xdata()) == 0
    ((_, low), (_, high)) = before.lines[2][0].get_segments()[0]
    assert (low, high) == (45, 55), "one standard error"
    bars = counts.containers[0].patches
    assert [bar.get_height() for bar in bars] == [100, 29, 30]
    assert bars[0].get_facecolor() == bars[2].get_facecolor() != bars[1].get_facecolor()


def test_bars_have_errors_and_their_numbers_and_the_style_of_their_head():
    styles = {"a": plots.Style("#ff0000"), "b": plots.Style("#0000ff", is_dashed=True)}
    ax = drawn(plots.draw_bars, ["a", "b"], [1.5, 0.75], [0.25, 0.125], label="speed", styles=styles)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    errors, (fast, slow) = ax.containers
    assert [fast.get_width(), slow.get_width()] == [1.5, 0.75]
    spans = errors[2][0].get_segments()
    assert [(left[0], right[0]) for left, right in spans] == [(1.25, 1.75), (0.625, 0.875)]
    assert [text.get_text() for text in ax.texts] == ["1.50 ± 0.25", "0.75 ± 0.12"]
    assert [bar.get_facecolor() for bar in (fast, slow)] == [(1, 0, 0, 1), (0, 0, 1, 1)]
    assert [bool(bar.get_hatch()) for bar in (fast, slow)] == [False, True]
    assert ax.get_xlim() == (0, 1.75), "the axis ends where the data ends"


def test_stacks_have_parts_side_by_side_and_their_sum():
    ax = drawn(plots.draw_stacks, ["a", "b"], {"draft": [2.0, 3.0], "verify": [10.0, 20.0]}, label="ms")
    draft, verify = ax.containers
    assert [(bar.get_x(), bar.get_width()) for bar in (*draft, *verify)] == [(0, 2), (0, 3), (2, 10), (3, 20)]
    assert [text.get_text() for text in ax.texts] == ["12.0", "23.0"]
    assert ax.get_xlim() == (0, 23)


def test_groups_have_a_bar_of_each_series_and_a_line_at_1():
    errors = {"a": [0.25, None], "b": [0.125, 0.5]}
    ax = drawn(plots.draw_groups, ["chat", "code"], {"a": [1.5, None], "b": [0.5, 2.0]}, errors=errors, label="speed")
    assert [label.get_text() for label in ax.get_xticklabels()] == ["chat", "code"]
    groups = [each for each in ax.containers if isinstance(each, BarContainer)]
    assert [[bar.get_height() for bar in bars] for bars in groups] == [[1.5, 0], [0.5, 2]]
    spans = [line.get_segments() for each in ax.containers if isinstance(each, ErrorbarContainer) for line in each[2]]
    assert [[(low[1], high[1]) for low, high in each] for each in spans] == [
        [(1.25, 1.75), (0, 0)],
        [(0.375, 0.625), (1.5, 2.5)],
    ]
    assert (ax.get_xlim(), ax.get_ylim()) == ((-0.5, 1.5), (0, 2.5)), "axes end where the data ends"
    centres = [[bar.get_x() + bar.get_width() / 2 for bar in bars] for bars in groups]
    assert centres == [pytest.approx([-0.2, 0.8]), pytest.approx([0.2, 1.2])]
    assert points(ax.lines[0]) == [(0, 1), (1, 1)]


def test_curves_lie_in_panels_and_have_a_tick_at_each_value():
    figure = Figure()
    panels = {"speed": {"a": [(1, 2.0, (1.0, 3.0)), (4, 8.0)], "b": [(2, 3.0)]}, "seconds": {"a": [(1, 0.5)]}}
    styles = {"a": plots.Style("#ff0000", is_dashed=True)}
    plots.draw_curves(figure, panels, label="batch size", log=True, styles=styles)
    above, below = figure.axes
    assert [points(line) for line in above.lines if line.get_marker() == "None"] == [[(1, 1.0), (1, 3.0)]]
    curve = next(line for line in above.lines if line.get_label() == "a")
    assert (curve.get_color(), curve.is_dashed()) == ("#ff0000", True)
    assert [line.is_dashed() for line in above.lines if line.get_label() == "b"] == [False]
    assert lines(above) == {"a": [(1, 2), (4, 8)], "b": [(2, 3)]}
    assert lines(below) == {"a": [(1, 0.5)]}
    assert [ax.get_ylabel() for ax in figure.axes] == ["speed", "seconds"]
    assert above.get_ylim() == (0, pytest.approx(8.24))
    assert below.get_xlabel() == "batch size"
    assert [label.get_text() for label in below.get_xticklabels()] == ["1", "2", "4"]
    assert len(figure.legends) == 1


def test_dots_have_intervals_and_are_hollow_where_they_are_dashed():
    spots = {"low": (0.5, 20.0), "high": (3.0, 80.0, (2.5, 3.25), (70.0, 90.0)), "none": (1.0, 1.0, None, None)}
    styles = {"high": plots.Style("#ff0000", "s", is_dashed=True)}
    ax = drawn(plots.draw_scatter, spots, x_label="tokens", y_label="speed", styles=styles)
    dots, lines = ([line for line in ax.lines if (line.get_marker() == "None") == bare] for bare in (False, True))
    assert [(line.get_label(), points(line)) for line in dots] == [(name, [spot[:2]]) for name, spot in spots.items()]
    assert [line.get_markerfacecolor() == "none" for line in dots] == [False, True, False]
    assert [points(line) for line in lines] == [[(2.5, 80.0), (3.25, 80.0)], [(3.0, 70.0), (3.0, 90.0)]]


def test_a_legend_of_long_labels_lies_within_the_figure():
    figure = Figure(figsize=(5.2, 3.4), layout="constrained")
    plots.draw_groups(figure, ["all"], {f"a long name {number}": [1.0] for number in range(7)}, label="speed")
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width


@pytest.mark.parametrize(
    "draw",
    [
        partial(plots.draw_losses, log=[], validation=[]),
        partial(plots.draw_acceptance, validation=[]),
        partial(plots.draw_tokens_per_step, validation=[]),
        partial(plots.draw_tree_sizes, trees=[("static", [1.0], [0.0])]),
        partial(plots.draw_speedups, curves=[], chosen=[]),
        partial(plots.draw_calibration, stages=[("before", [])], min_count=30),
        partial(plots.draw_curves, panels={"speed": {}}, label="nodes"),
        partial(plots.draw_groups, groups=[], series={}, label="speed"),
        partial(plots.draw_scatter, points={}, x_label="tokens", y_label="speed"),
        partial(plots.draw_stacks, names=[], parts={"drafting": []}, label="ms"),
    ],
)
def test_a_plot_of_nothing_is_still_a_plot(draw: Callable[[Any], None]):
    assert plot_of(draw).svg.startswith("<svg")


def test_bars_with_long_names_leave_room_for_the_bars():
    figure = Figure(figsize=(5.2, 2), layout="constrained")
    plots.draw_bars(figure, ["head-" * 20 + "last", "hydra"], [1.5, 1.0], [0.0, 0.0], label="speed")
    figure.draw_without_rendering()  # fails with a warning where there is no room
    first, second = (label.get_text() for label in figure.axes[0].get_yticklabels())
    assert first.startswith("…")
    assert first.endswith("head-last")
    assert second == "hydra"
    assert figure.axes[0].get_position().width > 0.4


def test_steps_are_whole_numbers():
    entries = [{**VALIDATION[0], "step": step} for step in range(3)]
    for draw in (partial(plots.draw_losses, log=LOG[:1]), plots.draw_acceptance, plots.draw_tokens_per_step):
        ticks = drawn(draw, validation=entries).get_xticks()
        assert all(float(tick).is_integer() for tick in ticks)


def plot_of(draw: Callable[[Any], None], name: str = "plot") -> plots.Figure:
    return plots.Figure("Title", draw, "Caption.", "Words.", name)


def test_an_svg_is_the_same_each_time_has_searchable_words_and_the_colour_of_the_page():
    plot = plot_of(partial(plots.draw_acceptance, validation=VALIDATION))
    assert plot.svg == plot.svg
    assert ">head 1</text>" in plot.svg
    assert "currentColor" in plot.svg
    assert "#000000" not in plot.svg
    assert not re.search("fill: (#ffffff|white)", plot.svg), "the background is that of the page"


def test_ids_in_svgs_of_other_names_are_others():
    draw = partial(plots.draw_acceptance, validation=VALIDATION)
    one, other = (set(re.findall(r'id="([^"]*)"', plot_of(draw, name).svg)) for name in ("one", "other"))
    assert one
    assert not one & other


def test_files_of_a_plot_stand_alone_and_are_black_on_white():
    plot = plot_of(partial(plots.draw_acceptance, validation=VALIDATION))
    files = plot.files("a model, a machine")
    assert files == plot.files("a model, a machine"), "the same bytes each time"
    svg = files["plot.svg"].decode()
    assert ET.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"  # noqa: S314 - our own
    assert ">head 1</text>" in svg
    assert "fill: #ffffff" in svg
    assert "#000000" in svg
    assert "currentColor" not in svg
    image = imread(io.BytesIO(files["plot.png"]))
    assert image.shape[:2] == (640 + 2 * 40, 1040), "200 dots per inch, and two lines of a title"
    assert all(words in svg for words in ("Title", "a model, a machine"))
    assert image[0, 0].tolist() == [1, 1, 1, 1]
    assert image[..., :3].min() < 0.05


def test_colours_are_readable_on_light_and_dark_cards():
    """Contrast of at least 3, as WCAG asks for graphics."""
    page = Path(plots.__file__).with_name("page.html.j2").read_text()
    cards = [f"#{card * 2 if len(card) == 3 else card}" for card in re.findall(r"--card: #(\w+)", page)]
    assert len(cards) == 2
    assert all(contrast(colour, card) >= 3 for colour in plots.COLOURS for card in cards)


def contrast(one: str, other: str) -> float:
    """Of two colours such as #ffffff, from 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
