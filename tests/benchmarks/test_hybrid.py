"""Random hybrid models beside llama.cpp: the smallest one without llama.cpp, and the GGUF files of three families."""

import doctest
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import hybrid  # noqa: E402 - the scripts are found by the line above
import random_model  # noqa: E402


def test_the_tables_have_what_can_be_measured_and_the_rest_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out.json"
    few: dict[str, Any] = {"rounds": 2, "repeats": 1, "length": 20, "prompt": 30, "max_new_tokens": 3, "threads": 1}
    places = {"environments": tmp_path / "none", "folder": tmp_path / "models", "json": out}
    small = hybrid.Options(size="lfm2-tiny", nodes=(2,), precisions=("fp32",), kinds=("Q8_0",), **few, **places)
    hybrid.main(small)
    text = capsys.readouterr().out
    assert "| draftheads fp32 | 8 | " in text
    assert "× |" in text
    assert "Q8_0: skipped: no environment; run benchmarks/environments.sh llama-cpp" in text
    (row,) = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert (row["name"], row["nodes"]) == ("draftheads fp32", [1, 2, 4, 8])
    assert [len(row[name]) for name in ("speeds", "prompts", "passes", "drafts")] == [2, 2, 2, 2]
    assert not list((tmp_path / "models").iterdir())


@pytest.fixture
def written(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[dict[str, Any], gguf.GGUFReader]:
    """The tensors of a model, and its GGUF file."""
    config = random_model.CONFIGS[request.param]
    random_model.write_model(config, tmp_path)
    random_model.write_gguf(config, tmp_path, tmp_path / "model.gguf")
    stored = {name: tensor.float().numpy() for name, tensor in random_model._stored(tmp_path)}
    return stored, gguf.GGUFReader(tmp_path / "model.gguf")


def settings(reader: gguf.GGUFReader) -> dict[str, Any]:
    return {name.partition(".")[2]: field.contents() for name, field in reader.fields.items()}


def numbers(reader: gguf.GGUFReader, name: str) -> Any:
    (found,) = (tensor for tensor in reader.tensors if tensor.name == name)
    assert found.tensor_type == gguf.GGMLQuantizationType.F32
    return np.asarray(found.data)


@pytest.mark.parametrize("written", ["qwen3.5-tiny"], indirect=True)
def test_a_file_of_qwen35_is_as_its_converter_would_write_it(written: tuple[dict[str, Any], gguf.GGUFReader]):
    stored, reader = written
    assert len(reader.tensors) == len(stored)
    found = settings(reader)
    names = ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
    assert [found[f"ssm.{name}"] for name in names] == [4, 128, 16, 16, 2048]
    assert (found["full_attention_interval"], found["rope.dimension_sections"]) == (4, [11, 11, 10, 0])
    assert (found["rope.dimension_count"], found["attention.key_length"]) == (64, 256)
    layer = {name.removeprefix("model.layers.0."): one for name, one in stored.items() if ".layers.0." in name}
    assert np.allclose(numbers(reader, "blk.0.ssm_a"), -np.exp(layer["linear_attn.A_log"]))
    assert np.array_equal(numbers(reader, "blk.0.ssm_dt.bias"), layer["linear_attn.dt_bias"])
    assert np.array_equal(numbers(reader, "blk.0.ssm_conv1d.weight"), layer["linear_attn.conv1d.weight"][:, 0])
    assert np.array_equal(numbers(reader, "blk.0.ssm_norm.weight"), layer["linear_attn.norm.weight"])
    assert np.array_equal(numbers(reader, "blk.0.attn_norm.weight"), layer["input_layernorm.weight"] + 1)


@pytest.mark.parametrize("written", ["granite-4-h-tiny"], indirect=True)
def test_a_file_of_granite_4_h_is_as_its_converter_would_write_it(written: tuple[dict[str, Any], gguf.GGUFReader]):
    stored, reader = written
    found = settings(reader)
    assert found["attention.head_count_kv"] == [0, 2, 0]
    assert (found["ssm.time_step_rank"], found["ssm.inner_size"], found["rope.scaling.finetuned"]) == (4, 128, False)
    assert [found[name] for name in ("embedding_scale", "logit_scale")] == [12.0, 6.0]
    layer = {name.removeprefix("model.layers.0."): one for name, one in stored.items() if ".layers.0." in name}
    assert np.allclose(numbers(reader, "blk.0.ssm_a"), -np.exp(layer["mamba.A_log"])[:, None])
    assert np.array_equal(numbers(reader, "blk.0.ssm_d"), layer["mamba.D"][:, None])
    assert np.array_equal(numbers(reader, "blk.0.ssm_norm.weight"), layer["mamba.norm.weight"][None])
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
    assert shapes["blk.0.ffn_gate.weight"] == shapes["blk.0.ffn_up.weight"] == [64, 128]
    assert shapes["blk.0.ffn_down.weight"] == [128, 64]


@pytest.mark.parametrize("written", ["lfm2-tiny"], indirect=True)
def test_a_file_of_lfm2_is_as_its_converter_would_write_it(written: tuple[dict[str, Any], gguf.GGUFReader]):
    stored, reader = written
    assert len(reader.tensors) == len(stored)
    found = settings(reader)
    assert (found["attention.head_count_kv"], found["shortconv.l_cache"]) == ([0, 0, 2, 0], 3)
    kernel = stored["model.layers.0.conv.conv.weight"]
    assert np.array_equal(numbers(reader, "blk.0.shortconv.conv.weight"), kernel[:, 0])
    assert "token_embd_norm.weight" in {tensor.name for tensor in reader.tensors}


def test_heads_that_llama_cpp_has_in_another_order_are_refused(tmp_path: Path):
    config = random_model.Qwen3_5TextConfig(linear_num_key_heads=16, linear_num_value_heads=32)
    with pytest.raises(ValueError, match="must equal linear_num_key_heads"):
        random_model.write_gguf(config, tmp_path, tmp_path / "model.gguf")


def test_the_examples_in_docstrings_hold():
    assert doctest.testmod(hybrid).failed == 0
