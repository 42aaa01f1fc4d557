"""A model without its layers: what heads are trained with is that of the whole model, and texts are refused."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftheads.errors import UnsupportedModel
from draftheads.models.fingerprint import Parts
from draftheads.models.model import TargetModel
from draftheads.runners import runner_for
from families import HAS_RECURRENT, tiny_model
from training_world import chat_tokenizer

FAMILIES = [
    "llama",
    "gpt2",
    "gemma2",
    "granite",
    "cohere",
    "mixtral",
    "qwen3_moe",
]  # untied, tied, caps, scales, experts
if HAS_RECURRENT:
    FAMILIES += ["granitemoehybrid", "mamba2"]


def saved(family: str, folder: Path) -> Path:
    """A tiny model of the family, in several files."""
    model = tiny_model(family).model
    model.save_pretrained(folder, max_shard_size="20KB")
    chat_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_those_of_the_whole_model(family: str, dtype: torch.dtype, tmp_path: Path):
    folder = saved(family, tmp_path / "model")
    whole = TargetModel.load(folder, dtype=dtype)
    parts = TargetModel.load(folder, dtype=dtype, parts=Parts())
    assert whole.has_layers
    assert not parts.has_layers
    sizes = [sum(weight.numel() for weight in each.model.parameters()) for each in (parts, whole)]
    assert sizes[0] < sizes[1] / 2
    hidden = torch.randn(5, whole.hidden_size).to(dtype)
    assert torch.equal(parts.logits(hidden), whole.logits(hidden))
    assert torch.equal(parts.final_norm(hidden), whole.final_norm(hidden))  # type: ignore[misc]
    assert torch.equal(parts.weights.embedding, whole.weights.embedding)
    for name in ("weights_fingerprint", "fingerprints", "layer_kinds", "head_sizes", "precision", "dtype", "eos_ids"):
        assert getattr(parts, name) == getattr(whole, name), name
    with pytest.raises(UnsupportedModel, match=r"only embedding, last norm and lm_head of .* load the whole model"):
        parts.hidden_states(torch.tensor([[1, 2]]))
    with pytest.raises(UnsupportedModel, match="load the whole model"):
        runner_for(parts)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_changed_number_in_a_layer_changes_the_fingerprint(family: str, tmp_path: Path):
    folder = saved(family, tmp_path / "model")
    before = TargetModel.load(folder, parts=Parts()).weights_fingerprint
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith(("layers.1.mlp.down_proj.weight", "layers.1.mlp.experts.3.up_proj.weight")):
                tensor.view(-1)[-1] += 1.0
        save_file(tensors, file, metadata={"format": "pt"})
    assert TargetModel.load(folder, parts=Parts()).weights_fingerprint != before
    assert TargetModel.load(folder, parts=Parts()).weights_fingerprint == TargetModel.load(folder).weights_fingerprint


def test_a_missing_layer_is_refused_as_of_the_whole_model(tmp_path: Path):
    folder = saved("llama", tmp_path / "model")
    file = next(file for file in folder.glob("*.safetensors") if any("layers.1." in key for key in load_file(file)))
    tensors = {key: value for key, value in load_file(file).items() if "layers.1." not in key}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"missing \(\d+ tensors?\): model\.layers\.1"):
        TargetModel.load(folder, parts=Parts())


def test_what_cannot_be_loaded_so_is_named(tmp_path: Path):
    folder = saved("gemma3n_text", tmp_path / "model")
    with pytest.raises(UnsupportedModel, match="embed_tokens_per_layer"):
        TargetModel.load(folder, parts=Parts())
    shutil.rmtree(folder)
    target = tiny_model("llama")
    torch.save(target.model.state_dict(), (saved("llama", folder) / "pytorch_model.bin"))
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        file.unlink()
    with pytest.raises(UnsupportedModel, match="no safetensors files"):
        TargetModel.load(folder, parts=Parts())
