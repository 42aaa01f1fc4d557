"""``draftheads generate``: what it prints and writes, and which options arrive."""

import io
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from cli_world import run_process
from draftheads.cli import generate
from draftheads.cli.main import main
from draftheads.data.records import prompts_in
from draftheads.decode.engine import Engine
from draftheads.sampling import SamplingSettings
from draftheads.shapes import BestFirst, BestPaths, Sampled
from draftheads.tree import Tree

TOKENS = ["--max-new-tokens", "12"]


@pytest.mark.parametrize(
    ("arguments", "given", "words"),
    [([], b"\xff", "standard input is not text"), (["\udcff"], b"", r".*half a character, '\\udcff'")],
    ids=["standard input", "command line"],
)
@pytest.mark.usefixtures("here")
def test_bytes_that_are_not_text_are_an_error(
    arguments: list[str], given: bytes, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))
    assert main(["generate", "--model", "model", *arguments]) == 1
    assert re.match(rf"error: {words}.*\n$", capsys.readouterr().err)


@pytest.mark.parametrize("head", [None, "medusa", "./hydra"])
@pytest.mark.usefixtures("here")
def test_generate_prints_the_answer(head: str | None, engine: Engine, capsys: pytest.CaptureFixture[str]):
    with_head = ["--head", head] if head else []
    assert main(["generate", "dead cab", "--model", "model", "--precision", "fp32", *TOKENS, *with_head]) == 0
    out, err = capsys.readouterr()
    expected = engine.generate(["dead cab"], max_new_tokens=12)[0]
    assert out == expected.text + "\n"
    assert err.startswith(f"{len(expected.token_ids)} tokens in ")
    assert err.endswith(f", ended by {expected.finish_reason}\n")
    assert " tokens/step, " in err
    assert err.count("\n") == 1


def test_generate_in_a_process_of_its_own(folder: Path, engine: Engine):
    """Nothing but the answer on one side and the count on the other: no bars, no warnings."""
    arguments = ["generate", "--model", "model", "--head", "hydra", "--precision", "fp32", *TOKENS]
    done = run_process(arguments, folder, input="dead cab")
    assert done.returncode == 0
    assert done.stdout == engine.generate(["dead cab"], max_new_tokens=12)[0].text + "\n"
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("12 tokens in ")


@pytest.mark.usefixtures("here")
def test_several_prompts_give_a_json_object_each(engine: Engine, capsys: pytest.CaptureFixture[str]):
    arguments = ["generate", "abba", "dead cab", "é", "--model", "model", "--head", "medusa", "--precision", "fp32"]
    assert main([*arguments, *TOKENS, "--batch-size", "2"]) == 0
    out, err = capsys.readouterr()
    expected = engine.generate(["abba", "dead cab", "é"], max_new_tokens=12)
    found = [json.loads(line) for line in out.splitlines()]
    assert [record["prompt"] for record in found] == ["abba", "dead cab", "é"]
    for record, result in zip(found, expected, strict=True):
        assert (record["text"], tuple(record["token_ids"])) == (result.text, result.token_ids)
        assert record["finish_reason"] == result.finish_reason
        assert record["tokens_per_step"] == (len(result.token_ids) - 1) / record["num_steps"]
        counts = {"num_steps", "tokens_per_step", "num_copied"}
        assert set(record) == {"prompt", "text", "token_ids", "finish_reason", *counts}
        assert 0 <= record["num_copied"] < len(record["token_ids"])
    assert max(record["tokens_per_step"] for record in found) > 1.0, "the head was not used"
    assert err.startswith(f"3 answers, {sum(len(result.token_ids) for result in expected)} tokens in ")
    assert err.count("\n") == 1


