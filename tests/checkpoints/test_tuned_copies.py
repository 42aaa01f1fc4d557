"""Installed heads are found for a tuned copy of their base by its sizes and tokenizer, wherever a head is named."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import draftheads
from adapter_world import saved_adapter
from cli_world import LETTERS, letters_tokenizer, write_model
from draftheads.bench.contenders import heads_for
from draftheads.checkpoints import registry
from draftheads.checkpoints.checkpoint import resolve_head
from draftheads.checkpoints.profile_store import find_profile
from draftheads.checkpoints.registry import base_in_zoo, find_head
from draftheads.cli.main import main
from draftheads.errors import ModelNotFound
from draftheads.loading import load_target, resolve, template_of
from draftheads.models.gguf_models import SMOLLM2_135M, converted_folder
from draftheads.serve.load_models import HeadExchange
from draftheads.train.new_head import Start
from draftheads.train.options import TrainOptions
from draftheads.train.run_folder import chat_template_text
from families import TREES, tiny_profile

FP32: dict[str, Any] = {"precision": "fp32", "device": "cpu"}
PROFILE = tiny_profile(TREES["ragged"])


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cheap_nodes: None) -> Path:
    """Heads for ``base-1``; its model is in ``origin``, and the working directory has no head."""
    weights = tmp_path / "weights"
    write_model(tmp_path / "origin", profile=PROFILE)
    for method in ("medusa", "hydra"):
        shutil.move(tmp_path / "origin" / method, weights / "base-1" / method)
    monkeypatch.setattr(registry, "weights_folder", lambda: weights)
    monkeypatch.setattr(registry, "data_package_folder", lambda: None)
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return weights


@pytest.fixture
def tuned(zoo: Path, tmp_path: Path) -> Path:
    """A copy of the base whose layers moved a little, as ``save_pretrained`` writes it."""
    return moved_copy(tmp_path / "origin" / "model", tmp_path / "my-model", noise=0.01)


def moved_copy(origin: Path, folder: Path, *, noise: float) -> Path:
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_pretrained(origin)
    for weight in model.model.layers.parameters():
        weight.data += noise * weight.std() * torch.randn_like(weight)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(origin).save_pretrained(str(folder))
    return folder


def change_base(zoo: Path, method: str, **changes: Any) -> None:
    """Another tokenizer or other sizes in what a head records of its base."""
    path = zoo / method / "config.json"
    text = path.read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)


@pytest.mark.parametrize("number", [0, 5])
def test_a_copy_with_more_tokens_uses_the_head(number: int, zoo: Path, tuned: Path) -> None:
    """The new tokens of the tokenizer lie behind the model's, or in what filled its embedding up."""
    tokenizer = AutoTokenizer.from_pretrained(tuned)
    tokenizer.add_tokens(["<tool>", "<think>"], special_tokens=True)
    model = AutoModelForCausalLM.from_pretrained(tuned)
    model.resize_token_embeddings(model.config.vocab_size + number)
    model.save_pretrained(tuned)
    tokenizer.save_pretrained(str(tuned))
    plain, drafted = (draftheads.load(tuned, head, **FP32) for head in (None, "hydra"))
    texts = [
        [result.token_ids for result in each.generate(["a dog", "ice"], max_new_tokens=30)] for each in (plain, drafted)
    ]
    assert texts[0] == texts[1]
    model.resize_token_embeddings(23)
    model.save_pretrained(tuned)
    with pytest.raises(ModelNotFound, match=r"vocab_size was .* and is 23"):
        draftheads.load(tuned, "hydra", **FP32)


