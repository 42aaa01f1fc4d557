"""The table of published heads in docs/import.md: each ● opens a file of that kind, each refusal is one of the code."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from block_files import FILES, write_markov_file
from draftheads.errors import UnsupportedModel
from draftheads.formats.reading import REFUSED, convert, is_published
from draftheads.models.model import TargetModel
from families import HAS_RECURRENT, tiny_model
from mtp_files import KINDS, model_for, random_layer
from published_heads import CASES, made, written

PAGE = (Path(__file__).parents[2] / "docs" / "import.md").read_text(encoding="utf-8")
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line][1:]
READ = {name: row for row in ROWS for name in re.findall(r"`([^`]+)`", row[1]) if row[-1].startswith("●")}
NOT_READ = {name: row for row in ROWS for name in re.findall(r"`([^`]+)`", row[1]) if row[-1] == "refused"}
TYPES = ("eagle", "eagle3", "peagle", "dflash", "dflash2", "dspark", "mtp")  # of speculators
# the case of the slow comparisons (test_published, test_block_files, test_mtp_files) that is a head of that name
OPENED = {
    "medusa_lm_head.pt": "medusa v0.1",
    "medusa_lm_head.safetensors": "medusa v2",
    "MedusaModel": "vllm-medusa",
    "hydra_lm_head.pt": "hydra++",
    "MLPSpeculatorPreTrainedModel": "accelerator, tied and scaled",
    **dict.fromkeys(("LlamaForCausalLMEagle", "EagleLlamaForCausalLM"), "eagle"),
    "Qwen2ForCausalLMEagle": "eagle of qwen2",
    **dict.fromkeys(("eagle", "EagleSpeculator"), "hass of speculators"),
    **dict.fromkeys(("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3MiniMaxM2ForCausalLM"), "eagle3"),
    **dict.fromkeys(("Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM"), "eagle3 of Qwen3-VL"),
    **dict.fromkeys(("eagle3", "Eagle3Speculator", "Eagle3DraftModel"), "speculators"),
    "Eagle3Qwen3ForCausalLM": "eagle3 with a layer of Qwen3",
    "LlamaForCausalLM": "eagle3 with YaRN",
    "PEagleDraftModel": "p-eagle of specforge",
    **dict.fromkeys(("peagle", "PEagleSpeculator"), "speculators p-eagle"),
    "DFlashDraftModel": "z-lab",
    **dict.fromkeys(("dflash", "DFlashSpeculator"), "speculators dflash"),
    "DFlash2DraftModel": "dflash2",
    "dflash2": "dflash2 of speculators",
    "Qwen3DSparkModel": "deepspec",
    "DSparkDraftModel": "specforge",
    "Lfm2DSparkDraftModel": "lfm2",
    **dict.fromkeys(("dspark", "DSparkSpeculator"), "speculators, reduced"),
    "Qwen3_5ForCausalLM": "qwen3.5",
    "Qwen3_5MoeForCausalLM": "qwen3.5-moe",
    "Qwen3NextForCausalLM": "qwen3-next",
    "Glm4MoeForCausalLM": "glm-4.5",
    "DeepseekV3ForCausalLM": "deepseek-v3",
    "MiMoForCausalLM": "mimo",
    **dict.fromkeys(("mtp", "MTPDraftModel"), "speculators"),
}


def cases(name: str) -> Mapping[str, Any]:
    """Those that are compared with slow versions, of the kind of that name."""
    found = READ[name][-1]
    return KINDS if "`mtp`" in found else FILES if "`dflash" in found or "`dspark`" in found else CASES


def write(name: str, folder: Path) -> tuple[Path, TargetModel]:
    """A file of the kind with that name in its configuration, and a base for it."""
    case, kinds = OPENED[name], cases(name)
    if kinds is KINDS:
        base = model_for(case)
        folder.mkdir()
        rest = {key: tensor.clone() for key, tensor in base.model.state_dict().items()}
        save_file({**rest, **random_layer(case)}, folder / "model.safetensors")
        config = json.loads(base.model.config.to_json_string())
        config = {"transformer_layer_config": config} if case == "speculators" else config
    elif kinds is FILES:
        base = tiny_model("llama")
        write_markov_file(folder, base, **FILES[case])
        config = json.loads((folder / "config.json").read_text())
    else:
        base = tiny_model("llama", num_hidden_layers=8)
        head = made(case, base)
        assert name.split(".", maxsplit=1)[0] not in ("medusa_lm_head", "hydra_lm_head") or head.file == name
        written(head, folder)
        config = head.config
    if name in TYPES:
        assert config.get("speculators_model_type", name) == name
        config["speculators_model_type"] = name
    elif "." not in name:
        config["architectures"] = [name]
    (folder / "config.json").write_text(json.dumps(config))
    return folder, base


def test_the_table_has_all_names_of_the_code() -> None:
    assert set(READ) == set(OPENED)
    assert set(NOT_READ) == set(REFUSED)
    assert all(case in cases(name) for name, case in OPENED.items())
    assert all(row[-1] == "refused" or row[-1].startswith("● `") for row in ROWS)


@pytest.mark.parametrize("name", OPENED)
def test_a_kind_that_is_read_opens(name: str, tmp_path: Path) -> None:
    if OPENED[name].startswith("qwen3") and not HAS_RECURRENT:
        pytest.skip("transformers is too old for this family")
    folder, base = write(name, tmp_path / "theirs")
    assert is_published(folder)
    layout = convert(folder, tmp_path / "ours", base=base)
    assert f"`{layout.config.method}`" in READ[name][-1]


@pytest.mark.parametrize("name", REFUSED)
def test_a_kind_that_is_refused_is_named(name: str, tmp_path: Path) -> None:
    """Also where its tensors would be those of a whole model."""
    base = tiny_model("llama")
    key = "architectures" if name[0].isupper() else "speculators_model_type"
    save_file({"model.embed_tokens.weight": base.weights.embedding}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({key: [name] if key == "architectures" else name}))
    for opened in (lambda: is_published(tmp_path), lambda: convert(tmp_path, tmp_path / "ours", base=base)):
        with pytest.raises(UnsupportedModel, match=rf"is a head of the kind {name}, which cannot be read: \w+"):
            opened()


def test_names_of_another_type_are_none(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    for named in (7, None, [["domino"]], {}):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": named}))
        assert is_published(tmp_path) is False
