"""The pages that commands write beside their records."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from draftheads.cli import show
from draftheads.reports.write import write_page
from html_pages import check_page
from report_records import BENCH, TUNE, write_training_run


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
    words = f"no page: the page needs {package}; install it with: pip install 'draftheads[report]'\n"
    assert capsys.readouterr().out == words
    assert not (tmp_path / "tune.html").exists()
