"""Facts of a tune result on its page."""

import copy
from typing import Any

import pytest

from draftheads.reports.tune_page import tune_page
from report_records import TUNE


def test_the_answer_is_the_fastest_tree_for_the_smallest_batch() -> None:
    page = tune_page(TUNE)
    assert page.title == "Trees for hydra (hydra) on smollm2-135m"
    assert page.answer == (
        "On this machine, a growing tree of 3 nodes is predicted to be fastest for one request: 1.60 times as fast as "
        "plain decoding."
    )


def test_the_answer_says_where_no_tree_is_faster() -> None:
    page = tune_page({**TUNE, "batches": TUNE["batches"][:1]})
    assert (
        page.answer == "No tree is predicted to be faster than plain decoding on this machine, for 8 requests together."
    )


def test_each_batch_size_has_a_row_smallest_first() -> None:
    assert tune_page(TUNE).tables[0].rows == [
        [1, "growing", 3, "80.0", "50.0", "1.60×"],
        [8, "plain", 1, "1,234.5", "1,234.5", "1.00×"],
    ]


def test_accuracies_of_the_heads_are_sums_over_ranks() -> None:
    table = tune_page(TUNE).tables[1]
    assert table.columns == ["head", "top-1", "top-3"], "four ranks were measured"
    assert table.rows == [[1, "50.0%", "68.8%"], [2, "25.0%", "25.0%"]]


def test_plots_show_both_kinds_of_trees_and_the_mean_calibration_error() -> None:
    trees, calibration = tune_page(TUNE).figures
    assert ">static tree</text>" in trees.svg
    assert ">growing tree</text>" in trees.svg
    assert "15.6 points before calibration and 3.1 points after calibration" in calibration.caption


def test_a_head_without_growing_trees_has_a_page() -> None:
    trees, _ = tune_page({**TUNE, "dynamic": None}).figures
    assert "growing" not in trees.svg


@pytest.mark.parametrize("bins", [[], [[0.5, 0.0, 0]]])
def test_a_record_without_draft_tokens_has_a_page(bins: list[Any]) -> None:
    record = copy.deepcopy(TUNE)
    record["confidence"] |= {"before": bins, "after": bins}
    assert "0.0 points before calibration" in tune_page(record).figures[1].caption
