"""The command line: its commands, its errors, and how it ends."""

import gc
import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import get_args
from unittest.mock import Mock

import pytest

from cli_world import Run, run_process, slow_imports
from draftheads.bench.settings import TreeKind
from draftheads.cli.help import options_of as help_options
from draftheads.cli.main import COMMANDS, all_commands, import_quickly, main, options_of, read_options
from draftheads.decode import step_costs
from draftheads.decode.engine import Engine
from draftheads.heads import head_methods
from families import tiny_head, tiny_model

GREETER = '''
from dataclasses import dataclass
from draftheads.cli.main import Command
from draftheads.errors import DataError

COMMAND = Command("greet somebody", "greeter.main", error_code=2, module="greeter.main")

@dataclass
class GreetOptions:
    """Greet."""
    name: str
    """Of whom."""

def run(options):
    if options.name == "Bob":
        raise DataError("not Bob")
    print("hello", options.name)
    return 3
'''


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], []])
def test_help_lists_the_commands(arguments: list[str], run: Run):
    lines = run(arguments).out.splitlines()
    assert lines[0] == "usage: draftheads COMMAND [options]"
    assert {f"  {name:<12} {command.summary}" for name, command in COMMANDS.items()} <= set(lines)


def test_an_unknown_command(run: Run):
    out, err = run(["generat", "hello"], code=2)
    assert not out
    assert err.startswith("draftheads: no command 'generat'; did you mean generate?\n\nusage: draftheads COMMAND")


