"""Facts of a training run on its page."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftheads.reports.training_page import training_page
from draftheads.train.report import verdict_of
from report_records import METRICS, MOVEMENT, VALIDATION, curves_of, write_training_run


def test_the_verdict_is_that_of_the_tokens_per_step_with_the_tree(tmp_path: Path):
    page = training_page({**METRICS, "reading_seconds": 20.3}, write_training_run(tmp_path))
    assert page.title == "hydra heads for a <b> & c"
    assert page.verdict == verdict_of(METRICS)
    assert "200 held-out texts with a tree of 3 nodes" in page.note
    assert "took 20 seconds for hidden states and 61 for training, which read 3,210 tokens per second" in page.note
    assert "took 0 seconds for hidden" in training_page(METRICS, tmp_path).note  # an earlier version's run
    assert page.numbers[:2] == [("7,070", "training texts"), ("9,015", "steps")]


def test_each_head_has_a_row_with_loss_and_accuracies(tmp_path: Path):
    (table,) = training_page(METRICS, write_training_run(tmp_path)).tables
    assert table.rows == [[1, "2.500", "50.0%", "70.0%", "87.5%"], [2, "3.250", "25.0%", "40.0%", "50.0%"]]


def test_a_joint_run_has_a_table_of_how_far_the_model_moved(tmp_path: Path):
    _, table = training_page({**METRICS, "movement": MOVEMENT}, write_training_run(tmp_path)).tables
    assert [row[1:] for row in table.rows] == [["3.500", "3.750"], ["", "0.0125"], ["", "97.5%"]]


def test_settings_that_differ_from_the_defaults_come_first(tmp_path: Path):
    page = training_page(METRICS, tmp_path)
    assert page.settings == [("data", ["chats.jsonl"])]
    facts = {title: dict(values) for title, values in page.facts}
    assert facts == {
        "Settings at their defaults": {"learning_rate": 0.0005},
        "Command and machine": METRICS["provenance"],
    }


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


def test_a_run_that_logged_nothing_has_a_page(tmp_path: Path):
    (plot,) = training_page(METRICS, tmp_path).plots
    assert curves_of(plot) == {"loss": {}}
