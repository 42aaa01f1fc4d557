"""Facts of a tune result on its page."""

import copy
from typing import Any

import pytest

from draftheads.reports.tune_page import tune_page
from report_records import TUNE, curves_of


def test_the_verdict_is_the_fastest_tree_for_the_smallest_number_of_requests():
    page = tune_page(TUNE)
    assert page.title == "Trees for hydra on smollm2-135m"
    assert page.verdict == (
        "With one request, growing trees of 3 nodes are fastest on this machine: predicted 1.60 × plain decoding."
    )
    assert page.note.startswith("From 8 requests at a time, plain decoding is predicted to be fastest.")
    assert "`draftheads bench` compares heads" in page.note
    assert {name: value for value, name in page.numbers} == {
        "tokens per step, 3 nodes": "1.88",
        "tokens per second, predicted": "80.0",
        "top-1 accuracy of head 1": "50%",
    }


def test_the_measured_speed_with_the_defaults_comes_first():
    page = tune_page({**TUNE, "defaults": {"speedup": 1.25, "error": 0.0625}})
    assert page.verdict == "With the defaults on this machine: 1.25 ± 0.06 × plain decoding (hydra)."
    assert page.note.startswith("With one request, growing trees of 3 nodes are fastest")
    assert page.numbers[0] == ("1.25", "× plain with the defaults, measured")


def test_the_verdict_says_where_no_tree_is_faster():
    page = tune_page({**TUNE, "batches": TUNE["batches"][:1]})
    assert page.verdict == (
        "With 8 requests at a time, plain decoding is fastest on this machine: no tree of this head is predicted to "
        "help."
    )
    assert page.note.startswith("Predicted means")
    assert len(page.numbers) == 1


def test_each_number_of_requests_has_a_row_smallest_first():
    assert tune_page(TUNE).tables[0].rows == [
        [1, "growing", 3, "1.60", "80.0", "50.0"],
        [8, "plain", 1, "1.00", "1,234.5", "1,234.5"],
    ]


def test_accuracies_of_the_heads_are_sums_over_ranks_from_1():
    table = tune_page(TUNE).tables[1]
    assert table.columns == ["head", "top-1", "top-3"], "four ranks were measured"
    assert table.rows == [[1, "50.0%", "68.8%"], [2, "25.0%", "25.0%"]]


def test_plots_show_speeds_both_kinds_of_trees_and_the_mean_calibration_error():
    speeds, trees, calibration = tune_page(TUNE).plots
    assert curves_of(speeds) == {
        "× plain decoding": {"1 request": [(1, 1.0), (2, 1.4), (3, 1.6)], "8 requests": [(1, 1.0)]}
    }
    assert speeds.caption.endswith("Fastest: 1 request 1.60 with 3 nodes, 8 requests 1.00 with 1 node.")
    static = [(1, 1.0, (1.0, 1.0)), (2, 1.5, (1.375, 1.625)), (3, 1.75, (1.5, 2.0))]
    growing = [*static[:2], (3, 1.875, (1.375, 2.375))]
    assert curves_of(trees) == {"tokens per step": {"static tree": static, "growing tree": growing}}
    assert speeds.guide == trees.guide == [(1, 1), (3, 1)]
    assert "15.6 points before calibration, 3.1 points after calibration" in calibration.caption
    assert curves_of(calibration)["draft tokens"]["before calibration"] == [(25, 300), (75, 100)]
    low, (confidence, accepted, bounds) = curves_of(calibration)["accepted, %"]["before calibration"]
    assert low[:2] == (25, 12.5)
    assert (confidence, accepted, bounds) == (75, 50, pytest.approx((45, 55))), "one standard error"
    assert "no dot" not in calibration.caption


def test_bins_with_few_draft_tokens_have_no_dot():
    record = copy.deepcopy(TUNE)
    record["confidence"]["after"] += [[0.95, 1.0, 29.0], [0.96, 1.0, 30.0]]
    plot = tune_page(record).plots[2]
    assert "fewer than 30 draft tokens have no dot" in plot.caption
    dots, counts = (curves["after calibration"] for curves in curves_of(plot).values())
    assert [x for x, *_ in dots] == [25, 75, 96]
    assert counts[-2:] == [(95, 29), (96, 30)]


@pytest.mark.parametrize("bins", [[], [[0.5, 0.0, 0]]])
def test_a_record_without_draft_tokens_has_a_page(bins: list[Any]):
    record = copy.deepcopy(TUNE)
    record["confidence"] |= {"before": bins, "after": bins}
    assert "0.0 points before calibration" in tune_page(record).plots[2].caption
