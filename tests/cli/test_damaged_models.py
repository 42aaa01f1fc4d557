"""A model whose files do not hold its weights is refused in each way in which commands load one, with the tensor."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from cli_world import Run
from test_loading_models import write_adapter

CHAT = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
COMMANDS = {
    "generate": ["generate", "mom", "--model", "./damaged"],
    "bench of a draft model": ["bench", "./model", "--heads", "--draft-model", "./damaged", "--prompts", "p.jsonl"],
    "tune": ["tune", "./damaged", "./hydra", "--prompts", "p.jsonl"],
    "train": ["train", "--method", "medusa", "--model", "./damaged", "--data", "c.jsonl", "--out", "out"],
    "train --joint": ["train", "--joint", "text", "--model", "./damaged", "--data", "c.jsonl", "--out", "out"],
    "export": ["export", "./medusa", "--model", "./damaged", "--out", "out"],
    "import": ["import", "./theirs", "--model", "./damaged", "--out", "out"],
    "merge": ["merge", "--model", "./damaged", "--adapter", "./lora", "--out", "out"],
    "serve": ["serve", "./damaged", "--port", "0"],
    "demo": ["demo", "--model", "./damaged", "--heads", "./hydra"],
    "a draft model": ["generate", "mom", "--model", "./model", "--draft-model", "./damaged"],
}


@pytest.fixture(scope="module")
def damaged(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The world with another copy of the model, in which a tensor is of another type."""
    place = tmp_path_factory.mktemp("damaged")
    shutil.copytree(folder, place, dirs_exist_ok=True)
    shutil.copytree(place / "model", place / "damaged")
    (place / "p.jsonl").write_text("".join(f'{{"prompt": "{word}"}}\n' for word in ("mom", "fog", "hello", "film")))
    (place / "c.jsonl").write_text(CHAT * 20)
    write_adapter(place / "lora", place / "model")
    (place / "theirs").mkdir()
    head = load_file(place / "medusa" / "model.safetensors")
    own = {name.removeprefix("blocks."): tensor for name, tensor in head.items() if name.startswith("blocks.")}
    save_file(own, place / "theirs" / "medusa_lm_head.safetensors")
    weights = load_file(place / "model" / "model.safetensors")
    key = "model.layers.1.mlp.gate_proj.weight"
    changed = {**weights, key: (weights[key] * 40).char()}
    save_file(changed, place / "damaged" / "model.safetensors", metadata={"format": "pt"})
    return place


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("here")
def test_the_tensor_is_named(command: str, damaged: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(damaged)
    said = " ".join(run(COMMANDS[command], code=1).err.split())
    assert "of another type (1 tensor): model.layers.1.mlp.gate_proj.weight (torch.int8)" in said
    assert not (damaged / "out").exists() or command.startswith("train")
    shutil.rmtree(damaged / "out", ignore_errors=True)
