"""The fixtures of the core's tests, and a folder with a tiny model and two heads for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_world import write_model
from conftest import _idle_machine, cheap_nodes, one_thread  # noqa: F401
from draftheads.cli.main import COMMANDS, main
from draftheads_papers import REPRODUCE
from families import TREES, tiny_profile


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model (``model``) and two heads for it (``medusa``, ``hydra``)."""
    return write_model(tmp_path_factory.mktemp("papers"), profile=tiny_profile(TREES["ragged"]))


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch, cheap_nodes: None) -> Path:  # noqa: F811
    """The folder is the working directory, and the screen is as narrow as screens get."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a command that ends with this code; what it writes to standard output and error."""
    monkeypatch.setitem(COMMANDS, "reproduce", REPRODUCE)  # also where the package is not installed

    def command(arguments: list[str], *, code: int = 0) -> Any:
        assert main(arguments) == code
        return capsys.readouterr()

    return command
