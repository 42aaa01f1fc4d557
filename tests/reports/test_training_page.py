"""Facts of a training run on its page."""

import json
from pathlib import Path

from draftheads.reports.training_page import training_page
from draftheads.train.summary import verdict_of
from report_records import METRICS, MOVEMENT, write_training_run


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


def test_what_is_smoothed_and_cut_off_is_stated(tmp_path: Path):
    folder = write_training_run(tmp_path)
    assert training_page(METRICS, folder).figures[1].caption == "Lower is better."
    losses = [100.0] * 2 + [4.0] * 98
    lines = [{"step": step, "head_losses": [loss]} for step, loss in enumerate(losses)]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "validation.jsonl").unlink()
    assert training_page(METRICS, folder).figures[0].caption == (
        "Lower is better. Training: the mean of the last 5 lines of the log. Early losses above 8 are cut off."
    )


def test_plots_of_held_out_text_need_measurements_during_training(tmp_path: Path):
    assert len(training_page(METRICS, write_training_run(tmp_path)).figures) == 3
    (tmp_path / "validation.jsonl").unlink()
    (losses,) = training_page(METRICS, tmp_path).figures
    assert ">held-out</text>" not in losses.svg


def test_a_run_that_logged_nothing_has_a_page(tmp_path: Path):
    assert len(training_page(METRICS, tmp_path).figures) == 1
