"""Plots hold the values that they were given."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from matplotlib.figure import Figure

from draftheads.reports import plots
from report_records import LOG, VALIDATION


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


def test_losses_are_a_moving_mean_per_head_and_dots_of_held_out_text() -> None:
    ax = drawn(plots.draw_losses, LOG, VALIDATION)
    assert lines(ax) == {"head 1": [(10, 4), (20, 3.5), (30, 3)], "head 2": [(10, 5), (20, 4.5), (30, 4)]}
    dots = [line for line in ax.lines if line.get_marker() == "o"]
    assert [points(line) for line in dots] == [[(0, 4), (30, 1)], [(0, 5), (30, 5)]]
    assert [line.get_color() for line in ax.lines[::2]] == [line.get_color() for line in dots]


def test_a_moving_mean_forgets_old_lines() -> None:
    log = [{"step": step, "head_losses": [100.0 if step < 10 else 1.0]} for step in range(40)]
    assert lines(drawn(plots.draw_losses, log, []))["head 1"][-1] == (39, 1.0)


def test_acceptance_is_top1_accuracy_of_each_head_in_percent() -> None:
    ax = drawn(plots.draw_acceptance, VALIDATION)
    assert lines(ax) == {"head 1": [(0, 12.5), (30, 42.5)], "head 2": [(0, 6.25), (30, 6.25)]}


def test_tokens_per_step_are_those_of_chain_and_tree() -> None:
    ax = drawn(plots.draw_tokens_per_step, VALIDATION)
    assert lines(ax) == {"tree": [(0, 1.75), (30, 31.75)], "chain": [(0, 1.5), (30, 1.5)]}


def test_tree_sizes_start_at_one_node_and_have_bands_of_one_error() -> None:
    ax = drawn(plots.draw_tree_sizes, [("static", [1.0, 1.5], [0.0, 0.25]), ("growing", [1.0], [0.0])])
    assert lines(ax) == {"static": [(1, 1), (2, 1.5)], "growing": [(1, 1)]}
    band = ax.collections[0].get_paths()[0].vertices.tolist()
    assert {(1.0, 1.0), (2.0, 1.25), (2.0, 1.75)} == {(x, y) for x, y in band}


def test_calibration_has_a_panel_per_stage_with_dots_in_percent() -> None:
    figure = Figure()
    plots.draw_calibration(figure, [("before", [(0.25, 0.5, 30.0), (0.75, 0.5, 10.0)]), ("after", [])])
    before, after = figure.axes
    assert before.get_title() == "before"
    assert before.collections[0].get_offsets().tolist() == [[25, 50], [75, 50]]
    large, small = before.collections[0].get_sizes()
    assert large > small
    assert len(after.collections[0].get_offsets()) == 0


def test_bars_hold_values_and_errors_of_every_series() -> None:
    series = [("greedy", [1.5, 2.0], [0.25, 0.5]), ("sampled", [1.25, 1.75], [0.0, 0.125])]
    ax = drawn(plots.draw_bars, ["a", "b"], series, label="speed")
    bars = [container for container in ax.containers if hasattr(container, "patches")]
    assert [[bar.get_width() for bar in container] for container in bars] == [[1.5, 2.0], [1.25, 1.75]]
    spans = [container.errorbar[2][0].get_segments() for container in bars]
    assert [[(left[0], right[0]) for left, right in of_series] for of_series in spans] == [
        [(1.25, 1.75), (1.5, 2.5)],
        [(1.25, 1.25), (1.625, 1.875)],
    ]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]


def test_a_legend_of_long_labels_lies_within_the_figure() -> None:
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    rules = ("greedy", "exact, T=0.7", "typical, T=0.7", "rejection, T=0.7", "block, T=0.7")
    plots.draw_bars(figure, ["a"], [(rule, [1.0], [0.0]) for rule in rules], label="speed")
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
    ],
)
def test_a_plot_of_nothing_is_still_a_plot(draw: Callable[[Any], None]) -> None:
    assert plots.as_svg(draw).startswith("<svg")


def test_an_svg_is_the_same_each_time_has_searchable_words_and_the_colour_of_the_page() -> None:
    svg = plots.as_svg(partial(plots.draw_acceptance, validation=VALIDATION))
    assert svg == plots.as_svg(partial(plots.draw_acceptance, validation=VALIDATION))
    assert ">head 1</text>" in svg
    assert "currentColor" in svg
    assert "#000000" not in svg
