"""``draftheads info`` tells what is in a head's folder, and which heads there are."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from cli_world import slow_imports
from draftheads.checkpoints import registry
from draftheads.checkpoints.checkpoint import save_head
from draftheads.cli.info import run
from draftheads.cli.main import read_options
from draftheads.errors import ModelNotFound
from draftheads.heads.medusa import MedusaConfig, MedusaHead
from draftheads.models.model import TargetModel
from draftheads.speculation.acceptance_profile import AcceptanceProfile
from draftheads.speculation.tree import Tree
from families import VOCAB, tiny_model, tiny_profile

TREE = Tree.from_paths([(0,), (1,), (0, 0)])
DRAWN = "root\n├── 0\n│   └── 0\n└── 1\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved Medusa head with everything that can be told about it."""
    base = tiny_model("llama")
    head = MedusaHead(MedusaConfig(hidden_size=32, vocab_size=VOCAB, num_heads=2, draft_vocab_size=20))
    head.initialise(base.weights, torch.arange(20))
    place = tmp_path_factory.mktemp("heads") / "tiny-llama" / "medusa"
    save_head(head, place, base=base, profile=tiny_profile(TREE, num_heads=2))
    return place


@pytest.fixture(autouse=True)
def zoo(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only bundled head is the saved one. No model may be loaded, and nobody looks at a wide screen."""
    monkeypatch.setattr(registry, "weights_folder", lambda: folder.parent.parent)
    monkeypatch.setattr(TargetModel, "load", lambda *_, **__: pytest.fail("info loaded a model"))
    monkeypatch.setenv("COLUMNS", "100")


def told(capsys: pytest.CaptureFixture[str], arguments: str) -> str:
    """What the command prints."""
    run(read_options("info", shlex.split(arguments)))
    return capsys.readouterr().out


def lines(text: str) -> list[str]:
    """Lines with their runs of blanks made one."""
    return [" ".join(line.split()) for line in text.splitlines()]


def test_a_head_is_described(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, shlex.quote(str(folder)))
    config = json.loads((folder / "config.json").read_text())
    for line in (
        "method medusa",
        "num heads 2",
        "lm head shared",
        "draft vocab size 20",
        f"parameters {2 * (32 * 32 + 32):,}",
        f"size {(folder / 'model.safetensors').stat().st_size / 1e3:.1f} kB",
        "base tiny-llama",
        f"tokenizer {config['base']['fingerprints']['tokenizer']}",
        f"torch {torch.__version__}",
        "measured on 4 texts, 80 tokens at temperature 0",
        "tokens/step, 4 nodes static 1.30, growing 1.36",
        "4 nodes, root included; depth 2",
    ):
        assert line in lines(text), line
    assert text.endswith(DRAWN)


def test_missing_facts_have_no_heading(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    AcceptanceProfile.assumed(2).save(tmp_path / "acceptance.json")
    text = told(capsys, shlex.quote(str(tmp_path)))
    assert "Made by" in text
    assert "by `draftheads tune`" not in text
    assert "measured on nothing: assumed" in lines(text)


def test_the_zoo_is_listed_and_its_heads_are_found_by_method_and_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = told(capsys, "")
    row = next(line for line in text.splitlines() if "tiny-llama" in line)
    cells = [cell.strip() for cell in row.strip("│ ").split("│")]
    size = f"{(folder / 'model.safetensors').stat().st_size / 1e3:.1f} kB"
    assert cells == ["tiny-llama", "medusa", "2", f"{2 * (32 * 32 + 32):,}", size, "1.49"]
    assert "More heads for smollm2-135m: pip install ./zoo (in a checkout of draftheads)\n" in text
    assert "method medusa" in lines(told(capsys, "medusa --model tiny-llama"))
    with pytest.raises(ModelNotFound, match=r"none is installed for smollm2-135m; .*tiny-llama/medusa"):
        told(capsys, "medusa")
    monkeypatch.setattr(registry, "weights_folder", lambda: tmp_path / "none")
    assert "No heads are installed" in told(capsys, "")


@pytest.mark.usefixtures("own_cache")
def test_of_a_model_the_heads_for_it_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "tiny-llama")
    assert "Heads for tiny-llama; `--head auto` takes the first one that fits:\n" in text
    assert "  medusa (installed, 1.49 tokens/step)\n" in text
    assert "the Hugging Face Hub was not asked: tiny-llama is not an id of a model there\n" in text
    assert "No head for smollm2-135m was found: `--head auto` drafts copies" in told(capsys, "smollm2-135m")


def test_what_is_no_head_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "head.pt").touch()
    with pytest.raises(ModelNotFound, match=r"head\.pt is a file, not the folder of a draft head"):
        told(capsys, str(file))


def test_it_imports_neither_torch_nor_transformers():
    code = 'assert main(["info"]) == main(["info", "hydra"]) == 0'
    last = slow_imports(code).splitlines()[-1]
    assert last in ("[]", "['numpy']")
