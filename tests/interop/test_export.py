"""An exported EAGLE-3 head is the head itself, in the layout that other engines read."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from draftheads import export_head
from draftheads.checkpoints.checkpoint import save_head
from draftheads.cli.main import main
from draftheads.errors import InvalidSettings, SpeedWarning, StorageError
from draftheads.formats.eagle import write_eagle3
from draftheads.heads.eagle3 import Eagle3Config, Eagle3Head
from draftheads.interop.export import as_stored
from draftheads.models.model import TargetModel
from draftheads.speculation.tree import Tree
from families import VOCAB, tiny_head, tiny_model, tiny_profile
from joint_world import on_disk
from published_heads import Eagle3

DEEP = {"num_hidden_layers": 8}  # three different layers are read
SCALED = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_parameters": SCALED, "max_position_embeddings": 256}
PLACES = torch.tensor([4, 9, 2, 20, 21, 23, 7, 10, 12, 13])  # draft tokens, in no order


def eagle3(target: TargetModel, **options: Any) -> Eagle3Head:
    """A head for the model with weights that are not its starting values."""
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, **target.head_sizes}
    config = Eagle3Config(**{**sizes, "num_heads": 3, "draft_vocab_size": len(PLACES), **options})
    torch.manual_seed(1)
    head = Eagle3Head(config)
    head.initialise(target.weights, PLACES if config.draft_vocab_size else None)
    for parameter in head.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
        parameter.data = parameter.data.bfloat16().float()  # as it is saved
    return head.eval().requires_grad_(requires_grad=False)


def written(head: Eagle3Head, target: TargetModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As the files have it."""
    config, tensors = write_eagle3(head, target)
    return config, {name: as_stored(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("family", "changes", "options"),
    [
        ("llama", {}, {}),
        ("qwen3", {}, {"lm_head": "own"}),
        ("llama", YARN, {"lm_head": "low_rank", "lm_head_rank": 4}),
        ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"] * 4}, {"fc_norm": True}),
        ("granite", {}, {"norm_output": True, "draft_vocab_size": None}),
    ],
)
@torch.no_grad()
def test_it_predicts_the_same(family: str, changes: dict[str, Any], options: dict[str, Any]) -> None:
    target = tiny_model(family, **DEEP, **changes)
    head = eagle3(target, **options)
    config, tensors = written(head, target)
    published = Eagle3(config)
    ids_of = torch.arange(config["draft_vocab_size"]) + tensors.pop("d2t", 0)
    is_drafted = tensors.pop("t2d", torch.ones(target.vocab_size, dtype=torch.bool))
    assert sorted(ids_of.tolist()) == is_drafted.nonzero()[:, 0].tolist()
    assert ids_of.tolist() == (PLACES if "draft_vocab_size" not in options else torch.arange(VOCAB)).tolist()
    published.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=True)
    torch.manual_seed(2)
    hidden, ids = torch.randn(1, 20, 3 * target.hidden_size), torch.randint(3, VOCAB, (1, 20))
    expected = [head.logits(features, i)[0] for i, features in enumerate(head(hidden, ids))]
    states, embedding = published.states(hidden[0]), target.weights.embedding.float()
    for read in (1, 5, 14):  # hidden states of so many tokens are known; then it goes on from its own
        known = states[:read]
        for depth in range(3):
            logits, state = published(embedding[ids[0, 1 : len(known) + 1]], known)
            torch.testing.assert_close(logits, expected[depth][read - 1], rtol=2e-2, atol=2e-2)
            known = torch.cat([known, state[None]])


def test_types_and_settings_are_the_published_ones() -> None:
    """Names and shapes are those of :class:`Eagle3`."""
    target = tiny_model("llama", **DEEP)
    config, tensors = written(eagle3(target), target)
    assert (tensors["d2t"].shape, tensors["t2d"].shape) == ((len(PLACES),), (VOCAB,))
    assert tensors["d2t"].tolist()[:4] == [4, 8, 0, 17]  # 4 - 0, 9 - 1, 2 - 2, 20 - 3
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert {tensor.dtype for name, tensor in tensors.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["vocab_size"], config["draft_vocab_size"]) == (VOCAB, len(PLACES))
    assert config["hidden_size"] == config["target_hidden_size"] == 32
    assert (config["norm_before_residual"], config["tie_word_embeddings"]) == (False, False)
    assert config["num_hidden_layers"] == 1
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": config["rope_theta"]}
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5], "whose inputs are read"
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4], "whose outputs these are"


def test_a_head_that_drafts_all_tokens_has_the_maps_too() -> None:
    target = tiny_model("llama", **DEEP)
    config, tensors = written(eagle3(target, draft_vocab_size=None, layers=[0, 3, 7]), target)
    assert not tensors["d2t"].any()
    assert tensors["t2d"].all()
    assert (len(tensors["d2t"]), config["draft_vocab_size"]) == (VOCAB, VOCAB)
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 3, 7]


def test_engines_that_leave_out_a_part_are_named(tmp_path: Path) -> None:
    name = on_disk(tmp_path / "model", **DEEP)
    target = TargetModel.load(name, dtype=torch.float32)
    save_head(eagle3(target, norm_output=True), tmp_path / "head", base=target, profile=tiny_profile(Tree.chain(3)))
    with pytest.warns(SpeedWarning, match=r"norm_output: llama.cpp and optimum-intel \(OpenVINO\) ignore it"):
        export_head(tmp_path / "head", tmp_path / "out", model=name)


def test_what_the_layout_cannot_hold_is_an_error() -> None:
    target = tiny_model("llama", **DEEP)
    with pytest.raises(InvalidSettings, match=r"reads the layers \[0, 3\], and engines give .* states of 3"):
        write_eagle3(eagle3(target, layers=[0, 3]), target)
    target.model.lm_head.bias = nn.Parameter(torch.ones(VOCAB))
    with pytest.raises(InvalidSettings, match=r"lm_head has a bias.*--lm-head own"):
        write_eagle3(eagle3(target), TargetModel(target.model, target.tokenizer, "biased"))


def test_a_folder_for_other_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = on_disk(tmp_path / "model", **DEEP)
    target = TargetModel.load(name, dtype=torch.float32)
    head = eagle3(target)
    save_head(head, tmp_path / "head", base=target, profile=tiny_profile(Tree.chain(3)))
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "head"), "--model", name, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    commands = dict(line.split(": ", 1) for line in said.splitlines()[1:])
    assert list(commands) == ["vLLM", "SGLang", "llama.cpp", "OpenVINO"]
    speculative = json.loads(shlex.split(commands["vLLM"])[-1])
    assert speculative == {"method": "eagle3", "model": str(out), "num_speculative_tokens": 3}
    config, tensors = written(head, target)
    assert json.loads((out / "config.json").read_text()) == config
    found = load_file(out / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], tensors[key]) for key in tensors)
    with pytest.raises(StorageError, match="already exists"):
        export_head(tmp_path / "head", out, model=name)
    save_head(tiny_head("medusa", target), tmp_path / "medusa", base=target, profile=tiny_profile(Tree.chain(3)))
    with pytest.raises(InvalidSettings, match="heads of the method medusa choose medusa or vllm-medusa"):
        export_head(tmp_path / "medusa", tmp_path / "other", model=name, to="eagle3")
    save_head(tiny_head("amphista", target), tmp_path / "amphista", base=target, profile=tiny_profile(Tree.chain(3)))
    with pytest.raises(InvalidSettings, match="no other project has heads of the method amphista"):
        export_head(tmp_path / "amphista", tmp_path / "other", model=name)