def test_prompts_from_a_file_go_to_a_file(
    here: Path, tmp_path: Path, engine: Engine, capsys: pytest.CaptureFixture[str]
):
    messages = [{"role": "user", "content": "abba"}, {"role": "assistant", "content": "no"}]
    records: list[dict[str, Any]] = [
        {"prompt": "dead\u2028cab\u0085", "turns": ["not this"]},
        {"messages": messages, "id": 7},
        {"question_id": 81, "turns": ["hello", "not this"]},
    ]
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    (tmp_path / "in.jsonl").write_text("\n\n".join(lines), encoding="utf-8")
    out = tmp_path / "new" / "out.jsonl"
    arguments = ["generate", "--prompts", str(tmp_path / "in.jsonl"), "--out", str(out), "--model", "model"]
    assert main([*arguments, "--precision", "fp32", *TOKENS]) == 0
    prompts = ["dead\u2028cab\u0085", messages, "hello"]
    found = [json.loads(line) for line in out.read_text(encoding="utf-8").split("\n")[:-1]]
    assert [record["prompt"] for record in found] == prompts
    expected = engine.generate(prompts, max_new_tokens=12)
    assert [record["text"] for record in found] == [result.text for result in expected]
    assert not capsys.readouterr().out
    assert prompts_in(out) == prompts, "answers can be prompts again"


def test_one_prompt_with_an_out_file_is_written_there(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out.jsonl"
    assert main(["generate", "abba", "--model", "model", "--out", str(out), *TOKENS]) == 0
    assert json.loads(out.read_text(encoding="utf-8"))["prompt"] == "abba"
    assert not capsys.readouterr().out


def test_all_options_are_passed_on(here: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []

    def load(*arguments: Any, **options: Any) -> Any:
        seen.append((arguments, options))
        return "engine"

    def batch(engine: Any, prompts: Any, settings: Any, out: Any) -> None:
        seen.append((engine, prompts, settings, out))

    monkeypatch.setattr(generate, "load", load)
    monkeypatch.setattr(generate, "_batch", batch)
    words = """abc def --model here --head there --tree chain.json --max-new-tokens 5 --temperature 0.5 --top-k 3
        --top-p 0.75 --repetition-penalty 1.5 --seed 11 --stop x yz --acceptance typical --batch-size 2
        --precision bf16 --no-copy --exact-bits --out o --profile p
        --chat-template vicuna"""
    assert main(["generate", *shlex.split(words)]) == 0
    options = {
        "draft_model": None,
        "chat_template": None,
        "tree": Tree.chain(2),
        "profile": "p",
        "copy": False,
        "precision": "bf16",
        "max_batch_size": 2,
        "exact_bits": True,
    }
    settings = SamplingSettings(
        max_new_tokens=5,
        temperature=0.5,
        top_k=3,
        top_p=0.75,
        repetition_penalty=1.5,
        seed=11,
        stop=("x", "yz"),
        acceptance="typical",
    )
    assert seen == [
        (("here", "there"), {**options, "chat_template": "vicuna"}),
        ("engine", ["abc", "def"], settings, Path("o")),
    ]
    assert main(["generate", "abc", "def"]) == 0
    defaults = {
        "draft_model": None,
        "chat_template": None,
        "tree": None,
        "profile": "auto",
        "copy": True,
        "precision": "auto",
        "max_batch_size": 16,
        "exact_bits": False,
    }
    assert seen[2][1] == defaults
    assert seen[3][2] == SamplingSettings()
    assert main(["generate", "abc", "def", "--grow", "9", "--threshold", "0.25", "--profile", "none"]) == 0
    assert seen[4][1] == {**defaults, "tree": BestFirst(9, threshold=0.25), "profile": None}
    assert main(["generate", "abc", "def", "--draft-model", "small", "--draw", "3", "--acceptance", "block"]) == 0
    assert seen[6][1] == {**defaults, "draft_model": "small", "tree": Sampled(Tree.chain(3))}
    assert seen[7][2] == SamplingSettings(acceptance="block")
    assert main(["generate", "abc", "def", "--paths", "4"]) == 0
    assert seen[8][1] == {**defaults, "tree": BestPaths((6, 3, 2), 4)}
    assert main(["generate", "abc", "def", "--paths", "3", "--widths", "4", "1"]) == 0
    assert seen[10][1] == {**defaults, "tree": BestPaths((4, 1), 3)}
