"""Wrong names, missing files and heads of another model are refused before torch is imported."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cli_world import write_model

BLOCK = """
import sys

class Blocked:
    def find_spec(name, *_):
        if name in ("torch", "transformers"):
            raise ImportError(f"{name} is imported")

sys.meta_path.insert(0, Blocked)
"""
RUN_ALL = """
import contextlib, io, json, shlex, traceback
from draftheads.cli.main import main

found = {}
for command in sys.argv[1:]:
    with contextlib.redirect_stderr(io.StringIO()) as shown, contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(shlex.split(command))
        except SystemExit as end:
            code = end.code
        except Exception:
            code = traceback.print_exc()
    found[command] = code, shown.getvalue()
print(json.dumps(found))
"""
# the words that the line has
REFUSED = {
    "generate a --model ./modle": "no such file or folder: ./modle (did you mean ./model?)",
    "generate a --model model --draft-model ~/none.gguf": "no such file or folder: ~/none.gguf",
    "generate a --model here/none.gguf": "no such file or folder: here/none.gguf",
    "generate a --model medusa": "medusa is a draft head (medusa for",
    "chat --model 'no such model'": "no such model is not a folder here",
    "serve --model empty": "empty is here, but it is not a model folder",
    "generate a --model model --head hydar": "no head 'hydar' (did you mean hydra?)",
    "serve model --head medusa prompt-lookup nohead": "no head 'nohead'",
    "bench wide --heads lookahead ./medusa": "with hidden_size 32, this model, wide, has 48",
    "export ./medusa --model wide --out out": "hidden_size 32, this model, wide, has 48",
    "train --method medusa --model wide --start-from ./medusa --data chats.jsonl --out out": "wide, has 48",
    "distill --model model --head ./broken --prompts chats.jsonl --out o.jsonl": "is missing; a head's folder has",
    "generate a --model model --head eagle": "for a tuned copy of its base: smollm2-135m/",
    "distill --prompts none.jsonl --out o.jsonl": "none.jsonl: cannot be read",
    "tune model ./medusa --prompts none.jsonl": "none.jsonl: cannot be read",
    "train --method medusa --data chats.jsonl none.jsonl --out out": "none.jsonl: cannot be read",
    "train --joint text --model model --start-from ./hydar --data chats.jsonl --out out": "file or folder: ./hydar",
    "generate a --model model --chat-template none.jinja": "chat template 'none.jinja' cannot be read",
    "generate a --model model --tree 0": "num_nodes is 0",
}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, two heads for it, a wider model's configuration, and what is neither."""
    folder = write_model(tmp_path_factory.mktemp("early"))
    (folder / "empty").mkdir()
    (folder / "chats.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8")
    shutil.copytree(folder / "model", folder / "wide")
    config = json.loads((folder / "wide" / "config.json").read_text(encoding="utf-8"))
    (folder / "wide" / "config.json").write_text(json.dumps({**config, "hidden_size": 48}), encoding="utf-8")
    shutil.copytree(folder / "medusa", folder / "broken")
    (folder / "broken" / "model.safetensors").unlink()
    return folder


@pytest.fixture(scope="module")
def refusals(here: Path) -> dict[str, tuple[int, str]]:
    """The exit code and standard error of each, from one process in which torch and transformers cannot be imported."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", BLOCK + RUN_ALL, *REFUSED],
        cwd=here, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.parametrize("command", REFUSED)
def test_without_torch_the_refusal_is_the_same(command: str, refusals: dict[str, tuple[int, str]]) -> None:
    code, shown = refusals[command]
    assert REFUSED[command] in shown
    assert (shown[:7], shown.count("\n"), code) == ("error: ", 1, 1)
