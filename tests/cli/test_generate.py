"""``draftheads generate``: what it prints and writes, and which options arrive."""

import io
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import draftheads
from cli_world import Run, run_process, without_colours
from draftheads.cli import generate
from draftheads.cli.main import main
from draftheads.cli.options import GenerateOptions
from draftheads.cli.show import DRAFTED, drafted_text
from draftheads.data.records import Record, prompts_in
from draftheads.decode.engine import Engine
from draftheads.decode.planner import Planner
from draftheads.settings import SamplingSettings
from draftheads.speculation.shapes import Drafting

TOKENS = ["--max-new-tokens", "12"]


@pytest.mark.parametrize(
    ("arguments", "given", "words"),
    [
        (["generate"], b"\xff", "standard input is not text"),
        (["chat"], b"\xff\n", "standard input is not text"),
        (["generate", "\udcff"], b"", r".*half a character, '\\udcff'"),
    ],
    ids=["generate", "chat", "command line"],
)
@pytest.mark.usefixtures("here")
def test_bytes_that_are_not_text_are_an_error(
    arguments: list[str], given: bytes, words: str, monkeypatch: pytest.MonkeyPatch, run: Run
):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))
    assert re.match(rf"error: {words}.*\n$", run([*arguments, "--model", "model"], code=1).err)


@pytest.mark.parametrize("head", [None, "./hydra"])
@pytest.mark.usefixtures("here")
def test_generate_prints_the_answer(head: str | None, engine: Engine, run: Run):
    with_head = ["--head", head] if head else []
    out, err = run(["generate", "dead cab", "--model", "model", "--precision", "fp32", *TOKENS, *with_head])
    expected = engine.generate(["dead cab"], max_new_tokens=12)[0]
    assert out == expected.text + "\n"
    assert err.startswith(f"{len(expected.token_ids)} tokens in ")
    end = {"stop": "complete", "length": "cut off at its greatest length (--max-new-tokens)"}
    assert err.endswith(f", {end[expected.finish_reason]}\n")
    assert " tokens/step, " in err
    assert err.count("\n") == 1


def test_generate_in_a_process_of_its_own(folder: Path, engine: Engine):
    """Nothing but the answer on one side and the count on the other: no bars, and what is measured the first time."""
    arguments = ["generate", "--model", "model", "--head", "hydra", "--precision", "fp32", *TOKENS]
    done = run_process(arguments, folder, input="dead cab")
    assert done.returncode == 0
    assert done.stdout == engine.generate(["dead cab"], max_new_tokens=12)[0].text + "\n"
    *notes, count = done.stderr.splitlines()
    assert all(note.startswith(("measuring ", "warning: other programs use the processor")) for note in notes)
    assert count.startswith("12 tokens in ")


@pytest.mark.usefixtures("here")
def test_several_prompts_give_a_json_object_each(engine: Engine, run: Run):
    arguments = ["generate", "abba", "dead cab", "é", "--model", "model", "--head", "medusa", "--precision", "fp32"]
    out, err = run([*arguments, *TOKENS, "--batch-size", "2"])
    expected = engine.generate(["abba", "dead cab", "é"], max_new_tokens=12)
    found = [json.loads(line) for line in out.splitlines()]
    assert [record["prompt"] for record in found] == ["abba", "dead cab", "é"]
    for record, result in zip(found, expected, strict=True):
        assert (record["text"], tuple(record["token_ids"])) == (result.text, result.token_ids)
        assert record["finish_reason"] == result.finish_reason
        assert record["tokens_per_step"] == (len(result.token_ids) - 1) / record["num_steps"]
        assert record.keys() == {"prompt", *result.record()}
        assert 0 <= record["num_copied"] < len(record["token_ids"])
    assert max(record["tokens_per_step"] for record in found) > 1.0, "the head was not used"
    assert err.startswith(f"3 answers, {sum(len(result.token_ids) for result in expected)} tokens in ")
    assert err.count("\n") == 1


def test_prompts_from_a_file_go_to_a_file_with_their_labels(here: Path, tmp_path: Path, engine: Engine, run: Run):
    messages = [{"role": "user", "content": "abba"}, {"role": "assistant", "content": "no"}]
    labels = {"question_id": 81, "category": "writing", "id": "x"}
    records: list[dict[str, Any]] = [
        {"prompt": "dead\u2028cab\u0085", "turns": ["not this"]},
        {"messages": messages, "id": 7},
        {**labels, "turns": ["hello", "not this"], "reference": ["no"]},
    ]
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    (tmp_path / "in.jsonl").write_text("\n\n".join(lines), encoding="utf-8")
    out = tmp_path / "new" / "out.jsonl"
    arguments = ["generate", "--model", "model", "--precision", "fp32", *TOKENS, "--out", str(out)]
    assert not run([*arguments, "--prompts", str(tmp_path / "in.jsonl")]).out
    prompts = ["dead\u2028cab\u0085", messages, "hello"]
    found = [json.loads(line) for line in out.read_text(encoding="utf-8").split("\n")[:-1]]
    assert [record["prompt"] for record in found] == prompts
    expected = engine.generate(prompts, max_new_tokens=12)
    assert [record["text"] for record in found] == [result.text for result in expected]
    assert labels.items() <= found[2].items()
    assert "reference" not in found[2]
    assert prompts_in(out) == prompts, "answers can be prompts again"
    assert not run([*arguments, "abba"]).out
    assert json.loads(out.read_text(encoding="utf-8"))["prompt"] == "abba", "one prompt goes there, too"


