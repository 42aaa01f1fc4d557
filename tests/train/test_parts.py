"""Heads are trained and tuned with their target's embedding, last norm and lm_head alone, where states are stored."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations import accelerate as accelerate_of_transformers

from draftheads.cli.main import main
from draftheads.data.texts import load_texts
from draftheads.errors import DataError, DataWarning, UnsupportedModel
from draftheads.models.model import TargetModel
from draftheads.train import training
from draftheads.train.training import Run
from draftheads.utils.progress import NoProgress
from families import saved_model
from training_world import chat_model, chat_options, distilled_chats, tensors, write_chats
from vllm_files import extract_as_vllm


class Stages(NoProgress):
    """Keeps what was done."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def stage(self, name: str) -> None:
        self.said.append(name)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in a folder, and its own answers to some questions."""
    folder = tmp_path_factory.mktemp("parts")
    target = chat_model()
    saved_model(target, folder / "model")
    write_chats(folder / "chats.jsonl", distilled_chats(target))
    return folder


def trained(out: Path, **changes: Any) -> Run:
    """A run, which has ended."""
    run = Run(chat_options(out, held_out=0.2, **changes), Stages())
    run.run()
    return run


def read_json(path: Path) -> Any:
    """The content of a file."""
    return json.loads(path.read_text())


def said(run: Run) -> str:
    return "\n".join(run.progress.said)  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["hydra", "eagle3"])
def test_the_head_and_its_profile_are_the_same(world: Path, tmp_path: Path, method: str):
    how = {"model": str(world / "model"), "method": method, "features": tmp_path / "states"}
    whole = trained(tmp_path / "whole", data=(world / "chats.jsonl",), **how)
    assert whole.target.has_layers
    for name, data in (("parts", ()), ("again", (world / "chats.jsonl",))):
        run = trained(tmp_path / name, data=data, **how)
        assert not run.target.has_layers
        for key, expected in tensors(tmp_path / "whole").items():
            assert torch.equal(tensors(tmp_path / name)[key], expected), key
        profile, config = (read_json(tmp_path / name / file) for file in ("acceptance.json", "config.json"))
        assert profile == read_json(tmp_path / "whole" / "acceptance.json")
        assert profile["dynamic_tokens"], "growing trees were replayed"
        assert config["base"] == read_json(tmp_path / "whole" / "config.json")["base"]


def test_tuning_on_stored_states_gives_the_profile_of_training(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model, states, head = str(world / "model"), tmp_path / "states", tmp_path / "head"
    trained(head, model=model, features=states, data=(world / "chats.jsonl",))
    command = ["tune", model, str(head), "--features", str(states), "--out", str(tmp_path / "tuned")]
    main([*command, "--precision", "fp32", "--num-prompts", str(training.NUM_TEXTS)])
    profile, expected = (read_json(folder / "acceptance.json") for folder in (tmp_path / "tuned", head))
    assert [profile["num_texts"], profile["num_tokens"]] == [expected["num_texts"], expected["num_tokens"]]
    for kind in ("static_tokens", "dynamic_tokens"):  # a saved head is in bf16
        assert profile[kind][:8] == pytest.approx(expected[kind][:8], abs=0.05)
    assert f"tokens per step on {profile['num_texts']} texts" in capsys.readouterr().out
    assert main([*command, "--measure", "1"])
    assert "leave --measure out" in capsys.readouterr().err
    assert main([*command, "--precision", "int8"])
    assert "int8" in capsys.readouterr().err


def test_a_warning_names_states_that_are_not_of_the_text(world: Path, tmp_path: Path):
    how = {"model": str(world / "model"), "features": tmp_path / "states"}
    trained(tmp_path / "whole", data=(world / "chats.jsonl",), **how)
    shard = tmp_path / "states" / "shard-00000.bf16"
    rows = np.memmap(shard, np.int16, "r+").reshape(-1, 32)
    rows[:] = rows[::-1].copy()
    rows.flush()
    with pytest.warns(DataWarning, match=r"shard-00000.* are not those of the text.*never trained, delete"):
        trained(tmp_path / "parts", **how)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """No whole model fits into the memory."""
    monkeypatch.setattr(training, "fits_memory", lambda *_, **__: False)


def extracted(world: Path, folder: Path, layer_ids: list[int]) -> dict[str, Any]:
    target = TargetModel.load(world / "model", dtype="fp32")
    texts = load_texts(target, [world / "chats.jsonl"], max_length=64, max_tokens=None)
    extract_as_vllm(target, texts, folder, layer_ids)
    return {"model": str(world / "model"), "features": folder, "data": (world / "chats.jsonl",), "method": "eagle3"}


LAYERS = {"head_options": ("layers=[0,1]",)}


@pytest.mark.parametrize(("layers", "layer_ids"), [([0, 1], [0, 1, 2]), ([2, 0], [0, 2])])
@pytest.mark.usefixtures("large")
def test_states_of_vllm_need_no_layers(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: list[int], layer_ids: list[int]
):
    """Layers in any order; the last one may be read, too, before its norm."""
    how = {**extracted(world, tmp_path / "states", layer_ids), "head_options": (f"layers={layers}".replace(" ", ""),)}
    run = trained(tmp_path / "parts", **how)
    assert not run.target.has_layers
    monkeypatch.undo()
    whole = trained(tmp_path / "whole", **how)
    assert whole.target.has_layers
    for key, expected in tensors(tmp_path / "whole").items():
        assert torch.equal(tensors(tmp_path / "parts")[key], expected), key
    assert (tmp_path / "parts/acceptance.json").read_text() == (tmp_path / "whole/acceptance.json").read_text()


@pytest.mark.usefixtures("large")
def test_files_of_vllm_with_other_layers_are_refused(world: Path, tmp_path: Path):
    how = {**extracted(world, tmp_path / "states", [1, 2]), **LAYERS}
    with pytest.raises(DataError, match=r"have 2 layers, and 3 are read.*ids \[0, 1, 2\]"):
        trained(tmp_path / "out", **how)


@pytest.mark.usefixtures("large")
def test_files_of_vllm_with_states_of_another_text_are_refused(world: Path, tmp_path: Path):
    how = {**extracted(world, tmp_path / "states", [0, 1, 2]), **LAYERS}
    for file in (tmp_path / "states").glob("*.safetensors"):
        stored = load_file(file)
        stored["hidden_states"] = stored["hidden_states"].flip(0).contiguous()
        save_file(stored, file)
    with pytest.raises(DataError, match=r"\.safetensors \(.*chats\.jsonl:\d+\): .* are not those of the text"):
        trained(tmp_path / "out", **how)


def test_a_model_of_which_all_is_loaded_is_said_once(world: Path, tmp_path: Path):
    folder = tmp_path / "model"
    target = TargetModel.load(world / "model", dtype="fp32")
    saved_model(target, folder)
    torch.save(target.model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    how = {"model": str(folder), "features": tmp_path / "states"}
    trained(tmp_path / "first", data=(world / "chats.jsonl",), **how)
    run = trained(tmp_path / "second", **how)
    assert run.target.has_layers
    assert said(run).count("no safetensors files") == 1


def make_small(monkeypatch: pytest.MonkeyPatch, num_bytes: int = 60_000) -> None:
    """The device does not hold the model, and the memory only some of its layers."""
    monkeypatch.setattr(training, "fits_memory", lambda *_, **__: False)
    monkeypatch.setattr(accelerate_of_transformers, "get_max_memory", lambda *_: {"cpu": num_bytes})


@pytest.mark.parametrize(
    ("method", "dtype", "places"),
    [
        ("hydra", torch.float32, "on cpu, .*on disk"),
        ("eagle3", torch.float32, "on cpu, .*on disk"),
        ("hydra", torch.bfloat16, "on cpu, .*on disk"),
        ("hydra", torch.bfloat16, "on cpu"),  # where accelerate finds more memory than we do
    ],
)
def test_a_spread_model_gives_the_same_head(  # noqa: PLR0917 - fixtures and cases
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, dtype: torch.dtype, places: str
):
    how = {"model": str(world / "model"), "method": method, "data": (world / "chats.jsonl",), "precision": "fp32"}
    monkeypatch.setattr(training, "reading_dtype", lambda *_: dtype)
    trained(tmp_path / "whole", **how)
    make_small(monkeypatch, 15_000 * dtype.itemsize if "disk" in places else 1_000_000)
    run = trained(tmp_path / "spread", **how)
    assert re.search(f"does not hold the model, which is spread: .*{places}", said(run))
    assert not run.target.has_layers
    for key, expected in tensors(tmp_path / "whole").items():
        assert torch.equal(tensors(tmp_path / "spread")[key], expected), key
    profile, expected = (read_json(tmp_path / name / "acceptance.json") for name in ("spread", "whole"))
    assert profile == expected
    base, expected = (read_json(tmp_path / name / "config.json")["base"] for name in ("spread", "whole"))
    assert base == expected


def test_a_spread_model_verifies_no_trees_and_has_one_process(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_small(monkeypatch)
    with pytest.raises(UnsupportedModel, match=r"weights on cpu, meta; drafts are verified on one device"):
        TargetModel.load(world / "model", dtype="fp32", spread_to=tmp_path)
    run = Run(chat_options(tmp_path / "out", model=str(world / "model"), data=(world / "chats.jsonl",)), Stages())
    monkeypatch.setattr(training.processes, "count", lambda: 2)
    with pytest.raises(UnsupportedModel, match="read its texts by one process"):
        run.load_target()