def test_a_command_of_a_package_that_is_not_installed(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("draftheads.cli.main.commands_for", lambda _: COMMANDS)
    assert "package of its own, pip install ./packages/papers" in run(["reproduce", "hydra-table-2"], code=2).err


def test_another_package_adds_a_command(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By an entry point, which is read only where it is needed; it replaces no command of ours."""
    info = tmp_path / "greeter-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greeter\nVersion: 1.0\n", encoding="utf-8")
    points = "[draftheads.commands]\ngreet = greeter.main:COMMAND\ninfo = greeter.main:COMMAND\n"
    (info / "entry_points.txt").write_text(points, encoding="utf-8")
    (tmp_path / "greeter").mkdir()
    (tmp_path / "greeter" / "main.py").write_text(GREETER, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    all_commands.cache_clear()
    try:
        assert "  greet        greet somebody" in run(["--help"]).out.splitlines()
        assert run(["greet", "--name", "Ada"], code=3).out == "hello Ada\n"
        assert run(["greet", "--name", "Bob"], code=2).err == "error: not Bob\n"
        assert "--name NAME" in run(["greet", "--help"]).out
        assert run(["greed"], code=2).err.startswith("draftheads: no command 'greed'; did you mean greet?")
        assert COMMANDS["info"] == all_commands()["info"]
    finally:
        all_commands.cache_clear()


def test_help_version_and_wrong_options_import_nothing_slow():
    """Neither by themselves nor on the way; nor does the package itself."""
    code = f"""
dir(sys.modules["draftheads"])
assert main(["--help"]) == main(["--version"]) == 0 and main(["no"]) == 2
assert not {{"rich", "tyro"}} & set(sys.modules)
for name in {list(COMMANDS)}:
    assert main([name, "--help"]) == 0
    try:
        main([name, "--no-such-option", "1"])
    except SystemExit as ended:
        assert ended.code == 2
    assert not {{"numpy", "torch", "transformers", "peft"}} & set(sys.modules), name
"""
    out = slow_imports(code, "peft")
    assert f"\n{importlib.metadata.version('draftheads')}\n" in out
    assert out.endswith("\n[]\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_a_line_for_each_option(name: str, run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "100")
    out = run([name, "--help"]).out
    assert out.startswith(f"usage: draftheads {name} ")
    assert max(map(len, out.splitlines())) <= 100
    for option in help_options(*options_of(name)):
        assert option.text, f"{option.name} is not explained"
        assert f"{option.flag} {option.line}" in " ".join(out.split())
        assert option.name not in ("model", "draft_model") or "a folder or a Hugging" not in option.text
    assert "None" not in out


def test_help_verbose_has_all_sentences(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["train", "--help-verbose"])
    shown = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "With each, heads are measured on held-out text." in shown


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train", [*head_methods(), "hydra-teacher", "prefix-mlp"]),
        ("bench", get_args(TreeKind)),
        ("tune", ["usage: draftheads tune [MODEL] [HEAD] [options]\n", "--num-prompts N", "[64]"]),
        ("generate", ["usage: draftheads generate [PROMPT …] [options]\n", "--[no-]copy ", "[on]\n"]),
    ],
)
def test_help_names_choices_defaults_and_what_comes_first(command: str, words: Sequence[str], run: Run):
    out = run([command, "--help"]).out
    assert [word for word in words if word not in out] == []


def test_help_after_two_dashes_is_a_prompt(run: Run):
    assert "no such model" in run(["generate", "--model", "no such model", "--", "--help"], code=1).err


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes(tmp_path: Path):
    script = run_process(["--tyro-print-completion", "bash"], tmp_path).stdout
    (tmp_path / "completion.bash").write_text(script, encoding="utf-8")
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for words, expected in (
        ("draftheads gen", "generate\n"),
        ("draftheads train --num-h", "--num-heads\n"),
        ("draftheads demo --precision bf", "bf16\n"),
    ):
        ask = f'''source completion.bash; COMP_WORDS=({words}); COMP_CWORD={words.count(" ")}; COMP_LINE="{words}"
            COMP_POINT={len(words)}; _tyro_draftheads; printf "%s\\n" "${{COMPREPLY[@]}}"'''
        command = ["bash", "-c", ask]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, env=env)
        assert done.stdout == expected


@pytest.mark.parametrize(
    "command",
    [
        *("tune there ./medusa", "tune there --head ./medusa", "tune --num-prompts 3 --head ./medusa --model there"),
        *("tune --num-prompts 3 there ./medusa", "tune --num-prompts=3 there --temperature 0 ./medusa"),
    ],
)
def test_model_and_head_may_stand_anywhere_without_their_names(command: str):
    name, *words = command.split()
    options = read_options(name, words)
    assert (options.model, options.head) == ("there", "./medusa")


def test_switches_take_no_word_and_lists_take_all():
    words = "--transformers there --heads a b --fresh"
    options = read_options("bench", words.split())
    assert (options.model, options.heads, options.transformers, options.fresh) == ("there", ("a", "b"), True, True)


# --- errors: one clear line ---

ERRORS = {
    "generate --model model": "the prompt is empty",  # nothing on standard input
    "generate abc ' ' --model model": "the prompt is empty",
    "generate abc --model model --head medusa --tree paths:99": "tree paths:99 cannot be read",
    "generate --prompts bad.jsonl": "bad.jsonl, line 2: not JSON",
    "generate --prompts empty.jsonl": "nothing to answer",
    "generate abc --prompts bad.jsonl": "a prompt on the command line and --prompts bad.jsonl: give one of them",
    "generate abc --model ~nobody-9/x": "~nobody-9/x: no home folder is known for ~nobody-9; write the whole path",
    "merge --model model --adapter model --out ~nobody-9/x": "~nobody-9/x: no home folder is known",
    "demo --prompts bad.jsonl": "bad.jsonl, line 2: not JSON",
    "demo --heads plain": "no head 'plain'",
    "demo --model model --seconds nan": "--seconds is nan: must be above 0",
    "demo --model model --json bad.jsonl/out.json": "cannot save bad.jsonl/out.json",
}


@pytest.mark.parametrize("command", ERRORS)
@pytest.mark.usefixtures("here")
def test_errors_are_one_line(command: str, run: Run):
    out, err = run(shlex.split(command), code=1)
    assert not out
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert ERRORS[command] in err


def test_garbage_is_collected_again_after_the_imports(monkeypatch: pytest.MonkeyPatch):
    def imported(_: str) -> None:
        raise ImportError("collected" if gc.isenabled() else "not collected")

    monkeypatch.setattr("draftheads.cli.main.importlib.import_module", imported)
    with pytest.raises(ImportError, match=r"^not collected$"):
        import_quickly("generate")
    assert gc.isenabled()


def test_what_takes_seconds_is_named_also_in_a_pipe(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def measure(_: object) -> None:
        for method in ("medusa", "medusa", "hydra"):
            step_costs.costs_of(model, tiny_head(method, model))

    model = tiny_model("llama")
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path))
    monkeypatch.setattr("draftheads.cli.main.import_quickly", lambda _: SimpleNamespace(run=measure))
    monkeypatch.setattr(step_costs.logger, "disabled", False)
    assert run(["doctor"]).err == "measuring the costs of steps (once per machine, model and head)\n"
    assert len(list((tmp_path / "costs").iterdir())) == 2


@pytest.mark.usefixtures("here")
def test_ctrl_c(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Engine, "run", Mock(side_effect=KeyboardInterrupt))
    assert run(["generate", "abc", "--model", "model"], code=130).err == "interrupted\n"
    monkeypatch.setattr("draftheads.cli.bench.compare_heads", Mock(side_effect=KeyboardInterrupt))
    assert run(["bench", "model"], code=130).err.endswith("interrupted: the same command continues\n")
    monkeypatch.setattr("draftheads.cli.main._command", Mock(side_effect=KeyboardInterrupt))
    for before_any_command in ([], ["--help"]):
        assert run(before_any_command, code=130).err == "interrupted\n"


def test_a_closed_pipe_is_not_an_error(tmp_path: Path):
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "draftheads", "--help"]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("command", "function", "words"),
    [
        ("bench", "bench.compare_heads", ""),
        ("demo", "bench.compare_heads", ""),
        ("tune model medusa", "bench.tune_head", "--device cpu --trust-remote-code"),
    ],
)
@pytest.mark.usefixtures("here")
def test_how_the_model_is_loaded_is_passed_on(command: str, function: str, words: str, monkeypatch: pytest.MonkeyPatch):
    seen: dict[str, object] = {}

    def stopped(*_: object, **options: object) -> None:
        seen.update(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(f"draftheads.cli.{function}", stopped)
    assert main([*command.split(), "--precision", "fp32", *words.split()]) == 130
    assert seen["precision"] == "fp32"
    assert not words or (seen["device"], seen["trust_remote_code"]) == ("cpu", True)
