"""Models in GGUF files: converted once, they give the text of the model that was written into the file."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import draftheads
from draftheads.cli.main import main
from draftheads.models.gguf_models import folder_of_gguf
from families import tiny_model
from gguf_world import write_gguf

FP32: dict[str, Any] = {"precision": "fp32", "device": "cpu"}
PROMPT = [3, 4, 5, 6, 7, 8]
LETTERS = [chr(number) for number in range(ord("a"), ord("t") + 1)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(path: Path, family: str, **changed: Any) -> Any:
    """The model of a family in a file, with a tokenizer of letters; returns the model."""
    model = tiny_model(family).model
    tokens = ["<s>", "</s>", "<unk>", "ab", *LETTERS][: model.config.vocab_size]
    tokens += [f"<{number}>" for number in range(model.config.vocab_size - len(tokens))]
    special = {"bos": 0, "eos": 1, "unk": 2, "pad": 1}
    write_gguf(path, model, tokens, merges=["a b"], special=special, **changed)
    return model


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
    assert engine.model.model_id == str(tmp_path / "model.gguf")
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
    assert main(["cache", "clear", "gguf"]) == 0
    assert not [path for path in (cache / "gguf").iterdir() if path.is_dir()]
    capsys.readouterr()
