"""A folder with a tiny model and two heads for it, which the commands use."""

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import logging

import draftheads
from cli_world import Run, write_model
from draftheads.cli.main import main
from draftheads.decode.engine import Engine
from families import TREES, tiny_profile


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model (``model``) and two heads for it (``medusa``, ``hydra``)."""
    place = tmp_path_factory.mktemp("cli")
    write_model(place, profile=tiny_profile(TREES["ragged"]))
    (place / "bad.jsonl").write_text('\n{"prompt": \n', encoding="utf-8")
    (place / "empty.jsonl").write_text("\n", encoding="utf-8")
    return place


@pytest.fixture(autouse=True)
def _noise() -> Iterator[None]:
    """Commands quiet transformers for the whole process; later tests hear it again."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    yield
    logging.set_verbosity(verbosity)
    if bars:
        logging.enable_progress_bar()


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch, cheap_nodes: None) -> Path:
    """The folder is the working directory, nobody types, and the screen is as narrow as screens get."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.setenv("COLUMNS", "80")
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command that ends with this code; what it writes to standard output and error."""

    def command(arguments: list[str], *, code: int = 0) -> Any:
        assert main(arguments) == code
        return capsys.readouterr()

    return command


@pytest.fixture(scope="session")
def engine(folder: Path) -> Engine:
    """What the command line should say the same as."""
    return draftheads.load(folder / "model", precision="fp32")
