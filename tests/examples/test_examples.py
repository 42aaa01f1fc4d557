"""Every script in examples/ runs on a tiny model."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftheads.checkpoints.checkpoint import save_head
from families import saved_model, tiny_head
from structured_world import json_model
from training_world import chat_model, counting_chats, write_chats

EXAMPLES = Path(__file__).parents[2] / "examples"
Script = Callable[..., str]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, an untrained head for it, chats and prompts."""
    folder = tmp_path_factory.mktemp("examples")
    target = chat_model()
    target.tokenizer.pad_token = target.tokenizer.eos_token  # generate of transformers needs one
    saved_model(target, folder / "model")
    save_head(tiny_head("hydra", target), folder / "head", base=target)
    write_chats(folder / "chats.jsonl", counting_chats(40))
    (folder / "prompts.txt").write_text("w1\nw2 w3\nw4\nw5 w6\n")
    return folder


@pytest.fixture
def run(world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Script:
    """Runs a script with options, in the world's folder, and returns what it prints."""

    def script(name: str, *options: str, model: str = "model") -> str:
        monkeypatch.chdir(world)
        monkeypatch.setenv("DRAFTHEADS_CACHE", str(world / "cache"))
        monkeypatch.setattr(sys, "argv", [name, "--model", str(world / model), *options])
        with torch.random.fork_rng():
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return script


RUNS = {  # options, and what is printed so often
    "generate.py": ("--head head --max-new-tokens 12", "tokens per step, ", 2),
    "custom_tree.py": ("--head head --max-new-tokens 12", "the same text as plain decoding", 2),
    "transformers_generate.py": ("--head head --max-new-tokens 12", "the same text as generate: True", 1),
    "train_head.py": ("--data chats.jsonl --out trained --epochs 1", "accuracy of the first head", 1),
    "tune_head.py": ("--head head --prompts prompts.txt --out tuned", "16 nodes: ", 1),
    "compare_heads.py": (
        "--heads head prompt-lookup --prompts prompts.txt --num-nodes 6 --max-new-tokens 12", "tokens per step", 3
    ),
}  # fmt: skip


@pytest.mark.usefixtures("cheap_nodes")
@pytest.mark.parametrize("name", RUNS)
def test_a_script_runs(name: str, run: Script):
    options, words, times = RUNS[name]
    assert run(name, *options.split()).count(words) == times


def test_structured_prints_json_and_the_same_text(run: Script, world: Path):
    model = json_model()
    saved_model(model, world / "json-model")
    save_head(tiny_head("hydra", model), world / "json-head", base=model)
    facts, steps, choice = run("structured.py", "--head", "json-head", model="json-model").splitlines()
    assert facts.startswith("{'name': '")
    assert steps.endswith("tokens per step, the same text: True")
    assert choice in ("yes", "no")


def test_every_script_has_a_test():
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert all(f'"{path.name}"' in tests for path in EXAMPLES.glob("*.py"))
