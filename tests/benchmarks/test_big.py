"""Random models beside llama.cpp: the smallest one without llama.cpp, its GGUF file, and what stays on disk."""

import doctest
import json
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import big  # noqa: E402 - the scripts are found by the line above
import random_model  # noqa: E402

GEMMA = Gemma3TextConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=64,
    vocab_size=64,
    head_dim=16,
)


def options(folder: Path, **changed: object) -> big.Options:
    few = {"rounds": 2, "repeats": 1, "length": 20, "max_new_tokens": 3, "nodes": (4,), "threads": 1}
    return big.Options(size="tiny", environments=folder / "none", folder=folder / "models", **{**few, **changed})


def test_what_can_be_measured_is_and_the_rest_has_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out.json"
    big.main(options(tmp_path, precisions=("fp32", "nonsense"), kinds=("Q8_0",), json=out))
    text = capsys.readouterr().out
    assert "nonsense: precision is 'nonsense'" in text
    assert "Q8_0: skipped: no environment; run benchmarks/environments.sh llama-cpp" in text
    (row,) = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert (row["name"], row["nodes"]) == ("draftheads fp32", [1, 4])
    assert [len(passes) for passes in row["passes"]] == [2, 2]
    assert str(tmp_path) not in out.read_text(encoding="utf-8")
    assert not list((tmp_path / "models").iterdir())


@pytest.mark.parametrize(("keep", "left"), [(False, 0), (True, 1)])
def test_the_model_is_deleted_when_a_run_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: bool, left: int
):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(big, "measured", interrupted)
    with pytest.raises(KeyboardInterrupt):
        big.main(options(tmp_path, precisions=("fp32",), kinds=(), keep=keep))
    assert len(list((tmp_path / "models").iterdir())) == left


@pytest.mark.parametrize("config", [random_model.CONFIGS["tiny"], GEMMA], ids=["llama", "gemma"])
def test_the_gguf_file_has_the_same_numbers(tmp_path: Path, config: object):
    random_model.write_model(config, tmp_path)
    random_model.write_gguf(config, tmp_path, tmp_path / "model.gguf")
    stored = dict(random_model._stored(tmp_path))
    read = {tensor.name: np.asarray(tensor.data) for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert len(read) == len(stored)
    norm = stored["model.norm.weight"].float().numpy()
    assert np.array_equal(read["output_norm.weight"], norm + 1 if config is GEMMA else norm)
    embedding = stored["model.embed_tokens.weight"].view(torch.uint8).numpy()
    assert np.array_equal(read["token_embd.weight"].reshape(-1), embedding.reshape(-1))


def test_neighbours_in_a_gguf_file_are_turned_together():
    weight = torch.arange(8.0)[:, None]  # one head of eight numbers, of which 0 and 4 are turned together
    turned = random_model._turned(
        "model.layers.0.self_attn.k_proj.weight",
        weight,
        random_model.LlamaConfig(num_attention_heads=1, num_key_value_heads=1),
    )
    assert turned.flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_the_examples_in_docstrings_hold():
    assert doctest.testmod(big).failed == 0
