"""Facts of a tune result on its page."""

import copy
from typing import Any

import pytest

from draftheads.reports.tune_page import tune_page
from report_records import TUNE


def test_the_verdict_is_the_fastest_tree_for_the_smallest_number_of_requests():
    page = tune_page(TUNE)
    assert page.title == "Trees for hydra on smollm2-135m"
    assert page.verdict == (
        "With one request, growing trees of 3 nodes are fastest on this machine: predicted "
        "1.60\N{NO-BREAK SPACE}× plain decoding."
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
    words = page.verdict.replace("\N{NO-BREAK SPACE}", " ")
    assert words == "With the defaults on this machine: 1.25 ± 0.06 × plain decoding (hydra)."
    assert "1.25 " not in page.verdict, "numbers stay in one piece"
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
    speeds, trees, calibration = tune_page(TUNE).figures
    assert ">8 requests</text>" in speeds.svg
    assert speeds.alt.endswith("Fastest: 1 request 1.60 with 3 nodes, 8 requests 1.00 with 1 node.")
    assert ">static tree</text>" in trees.svg
    assert ">growing tree</text>" in trees.svg
    assert "15.6 points before calibration, 3.1 points after calibration" in calibration.caption
    assert "Grey" not in calibration.caption


def test_bins_with_few_draft_tokens_are_mentioned():
    record = copy.deepcopy(TUNE)
    record["confidence"]["after"].append([0.95, 1.0, 29.0])
    assert "Grey bars: fewer than 30 draft tokens" in tune_page(record).figures[2].caption


@pytest.mark.parametrize("bins", [[], [[0.5, 0.0, 0]]])
def test_a_record_without_draft_tokens_has_a_page(bins: list[Any]):
    record = copy.deepcopy(TUNE)
    record["confidence"] |= {"before": bins, "after": bins}
    assert "0.0 points before calibration" in tune_page(record).figures[2].caption