def test_load_finds_the_head_with_its_profile_and_template(zoo: Path, tuned: Path) -> None:
    plain = draftheads.load(tuned, **FP32)
    expected = [result.token_ids for result in plain.generate(["a dog", "ice"], max_new_tokens=30)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # so close to its base
        engine = draftheads.load(tuned, "hydra", **FP32)
    assert engine.profile == PROFILE == find_profile(resolve_head("hydra", tuned))
    assert [result.token_ids for result in engine.generate(["a dog", "ice"], max_new_tokens=30)] == expected
    model = AutoModelForCausalLM.from_pretrained(tuned)
    again = draftheads.load(model, "hydra", tokenizer=str(tuned), **FP32)
    assert again.profile == PROFILE, "a loaded model has the name of its folder"


def test_every_other_place_finds_it_too(zoo: Path, tuned: Path) -> None:
    folder = zoo / "base-1" / "hydra"
    assert find_head("hydra", str(tuned)) == folder
    assert heads_for(str(tuned))[:2] == ("medusa", "hydra")
    assert HeadExchange(None, str(tuned)).find("hydra") == folder  # type: ignore[arg-type]
    assert Start.read("hydra", load_target(tuned, **FP32)).saved.folder == folder
    change_base(zoo / "base-1", "hydra", **{'"provenance"': '"chat_template": "{{ messages }}", "provenance"'})
    assert template_of(None, resolve("hydra", tuned)) == "{{ messages }}"
    options = TrainOptions.of(
        method="hydra", out=Path("out"), data=(Path("chats.jsonl"),), model=str(tuned), start_from="hydra"
    )
    assert chat_template_text(options) == "{{ messages }}"


def test_a_merged_adapter_and_an_adapter_of_a_copy_have_the_heads_of_the_base(
    zoo: Path, tuned: Path, tmp_path: Path
) -> None:
    base = load_target(tuned, fast=False, **FP32)
    adapter = saved_adapter(base, tmp_path / "adapter", scale=0.01, targets=("q_proj", "v_proj"))
    assert find_head("hydra", str(adapter)) == zoo / "base-1" / "hydra"
    assert main(["merge", "--adapter", str(adapter), "--out", str(tmp_path / "merged")]) == 0
    assert find_head("hydra", str(tmp_path / "merged")) == zoo / "base-1" / "hydra"
    assert draftheads.load(tmp_path / "merged", "hydra", **FP32).profile == PROFILE


def test_other_sizes_are_named_with_both_values(zoo: Path, tuned: Path) -> None:
    change_base(zoo / "base-1", "hydra", **{'"hidden_size": 32': '"hidden_size": 64'})
    with pytest.raises(ModelNotFound, match=r"'hydra' for .*my-model.*base-1: hidden_size was 64 and is 32"):
        find_head("hydra", str(tuned))
    assert find_head("medusa", str(tuned)) == zoo / "base-1" / "medusa"


def test_another_tokenizer_is_named_until_it_is_changed(zoo: Path, tuned: Path) -> None:
    letters_tokenizer(LETTERS[:-1]).save_pretrained(str(tuned))
    with pytest.raises(ModelNotFound, match=r"base-1: tokenizer fingerprint was '[0-9a-f]{16}' and is '[0-9a-f]{16}'"):
        find_head("hydra", str(tuned))
    assert heads_for(str(tuned))[0] not in ("medusa", "hydra")
    letters_tokenizer().save_pretrained(str(tuned))
    assert find_head("hydra", str(tuned)) == zoo / "base-1" / "hydra", "what was read before is not kept"


def test_a_copy_without_a_tokenizer_is_found_by_its_sizes(zoo: Path, tuned: Path, tmp_path: Path) -> None:
    for path in tuned.glob("tokenizer*"):
        path.unlink()
    assert find_head("hydra", str(tuned)) == zoo / "base-1" / "hydra"
    engine = draftheads.load(tuned, "hydra", tokenizer=str(tmp_path / "origin" / "model"), **FP32)
    assert engine.profile == PROFILE


def test_of_several_bases_the_tokenizer_decides(zoo: Path, tuned: Path) -> None:
    shutil.copytree(zoo / "base-1", zoo / "base-2")
    with pytest.raises(ModelNotFound, match=r"give the folder of one, .*base-1/hydra or .*base-2/hydra"):
        find_head("hydra", str(tuned))
    change_base(zoo / "base-1", "hydra", **{'"tokenizer": "': '"tokenizer": "0'})
    assert find_head("hydra", str(tuned)) == zoo / "base-2" / "hydra"


def test_heads_of_the_package_that_is_not_installed_are_named_for_copies(zoo: Path, tuned: Path) -> None:
    (zoo / "base-1").rename(zoo / "smollm2-135m")
    assert base_in_zoo(str(tuned)) == "smollm2-135m"
    with pytest.raises(ModelNotFound, match="the head 'eagle' for smollm2-135m is in the package draftheads-zoo"):
        find_head("eagle", str(tuned))


@pytest.mark.real
def test_a_copy_of_the_real_model_has_the_bundled_heads(tmp_path: Path) -> None:
    origin = converted_folder(SMOLLM2_135M)
    assert origin is not None
    AutoTokenizer.from_pretrained(origin).save_pretrained(str(tmp_path))
    shutil.copy(origin / "config.json", tmp_path)
    assert find_head("hydra", str(tmp_path)) == find_head("hydra", "smollm2-135m")
