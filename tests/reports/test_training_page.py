"""Facts of a training run on its page."""

from pathlib import Path

from draftheads.reports.training_page import training_page
from report_records import METRICS, MOVEMENT, write_training_run


def test_the_answer_is_the_tokens_per_step_with_the_tree(tmp_path: Path) -> None:
    page = training_page(METRICS, write_training_run(tmp_path))
    assert page.title == "hydra heads for a <b> & c"
    assert page.answer == (
        "A tree of 3 nodes gives 1.75 tokens per step on 200 held-out texts; plain decoding gives 1."
    )
    assert "7,070 texts in 9,015 steps" in page.note
    assert "61 seconds at 3,210 tokens per second" in page.note


def test_each_head_has_a_row_with_loss_and_accuracies(tmp_path: Path) -> None:
    (table,) = training_page(METRICS, write_training_run(tmp_path)).tables
    assert table.rows == [[1, "2.500", "50.0%", "70.0%", "87.5%"], [2, "3.250", "25.0%", "40.0%", "50.0%"]]


def test_a_joint_run_has_a_table_of_how_far_the_model_moved(tmp_path: Path) -> None:
    _, table = training_page({**METRICS, "movement": MOVEMENT}, write_training_run(tmp_path)).tables
    assert [row[1:] for row in table.rows] == [["3.500", "3.750"], ["", "0.0125"], ["", "97.5%"]]


def test_options_and_provenance_are_listed(tmp_path: Path) -> None:
    facts = {title: dict(values) for title, values in training_page(METRICS, tmp_path).facts}
    assert facts == {"Settings": METRICS["options"], "Provenance": METRICS["provenance"]}


def test_plots_of_held_out_text_need_measurements_during_training(tmp_path: Path) -> None:
    assert len(training_page(METRICS, write_training_run(tmp_path)).figures) == 3
    (tmp_path / "validation.jsonl").unlink()
    (losses,) = training_page(METRICS, tmp_path).figures
    assert "dots" not in losses.caption


def test_a_run_that_logged_nothing_has_a_page(tmp_path: Path) -> None:
    assert len(training_page(METRICS, tmp_path).figures) == 1
