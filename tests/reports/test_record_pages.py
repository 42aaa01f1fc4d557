"""Facts of a training run and of a tune result on their pages, and the writing of pages beside their records."""

import copy
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from draftheads.bench.table import Row
from draftheads.cli import show
from draftheads.reports.record_pages import training_page, tune_page, write_page
from draftheads.train.report import verdict_of
from html_pages import check_page
from report_records import BENCH, METRICS, MOVEMENT, TUNE, VALIDATION, curves_of, write_training_run


def test_the_verdict_is_that_of_the_tokens_per_step_with_the_tree(tmp_path: Path):
    page = training_page({**METRICS, "reading_seconds": 20.3}, write_training_run(tmp_path))
    assert page.title == "hydra heads for a <b> & c"
    assert page.verdict == verdict_of(METRICS)
    assert "200 held-out texts with a tree of 3 nodes" in page.note
    assert "took 20 seconds for hidden states and 61 for training, which read 3,210 tokens per second" in page.note
    assert "took 0 seconds for hidden" in training_page(METRICS, tmp_path).note  # an earlier version's run
    assert page.numbers[:2] == [("7,070", "training texts"), ("9,015", "steps")]


def test_each_head_has_a_row_and_a_joint_run_a_table_of_how_far_the_model_moved(tmp_path: Path):
    heads, moved = training_page({**METRICS, "movement": MOVEMENT}, write_training_run(tmp_path)).tables
    assert heads.rows == [[1, "2.500", "50.0%", "70.0%", "87.5%"], [2, "3.250", "25.0%", "40.0%", "50.0%"]]
    assert [row[1:] for row in moved.rows] == [["3.500", "3.750"], ["", "0.0125"], ["", "97.5%"]]


def test_settings_that_differ_from_the_defaults_come_first_and_a_run_that_logged_nothing_has_a_page(tmp_path: Path):
    page = training_page(METRICS, tmp_path)
    assert page.settings == [("data", ["chats.jsonl"])]
    facts = {title: dict(values) for title, values in page.facts}
    defaults = {"learning_rate": 0.0005}
    assert facts == {"Settings at their defaults": defaults, "Command and machine": METRICS["provenance"]}
    assert len(page.tables) == 1
    (plot,) = page.plots
    assert curves_of(plot) == {"loss": {}}


def losses_of(folder: Path, losses: Sequence[float]) -> Any:
    """The plot of a run with one head and these losses."""
    lines = [json.dumps({"step": step, "head_losses": [loss]}) for step, loss in enumerate(losses)]
    (folder / "log.jsonl").write_text("\n".join(lines))
    (plot,) = training_page(METRICS, folder).plots
    return plot


def test_plots_have_the_numbers_of_the_logs(tmp_path: Path):
    tokens, losses, accuracy = training_page(METRICS, write_training_run(tmp_path)).plots
    assert curves_of(tokens) == {"tokens per step": {"tree": [(0, 1.75), (30, 31.75)], "chain": [(0, 1.5), (30, 1.5)]}}
    assert tokens.guide == [(0, 1), (30, 1)]
    assert losses.caption == "Lower is better."
    assert curves_of(losses)["loss"] == {
        "head 1": [(10, 4), (20, 3), (30, 2)],
        "head 1, held-out": [(0, 4), (30, 1)],
        "head 2": [(10, 5), (20, 4), (30, 3)],
        "head 2, held-out": [(0, 5), (30, 5)],
    }
    assert losses.top is None
    assert list(losses.styles.values()) == [(head, is_dashed) for head in (0, 1) for is_dashed in (False, True)]
    assert curves_of(accuracy) == {
        "top-1 accuracy, %": {"head 1": [(0, 12.5), (30, 42.5)], "head 2": [(0, 6.25), (30, 6.25)]}
    }
    assert accuracy.top == 1.05 * 42.5


