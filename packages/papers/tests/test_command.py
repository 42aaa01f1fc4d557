"""``draftheads reproduce``: the list of tables, and a table of one's own file."""

import json
import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from cli_world import Run
from draftheads_papers import REPRODUCE
from draftheads_papers.options import table_names

TABLE = """
title = "Mine"
source = "me, table 1"
needs = "nothing"
heads = ["./hydra"]
load = { precision = "fp32" }
columns = "part"
values = ["speedup", "tokens_per_step", "tokens_per_second"]
[runs.""]
trees = ["chain"]
num_nodes = [3]
max_new_tokens = 6
num_calibration_prompts = 2
[published.A]
hydra = { "all × plain" = 2.5 }
"""


def test_its_entry_point_is_the_command() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["draftheads.commands"]["reproduce"].partition(":")
    assert getattr(import_module(module), name) is REPRODUCE


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("medusa-tabel-1", "no table 'medusa-tabel-1'; did you mean medusa-table-1?"),
        ("./mine.toml", "no table './mine.toml'; `draftheads reproduce` lists them"),
        ("medusa-figure-7 --train epochs", "--train is 'epochs'; give NAME=VALUE"),
        ("hydra-figure-5", "hydra-figure-5 trains .*: give --data FILE…, --quick, or your own --heads"),
        ("hydra-figure-5 hydra-figure-5", "hydra-figure-5 is given twice"),
        ("hydra-figure-5 hydra-tabel-1", "no table 'hydra-tabel-1'; did you mean hydra-table-1?"),
    ],
)
def test_impossible_commands(run: Run, arguments: str, words: str, tmp_path: Path) -> None:
    arguments += f" --out {tmp_path}"
    assert re.search(words, run(["reproduce", *arguments.split()], code=1).err)


def test_without_a_table_all_are_listed(run: Run) -> None:
    shown = run(["reproduce"]).out
    assert all(name in shown for name in table_names())
    assert "--quick" in shown


@pytest.mark.parametrize("parts", [1, 4])
def test_a_table_is_written_and_shown_whole(here: Path, run: Run, parts: int) -> None:
    (here / "mine.toml").write_text(TABLE)
    lines = [{"prompt": f"{'a dog' if n % 2 else 'fog'} {n}", "category": f"kind {n % parts}"} for n in range(4)]
    (here / "four.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = ["reproduce", "./mine.toml", "--model", "./model", "--prompts", "four.jsonl"]
    shown = run([*command, "--out", "out"]).out
    text = (here / "out" / "mine.md").read_text()
    assert "(2.50)" in text or "(2.5)" in text
    assert ("kind 3 tokens/step" in text) == (parts == 4)
    assert "…" not in shown, "no column is cut"
    assert all(len(line) <= 80 for line in shown.splitlines() if "wrote" not in line)
    assert "hydra" in shown
    assert ("kind 3 tokens/step" in shown) == (parts == 4), "a wide table has its columns as lines"
    assert "wrote out/mine.md and out/mine.json" in shown
    record = json.loads((here / "out" / "mine.json").read_text())
    assert record["cells"]["hydra"]["all tokens/step"] >= 1


CANDIDATES = """
title = "Candidates"
source = "MLP Speculator, table 0"
needs = "nothing"
heads = ["./hydra"]
load = { precision = "fp32" }
rows = ["name", "num_nodes", "prompt_tokens"]
columns = "batch_size"
values = ["speedup", "tokens_per_second"]
[runs.""]
trees = ["paths"]
num_nodes = [1, 3]
batch_sizes = [1, 2]
prompt_tokens = [4, 6]
max_new_tokens = 6
num_calibration_prompts = 2
[published.A]
"plain, prompt 4" = { "batch 1 × plain" = 1.0 }
"hydra, k = 9, prompt 4" = { "batch 1 × plain" = 1.0 }
"""


def test_each_row_is_over_the_plain_decoding_that_is_printed(here: Path, run: Run) -> None:
    (here / "candidates.toml").write_text(CANDIDATES)
    (here / "four.jsonl").write_text("\n".join(json.dumps({"prompt": f"a dog {n}"}) for n in range(4)))
    command = ["reproduce", "./candidates.toml", "--model", "./model", "--prompts", "four.jsonl", "--quick"]
    shown = run([*command, "--out", "out"]).out
    record = json.loads((here / "out" / "candidates.json").read_text())
    assert list(record["cells"]) == [
        f"{way}, prompt {n}" for n in (4, 6) for way in ("plain", "hydra, k = 1", "hydra, k = 3")
    ]
    for label, line in record["cells"].items():
        plain = record["cells"][f"plain, {label.rpartition(', ')[2]}"]
        for size in (1, 2):
            ratio = line[f"batch {size} tokens/s"] / plain[f"batch {size} tokens/s"]
            assert line[f"batch {size} × plain"] == pytest.approx(ratio), "of the same comparison"
    assert "k = 0," in shown
    assert "k = 9" not in shown, "nobody measured it"
    assert "A quick run: 3 questions, answers of at most 6 tokens, fp32" in " ".join(shown.split())
    assert "The paper's baseline is IBM's own inference code" in " ".join(shown.split())


TRAINED = """
title = "Trained"
source = "me, table 2"
needs = "nothing"
load = { precision = "fp32" }
values = ["tokens_per_step"]
[shared]
num_heads = 2
draft_vocab_size = 0
[variants.one]
method = "medusa"
[runs.""]
trees = ["chain"]
num_nodes = [3]
max_new_tokens = 6
num_calibration_prompts = 2
"""


def test_tables_of_one_command_are_trained_first_and_share_heads(here: Path, run: Run) -> None:
    for name in ("first", "second"):
        (here / f"{name}.toml").write_text(TRAINED)
    (here / "four.jsonl").write_text("\n".join(json.dumps({"prompt": f"a dog {n}"}) for n in range(4)))
    chats = [[{"role": role, "content": "a dog in the fog"} for role in ("user", "assistant")] for _ in range(20)]
    (here / "chats.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    command = ["reproduce", "first.toml", "second.toml", "--model", "./model", "--prompts", "four.jsonl"]
    shown = run([*command, "--data", "chats.jsonl", "--train", "epochs=1", "max_tokens=500", "--out", "both"])
    names = sorted(path.name for path in (here / "both").iterdir())
    assert names == ["first.json", "first.md", "heads", "second.json", "second.md"]
    assert len([*(here / "both" / "heads").glob("one-*")]) == 1
    log = shown.out + shown.err
    assert log.index("variant 1 of 1") < log.index("wrote both/first.md") < log.index("wrote both/second.md")
    run([*command, "--heads", "./hydra", "--out", "own"])
    assert sorted(path.name for path in (here / "own").iterdir()) == names[:2] + names[3:], "nothing is trained"
    assert json.loads((here / "own" / "first.json").read_text())["cells"].keys() == {"plain", "hydra"}
