"""The command line, on a tiny model in a folder: what it prints, what it refuses, and how it ends."""

import importlib.metadata
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

import draftheads
from draftheads.bench.compare import Extent, Row
from draftheads.cli import demo, generate, show_comparison
from draftheads.cli.main import VERBS, main
from draftheads.cli.show import show_stream
from draftheads.data.records import prompts_in
from draftheads.decode import cost_profile as cost
from draftheads.decode.engine import Engine
from draftheads.drafters.copying import Copying
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.sampling import SamplingSettings
from draftheads.shapes import BestFirst, BestPaths, Sampled
from draftheads.tree import Tree
from families import SMALL, TREES, VOCAB, Prophet, tiny_head, tiny_profile

LETTERS = "abcdefghijklmnop \n\té"
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
TOKENS = ["--max-new-tokens", "12"]


def letters_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each of a few letters, with the ids that the tiny models' configurations speak of."""
    vocab = {token: number for number, token in enumerate([*SPECIAL, *LETTERS])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model (``model``) and two heads for it (``medusa``, ``hydra``)."""
    place = tmp_path_factory.mktemp("cli")
    torch.manual_seed(22)  # of those whose answers have many letters
    model = LlamaForCausalLM(LlamaConfig(**{**SMALL, "vocab_size": VOCAB, "max_position_embeddings": 512})).eval()
    model.lm_head.weight.data[: len(SPECIAL)] = 0  # it says letters only, and does not end
    model.save_pretrained(place / "model")
    letters_tokenizer().save_pretrained(str(place / "model"))
    base = TargetModel.load(str(place / "model"), dtype=torch.float32)
    for method in ("medusa", "hydra"):
        head, profile = tiny_head(method, base), tiny_profile(TREES["ragged"])
        draftheads.save_head(head, place / method, base=base, dtype=torch.float32, profile=profile)
    (place / "deep.json").write_text("[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]", encoding="utf-8")
    (place / "chain.json").write_text("[[0], [0, 0]]", encoding="utf-8")
    (place / "no.json").write_text("[[0, 0]", encoding="utf-8")
    (place / "bad.jsonl").write_text('{"prompt": "abc"}\n{"prompt": \n', encoding="utf-8")
    (place / "empty.jsonl").write_text("\n", encoding="utf-8")
    return place


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch, cheap_nodes: None) -> Iterator[Path]:
    """The folder is the working directory, nobody types, and the screen is as narrow as screens get."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.setenv("COLUMNS", "80")
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    yield folder
    logging.set_verbosity(verbosity)
    if bars:
        logging.enable_progress_bar()


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    """What the command line should say the same as."""
    return draftheads.load(folder / "model", precision="fp32")


def run_process(arguments: list[str], folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "draftheads", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False, **options)


# --- the command itself ---


def test_the_command_is_installed():
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="draftheads")
    assert command.value == "draftheads.cli.main:main"


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], []])
def test_help_lists_the_commands(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert not err
    assert out.startswith("usage: draftheads COMMAND")
    for name, verb in VERBS.items():
        assert any(line.split(maxsplit=1) == [name, verb.summary] for line in out.splitlines())


def test_help_and_version_are_fast(tmp_path: Path):
    """They import nothing heavy, neither by themselves nor on the way."""
    heavy = "{'numpy', 'rich', 'torch', 'transformers', 'tyro'}"
    code = f"""
import sys
from draftheads.cli.main import main
assert main(["--help"]) == main(["--version"]) == 0 and main(["nonsense"]) == 2
print(sorted({heavy} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith(f"\n{importlib.metadata.version('draftheads')}\n[]\n")


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]):
    assert main(["generat", "hello"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("draftheads: no command 'generat'\n\nusage: draftheads COMMAND")


@pytest.mark.parametrize("name", ["demo", "generate"])
def test_every_option_is_explained(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    words = capsys.readouterr().out
    assert f"draftheads {name}" in words
    options = {"demo": demo.DemoOptions, "generate": generate.GenerateOptions}[name]
    for field in options.__dataclass_fields__:
        assert f"--{field.replace('_', '-')}" in words or field == "prompt"
    assert words.count(".") > len(options.__dataclass_fields__)


def test_an_unknown_option(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["generate", "hello", "--max-new-tokenz", "3"])
    assert ended.value.code == 2
    assert "--max-new-tokens" in capsys.readouterr().err


# --- errors: one clear line ---

ON_MODEL = "--model model"
ERRORS = {
    "generate abc --model 'no such model'": "no such model is no folder here",
    "generate abc --model medusa": "medusa",
    f"generate abc {ON_MODEL} --head medusaa": "no head 'medusaa'",
    f"generate '' {ON_MODEL}": "the prompt is empty",
    f"generate {ON_MODEL}": "the prompt is empty",  # nothing on standard input
    f"generate abc ' ' {ON_MODEL}": "the prompt is empty",
    f"generate {'abc' * 200} {ON_MODEL}": "the prompt has 601 tokens",
    f"generate abc {ON_MODEL} --temperature -1": "temperature is -1.0",
    f"generate abc {ON_MODEL} --batch-size 0": "max_batch_size is 0",
    f"generate abc {ON_MODEL} --tree chain.json": "nothing is there to fill it",
    f"generate abc {ON_MODEL} --head medusa --tree none.json": "none.json cannot be read",
    f"generate abc {ON_MODEL} --head medusa --tree no.json": "a tree must be a JSON list of rank paths",
    f"generate abc {ON_MODEL} --head medusa --tree deep.json": "the tree is 4 deep but the head has 3 heads",
    f"generate abc {ON_MODEL} --head medusa --tree chain.json --grow 5": "--tree chain.json and --grow 5",
    f"generate abc {ON_MODEL} --head medusa --grow 0": "num_nodes is 0",
    f"generate abc {ON_MODEL} --head medusa --grow 5 --threshold 1": "threshold is 1.0",
    f"generate abc {ON_MODEL} --head medusa --draw 0": "--draw is 0; it must be at least 1",
    f"generate abc {ON_MODEL} --head medusa --draw 3 --grow 5": "--grow 5 and --draw 3: give one of them",
    f"generate abc {ON_MODEL} --head medusa --paths 3 --draw 2": "--draw 2 and --paths 3: give one of them",
    f"generate abc {ON_MODEL} --head medusa --widths 3 2": "--widths 3 2 is for paths: give --paths, too",
    f"generate abc {ON_MODEL} --head medusa --paths 9 --widths 3 2": "num_paths is 9 but widths [3, 2] have 6 paths",
    f"generate abc {ON_MODEL} --head lookahead --draw 3": "lookahead fills no tree; give a draft head by head=",
    f"generate abc {ON_MODEL} --head medusa --threshold 0.5": "--threshold 0.5 is for growing trees",
    f"generate abc {ON_MODEL} --head medusa --profile none.json": "no acceptance profile at none.json",
    f"generate abc {ON_MODEL} --head medusa --profile chain.json": "it is [[0], [0, 0]]; it must be an object",
    f"generate abc {ON_MODEL} --profile medusa": "profile medusa needs a head",
    f"generate abc {ON_MODEL} --head medusa --profile medusa --tree chain.json": "tree and profile medusa contradict",
    "generate --prompts none.jsonl": "none.jsonl: cannot be read",
    "generate --prompts bad.jsonl": "bad.jsonl, line 2: not JSON",
    "generate --prompts empty.jsonl": "nothing to answer",
    "generate abc --prompts bad.jsonl": "a prompt on the command line and --prompts bad.jsonl: give one of them",
    f"generate abc {ON_MODEL} --max-new-tokens 2 --out bad.jsonl/out": "cannot save bad.jsonl/out",
    f"generate abc {ON_MODEL} --temperature 1 --seed {10**23}": f"seed is {10**23}; it must be",
    "generate abc --model ~nobody-9/x": "~nobody-9/x: no home folder is known for ~nobody-9; write the whole path",
    f"generate abc {ON_MODEL} --head ~nobody-9/x": "~nobody-9/x: no home folder is known",
    "info --tree ~nobody-9/x": "~nobody-9/x: no home folder is known",
    "merge --model model --adapter model --out ~nobody-9/x": "~nobody-9/x: no home folder is known",
    f"train --method medusa --out out --data bad.jsonl --seed {10**23}": f"--seed is {10**23}",
    "demo --prompts bad.jsonl": "bad.jsonl, line 2: not JSON",
    "demo --prompts empty.jsonl": "empty.jsonl: holds no prompt",
    "demo --limit 0": "holds no prompt",
    "demo --heads medusa medusa": "heads are medusa, medusa: each must have a name of its own",
    "demo --heads plain": "heads are plain: each must have a name of its own",
    f"demo {ON_MODEL} --heads nohead": "no head 'nohead'",
    f"demo {ON_MODEL} --seconds 0": "--seconds is 0; it must be above 0",
    f"demo {ON_MODEL} --seconds nan": "--seconds is nan; it must be above 0",
    f"demo {ON_MODEL} --json nowhere/out.json": "--json nowhere/out.json: there is no folder nowhere",
}


@pytest.mark.parametrize("command", ERRORS)
@pytest.mark.usefixtures("here")
def test_errors_are_one_line(command: str, capsys: pytest.CaptureFixture[str]):
    assert main(shlex.split(command)) == 1
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert ERRORS[command] in err


def test_exact_bits_that_cannot_be_kept(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any):
    monkeypatch.setattr(demo, "rows_keep_their_bits", lambda _: False)
    assert main(["demo", "--model", "model", "--heads", "hydra", "--exact-bits"]) == 1
    assert "error: exact_bits: this machine's kernels change a row's bits" in capsys.readouterr().err


@pytest.mark.usefixtures("here")
def test_ctrl_c(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "run", interrupted)
    assert main(["generate", "abc", "--model", "model"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_reader_that_has_gone_is_no_error(tmp_path: Path):
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "draftheads", "--help"]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")


# --- generate ---


def test_bytes_that_are_no_text(folder: Path):
    """On standard input and, as half characters, on the command line."""
    for arguments, given in (([], b"\xff"), ([b"\xff"], b"")):
        command = [sys.executable, "-m", "draftheads", "generate", "--model", "model", *arguments]
        environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, input=given, check=False)
        assert done.returncode == 1
        assert re.match(rb"error: (standard input is no text|.*half a character, '\\udcff').*\n$", done.stderr)


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


def test_all_options_arrive(here: Path, monkeypatch: pytest.MonkeyPatch):
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
        --precision bf16 --no-copy --exact-bits --out o --profile p"""
    assert main(["generate", *shlex.split(words)]) == 0
    options = {
        "draft_model": None,
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
    assert seen == [(("here", "there"), options), ("engine", ["abc", "def"], settings, Path("o"))]
    assert main(["generate", "abc", "def"]) == 0
    defaults = {
        "draft_model": None,
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


# --- demo ---

HEADINGS = [
    "method",
    "tokens /s",
    "tokens /step",
    "speed-up (quartiles)",
    "× trans- formers",
    "same text",
    "worst margin",
]


DEMO = ["demo", "--model", "model", "--max-new-tokens", "3", "--no-stream"]
COLUMNS = {"COLUMNS": "80", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def shown(folder: Path) -> tuple[str, str]:
    """What the demo prints, in a process of its own and in fp32."""
    (folder / "two.jsonl").write_text('{"prompt": "[/b] ab"}\n{"turns": ["cabbage"]}\n', encoding="utf-8")
    arguments = ["demo", "--model", "model", "--heads", "./hydra", "medusa", "--prompts", "two.jsonl", "--json", "-"]
    environment = {**os.environ, **COLUMNS, "DRAFTHEADS_CACHE": str(folder)}
    done = run_process([*arguments, "--precision", "fp32", "--max-new-tokens", "24"], folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_the_demo_ends_with_one_json_object(shown: tuple[str, str]):
    lines = shown[0].splitlines()
    record = json.loads(lines[-1])
    assert list(record) == [
        *("model", "precision", "threads", "exact_bits", "copy", "num_prompts", "max_new_tokens", "seconds", "rows"),
        *("step_milliseconds", "sentences", "provenance"),
    ]
    assert (record["model"], record["precision"], record["exact_bits"]) == ("model", "fp32", False)
    assert (record["num_prompts"], record["max_new_tokens"], record["copy"]) == (2, 24, True)
    assert isinstance(record["threads"], int)
    assert 0 < record["seconds"] < 100
    assert record["provenance"]["command"].endswith("--max-new-tokens 24")
    rows = {row["method"]: row for row in record["rows"]}
    assert list(rows) == ["transformers", "plain", "hydra", "medusa"]
    for row in record["rows"]:
        assert row["identical"] is True
        assert row["num_different"] == 0
        assert 0 <= row["worst_margin"] < 1e-4
        assert row["tokens_per_second"] > 0
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / rows["plain"]["tokens_per_second"])
    assert rows["transformers"]["tokens_per_step"] == rows["plain"]["tokens_per_step"] == 1.0
    assert rows["medusa"]["tokens_per_step"] >= 1.0  # of a model so small nothing may be as fast as plain decoding
    assert rows["hydra"]["tokens_per_step"] >= 1.0
    parts = record["step_milliseconds"]
    fastest = max(("hydra", "medusa"), key=lambda name: rows[name]["tokens_per_second"])
    assert list(parts) == ["plain", fastest]
    assert set(parts["plain"]) == {"drafting", "verification", "accept and rest"}


def test_the_demo_shows_one_answer_and_a_table(shown: tuple[str, str], engine: Engine):
    out, err = shown
    assert not err, "no bars, no warnings"
    text = engine.generate(["[/b] ab"], max_new_tokens=24)[0].text
    title = "[/b] ab   (hydra)\n"
    assert out.startswith(f"{title}\n{text}\n\n")
    lines = out.removeprefix(f"{title}\n{text}\n\n").splitlines()[:-1]
    assert all(len(line) <= 80 for line in lines)
    assert "…" not in out
    heads = [line for line in lines if line and not line.startswith("─")]
    assert sorted(" ".join(heads[:2]).split()) == sorted(" ".join(HEADINGS).split())
    table = [line.split() for line in heads[2:6]]
    assert [row[0] for row in table] == ["transformers", "plain", "hydra", "medusa"]
    record = json.loads(out.splitlines()[-1])
    for cells, row in zip(table, record["rows"], strict=True):
        low, high = row["speedup_quartiles"]
        assert cells[1:] == [
            f"{row['tokens_per_second']:.1f}",
            f"{row['tokens_per_step']:.2f}",
            f"{row['speedup']:.2f}",
            f"({low:.2f}-{high:.2f})",
            f"{row['speedup_over_transformers']:.2f}",
            "yes",
            f"{row['worst_margin']:.1g}",
        ]
    assert heads[6].startswith("2 prompts, answers of at most 24 tokens, ")
    assert heads[7] == "Parts of a step, milliseconds"
    assert [line.split()[0] for line in heads[8:10]] == list(record["step_milliseconds"])
    assert " ".join(record["sentences"]) == " ".join(" ".join(heads[11:]).split())
    assert record["sentences"][0].startswith(f"With one request {list(record['step_milliseconds'])[1]} drafts ")


def test_the_widest_table_fits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    row = Row("transformers", 12345.67, 12.345, 12.34, (10.12, 14.56), 123.45, identical=False, num_different=80,
              worst_margin=1.23e-05)  # fmt: skip
    show_comparison.print_table([row], Extent(80, 128, 1234.5), Console(highlight=False))
    parts = {name: {"drafting": 1234.5, "verification": 3.0, "accept and rest": 0.0} for name in ("plain", "h" * 90)}
    show_comparison.print_parts(parts, Console(highlight=False))
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[3].split() == [
        *("transformers", "12345.7", "12.35", "12.34", "(10.12-14.56)", "123.45", "no", "(80)", "1e-05")
    ]
    assert lines[4] == "80 prompts, answers of at most 128 tokens, 1234 s in all"


@pytest.mark.usefixtures("here")
def test_heads_draft_with_the_fast_kernels_in_the_demo(monkeypatch: pytest.MonkeyPatch):
    sped_up: list[str] = []
    monkeypatch.setattr(DraftHead, "speed_up", lambda head, **_: sped_up.append(head.config.method))
    arguments = [*DEMO, "--heads", "./medusa", "./hydra", "--limit", "1", "--no-transformers", "--precision", "fp32"]
    assert main(arguments) == 0
    assert sped_up == ["medusa", "hydra"]


@pytest.mark.usefixtures("here")
def test_the_demo_explains_texts_that_differ(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    compared = demo.rows
    differing = False

    def rows(*arguments: Any, **options: Any) -> Any:
        return [replace(row, identical=not differing) for row in compared(*arguments, **options)]

    monkeypatch.setattr(demo, "rows", rows)
    said = {}
    for precision in ("bf16", "fp32", "int8"):
        for differing in (False, True):
            assert main([*DEMO, "--heads", "./hydra", "--limit", "1", "--precision", precision]) == 0
            out = capsys.readouterr().out
            said[precision, differing] = [
                words for words in ("--exact-bits", "please report", "another model than int8") if words in out
            ]
            assert all(len(line) <= 80 for line in out.splitlines())
    assert said == {
        ("bf16", False): [],
        ("bf16", True): ["--exact-bits"],
        ("fp32", False): [],
        ("fp32", True): ["please report"],
        ("int8", False): [],
        ("int8", True): ["please report", "another model than int8"],
    }


def test_demo_variants(here: Path, capsys: pytest.CaptureFixture[str]):
    """Own prompts, fewer of them, without transformers or a stream; two heads of one name keep their paths."""
    arguments = [*DEMO, "--limit", "1", "--no-transformers", "--precision", "fp32", "--no-copy", "--seconds", "inf"]
    assert main([*arguments, "--heads", "./medusa", str(here / "medusa"), "--json", "record.json"]) == 0
    out, err = capsys.readouterr()
    assert not err
    assert "provenance" not in out
    assert "draft tokens are" not in out
    record = json.loads((here / "record.json").read_text(encoding="utf-8"))
    assert [row["method"] for row in record["rows"]] == ["plain", "./medusa", str(here / "medusa")]
    assert [row["speedup_over_transformers"] for row in record["rows"]] == [None] * 3
    assert [row["num_copied"] for row in record["rows"]] == [0] * 3
    assert (record["copy"], record["num_prompts"], record["max_new_tokens"]) == (False, 1, 3)


@pytest.mark.usefixtures("here")
def test_the_demo_in_int8_compares_with_plain_int8(capsys: pytest.CaptureFixture[str]):
    """Transformers' model stays exact; plain and heads share the quantised one, and nothing is re-scored."""
    arguments = ["demo", "--model", "model", "--heads", "./hydra", "--limit", "2", "--no-stream", "--json", "-"]
    assert main([*arguments, "--precision", "int8", "--max-new-tokens", "24"]) == 0
    out = capsys.readouterr().out
    assert "margin" not in out.split("provenance")[0].split('{"model"')[0]
    record = json.loads(out.splitlines()[-1])
    assert (record["precision"], record["exact_bits"]) == ("int8", True)
    assert [row["worst_margin"] for row in record["rows"]] == [None] * 3
    rows = {row["method"]: row for row in record["rows"]}
    assert rows["plain"]["identical"]
    assert rows["hydra"]["identical"], "to the bit"
    assert rows["hydra"]["tokens_per_step"] > 1.0


def test_the_demo_with_exact_bits_compares_with_plain_of_the_same_kernels(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    asked: list[Any] = []
    compared = demo.rows

    def rows(*arguments: Any, references: Any) -> Any:
        asked.append(references)
        return compared(*arguments, references=references)

    monkeypatch.setattr(demo, "rows", rows)
    monkeypatch.setattr(demo, "rows_keep_their_bits", lambda _: True)
    arguments = ["demo", "--model", "model", "--limit", "2", "--no-stream", "--max-new-tokens", "10", "--heads"]
    arguments += ["hydra", "--precision", "fp32", "--json", "-"]
    assert main([*arguments, "--exact-bits"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["exact_bits"] is True
    assert all(row["identical"] for row in record["rows"])
    assert list(asked[0]) == ["hydra"]
    assert [len(answer) for answer in asked[0]["hydra"]] == [10, 10]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["exact_bits"] is False
    assert asked[1] == {}


# --- what the demo says ---


def test_a_bar_shows_the_parts_in_proportion():
    parts = {"drafting": 3.0, "verification": 6.0, "accept and rest": 1.0}
    assert show_comparison.bar(parts, 10.0, cells=20).plain == "▒" * 6 + "█" * 12 + "░" * 2
    assert show_comparison.bar(parts, 20.0, cells=20).plain == "▒" * 3 + "█" * 6 + "░"
    assert show_comparison.bar(dict.fromkeys(parts, 0.0), 0.0).plain == ""
    coloured = Console(file=io.StringIO(), force_terminal=True, color_system="standard", _environ={})
    coloured.print(show_comparison.bar(parts, 10.0, cells=20))
    assert isinstance(coloured.file, io.StringIO)
    assert coloured.file.getvalue().count("\x1b[0m") == 3, "each part has its colour"


def costly(per_node: float) -> cost.CostProfile:
    """A plain step takes 10 ms, each further node so many, a draft 1."""
    points = [("verify", 1, nodes, 10.0 + per_node * (nodes - 1)) for nodes in (1, 33)]
    return cost.by_hand([*points, ("static", 1, 2, 1.0)])


def told(engine: Engine, per_node: float, *, copies: bool = False, **profile: Any) -> str:
    head = tiny_head("hydra", engine.model)
    drafter = Copying(head) if copies else head
    found = tiny_profile(Tree.chain(3), static_tokens=[1.0, 1.5, 1.75, 1.8], **profile)
    return show_comparison.tree_sentence("hydra", Engine(engine.model, drafter, profile=found, cost=costly(per_node)))


def test_a_sentence_explains_the_tree(engine: Engine):
    fixed = told(engine, 1.0, dynamic_tokens=[])
    assert fixed == (
        "With one request hydra drafts a fixed tree of 3 nodes: a step then costs 1.3 plain steps and brings about "
        "1.8 tokens."
    )
    growing = told(engine, 1.0, dynamic_tokens=[1.0, 2.0])
    assert growing == (
        "With one request hydra drafts growing trees of 2 nodes: a step then costs 1.2 plain steps and brings about "
        "2.0 tokens."
    )
    nothing = told(engine, 20.0, dynamic_tokens=[])
    assert nothing.startswith("With one request hydra drafts nothing: on this machine verifying draft tokens takes")
    assert "nothing, but copies from the text:" in told(engine, 20.0, copies=True, dynamic_tokens=[])
    assert "always drafts the same tree" in show_comparison.tree_sentence("hydra", engine)


def row_of(method: str, speedup: float) -> Row:
    return Row(method, 10.0, 1.5, speedup, (1.0, 1.0), None, identical=True, num_different=0, worst_margin=0.0,
               num_drafted=50, num_copied=7)  # fmt: skip


def test_a_head_that_is_slower_than_plain_is_named():
    table = [row_of("transformers", 0.5), row_of("plain", 1.0), row_of("hydra", 1.2), row_of("medusa", 0.934)]
    options = {"precision": "fp32", "copy": True, "model": "./mine"}
    (sentence,) = show_comparison.slower_sentences(table, **options)  # type: ignore[arg-type]
    assert sentence == (
        "medusa is slower than plain decoding here (0.93 ×). Try --precision int8 or --no-copy, or measure its trees "
        "on your own prompts: draftheads tune ./mine medusa --prompts FILE"
    )
    (sentence,) = show_comparison.slower_sentences(table, precision="int8", copy=False, model="./mine")
    assert "here (0.93 ×). To change that, measure its trees" in sentence
    assert not show_comparison.slower_sentences(table[:3], precision="fp32", copy=True, model="./mine")
    assert "Of its 50 accepted draft tokens, 7 were copied" in show_comparison.copies_sentence(table[2])


# --- answers as they come ---


@pytest.fixture(scope="module")
def drafted(engine: Engine) -> Engine:
    """An engine whose drafter often guesses rightly, for the one prompt ``[5, 6, 7]``."""
    answer = engine.generate([[5, 6, 7]], max_new_tokens=30, ignore_eos=True)[0].token_ids
    return Engine(engine.model, Prophet(TREES["chain"], {(5, 6, 7): answer}))


def shown_on(console: Console, engine: Engine, **settings: Any) -> tuple[str, str]:
    """What a console gets, and the result's text."""
    assert isinstance(engine.drafter, Prophet)
    engine.drafter.generator.manual_seed(0)
    engine.drafter.texts = []
    sequences = engine.sequences([[5, 6, 7]], **{"max_new_tokens": 30, "ignore_eos": True, **settings})
    show_stream(engine, sequences, console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue(), sequences[0].result().text


def test_guessed_tokens_are_green_on_a_terminal(drafted: Engine):
    def console() -> Console:
        return Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=20, _environ={})

    out, text = shown_on(console(), drafted)
    green, plain = "\x1b[1;32m", "\x1b[0m"
    parts = out.split(green)
    assert len(parts) > 8, "nothing was guessed"
    assert all(plain in part for part in parts[1:])
    bare = out.replace(green, "").replace(plain, "")
    assert bare.replace(" ", "") == (text + "\n").replace("\t", "").replace(" ", "")
    drafted.drafter.generator.manual_seed(0)  # type: ignore[attr-defined]
    drafted.drafter.texts = []  # type: ignore[attr-defined]
    events = list(drafted.stream([5, 6, 7], max_new_tokens=30, ignore_eos=True))
    expected = [
        drafted.model.tokenizer.decode(token) for event in events for token in event.token_ids[: event.num_drafted]
    ]
    shown = [part.split(plain)[0] for part in parts[1:]]
    assert [word for word in shown if word.strip()] == [word for word in expected if word.strip()]

    token = int(drafted.model.tokenizer.convert_tokens_to_ids(text.strip()[-1]))
    out, text = shown_on(console(), drafted, stop_token_ids=(token,))
    bare = out.replace(green, "").replace(plain, "")
    assert bare.replace(" ", "") == (text + "\n").replace("\t", "").replace(" ", "")

    out, text = shown_on(console(), drafted, stop=(text[-3:],))
    assert out == text + "\n", "with stop strings nobody can say which letters were guessed"


def test_elsewhere_the_text_is_written_to_the_letter(drafted: Engine):
    """No colour codes, no wrapping, no tabs made blanks."""
    out, text = shown_on(Console(file=io.StringIO(), width=5, _environ={}), drafted)
    assert out == text + "\n"
    assert "\t" in text
    assert len(max(text.split("\n"), key=len)) > 5