def test_noise_of_small_accuracies_is_not_magnified(tmp_path: Path):
    lines = [{**VALIDATION[0], "step": step, "top1": [share]} for step, share in ((0, 0.001), (9, 0.002))]
    (tmp_path / "validation.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert training_page(METRICS, tmp_path).plots[2].top == 10


def test_losses_are_smoothed_over_a_twentieth_of_the_log(tmp_path: Path):
    plot = losses_of(tmp_path, [0.0, 1.0] * 20)
    assert curves_of(plot)["loss"]["head 1"][:3] == [(0, 0.0), (1, 0.5), (2, 0.5)]
    assert plot.caption == "Lower is better. Training: the mean of the last 2 lines of the log."


def test_an_early_spike_of_the_loss_does_not_flatten_the_rest(tmp_path: Path):
    plot = losses_of(tmp_path, [100.0] * 3 + [2.0] * 37)
    assert plot.top == 4
    assert plot.caption.endswith("Early losses above 4 are cut off.")
    assert losses_of(tmp_path, [2.0] * 30 + [100.0] + [2.0] * 9).top is None, "only early losses are cut off"
    assert losses_of(tmp_path, [100.0]).top is None


# --- what was tuned ---


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


def timed(nodes: int, predicted: float, speed: float) -> dict[str, Any]:
    numbers = {"num_nodes": nodes, "predicted_tokens_per_second": predicted, "predicted_speedup": predicted / 40}
    row = Row(
        name="head", tokens_per_step=1.5, predicted_tokens_per_step=1.75, tokens_per_second=9.0, speedup=9.0,
        decode_tokens_per_second=speed, decode_speedup=speed / 50, decode_speedup_interval=(1, 2), numbers=numbers,
        decode_tokens_per_second_interval=(speed - 5, speed + 5), num_answers=16, num_different=nodes // 9,
    )  # fmt: skip
    return asdict(row)


def test_timed_trees_have_a_sentence_and_a_table_for_each_batch_size():
    one, four = [timed(1, 40, 50), timed(3, 80, 75), timed(9, 60, 70)], [timed(1, 40, 50), timed(3, 44, 45)]
    page = tune_page({**TUNE, "measured": {"1": one, "4": four}})
    assert (
        "Measured with one request, the static tree of 3 nodes is fastest: 1.50 × plain decoding. 3 nodes had been "
        "predicted; 31 of 32 answers have the text of plain decoding. Measured with 4 requests at a time, no static "
        "tree is faster than plain decoding. 3 nodes had been predicted; 16 of 16 answers have the text of plain "
        "decoding. Predicted means"
    ) in page.note
    *_, first, second = page.tables
    assert (first.title, second.title) == ("Static trees with one request", "Static trees with 4 requests at a time")
    assert first.rows[1] == ["3", "1.75", "1.50", "80.0", "75.0 (70.0-80.0)", "2.00", "1.50"]


def test_tables_are_by_requests_by_size_of_tree_and_by_head():
    speeds, sizes, accuracy = tune_page(TUNE).tables
    assert speeds.rows == [
        [1, "growing", 3, "1.60", "80.0", "50.0"],
        [8, "plain", 1, "1.00", "1,234.5", "1,234.5"],
    ]
    assert sizes.rows == [[1, "1.00", "1.00"], [2, "1.50", "1.50"]]
    assert accuracy.columns == ["head", "top-1", "top-3"], "four ranks were measured"
    assert accuracy.rows == [[1, "50.0%", "68.8%"], [2, "25.0%", "25.0%"]], "sums over ranks"


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


# --- writing ---


def folder_with(tmp_path: Path, kind: Any) -> Path:
    if kind == "training":
        return write_training_run(tmp_path)
    (tmp_path / f"{kind}.json").write_text(json.dumps({"tune": TUNE, "bench": BENCH}[kind]))
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "name", "facts"),
    [
        ("training", "report.html", ["1.75 tokens per step", "<td>87.5%</td>", "0.0005"]),
        ("tune", "tune.html", ["growing trees of 3 nodes", "<td>1,234.5</td>", "1.31, 1.50", "bfloat16"]),
        ("bench", "bench.html", ["hydra is fastest", "<td>12.3 M</td>", "some/questions.jsonl"]),
    ],
)
def test_each_kind_of_record_gives_a_page_with_its_facts(tmp_path: Path, kind: Any, name: str, facts: list[str]):
    page = write_page(folder_with(tmp_path, kind), kind)
    assert page == tmp_path / name
    html = page.read_text()
    assert write_page(tmp_path, kind).read_text() == html, "the same record gives the same bytes"
    check_page(html)
    assert "<summary>Command and machine</summary>" in html
    assert [fact for fact in facts if fact not in html] == []


def test_commands_print_which_page_they_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show.write_page(Console(), folder_with(tmp_path, "tune"), "tune")
    assert capsys.readouterr().out == f"wrote {tmp_path / 'tune.html'}\n"


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_without_its_package_commands_print_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    show.write_page(Console(), folder_with(tmp_path, "tune"), "tune")
    words = f"no page: the page needs {package}; install it with: pip install '.[report]' in a checkout of"
    assert capsys.readouterr().out.startswith(words)
    assert not (tmp_path / "tune.html").exists()
