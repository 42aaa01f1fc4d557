"""z-lab's DFlash files: random heads in their layout beside a row-by-row version of it, and ours there and back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from block_files import BASE, BLOCK, GROUPS, HEADS, LAYERS, MASK, write_file
from draftheads.checkpoints.checkpoint import load_head
from draftheads.decode.engine import Engine
from draftheads.errors import CheckpointCorrupt, DraftHeadsError, InvalidSettings, UnsupportedModel
from draftheads.formats.dflash import write_dflash
from draftheads.formats.reading import convert
from draftheads.models.model import TargetModel
from draftheads.speculation.draft import Context
from families import tiny_head, tiny_model
from slow_heads import slow_block

TEXT = torch.tensor([[3, 4, 5, 6, 7, 8, 9]])


@pytest.fixture(scope="module")
def model() -> TargetModel:
    return tiny_model("llama")


@pytest.mark.parametrize(("known", "scale"), [(0, None), (4, None), (4, 3.0)])
def test_a_published_head_has_the_logits_of_its_layout(
    tmp_path: Path, model: TargetModel, known: int, scale: float | None
) -> None:
    """At all places, behind a text that is read at once or in two parts; with a scale of embeddings if it has one."""
    own = {"attention_value_scale": 1.0, "input_embedding_scale": scale}
    tensors = write_file(tmp_path / "theirs", model, output_multiplier=1.0, dflash_config=own)
    convert(tmp_path / "theirs", tmp_path / "ours", base=model)
    head = load_head(tmp_path / "ours", model)
    assert (head.hidden_layers, head.config.num_heads, head.config.num_layers) == ((0, 1), BLOCK - 1, LAYERS)
    states = model.model(TEXT, output_hidden_states=True).hidden_states
    hidden = torch.cat([states[0], states[1]], -1)
    embedding = model.weights.embedding * (scale or 1.0)
    rows = [embedding[token] for token in (int(TEXT[0, 6]), *[MASK] * (BLOCK - 1))]
    expected = (
        slow_block(tensors, rows, list(hidden[0, :6]), heads=HEADS, groups=GROUPS, base=BASE)[1:]
        @ model.weights.lm_head.T
    )
    session = head.start()
    if known:
        session.observe(Context(hidden[:, :known], TEXT[:, :known], torch.tensor([known]), TEXT[:, known]))
    count = 6 - known
    root = session.root(Context(hidden[:, known:6], TEXT[:, known:6], torch.tensor([count]), TEXT[:, 6]))
    found = head.begin(root, BLOCK - 1)[:, 0]
    torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"embedding_scale": 7.0, "num_layers": 2}, {"draft_vocab_size": 20}])
def test_ours_comes_back(tmp_path: Path, model: TargetModel, options: dict[str, Any]) -> None:
    """A scale of embeddings is divided out of what layers add, and all tokens are predicted."""
    head = tiny_head("dflash", model, **options)
    about, tensors = write_dflash(head, model)
    (tmp_path / "theirs").mkdir()
    save_file({name: tensor.float() for name, tensor in tensors.items()}, tmp_path / "theirs" / "model.safetensors")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(about), encoding="utf-8")
    convert(tmp_path / "theirs", tmp_path / "back", base=model)
    back = load_head(tmp_path / "back", model)
    assert back.config.num_heads == head.config.num_heads
    hidden = head.split(model.hidden_states(TEXT, head.hidden_layers))[0]
    ours, theirs = (one.logits(one(hidden, TEXT), 0).float() for one in (head, back))
    if options.get("draft_vocab_size"):
        theirs = theirs[..., head.draft_vocab]
    torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-3)
    plain = Engine(model).generate([[5, 6, 7]], max_new_tokens=20, ignore_eos=True)
    assert (
        Engine(model, back).generate([[5, 6, 7]], max_new_tokens=20, ignore_eos=True)[0].token_ids == plain[0].token_ids
    )


def test_the_file_that_is_written_has_what_engines_read(model: TargetModel) -> None:
    given, tensors = write_dflash(tiny_head("dflash", model, num_layers=2, mask_token_id=5), model)
    assert given["architectures"] == ["DFlashDraftModel"]
    assert (given["block_size"], given["num_target_layers"], given["num_hidden_layers"]) == (4, 2, 2)
    own = given["dflash_config"]
    assert (own["mask_token_id"], own["target_layer_ids"]) == (5, [-1, 0])
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.q_norm.weight"} <= set(tensors)
    assert not {name for name in tensors if name.startswith(("embed_tokens", "lm_head"))}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"dflash_config": {"sample_from_anchor": True}, "shift_label": False},
            CheckpointCorrupt,
            "sample_from_anchor is True and shift_label is False; give one of them",
        ),
        ({"architectures": ["Gemma4DFlashModel"]}, UnsupportedModel, "only heads with Qwen3's layers can be read"),
        ({"num_hidden_layers": 3}, CheckpointCorrupt, r"missing tensors? layers\.2"),
        ({"dflash_config": {"causal": True}}, UnsupportedModel, "causal is True, and heads with rows that see"),
        ({"final_logit_softcapping": 30.0}, UnsupportedModel, "capped logits cannot be read"),
        ({"dflash_config": {"output_multiplier": 2.0}}, UnsupportedModel, "scaled logits cannot be read"),
        ({"layer_types": ["sliding_attention"] * 2}, UnsupportedModel, "windows cannot be read"),
        ({"dflash_config": {"target_layer_ids": [0, 1]}}, CheckpointCorrupt, r"makes the layers \[1, 2\]; .* has 2"),
        ({"dflash_config": {"target_layer_ids": []}}, CheckpointCorrupt, r"makes the layers \[\]"),
        ({"dflash_config": {"mask_token_id": None}}, CheckpointCorrupt, "mask_token_id None; give both"),
        ({"dflash_config": {"mask_token_id": 4000}}, InvalidSettings, "mask_token_id is 4000; it must lie in 0"),
        ({"block_size": 1}, CheckpointCorrupt, "block_size is 1"),
    ],
)
def test_other_kinds_of_heads_are_refused(
    tmp_path: Path, model: TargetModel, changes: dict[str, Any], error: type[DraftHeadsError], message: str
) -> None:
    write_file(tmp_path / "theirs", model, **changes)
    with pytest.raises(error, match=message):
        convert(tmp_path / "theirs", tmp_path / "ours", base=model)


def test_a_head_of_a_later_kind_is_named(tmp_path: Path, model: TargetModel) -> None:
    tensors = write_file(tmp_path / "theirs", model)
    save_file(
        {**tensors, "candidate_selector.hidden_projection.weight": torch.ones(2, 2)},
        tmp_path / "theirs" / "model.safetensors",
    )
    with pytest.raises(UnsupportedModel, match=r"parts that DFlash and DSpark do not have \(candidate_selector\)"):
        convert(tmp_path / "theirs", tmp_path / "ours", base=model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": []}, "what enters layers: train a head"),
        ({"lm_head": "own"}, "engines take the target's for block drafters"),
        ({"lm_head": "own", "draft_vocab_size": 20}, "train it with --lm-head shared, or export it --to speculators"),
    ],
)
def test_what_the_layout_has_no_place_for_is_an_error(
    model: TargetModel, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidSettings, match=message):
        write_dflash(tiny_head("dflash", model, **options), model)
