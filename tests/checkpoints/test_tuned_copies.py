"""A head of a base drafts for a tuned copy of it, if it is named with its base."""

import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import draftheads
from cli_world import write_model
from draftheads.bench.contenders import heads_for
from draftheads.checkpoints import registry
from draftheads.checkpoints.registry import find_head
from draftheads.errors import ModelNotFound
from draftheads.serve.load_models import allowed_head
from families import TREES, tiny_profile

FP32: dict[str, Any] = {"precision": "fp32", "device": "cpu"}
PROFILE = tiny_profile(TREES["ragged"])


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cheap_nodes: None) -> Path:
    """Heads for ``base-1``, and ``my-model``, a copy of this base whose layers moved a little."""
    write_model(tmp_path / "origin", profile=PROFILE)
    for method in ("medusa", "hydra"):
        shutil.move(tmp_path / "origin" / method, tmp_path / "weights" / "base-1" / method)
    monkeypatch.setattr(registry, "weights_folder", lambda: tmp_path / "weights")
    monkeypatch.setattr(registry, "data_package_folder", lambda: None)
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "origin" / "model")
    for weight in model.model.layers.parameters():
        weight.data += 0.01 * weight.std() * torch.randn_like(weight)
    model.save_pretrained(tmp_path / "my-model")
    AutoTokenizer.from_pretrained(tmp_path / "origin" / "model").save_pretrained(str(tmp_path / "my-model"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "weights" / "base-1"


def test_it_is_named_with_its_base(zoo: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It has its profile there, and one sentence tells what is known."""
    plain = draftheads.load("my-model", **FP32).generate(["a dog", "ice"], max_new_tokens=30)
    for head in ("base-1/hydra", zoo / "hydra"):
        caplog.clear()
        with warnings.catch_warnings(), caplog.at_level(logging.INFO, "draftheads.checkpoints"):
            warnings.simplefilter("error")  # so close to its base
            engine = draftheads.load("my-model", head, **FP32)
        assert engine.profile == PROFILE
        [said] = [record.getMessage() for record in caplog.records if "was trained for" in record.getMessage()]
        assert "hydra was trained for model, whose layers differ by 0.9 % from those of my-model: " in said
        drafted = engine.generate(["a dog", "ice"], max_new_tokens=30)
        assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    assert allowed_head("base-1/hydra", "my-model") == zoo / "hydra"


def test_by_its_method_alone_it_is_not_found(zoo: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"for a tuned copy of its base: base-1/hydra, base-1/medusa"):
        find_head("hydra", "my-model")
    assert not {"medusa", "hydra"} & set(heads_for("my-model"))
    assert find_head("base-1/hydra", "base-1") == find_head("hydra", "base-1") == zoo / "hydra"
