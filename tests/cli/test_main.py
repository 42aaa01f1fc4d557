"""The command line: its commands, its errors, and how it ends."""

import importlib.metadata
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from draftheads.cli import demo, generate
from draftheads.cli.main import COMMANDS, main
from draftheads.decode.engine import Engine
from draftheads.sampling import SamplingSettings


def test_the_command_is_installed():
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="draftheads")
    assert command.value == "draftheads.cli.main:main"


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], []])
def test_help_lists_the_commands(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert not err
    assert out.startswith("usage: draftheads COMMAND")
    for name, summary in COMMANDS.items():
        assert any(line.split(maxsplit=1) == [name, summary] for line in out.splitlines())


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
    options = {"demo": [demo.DemoOptions], "generate": [generate.GenerateOptions, SamplingSettings]}[name]
    names = {field for one in options for field in one.__dataclass_fields__}
    for field in names - {"prompt", "settings"}:
        assert f"--{field.replace('_', '-')}" in words
    assert words.count(".") > len(names)


def test_an_unknown_option(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["generate", "hello", "--max-new-tokenz", "3"])
    assert ended.value.code == 2
    assert "--max-new-tokens" in capsys.readouterr().err


# --- errors: one clear line ---

ON_MODEL = "--model model"
ERRORS = {
    "generate abc --model 'no such model'": "no such model is not a folder here",
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


@pytest.mark.usefixtures("here")
def test_ctrl_c(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "run", interrupted)
    assert main(["generate", "abc", "--model", "model"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_closed_pipe_is_not_an_error(tmp_path: Path):
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "draftheads", "--help"]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")
