"""P-EAGLE: one pass behind the text beside a published head, the places of each depth in training, its start."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import published_heads as published
from draftheads.checkpoints.checkpoint import load_head
from draftheads.decode.engine import Engine
from draftheads.errors import (
    CheckpointCorrupt,
    CheckpointMismatch,
    DraftHeadsError,
    InvalidSettings,
    InvalidTree,
    UnsupportedModel,
)
from draftheads.formats.reading import convert
from draftheads.heads import head_classes
from draftheads.models.model import TargetModel
from draftheads.speculation.draft import Context
from draftheads.speculation.tree import Tree
from draftheads.train.learner import Learner
from families import EIGHT, GROWING, TREES, ids, tiny_head, tiny_model
from published_heads import HEADS, MASK, Published

DEEP = {"num_hidden_layers": 8}  # three different layers are read
TEXT = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10, 11, 12]])


@pytest.fixture
def target() -> TargetModel:
    return tiny_model("llama", **DEEP)


def written(folder: Path, head: Published) -> Path:
    folder.mkdir()
    save_file(head.tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(head.config), encoding="utf-8")
    return folder


def drafted(head: Any, hidden: Tensor, known: int, end: int, depth: int) -> Tensor:
    """(depth, V') logits behind ``end`` tokens, of which ``known`` are read before the others, with a draft."""
    session = head.start()
    for start, stop in ((0, known), (known, end)) if known else ((0, end),):
        part = slice(start, stop)
        context = Context(hidden[:, part], TEXT[:, part], torch.tensor([stop - start]), TEXT[:, stop])
        root = session.root(context)
        made: Tensor = head.begin(root, depth)[:, 0]
    return made


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"form": "speculators", "norm_before_residual": True, "trimmed": True, "num_layers": 2, "norm_heads": True},
        {"norm_before_fc": True, "attention_bias": True, "num_layers": 1},
        {"fc_norm": True, "own_embedding": False},
    ],
)
@torch.no_grad()
def test_drafting_and_training_give_the_logits_of_a_published_head(
    options: dict[str, Any], target: TargetModel, tmp_path: Path
) -> None:
    """Read at once and in parts, for fewer and more depths than the file has."""
    torch.manual_seed(0)
    theirs = published.p_eagle(target, **options)
    convert(written(tmp_path / "theirs", theirs), tmp_path / "ours", base=target)
    head: Any = load_head(tmp_path / "ours", target)
    count = 8 if options.get("form") is None else HEADS
    assert (head.config.num_heads, head.config.num_layers) == (count, options.get("num_layers", 3))
    assert (head.mask_token_id, head.hidden_layers) == (MASK, (2, 4, 5))
    hidden = torch.randn(1, 10, 3 * target.hidden_size, generator=torch.Generator().manual_seed(1))
    expected = torch.cat(theirs.logits(hidden, TEXT))  # (HEADS, places, V')
    features = head(hidden, TEXT)
    for end in (1, 4, 6):
        for known in range(end):
            found = drafted(head, hidden, known, end, HEADS)
            torch.testing.assert_close(found, expected[:, end - 1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(drafted(head, hidden, 0, end, 1), expected[:1, end - 1], rtol=1e-4, atol=1e-4)
        trained = torch.stack([head.logits(features[i, 0, end - 1], i) for i in range(HEADS)])
        torch.testing.assert_close(trained, expected[:, end - 1], rtol=1e-4, atol=1e-4)


def test_each_depth_is_trained_behind_some_of_the_places_of_the_depth_above() -> None:
    model = tiny_model("llama")
    head: Any = tiny_head("p-eagle", model, num_heads=8, num_layers=2)
    assert head.place_shares == pytest.approx([1, 0.7, 0.49, 0.343, 0.2401, 0.2, 0.2, 0.2])
    tokens = torch.arange(2, 22).repeat(2, 1)
    hidden = head.split(model.hidden_states(tokens, head.hidden_layers))[0]
    places = torch.stack([torch.randperm(20, generator=torch.Generator().manual_seed(seed))[:10] for seed in (0, 1)])
    numbers = head.place_numbers(10)
    assert numbers == [10, 7, 5, 3, 2, 2, 2, 2]
    whole, some = head(hidden, tokens), head(hidden, tokens, places)
    torch.testing.assert_close(some[0], whole[0])
    for depth, number in enumerate(numbers[1:], 1):
        for row in range(2):
            kept = places[row, :number]
            torch.testing.assert_close(some[depth, row, kept], whole[depth, row, kept])
            assert some[depth, row].any(-1).sum() == number


def test_the_losses_of_training_count_what_was_computed() -> None:
    """All places are drawn, and the losses are means over those of each depth."""
    model = tiny_model("llama")
    head = tiny_head("p-eagle", model, num_heads=4).requires_grad_(requires_grad=True)
    tokens = torch.arange(2, 22).view(1, 20)
    hidden, mask = model.hidden_states(tokens, head.hidden_layers).clone(), torch.ones(1, 20, dtype=torch.bool)
    learner = Learner(head, model.weights, loss="teacher").train()
    torch.manual_seed(3)
    drawn = learner.count(tokens, mask)
    assert drawn["places"].shape == (1, 18), "two tokens follow each"
    assert sorted(drawn["places"][0].tolist()) == list(range(18))
    behind = [drawn["places"][0, :number] for number in (18, 13, 9, 6)]
    assert drawn["numbers"].tolist() == [int((part < 18 - depth).sum()) for depth, part in enumerate(behind)]
    found = learner(hidden, tokens, mask, **drawn)
    found["loss"].backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in head.parameters())
    read, last = head.split(hidden)
    features, teacher = head(read, tokens), model.logits(last)[0].softmax(-1)
    for depth, part in enumerate(behind):
        at = part[part < 18 - depth]
        log_probs = head.logits(features[depth, 0, at], depth).log_softmax(-1)
        expected = -(teacher[at + 1 + depth] * log_probs).sum(-1).mean()
        torch.testing.assert_close(found["head_losses"][depth], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_those_of_plain_decoding(family: str, temperature: float) -> None:
    """In batches, on a chain, a tree and a growing tree; sampled with the same random numbers."""
    model = tiny_model(family)
    settings: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "temperature": temperature, "seed": 5}
    plain = Engine(model).generate(EIGHT, **settings)
    head = tiny_head("p-eagle", model, num_layers=2, num_key_value_heads=2)
    for shape in (Tree.chain(3), TREES["ragged"], GROWING["best first"]):
        found = Engine(model, head, shape=shape, max_batch_size=3).generate(EIGHT, **settings)
        assert ids(found) == ids(plain)
        assert max(result.tokens_per_step for result in found) > 1.0, "nothing was ever accepted"
    with pytest.raises(InvalidTree, match="the tree is 4 deep but the head has 3 heads"):
        head.check_shape(Tree.chain(4))


@pytest.mark.parametrize("options", [{}, {"layers": []}, {"norm_before_residual": True, "own_embedding": True}])
def test_a_new_head_starts_as_a_linear_one(options: dict[str, Any]) -> None:
    """The next hidden state is a turn of the last one, plus a linear function of the token behind it."""
    model = tiny_model("llama")
    head: Any = tiny_head("p-eagle", model, mask_token_id=1, num_key_value_heads=2, rope_theta=1e5, **options)
    if head.embedding is not None:
        head.embedding.weight.copy_(model.weights.embedding)
    size, rank = head.config.hidden_size, head.config.head_size
    torch.manual_seed(0)
    space, turn = torch.linalg.qr(torch.randn(size, rank)).Q, torch.linalg.qr(torch.randn(rank, rank)).Q
    told = torch.nn.functional.normalize(model.weights.embedding.float(), dim=-1) @ torch.randn(size, rank)
    texts = []
    for _ in range(80):
        tokens = torch.randint(2, head.config.vocab_size, (16,))
        states = [torch.randn(rank)]
        for token in tokens[1:]:
            states.append(0.7 * turn @ states[-1] + told[token])
        last = torch.stack(states) @ space.T + 1.0
        texts.append((torch.cat([last, -last, last], -1) if head.hidden_layers else last, tokens))
    head.start_near(texts)
    for depth in range(2):  # with so few numbers in a query, a row two places away is not the nearest
        likeness = []
        for hidden, tokens in texts[:8]:
            read, last = head.split(hidden)
            made = head.logits(head(read[None], tokens[None])[depth, 0, :-1], depth)
            likeness.append(torch.cosine_similarity(made, head.lm_heads(last[1:], 0), dim=-1)[4:].mean())
        assert float(sum(likeness)) / 8 > (0.8, 0.9)[depth]
    (place,) = (head.norm.weight == 0).nonzero()[:, 0]
    read, tokens = head.split(texts[0][0])[0], texts[0][1]
    same = head.layers[0].read(head.inputs(tokens[1:], head.states(read[:-1])))[:, size + place]
    assert same.std() < 0.05 * same.mean(), "keys of all rows have one length"
    assert float(head.layers[0].read(head.mask(read))[0, size + place] / same.mean()) == pytest.approx(-1, abs=0.05)


@pytest.mark.parametrize(
    ("changes", "tensors", "error", "message"),
    [
        ({"ptd_token_id": None}, {}, CheckpointCorrupt, "mask's token is missing: give one number as mask_token_id or"),
        ({"mask_token_id": 5}, {}, CheckpointCorrupt, r"is \{'mask_token_id': 5, 'ptd_token_id': 6\}: give one number"),
        ({"ptd_token_id": "6"}, {}, CheckpointCorrupt, r"is \{'ptd_token_id': '6'\}: give one number"),
        ({"pard_token": 24, "ptd_token_id": 24}, {}, CheckpointCorrupt, "mask_token_id is 24; it must lie in 0 … "),
        ({"parallel_drafting": False}, {}, CheckpointCorrupt, "parallel_drafting is false, and the tensor mask_hidden"),
        ({"num_depths": 0}, {}, CheckpointCorrupt, "num_depths is 0; it must lie in 1 … 32"),
        ({"num_hidden_layers": 2}, {}, CheckpointCorrupt, r"surplus tensors? layers\.2\."),
        ({"num_hidden_layers": 4}, {}, CheckpointCorrupt, r"missing tensors? layers\.3\."),
        ({"steering": 2}, {}, UnsupportedModel, "unknown key steering"),
        ({"norm_output": "yes"}, {}, CheckpointCorrupt, "norm_output is 'yes'; it must be true or false"),
        ({"sliding_window": 8}, {}, UnsupportedModel, "attention within a window"),
        (
            {},
            {"mask_hidden": torch.zeros(1, 1, 32)},
            CheckpointCorrupt,
            r"mask_hidden \(1, 1, 32\) is \(32,\); .* \(96,",
        ),
        (
            {},
            {"layers.1.self_attn.q_norm.weight": torch.ones(8)},
            CheckpointCorrupt,
            "surplus tensor layers.1.self_attn",
        ),
        ({}, {"embed_tokens.weight": torch.ones(30, 32)}, CheckpointMismatch, r"differs by its size \(30, 32\), not"),
        (
            {"speculators_model_type": "peagle"},
            {"mask_hidden": None},
            CheckpointCorrupt,
            "tensor mask_hidden is missing",
        ),
        ({}, {"mask_hidden": None}, DraftHeadsError, "surplus|unknown key"),
    ],
)
def test_files_that_are_not_of_one_kind_are_refused(
    changes: dict[str, Any],
    tensors: dict[str, Any],
    error: type[DraftHeadsError],
    message: str,
    *,
    target: TargetModel,
    tmp_path: Path,
) -> None:
    head = published.p_eagle(target)
    head.config |= changes
    head.tensors = {name: tensor for name, tensor in {**head.tensors, **tensors}.items() if tensor is not None}
    with pytest.raises(error, match=message):
        convert(written(tmp_path / "theirs", head), tmp_path / "ours", base=target)
    assert not (tmp_path / "ours").exists()


def test_what_changes_nothing_is_read_over(target: TargetModel, tmp_path: Path) -> None:
    """Keys of training, a norm that engines have in deeper layers, and what says the number of tokens."""
    head = published.p_eagle(target)
    head.config |= {"num_depths": 5, "down_sample_ratio": 0.7, "down_sample_ratio_min": 0.2, "parallel_drafting": True}
    head.tensors["layers.1.hidden_norm.weight"] = torch.ones(32)
    layout = convert(written(tmp_path / "theirs", head), tmp_path / "ours", base=target)
    assert layout.config.num_heads == 5
    assert not any("num_depths" in guess for guess in layout.guesses)
    del head.config["num_depths"]
    layout = convert(written(tmp_path / "others", head), tmp_path / "more", base=target)
    assert layout.guesses[0] == "that it predicts 8 tokens, as the files do not say it (num_depths)"


def test_a_mask_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidSettings, match=r"mask_token_id is 64; it must lie in 0 … vocab_size - 1 \(63\)"):
        head_classes("p-eagle")[0](hidden_size=32, vocab_size=64, mask_token_id=64)  # type: ignore[call-arg]
