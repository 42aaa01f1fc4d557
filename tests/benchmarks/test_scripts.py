"""Scripts that measure the core run their smallest size on tiny models."""

import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cli_world import write_model

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
Script = Callable[..., str]
# options for a tiny model, and what is printed
SMALL: dict[str, tuple[str, str]] = {
    "distill_rate.py": ("--prompts 8 --batch-size 2 --seconds 0.01 --rounds 1", "answers/s"),
    "large_target.py": ("--size tiny --num-texts 12", "anonymous_gb"),
    "memory.py": ("--model model --head hydra --precisions fp32 --max-new-tokens 4", "fp32"),
    "step.py": ("--model model --precisions fp32 --nodes 1 4 --rows 1 --lengths 20 --prompts 8 --repeats 1", "Prompts"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("scripts"))


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Script:
    """Runs a script in this process, with the processes that it would start, and returns what it prints."""

    start = subprocess.run

    def process(command: list[str], **options: Any) -> Any:
        if command[0] != sys.executable:
            return start(command, **options)
        return SimpleNamespace(stdout=script(Path(command[1]).name, *command[2:]))

    def script(name: str, *options: str) -> str:
        monkeypatch.chdir(folder)
        monkeypatch.setenv("DRAFTHEADS_CACHE", str(folder / "cache"))
        monkeypatch.syspath_prepend(BENCHMARKS)
        monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / name), *options])
        monkeypatch.setattr(subprocess, "run", process)
        with torch.random.fork_rng():
            runpy.run_path(sys.argv[0], run_name="__main__")
        return capfd.readouterr().out

    return script


@pytest.mark.parametrize("name", SMALL)
def test_the_smallest_size_runs(name: str, run: Script):
    options, expected = SMALL[name]
    assert expected in run(name, *options.split())


def test_a_hybrid_model_is_written_and_timed(run: Script, folder: Path):
    run("random_model.py", "qwen3.5-tiny", "hybrid")
    small = "--model hybrid --precisions fp32 --nodes 3 --rows 1 --lengths 20 --repeats 1"
    assert "hybrid in fp32" in run("step.py", *small.split())


def test_the_readme_has_every_file():
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in BENCHMARKS.glob("*.py") if f"`{path.name}`" not in text] == []
