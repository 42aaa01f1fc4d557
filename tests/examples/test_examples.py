"""Every script in examples/ runs on a tiny model."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftheads.checkpoints.checkpoint import save_head
from draftheads.heads.medusa import MedusaConfig, MedusaHead
from families import tiny_head
from structured_world import json_model
from training_world import chat_model, counting_chats, write_chats

EXAMPLES = Path(__file__).parents[2] / "examples"
Script = Callable[..., str]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, an untrained head for it, chats and prompts."""
    folder = tmp_path_factory.mktemp("examples")
    target = chat_model()
    target.model.save_pretrained(folder / "model")
    target.tokenizer.save_pretrained(folder / "model")
    head = MedusaHead(MedusaConfig(hidden_size=target.hidden_size, vocab_size=target.vocab_size, num_heads=3))
    head.initialise(target.weights)
    save_head(head, folder / "head", base=target)
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


def test_generate_prints_answers_and_tokens_per_step(run: Script):
    assert run("generate.py", "--head", "head", "--max-new-tokens", "12").count("tokens per step, ") == 2


def test_custom_tree_prints_the_same_text_for_both_shapes(run: Script):
    out = run("custom_tree.py", "--head", "head", "--max-new-tokens", "12")
    assert out.count("the same text as plain decoding") == 2


def test_train_head_writes_a_head_and_uses_it(run: Script, world: Path):
    out = run("train_head.py", "--data", "chats.jsonl", "--out", "trained", "--epochs", "1")
    assert "accuracy of the first head" in out
    assert (world / "trained" / "model.safetensors").is_file()


def test_tune_head_writes_a_profile_and_uses_it(run: Script, world: Path):
    out = run("tune_head.py", "--head", "head", "--prompts", "prompts.txt", "--out", "tuned")
    assert "16 nodes: " in out
    assert (world / "tuned" / "acceptance.json").is_file()


def test_compare_heads_prints_a_line_per_drafter(run: Script):
    sizes = ("--num-nodes", "6", "--max-new-tokens", "12")
    out = run("compare_heads.py", "--heads", "head", "prompt-lookup", "--prompts", "prompts.txt", *sizes)
    assert out.count("tokens per step") >= 2


def test_structured_prints_json_and_the_same_text(run: Script, world: Path):
    model = json_model()
    model.model.save_pretrained(world / "json-model")
    model.tokenizer.save_pretrained(world / "json-model")
    save_head(tiny_head("hydra", model), world / "json-head", base=model)
    facts, steps, choice = run("structured.py", "--head", "json-head", model="json-model").splitlines()
    assert facts.startswith("{'name': '")
    assert steps.endswith("tokens per step, the same text: True")
    assert choice in ("yes", "no")


def test_every_script_has_a_test():
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert all(f'"{path.name}"' in tests for path in EXAMPLES.glob("*.py"))
