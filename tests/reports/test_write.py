"""What a folder holds decides which pages are written into it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from draftheads.errors import DataError, MissingDependency
from draftheads.reports.bench_page import bench_page
from draftheads.reports.training_page import training_page
from draftheads.reports.tune_page import tune_page
from draftheads.reports.write import write_report
from html_pages import check_page
from report_records import BENCH, METRICS, TUNE, write_training_run


def folder_with(tmp_path: Path, record: str) -> Path:
    if record == "metrics.json":
        return write_training_run(tmp_path)
    (tmp_path / record).write_text(json.dumps({"tune.json": TUNE, "bench.json": BENCH}[record]))
    return tmp_path


@pytest.mark.parametrize(
    ("record", "page", "facts"),
    [
        ("metrics.json", "report.html", ["1.75 tokens per step", "<td>87.5%</td>", "0.0005"]),
        ("tune.json", "tune.html", ["growing trees of 3 nodes", "<td>1,234.5</td>", "1.31, 1.50", "bfloat16"]),
        ("bench.json", "bench.html", ["hydra is fastest", "<td>12.3 M</td>", "some/questions.jsonl"]),
    ],
)
def test_each_kind_of_folder_gives_a_page_with_its_facts(tmp_path: Path, record: str, page: str, facts: list[str]):
    assert write_report(folder_with(tmp_path, record)) == [tmp_path / page]
    html = (tmp_path / page).read_text()
    write_report(tmp_path)
    assert (tmp_path / page).read_text() == html, "the same record gives the same bytes"
    check_page(html)
    assert "<summary>Command and machine</summary>" in html
    assert [fact for fact in facts if fact not in html] == []


@pytest.mark.parametrize("record", ["metrics.json", "tune.json", "bench.json"])
def test_everything_from_files_is_escaped(tmp_path: Path, record: str):
    """Names of models, heads, prompts and settings."""
    strange = "<script>alert('$x')</script>"
    path = folder_with(tmp_path, record) / record
    content = json.loads(path.read_text())
    path.write_text(json.dumps(with_words(content, strange)))
    (page,) = write_report(tmp_path)
    html = page.read_text()
    check_page(html)
    assert html.count("&lt;script&gt;alert(") > 3


def with_words(value: Any, words: str) -> Any:
    """The record with these words before all its texts but the names of kinds of trees and of parts of questions."""
    if isinstance(value, dict):
        return {name: part if name in ("kind", "part") else with_words(part, words) for name, part in value.items()}
    if isinstance(value, list):
        return [with_words(part, words) for part in value]
    return f"{words}{value}" if isinstance(value, str) else value


def test_plots_are_written_as_files_for_papers(tmp_path: Path):
    page, *written = write_report(folder_with(tmp_path, "tune.json"), figures=True)
    assert page == tmp_path / "tune.html"
    assert [path.relative_to(tmp_path / "figures").name for path in written] == [
        f"{name}.{form}" for name in ("speedups", "sizes", "calibration") for form in ("svg", "png")
    ]
    assert all(path.read_bytes()[:5] == (b"<?xml" if path.suffix == ".svg" else b"\x89PNG\r") for path in written)


def test_plots_of_a_folder_have_names_of_their_own(tmp_path: Path):
    pages = [training_page(METRICS, write_training_run(tmp_path)), tune_page(TUNE), bench_page(BENCH)]
    names = [plot.name for page in pages for plot in page.plots]
    assert len(set(names)) == len(names) > 10


def test_a_folder_with_several_records_gets_the_wanted_pages(tmp_path: Path):
    folder_with(folder_with(tmp_path, "tune.json"), "metrics.json")
    assert [page.name for page in write_report(tmp_path, "tune")] == ["tune.html"]
    assert not (tmp_path / "report.html").exists()
    assert [page.name for page in write_report(tmp_path)] == ["report.html", "tune.html"]


def test_an_empty_folder_is_an_error_that_names_the_records(tmp_path: Path):
    with pytest.raises(DataError, match=r"no metrics\.json .* tune\.json .* bench\.json"):
        write_report(tmp_path)


@pytest.mark.parametrize("record", ["metrics.json", "tune.json", "bench.json"])
@pytest.mark.parametrize("content", ["{", "{}", "[]", '"text"', "\xff", '{"rows": 3}', '{"format_version": 2}'])
def test_a_damaged_record_is_named(tmp_path: Path, record: str, content: str):
    (tmp_path / record).write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match="cannot be read") as caught:
        write_report(tmp_path)
    assert caught.value.path == str(tmp_path / record)
    assert [path.name for path in tmp_path.iterdir()] == [record], "nothing is written"


@pytest.mark.parametrize(
    "damage",
    [
        {"batches": []},
        {"dynamic": {"expected": [1.0], "error": []}},
        {"confidence": None},
        {"format_version": 3},
    ],
)
def test_a_record_with_a_wrong_part_is_named(tmp_path: Path, damage: dict[str, Any]):
    (tmp_path / "tune.json").write_text(json.dumps({**TUNE, **damage}))
    with pytest.raises(DataError, match="this tune result cannot be read"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    "damage", [{"format_version": 2}, {"rows": []}, {"rows": [{"name": "hydra"}]}, {"drafting": {"hydra": {}}}]
)
def test_a_comparison_with_a_wrong_part_is_named(tmp_path: Path, damage: dict[str, Any]):
    (tmp_path / "bench.json").write_text(json.dumps({**BENCH, **damage}))
    with pytest.raises(DataError, match="this comparison cannot be read"):
        write_report(tmp_path)


def test_a_damaged_log_of_training_is_an_error(tmp_path: Path):
    (write_training_run(tmp_path) / "log.jsonl").write_text("{")
    with pytest.raises(DataError, match="this training run cannot be read"):
        write_report(tmp_path)


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_a_missing_package_is_named_with_its_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency, match=rf"needs {package}; .* pip install 'draftheads\[report\]'"):
        write_report(folder_with(tmp_path, "tune.json"))
    assert not (tmp_path / "tune.html").exists()
