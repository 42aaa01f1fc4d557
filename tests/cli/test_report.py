"""``draftheads report``, and the pages that other commands write at their end."""

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from cli_world import Run
from draftheads.cli.report import write_pages
from report_records import TUNE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tune.json").write_text(json.dumps(TUNE))
    return tmp_path


def test_the_command_writes_pages_and_prints_their_paths(folder: Path, run: Run) -> None:
    assert run(["report", str(folder)]).out == f"{folder / 'tune.html'}\n"
    assert (folder / "tune.html").is_file()


def test_plots_are_written_on_request(folder: Path, run: Run) -> None:
    first, *others = run(["report", str(folder), "--figures"]).out.splitlines()
    assert first == str(folder / "tune.html")
    assert sorted(others) == sorted(str(path) for path in (folder / "figures").iterdir())
    assert str(folder / "figures" / "sizes.png") in others


def test_a_folder_without_records_is_an_error(tmp_path: Path, run: Run) -> None:
    err = run(["report", str(tmp_path)], code=1).err
    assert f"error: {tmp_path}: not an output folder of train, tune or bench" in err


def test_other_commands_print_which_page_they_wrote(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pages(Console(), folder, "tune")
    assert capsys.readouterr().out == f"wrote {folder / 'tune.html'}\n"


def test_without_matplotlib_other_commands_print_how_to_install_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_pages(Console(), folder, "tune")
    install = "pip install 'draftheads[report]'"
    assert capsys.readouterr().out == (
        f"no page: the report needs matplotlib; install it with: {install}; then run: draftheads report {folder}\n"
    )
    assert not (folder / "tune.html").exists()