def test_all_options_are_passed_on(here: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []

    class Engine:
        def requests(self, *arguments: Any) -> Any:
            seen.append(arguments)
            raise KeyboardInterrupt  # the rest is other tests'

    def load(*arguments: Any, **options: Any) -> Any:
        seen[:] = [(arguments, options)]
        return Engine()

    monkeypatch.setattr(generate, "load", load)
    monkeypatch.setattr("draftheads.cli.config.check_names", lambda _: None)
    usual = {"head": None, "draft_model": None, "tree": "auto", "copy": True, "corpus": None, "max_batch_size": 16}
    for words, loaded, settings in (
        ("", {}, SamplingSettings()),
        (
            "--head there --tree static:4 --batch-size 2 --no-copy --out o --top-k 3 --stop x yz --acceptance typical",
            {"head": "there", "tree": "static:4", "copy": False, "max_batch_size": 2},
            SamplingSettings(top_k=3, stop=("x", "yz"), acceptance="typical"),
        ),
        (
            "--precision bf16 --chat-template vicuna --device cuda:1 --trust-remote-code --seed 11",
            {"precision": "bf16", "chat_template": "vicuna", "device": "cuda:1", "trust_remote_code": True},
            SamplingSettings(seed=11),
        ),
        (
            "--draft-model small --tree drawn:3 --acceptance block",
            {"draft_model": "small", "tree": "drawn:3"},
            SamplingSettings(acceptance="block"),
        ),
    ):
        assert main(["generate", "abc", "def", "--model", "here", *shlex.split(words)]) == 130
        assert seen == [(("here",), {**usual, **loaded}), (["abc", "def"], settings)]


@pytest.mark.usefixtures("here")
def test_several_answers_on_a_terminal_are_to_be_read(engine: Engine, run: Run, monkeypatch: pytest.MonkeyPatch):
    """Each under its prompt, and no JSON; what happens before the first one is shown, too."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    prompts, arguments = ["abba", "dead cab"], ["--model", "model", "--head", "medusa", "--precision", "fp32", *TOKENS]
    out, err = map(without_colours, run(["generate", *prompts, *arguments]))
    assert "{" not in out
    assert "loading model" in err
    assert "answering" in err
    for prompt, result in zip(prompts, engine.generate(prompts, max_new_tokens=12), strict=True):
        heading, _, rest = out.partition(f"{prompt} ─")
        assert rest
        assert "".join(result.text.split()) in "".join(rest.split())
        out = heading + rest


def test_a_heading_on_a_terminal_is_the_name_and_the_question(engine: Engine):
    out, asked = io.StringIO(), ({"role": "user", "content": "abba"},)
    questions = [Record(asked, labels=labels, is_text=True) for labels in ({"id": 7}, {"question_id": None}, {})]
    results = engine.generate(["abba"] * 3, max_new_tokens=1)
    generate._give(questions, results, None, Console(file=out, force_terminal=True, color_system=None, width=40))
    headings = [line.rstrip("─ ") for line in out.getvalue().splitlines() if line.endswith("─")]
    assert headings == ["7 abba", "abba", "abba"]


def test_draft_tokens_of_a_finished_answer_are_green(engine: Engine, folder: Path):
    with_head = draftheads.load(str(folder / "model"), str(folder / "medusa"), precision="fp32")
    result = with_head.generate(["dead cab"], max_new_tokens=12)[0]
    text = drafted_text(result)
    assert text.plain == result.text
    assert sum(span.end - span.start for span in text.spans if span.style == DRAFTED) == sum(
        len(piece) for piece, drafted in zip(result.pieces, result.drafted, strict=True) if drafted
    )
    assert text.spans


def test_it_says_so_if_nothing_is_drafted(folder: Path, monkeypatch: pytest.MonkeyPatch):
    options = GenerateOptions(model="model", drafting=Drafting("medusa"))
    engine = draftheads.load(str(folder / "model"), str(folder / "medusa"), precision="fp32")
    monkeypatch.setattr(Planner, "choose", lambda *_, **__: (None, 1, 1.0))
    words = generate.no_draft_sentence(engine, options) or ""
    assert "drafts no tokens of its own here, only copies" in words
    assert words.endswith(f"on your prompts: draftheads tune model {folder / 'medusa'} --prompts FILE")
    monkeypatch.setattr(Planner, "choose", lambda *_, **__: (object(), 3, 1.0))
    assert generate.no_draft_sentence(engine, options) is None
