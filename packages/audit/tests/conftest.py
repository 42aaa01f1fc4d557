"""The command on fake servers, and on our own."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai._base_client
import pytest

import draftheads
from audit_world import NEW_TOKENS, Audit, World
from cli_world import write_model
from draftheads.cli.main import COMMANDS, main
from draftheads_audit import COMMAND, command
from serve_world import Running, running


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(write_model(tmp_path_factory.mktemp("audit")))


@pytest.fixture(scope="session")
def server(world: World) -> Iterator[Running]:
    """Our own, with a head."""
    drafting = draftheads.load(
        world.model, world.folder / "hydra", precision="fp32", tree=[[0], [1], [0, 0], [0, 0, 0]]
    )
    with running({"tiny": drafting, "tiny:plain": world.engine}) as one:
        yield one


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "audit", COMMAND)  # also where the package is not installed
    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr(command, "load", lambda name, **given: draftheads.load(name, **{**given, "precision": "fp32"}))
    monkeypatch.setattr(command, "quiet_transformers", lambda: None)  # for the whole process, and later tests
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "AUDIT_API_KEY", "AUDIT_BASELINE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def audit(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Audit:
    """Runs the command, which must end with a code; its JSON, with what it printed as ``shown`` and ``errors``."""

    def run(url: str, *arguments: str, code: int = 0, prompts: Path | None = None) -> dict[str, Any]:
        path = tmp_path / "audit.json"
        path.unlink(missing_ok=True)
        given = ["--prompts", str(prompts or world.folder / "prompts.txt"), "--max-new-tokens", str(NEW_TOKENS)]
        found = main(["audit", url, *given, "--json", str(path), *arguments])
        shown = capsys.readouterr()
        assert found == code, shown
        record = json.loads(path.read_text()) if path.exists() else {}
        return {**record, "shown": shown.out, "errors": shown.err}

    return run
