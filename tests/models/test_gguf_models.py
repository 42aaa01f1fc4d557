"""Models in GGUF files: converted once, they give the text of the model that was written into the file."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map
from transformers import AutoModelForCausalLM

import draftheads
from draftheads.cli.main import main
from draftheads.errors import ModelNotFound, UnsupportedModel
from draftheads.models.gguf_models import folder_of_gguf
from families import tiny_model

ARCHITECTURES = {"llama": MODEL_ARCH.LLAMA, "qwen2": MODEL_ARCH.QWEN2, "gemma3_text": MODEL_ARCH.GEMMA3}
FP32: dict[str, Any] = {"precision": "fp32", "device": "cpu"}
PROMPT = [3, 4, 5, 6, 7, 8]
LETTERS = [chr(number) for number in range(ord("a"), ord("t") + 1)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(
    path: Path, family: str, *, left_out: Sequence[str] = (), more: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> Any:
    """The model of a family in a file, with a byte-level tokenizer of letters; returns the model."""
    model = tiny_model(family).model
    config, arch = model.config, ARCHITECTURES[family]
    writer = GGUFWriter(path, "gemma3" if family == "gemma3_text" else family)
    tokens = ["<s>", "</s>", "<unk>", "ab", *LETTERS][: config.vocab_size]
    tokens += [f"<{number}>" for number in range(config.vocab_size - len(tokens))]
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope_theta(config))
    if family == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    writer.add_pad_token_id(1)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name in left_out:
            continue
        values = weight.float()
        if family == "llama" and ("q_proj" in name or "k_proj" in name):  # llama.cpp's order of rows
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = values.view(heads, 2, -1, values.shape[1]).transpose(1, 2).reshape(values.shape)
        if family == "gemma3_text" and "norm" in name:
            values = values + 1.0  # llama.cpp's norms multiply by w
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        writer.add_tensor(str(found), values.contiguous().numpy())
    for name, values in more.items():
        writer.add_tensor(name, values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def rope_theta(config: Any) -> float:
    ropes = config.rope_parameters
    return float((ropes.get("full_attention") or ropes)["rope_theta"])


def answer(model: Any) -> list[int]:
    """By transformers."""
    model.generation_config.eos_token_id = None
    options: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    found = model.generate(torch.tensor([PROMPT]), **options)[0, len(PROMPT) :].tolist()
    return list(found)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
def test_a_file_gives_the_text_of_transformers(family: str, tmp_path: Path, cache: Path) -> None:
    """Of the file: what tiny models have beside usual ones, such as short windows, is not in it."""
    written = write(tmp_path / "model.gguf", family)
    engine = draftheads.load(tmp_path / "model.gguf", **FP32)
    [result] = engine.generate([PROMPT], max_new_tokens=30, ignore_eos=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    assert list(result.token_ids) == answer(theirs)
    if family == "llama":
        assert list(result.token_ids) == answer(written)
    [folder] = [path for path in (cache / "gguf").iterdir() if path.is_dir()]
    assert folder == folder_of_gguf(tmp_path / "model.gguf")


def test_it_is_converted_once_and_again_when_it_changes(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.gguf"
    write(file, "llama")
    first = folder_of_gguf(file)
    assert capsys.readouterr().err == "", "no bar in a file of messages"
    assert folder_of_gguf(file) == first
    os.utime(file, ns=(1, 1))
    assert folder_of_gguf(file) != first
    assert main(["generate", "a b", "--model", str(file), "--max-new-tokens", "3"]) == 0
    assert main(["cache", "clear", "gguf", "--yes"]) == 0
    assert not [path for path in (cache / "gguf").iterdir() if path.is_dir()]
    capsys.readouterr()


def test_a_head_has_the_file_as_its_base(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", "llama")
    engine = draftheads.load(tmp_path / "model.gguf", **FP32)
    plain = engine.generate([PROMPT], max_new_tokens=30, ignore_eos=True)[0].token_ids
    drafted = draftheads.load(tmp_path / "model.gguf", "lookahead", **FP32)
    assert drafted.generate([PROMPT], max_new_tokens=30, ignore_eos=True)[0].token_ids == plain
    assert engine.model.model_id == str(tmp_path / "model.gguf")


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write(file, "llama", left_out=("model.layers.1.mlp.up_proj.weight",))
    with pytest.raises(UnsupportedModel, match=r"has no tensor for model\.layers\.1\.mlp\.up_proj\.weight"):
        draftheads.load(file, **FP32)
    write(file, "llama", more={"rope_freqs.weight": torch.ones(4)})
    with pytest.raises(UnsupportedModel, match=r"with a tensor rope_freqs\.weight, which cannot be read"):
        draftheads.load(file, **FP32)
    file.write_bytes(b"GGUF nothing")
    with pytest.raises(ModelNotFound, match="is damaged"):
        draftheads.load(file, **FP32)
    with pytest.raises(ModelNotFound, match="is not a folder here"):
        draftheads.load(tmp_path / "another.gguf", **FP32)
