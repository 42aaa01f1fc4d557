"""The page of a training run: everything in it comes from the files of the run's folder."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from draftheads.cli.main import main
from draftheads.errors import DataError, MissingDependency
from draftheads.reports.train_page import render, write_page

METRICS = {
    "method": "hydra",
    "model_id": "a <b> & c",
    "num_training_texts": 7070,
    "num_held_out_texts": 200,
    "num_steps": 9015,
    "training_seconds": 61.4,
    "tokens_per_second": 3210.0,
    "losses": [2.5, 3.25],
    "accuracy_by_rank": [[0.5, 0.6, 0.7], [0.25, 0.3, 0.4]],
    "top1": [0.5, 0.25],
    "top3": [0.7, 0.4],
    "top10": [0.875, 0.5],
    "tokens_per_step_chain": 1.625,
    "tokens_per_step_tree": 1.75,
    "tree": [[0], [1]],
    "options": {"learning_rate": 0.0005, "data": ["chats.jsonl"]},
    "provenance": {"command": "draftheads train", "torch": "2.13.0"},
}
LOG = [{"step": step, "loss": 5.0, "head_losses": [5 - step / 10, 6 - step / 10]} for step in (10, 20, 30)]
VALIDATION = [
    {"step": step, "losses": [4.0, 5.0], "tokens_per_step_chain": 1.5, "tokens_per_step_tree": 1.6} for step in (0, 30)
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "metrics.json").write_text(json.dumps(METRICS))
    for name, records in (("log.jsonl", LOG), ("validation.jsonl", VALIDATION)):
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def test_the_page_tells_what_the_files_hold(folder: Path) -> None:
    page = write_page(folder).read_text()
    assert page == render(METRICS, LOG, VALIDATION), "the same each time"
    for text in (
        "hydra heads for a &lt;b&gt; &amp; c",
        "7,070 texts in 9,015 steps, 61 seconds, 3,210 tokens a second",
    ):
        assert text in page
    assert "<b>" not in page, "names are text, not HTML"
    cells = ("2.500", "50.0%", "70.0%", "87.5%", "3.250", "25.0%", "40.0%")
    assert all(f"<td>{cell}</td>" in page for cell in cells)
    assert "1.62 with a chain, 1.75 with a tree of 3 nodes" in page
    assert "<th>learning_rate</th><td>0.0005</td>" in page
    assert "<th>torch</th><td>2.13.0</td>" in page
    assert page.count("<svg") == page.count("</svg>") == 3
    for label in ("head 1", "head 2", "chain", "tree", "expected tokens per step", "loss"):
        assert f">{label}</text>" in page, "pictures have words that can be searched"
    assert "src=" not in page, "nothing is fetched from elsewhere"
    assert 'href="http' not in page


def test_pictures_follow_their_numbers(folder: Path) -> None:
    whole = render(METRICS, LOG, VALIDATION)
    changed: list[tuple[Any, Any, Any]] = [
        (METRICS, [{**line, "head_losses": [9.0, 2.0 + line["step"]]} for line in LOG], VALIDATION),
        ({**METRICS, "accuracy_by_rank": [[0.1, 0.2, 0.9], [0.25, 0.3, 0.4]]}, LOG, VALIDATION),
        (METRICS, LOG, [{**line, "tokens_per_step_tree": 1 + line["step"]} for line in VALIDATION]),
        (METRICS, LOG, [{**line, "losses": [line["step"], 5.0]} for line in VALIDATION]),
    ]
    pages = {whole, *(render(*arguments) for arguments in changed)}
    assert len(pages) == 5


def test_a_run_that_logged_nothing_has_a_page() -> None:
    assert render(METRICS, [], []).count("<svg") == 3


def test_a_folder_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match="holds no finished training run"):
        write_page(tmp_path)
    assert main(["report", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert all(f"no {name}" in told for name in ("metrics.json", "tune.json", "bench.json"))


@pytest.mark.parametrize(
    ("name", "content"), [("metrics.json", "{"), ("metrics.json", "{}"), ("metrics.json", "[]"), ("log.jsonl", "{")]
)
def test_damaged_files(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(DataError, match="no training run that can be read"):
        write_page(folder)


def test_the_command_says_where_the_page_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    assert (folder / "report.html").is_file()


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_a_missing_package_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency, match=r"pip install 'draftheads\[report\]'"):
        write_page(folder)
    assert not (folder / "report.html").exists()
