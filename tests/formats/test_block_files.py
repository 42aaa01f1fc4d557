"""Files of block drafters of z-lab, DeepSpec, ModelOpt and speculators beside a row-by-row version, there and back."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import block_files
from block_files import BASE, BLOCK, DRAFTED, FILES, GROUPS, HEADS, MASK, write_file, write_markov_file
from draftheads import export_head
from draftheads.checkpoints.checkpoint import load_head, save_head
from draftheads.errors import (
    CheckpointCorrupt,
    CheckpointMismatch,
    DraftHeadsError,
    InvalidSettings,
    SpeedWarning,
    UnsupportedModel,
)
from draftheads.formats.dflash import write_dflash, write_dspark, write_speculators
from draftheads.formats.dflash2 import write_dflash2
from draftheads.formats.reading import convert
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.speculation.draft import Context
from draftheads.speculation.tree import Tree
from families import tiny_head, tiny_model, tiny_profile
from joint_world import on_disk
from slow_heads import slow_block, slow_block_log_probs

TEXT = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10, 11, 5, 3]])
READ = 6  # tokens before the block's first


def expected_log_probs(
    tensors: dict[str, Tensor],
    model: TargetModel,
    hidden: Tensor,
    *,
    shifted: bool,
    lm_head: Tensor,
    scale: float,
    mask: Tensor | None = None,
    num_candidates: int | None = None,
    **attention: Any,
) -> Tensor:
    """(K, V') of all places of the block behind ``READ`` tokens; the text's tokens stand where draft tokens would."""
    embedding, text = model.weights.embedding * scale, TEXT[0].tolist()
    masks = [embedding[MASK] if mask is None else mask] * (BLOCK - 1)
    block = [embedding[text[READ]], *masks]
    rows = slow_block(tensors, block, list(hidden[:READ]), heads=HEADS, groups=GROUPS, base=BASE, **attention)
    few = {"is_shifted": shifted, "num_candidates": num_candidates}
    return slow_block_log_probs(tensors, rows, lm_head, text[READ:], **few)


def drafted_log_probs(head: DraftHead, hidden: Tensor, known: int) -> Tensor:
    """(K, V') along the text, of which ``known`` tokens are read before the others."""
    session: Any = head.start()
    if known:
        session.observe(Context(hidden[None, :known], TEXT[:, :known], torch.tensor([known]), TEXT[:, known]))
    new = Context(hidden[None, known:READ], TEXT[:, known:READ], torch.tensor([READ - known]), TEXT[:, READ])
    depth = head.config.num_heads
    state, found = head.begin(session.root(new), depth), []
    for i in range(depth):
        found.append(head.predict(state, i)[0, 0].log_softmax(-1))
        state = head.descend(state, i, torch.zeros(1, 1, dtype=torch.long), TEXT[:, READ + 1 + i : READ + 2 + i])
    return torch.stack(found)


PART = {"draft_vocab_size": 20}


def own(**given: Any) -> dict[str, Any]:
    """Keys of z-lab's own part of a configuration."""
    return {"form": "zlab", "dflash_config": given}


def tensors(prefix: str = "markov_head.", **given: Tensor | None) -> dict[str, Any]:
    """Other tensors of a DeepSpec file, or none."""
    return {"given": {f"{prefix}{name}.weight": tensor for name, tensor in given.items()}}


SPECULATORS = {"form": "speculators"}
ATTENTION: dict[str, dict[str, Any]] = {
    "z-lab, windows": {"windows": [0, 5], "causal": [1]},
    "z-lab, windows, not causal": {"windows": [0, 5]},
    "z-lab, causal": {"causal": [0, 1]},
    "use_swa": {"windows": [4, 4]},
    "speculators, windows": {"windows": [3, 3], "causal": [0, 1]},
    "speculators, windows, not causal": {"windows": [3, 3]},
    "lfm2": {"halves": False},
    "jetspec": {"causal": [0, 1]},
    "dflash2": {"num_candidates": 5},
    "dflash2 of speculators": {"num_candidates": 5},
    "dflash2, other names": {"num_candidates": 5},
}


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("case", FILES)
@torch.no_grad()
def test_a_published_head_has_the_log_probs_of_its_layout(tmp_path: Path, case: str, family: str) -> None:
    """At all places, with and without cached context, and in training. Gemma's factor of embeddings is not applied."""
    target, options = tiny_model(family), {**FILES[case]}
    mask = torch.randn(target.hidden_size) if options.pop("own_mask", False) else None
    tensors = write_markov_file(tmp_path / "theirs", target, **options)
    if mask is not None:
        torch.save({"mask_token_id": MASK, "embedding": mask}, tmp_path / "theirs" / "mask_embedding.pt")
    convert(tmp_path / "theirs", tmp_path / "ours", base=target)
    head = load_head(tmp_path / "ours", target)
    config: Any = head.config
    kind = "none" if options.get("form") == "zlab" else options.get("kind", "gated")
    method = "dflash2" if case.startswith("dflash2") else "dflash" if kind == "none" else "dspark"
    scale = options.get("dflash_config", {}).get("input_embedding_scale", 1.0)
    shifted = options.get("sample_from_anchor", kind != "none" and case != "specforge")
    assert config.method == method
    assert (config.is_shifted, config.num_heads, config.mask_token_id) == (shifted, BLOCK - (not shifted), MASK)
    assert head.hidden_layers == ((1, 0) if options.get("form") == "modelopt" else (0, 1)), "whose inputs are read"
    states = target.model(TEXT, output_hidden_states=True).hidden_states
    hidden = torch.cat([states[layer] for layer in head.hidden_layers], -1)[0]
    lm_head = tensors["lm_head.weight"] if options.get("reduced") else target.weights.lm_head
    seen = ATTENTION.get(case, {})
    expected = expected_log_probs(
        tensors, target, hidden, shifted=shifted, lm_head=lm_head, scale=scale, mask=mask, **seen
    )
    for known in (0, 4, 5):
        torch.testing.assert_close(drafted_log_probs(head, hidden, known), expected, rtol=1e-4, atol=1e-4)
    if method == "dflash2":  # training has all candidates
        expected = expected_log_probs(tensors, target, hidden, shifted=shifted, lm_head=lm_head, scale=scale)
    features = head(hidden[None], TEXT)[:, 0, READ - 1]
    trained = torch.stack([head.logits(row, i).log_softmax(-1) for i, row in enumerate(features)])
    torch.testing.assert_close(trained, expected, rtol=1e-4, atol=1e-4)
    assert head.to_target_ids(torch.arange(3)).tolist() == (DRAFTED[:3] if options.get("reduced") else [0, 1, 2])


@torch.no_grad()
def test_a_head_of_the_published_depth_and_block(
    tmp_path: Path, model: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five layers and blocks of sixteen."""
    monkeypatch.setattr(block_files, "LAYERS", 5)
    monkeypatch.setattr(block_files, "BLOCK", 16)
    tensors = write_file(tmp_path / "theirs", model)
    convert(tmp_path / "theirs", tmp_path / "ours", base=model)
    head = load_head(tmp_path / "ours", model)
    assert (head.config.num_layers, head.config.num_heads) == (5, 15)
    hidden = model.hidden_states(TEXT, head.hidden_layers).chunk(3, -1)
    read = torch.cat(hidden[:2], -1)[0]
    embedding = model.weights.embedding
    block = [embedding[TEXT[0, READ]], *[embedding[MASK]] * 15]
    rows = slow_block(tensors, block, list(read[:READ]), heads=HEADS, groups=GROUPS, base=BASE)
    expected = slow_block_log_probs(tensors, rows, model.weights.lm_head, TEXT[0].tolist(), is_shifted=False)
    session: Any = head.start()
    context = Context(read[None, :READ], TEXT[:, :READ], torch.tensor([READ]), TEXT[:, READ])
    drafted = head.begin(session.root(context), 15)[:, 0].log_softmax(-1)
    torch.testing.assert_close(drafted, expected, rtol=1e-4, atol=1e-4)


def test_rows_of_the_base_are_not_stored_again(tmp_path: Path, model: TargetModel) -> None:
    tensors = write_markov_file(tmp_path / "theirs", model, form="speculators", reduced=True)
    tensors["lm_head.weight"] = model.weights.lm_head[DRAFTED].clone()
    save_file(tensors, tmp_path / "theirs" / "model.safetensors")
    convert(tmp_path / "theirs", tmp_path / "ours", base=model)
    assert load_head(tmp_path / "ours", model).config.lm_head == "shared"
    assert not {"lm_heads.heads.0.weight", "embed_tokens.weight"} & set(
        load_file(tmp_path / "ours" / "model.safetensors")
    )


def test_a_confidence_head_is_named_as_not_used(tmp_path: Path, model: TargetModel) -> None:
    tensors = write_markov_file(tmp_path / "theirs", model)
    tensors |= {"confidence_head.proj.weight": torch.ones(1, 8), "confidence_head.proj.bias": torch.ones(1)}
    save_file(tensors, tmp_path / "theirs" / "model.safetensors")
    with pytest.warns(SpeedWarning, match=r"confidence head \(confidence_head\.proj\.bias, .* is not used"):
        convert(tmp_path / "theirs", tmp_path / "ours", base=model)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"architectures": ["Gemma4DSparkModel"]}, UnsupportedModel, "of the kind Gemma4DSparkModel, which cannot"),
        ({"architectures": ["OtherModel"]}, UnsupportedModel, r"architectures is \['OtherModel'\]"),
        ({"num_target_layers": 3}, CheckpointCorrupt, "num_target_layers is 3, and tiny-llama has 2"),
        ({"markov_head_type": "rnn"}, CheckpointCorrupt, "is 'rnn', and the tensors are those of 'gated'"),
        ({"markov_head_type": "vanilla"}, CheckpointCorrupt, "is 'vanilla', and the tensors are those of 'gated'"),
        ({"markov_rank": 7}, CheckpointCorrupt, "markov_rank is 7, and the tensors are those of 6"),
        ({"sample_from_anchor": "yes"}, CheckpointCorrupt, "sample_from_anchor is 'yes'; give one"),
        (
            {"mask_token_id": 4000},
            CheckpointCorrupt,
            "theirs is no head that can be: mask_token_id is 4000; it must lie",
        ),
        (own(target_layer_ids=[0, 0]), CheckpointCorrupt, r"theirs is no head .* layers is \[1, 1\]; give different"),
        (SPECULATORS | {"sample_from_anchor": None}, CheckpointCorrupt, "missing; give true if the first"),
        (SPECULATORS | {"aux_hidden_state_layer_ids": [1, 3]}, CheckpointCorrupt, r"layer_ids makes .*\[1, 3\]"),
        (SPECULATORS | {"draft_vocab_size": 8}, CheckpointCorrupt, r"8 of \d+ tokens, and tensor d2t is missing"),
        (SPECULATORS | {"reduced": True, "draft_vocab_size": 9}, CheckpointCorrupt, r"it must be \(9,\)"),
        ({"kind": "none", "markov_rank": 6}, CheckpointCorrupt, r"missing tensors markov_head\.markov_w1\.weight, "),
        (own(sample_from_anchor=True) | {"shift_label": False}, CheckpointCorrupt, "anchor is True and shift_label"),
        ({"form": "zlab", "num_hidden_layers": 3, "layer_types": None}, CheckpointCorrupt, r"tensors? layers\.2"),
        (own(causal="yes"), CheckpointCorrupt, "causal is 'yes'; give one of them, true or false"),
        (own(causal=True) | {"is_causal": False}, CheckpointCorrupt, "causal is True and is_causal is False; give one"),
        ({"form": "zlab", "layer_types": ["full_attention"]}, CheckpointCorrupt, "for each of 2 layers"),
        ({"form": "zlab", "layer_types": None, "sliding_window": 3}, CheckpointCorrupt, "layer_types is missing: it"),
        (
            {"form": "zlab", "layer_types": ["chunked"] * 2},
            CheckpointCorrupt,
            r"layer_types is \['chunked', 'chunked'\]",
        ),
        (own(use_swa=True) | {"layer_types": None}, CheckpointCorrupt, "sliding_window is None, and layers have a"),
        ({"form": "zlab", "final_logit_softcapping": 30.0}, UnsupportedModel, "capped logits cannot be read"),
        (own(output_multiplier=2.0), UnsupportedModel, "scaled logits cannot be read"),
        ({"form": "zlab", "layer_types": ["sliding_attention"] * 2}, CheckpointCorrupt, "sliding_window is None, and"),
        (own(target_layer_ids=[0, 2]), CheckpointCorrupt, r"makes the layers \[1, 3\]; they must lie in 0 … 2"),
        (own(projector_type="domino"), UnsupportedModel, "projector_type is 'domino'"),
        (own(steering=2), UnsupportedModel, "unknown key steering"),
        (own(target_layer_ids="01"), CheckpointCorrupt, "target_layer_ids is '01'; it must be a list of integers"),
        (own(target_layer_ids=[0.5, 1]), CheckpointCorrupt, r"is \[0.5, 1\]; it must be a list of integers"),
        (own(block_size=9), CheckpointCorrupt, "block_size is 4, and 9 in dflash_config: give one of them"),
        ({"form": "zlab", "hidden_size": 64}, CheckpointCorrupt, "hidden_size is 64, and that of tiny-llama is 32"),
        (
            {
                "form": "zlab",
                "layer_types": ["sliding_attention"] * 2,
                "sliding_window": 3,
                "use_sliding_window": False,
            },
            CheckpointCorrupt,
            "use_sliding_window is false, and layer_types names windows",
        ),
        (own(target_layer_ids=[]), CheckpointCorrupt, r"makes the layers \[\]"),
        (own(mask_token_id=None), CheckpointCorrupt, "mask_token_id None; give both"),
        ({"form": "zlab", "block_size": 1}, CheckpointCorrupt, "block_size is 1"),
        (tensors(gate_proj=None), CheckpointCorrupt, "the tensors are those of 'vanilla'"),
        (tensors(gate_proj=torch.ones(6, 33)), CheckpointCorrupt, r"weight \(6, 33\) is \(6, 1\); .* it \(6, 6\)"),
        (tensors("", embed_tokens=torch.ones(2, 2)), CheckpointMismatch, r"embed_tokens\.weight differs by .*\(2, 2\)"),
        (tensors("", prefix_gru=torch.ones(2, 2)), UnsupportedModel, r"do not have \(prefix_gru\).* such as Domino"),
        (
            tensors("", candidate_selector=torch.ones(2)),
            CheckpointCorrupt,
            "selector_top_k is missing, and the tensors",
        ),
        (tensors("", lm_head=torch.ones(24, 32)), CheckpointMismatch, r"its lm_head\.weight differs by \d+% from the"),
        (SPECULATORS | {"reduced": True, "given": {"t2d": torch.ones(24)}}, CheckpointCorrupt, "t2d and d2t name"),
    ],
)
def test_other_kinds_of_heads_are_refused(
    tmp_path: Path, model: TargetModel, options: dict[str, Any], error: type[DraftHeadsError], message: str
) -> None:
    write_markov_file(tmp_path / "theirs", model, **options)
    with pytest.raises(error, match=message):
        convert(tmp_path / "theirs", tmp_path / "ours", base=model)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("saved", "error", "message"),
    [
        ({"mask_token_id": MASK}, CheckpointCorrupt, r"mask_embedding\.pt must hold one embedding of \d+ numbers"),
        ({"mask_token_id": 7, "embedding": torch.ones(32)}, CheckpointCorrupt, "is for the token 7, and mask_token_id"),
        ({"embedding": torch.ones(32), "scale": 2}, UnsupportedModel, "unknown key scale; give mask_token_id and"),
        (torch.ones(1, 9), CheckpointCorrupt, "must hold one embedding of"),
        (object(), CheckpointCorrupt, "holds more than tensors"),
    ],
)
def test_an_embedding_of_the_mask_that_does_not_fit_is_refused(
    tmp_path: Path, model: TargetModel, saved: Any, error: type[DraftHeadsError], message: str
) -> None:
    write_file(tmp_path / "masked", model)
    torch.save(saved, tmp_path / "masked" / "mask_embedding.pt")
    with pytest.raises(error, match=message):
        convert(tmp_path / "masked", tmp_path / "ours", base=model)


def test_models_that_cannot_be_represented_are_refused_by_name(tmp_path: Path) -> None:
    """Models whose logits are more than a product."""
    scaled = tiny_model("granite", logits_scaling=2.0)
    write_markov_file(tmp_path / "scaled", scaled)
    with pytest.raises(UnsupportedModel, match=r"multiplies its logits by 0\.5, for which the layout has no place"):
        convert(tmp_path / "scaled", tmp_path / "ours", base=scaled)
    with pytest.raises(InvalidSettings, match=r"multiplies its logits by 0\.5"):
        write_dspark(tiny_head("dspark", scaled), scaled)


@pytest.mark.parametrize(
    ("method", "write", "options"),
    [
        ("dflash", write_dflash, {}),
        ("dflash", write_dflash, {"embedding_scale": 7.0, "num_layers": 2}),
        ("dflash", write_dflash, PART),
        ("dspark", write_dspark, {}),
        ("dspark", write_dspark, {"gated": False, "embedding_scale": 7.0}),
        ("dspark", write_dspark, {"own_embedding": True, "gate_reads_token": True, "num_layers": 2}),
        ("dspark", write_speculators, {**PART, "lm_head": "low_rank", "lm_head_rank": 4, "is_shifted": False}),
        ("dspark", write_speculators, {"gated": False}),
        ("dflash", write_speculators, PART),
        ("dflash", write_speculators, {"embedding_scale": 7.0}),
        ("dflash2", write_dflash2, {"kernel_taps": 3, "kernel_group": 8, "num_candidates": 9, "markov_rank": 5}),
        ("dflash2", write_dflash2, {"own_embedding": True, "embedding_scale": 7.0, "num_layers": 2}),
    ],
)
@torch.no_grad()
def test_ours_comes_back(
    tmp_path: Path, model: TargetModel, method: str, write: Callable[..., Any], options: dict[str, Any]
) -> None:
    head = tiny_head(method, model, **options)
    for name, parameter in head.named_parameters():
        if name.startswith(("up.", "gates.", "token_gates.")) or "_conv." in name:
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    about, tensors = write(head, model, "base")
    (tmp_path / "theirs").mkdir()
    stored = {name: tensor.float().contiguous() for name, tensor in tensors.items() if tensor.is_floating_point()}
    save_file({**tensors, **stored}, tmp_path / "theirs" / "model.safetensors")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(about), encoding="utf-8")
    convert(tmp_path / "theirs", tmp_path / "back", base=model)
    back = load_head(tmp_path / "back", model)
    same = {"num_heads", "num_candidates", "kernel_taps", "kernel_group"} & head.config.options().keys()
    assert {name: getattr(back.config, name) for name in same} == {name: getattr(head.config, name) for name in same}
    assert back.config.draft_vocab_size == (None if write is write_dflash else head.config.draft_vocab_size)
    hidden = head.split(model.hidden_states(TEXT, head.hidden_layers))[0]
    ours, theirs = (
        torch.stack([one.logits(rows, i).float() for i, rows in enumerate(one(hidden, TEXT))]) for one in (head, back)
    )
    if write is write_dflash and "draft_vocab_size" in options:  # all tokens are predicted then
        theirs = theirs[..., head.draft_vocab]
    torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-3)


def test_the_files_that_are_written_have_what_engines_read(model: TargetModel) -> None:
    """Beside what is read back."""
    given, tensors = write_dflash(tiny_head("dflash", model, num_layers=2), model)
    assert (given["architectures"], given["num_target_layers"]) == (["DFlashDraftModel"], 2)
    assert given["dflash_config"]["target_layer_ids"] == [-1, 0]
    assert not {name for name in tensors if name.startswith(("embed_tokens", "lm_head"))}
    given, tensors = write_dspark(tiny_head("dspark", model), model)
    assert given["architectures"] == ["Qwen3DSparkModel"]
    assert (given["target_layer_ids"], given["enable_confidence_head"]) == ([-1, 0], False)
    assert {"embed_tokens.weight", "lm_head.weight"} <= set(tensors)
    given, tensors = write_speculators(tiny_head("dflash", model, **PART), model, "some/base")
    assert (given["architectures"], given["speculators_model_type"]) == (["DFlashDraftModel"], "dflash")
    assert given["transformer_layer_config"]["model_type"] == "qwen3"
    assert given["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert given["speculators_config"]["verifier"]["name_or_path"] == "some/base"
    assert "embed_tokens.weight" not in tensors
    given, tensors = write_dflash2(tiny_head("dflash2", model), model)
    assert (given["architectures"], given["dflash_config"]["selector_top_k"]) == (["DFlash2DraftModel"], 16)
    assert {"candidate_selector.predecessor_codebook", "layers.0.mlp_conv.base_kernel"} <= set(tensors)
    _, tensors = write_speculators(tiny_head("dspark", model), model, "some/base")
    assert not {"lm_head.weight", "d2t", "t2d"} & set(tensors)


@pytest.mark.parametrize(
    ("method", "write", "options", "message"),
    [
        ("dflash", write_dflash, {"layers": []}, "what enters layers: train a head"),
        ("dflash", write_dflash, {"lm_head": "own", **PART}, "with --lm-head shared, or export it --to speculators"),
        ("dspark", write_dspark, {"is_shifted": False}, "not shifted, .* export it --to speculators"),
        ("dspark", write_dspark, PART, r"predicts 20 of \d+ tokens, .* --to speculators, or train"),
        ("dspark", write_speculators, {"lm_head": "own"}, "train it with --lm-head shared"),
        ("dflash", write_speculators, {"is_shifted": True}, "train it with --head-options is_shifted=false"),
        ("dflash2", write_dflash2, PART, r"predicts 20 of \d+ tokens, .* train it with --draft-vocab-size 0"),
        ("dflash2", write_dflash2, {"is_shifted": True}, "train it with --head-options is_shifted=false"),
        ("dflash2", write_dflash2, {"lm_head": "own"}, "train it with --lm-head shared"),
    ],
)
def test_what_a_layout_has_no_place_for_is_an_error(
    model: TargetModel, method: str, write: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidSettings, match=message):
        write(tiny_head(method, model, **options), model, "base")


@pytest.mark.parametrize("method", ["dflash", "dflash2", "dspark"])
def test_export_names_the_engines_commands(method: str, tmp_path: Path) -> None:
    name = on_disk(tmp_path / "model")
    target = TargetModel.load(name, dtype=torch.float32)
    save_head(tiny_head(method, target), tmp_path / "head", base=target, profile=tiny_profile(Tree.chain(3)))
    done = export_head(tmp_path / "head", tmp_path / "out", model=name)
    assert (done.layout, list(done.commands)) == (method, ["vLLM", "SGLang"])
    given = json.loads(shlex.split(done.commands["vLLM"])[-1])
    algorithm = method.removesuffix("2")  # engines tell DFlash2 by its architecture
    assert given == {"method": algorithm, "model": str(tmp_path / "out"), "num_speculative_tokens": 3}
    assert f"--speculative-algorithm {algorithm.upper()} " in done.commands["SGLang"]
    refused = f"--to openvino is not for heads of the method {method}.* For openvino "
    with pytest.raises(InvalidSettings, match=refused) as caught:
        export_head(tmp_path / "head", tmp_path / "other", model=name, to="openvino")
    assert "plug-in" not in str(caught.value), "which refuses heads that read inner layers"
