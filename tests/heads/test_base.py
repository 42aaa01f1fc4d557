"""Medusa and Hydra against slow twins that follow each path alone; what all heads have in common."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from draftheads.errors import InvalidSettings, InvalidTree
from draftheads.heads import HEADS, head_classes
from draftheads.heads.base import DraftHead
from draftheads.speculation.draft import TargetWeights
from draftheads.speculation.shapes import BestFirst
from draftheads.speculation.tree import Path, Tree
from families import fitting, propose, tiny_head, tiny_model
from slow_heads import (
    DRAFT_VOCAB,
    KINDS,
    METHODS,
    D,
    K,
    V,
    fresh_head,
    normal,
    random_context,
    random_head,
    random_weights,
    slow_features,
    slow_logits,
    tokens,
)

TREES = {
    "root": Tree.chain(0),
    "chain": Tree.chain(3),
    "shallow": Tree.from_paths([(0,), (2,)]),
    "ragged": Tree.from_paths([(0,), (1,), (4,), (0, 0), (0, 2), (1, 7), (4, 1), (0, 2, 0), (4, 1, 1), (4, 1, 3)]),
    "cartesian": Tree.cartesian([3, 2, 2]),
}


# --- slow twins, from the papers' formulas ---


def slow_path(head: DraftHead, hidden: Tensor, root: int, path: Path) -> int:
    """The token at the end of a path of ranks, expanded alone."""
    known = [root]
    for i, rank in enumerate(path):
        logits = slow_logits(head, i, slow_features(head, i, hidden, known))
        draft_id = int(logits.argsort(descending=True)[rank])
        known.append(int(DRAFT_VOCAB[draft_id]) if head.config.draft_vocab_size else draft_id)
    return known[-1]


@pytest.mark.few(20)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_every_node_is_predicted_from_its_own_path(method: str, kind: str, tree: str) -> None:
    head, context = random_head(method, **KINDS[kind]), random_context(4)
    shape = TREES[tree]
    with torch.no_grad():
        draft = propose(head, context, shape)
    assert draft.token_ids.shape == (4, shape.num_nodes)
    assert (draft.max_depth, draft.sampled) == (shape.max_depth, False)
    for row in range(4):
        hidden = context.hidden[row, int(context.num_accepted[row]) - 1]
        for node, path in enumerate(shape.paths):
            assert int(draft.token_ids[row, node]) == slow_path(head, hidden, int(context.root_ids[row]), path)


# --- starting values ---


@pytest.mark.few(12)
@pytest.mark.parametrize("kind", ["shared", "deep", "own", "trimmed", "trimmed, own, deep"])
@pytest.mark.parametrize("method", [*METHODS, "hydra++", "amphista", "eagle", "markov-medusa"])
def test_a_new_head_predicts_the_targets_next_token(method: str, kind: str) -> None:
    """Every head starts as the target's lm_head on h_t, if all hidden states have one size, as after a norm."""
    # own lm_heads have no bias but in Hydra
    weights = random_weights(bias="own" not in kind or method.startswith("hydra"))
    size = 3.0
    hidden = size * F.normalize(normal(2, 6, D), dim=-1) * D**0.5
    scale = size / float(weights.embedding.square().mean().sqrt())
    options = fitting(method, num_heads=K, **KINDS[kind])
    head = fresh_head(method, weights, **options, **({} if method == "medusa" else {"embedding_scale": scale}))
    target = hidden @ weights.lm_head.T
    if weights.lm_head_bias is not None:
        target = target + weights.lm_head_bias
    target = target * weights.logit_scale
    expected = target[..., DRAFT_VOCAB] if head.config.draft_vocab_size else target
    with torch.no_grad():
        for i, features in enumerate(head(hidden, tokens(2, 6))):
            torch.testing.assert_close(head.logits(features, i), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("kind", "rows"), [("low rank", slice(None)), ("trimmed, low rank", DRAFT_VOCAB)])
def test_a_low_rank_lm_head_is_the_best_of_its_rank(kind: str, rows: slice | Tensor) -> None:
    weights = random_weights(bias=False)
    head = fresh_head("medusa", weights, **{**KINDS[kind], "lm_head_rank": 4})
    matrix = weights.lm_head[rows] * weights.logit_scale
    with torch.no_grad():
        found = torch.stack([head.logits(each, 0) for each in torch.eye(D)], 1)
    # Eckart and Young: what is missing is the smaller singular values
    missing = math.sqrt(float(torch.linalg.svdvals(matrix)[4:].square().sum()))
    assert float(torch.linalg.matrix_norm(matrix - found)) == pytest.approx(missing, rel=1e-4)


# --- draft vocabulary ---


@pytest.mark.parametrize("method", METHODS)
def test_a_trimmed_vocabulary_drafts_only_its_tokens_as_target_ids(method: str) -> None:
    head = random_head(method, draft_vocab_size=len(DRAFT_VOCAB))
    assert head.to_target_ids(torch.tensor([[0, 2], [7, 1]])).tolist() == [[19, 7], [5, 3]]
    assert random_head(method).to_target_ids(torch.tensor([4])).tolist() == [4]
    with torch.no_grad():
        ids = propose(head, random_context(2), Tree.cartesian([8, 8])).token_ids
    children = ids[:, 1:9].sort(-1).values
    assert torch.equal(children, DRAFT_VOCAB.sort().values.expand(2, -1)), "every token of it, each once"


def test_binding_again_takes_the_new_targets_rows() -> None:
    head = fresh_head("medusa", draft_vocab_size=len(DRAFT_VOCAB))
    other = random_weights(seed=8)
    head.bind(other)
    assert other.lm_head_bias is not None
    features = normal(D)
    expected = (other.lm_head @ features + other.lm_head_bias)[DRAFT_VOCAB] * other.logit_scale
    assert torch.allclose(head.logits(features, 0), expected, atol=1e-5)
    assert torch.equal(head.target_embedding, other.embedding)


@pytest.mark.parametrize(("method", "options"), [*((method, {}) for method in HEADS), ("medusa", {"lm_head": "own"})])
def test_the_targets_tensors_do_not_become_a_heads_weights(method: str, options: dict[str, Any]) -> None:
    """Or training the head would change the target: phi has an lm_head with a bias."""
    target = tiny_model("phi")
    theirs = {weight.data_ptr() for weight in target.model.parameters()}
    head = tiny_head(method, target, **options)  # which changes all weights of the head
    assert not [name for name, weight in head.named_parameters() if weight.data_ptr() in theirs]
    target.model.requires_grad_()
    head.bind(target.weights)
    states = torch.randn(1, 9, max(1, len(head.hidden_layers)) * target.hidden_size)
    assert not head.logits(head(states, torch.arange(3, 12)[None])[0], 0).requires_grad, "only a head is trained"
    assert tiny_model("phi").weights_fingerprint == target.weights_fingerprint


# --- errors ---


def test_the_edges_of_what_is_allowed() -> None:
    config_class, _ = head_classes("medusa")
    least = config_class(hidden_size=1, vocab_size=1, num_heads=1, num_layers=1, lm_head_rank=1, draft_vocab_size=1)
    assert least.num_draft_tokens == 1
    assert config_class(hidden_size=D, vocab_size=V, draft_vocab_size=V).num_draft_tokens == V
    assert config_class(hidden_size=D, vocab_size=V).num_draft_tokens == V


@pytest.mark.parametrize("method", METHODS)
def test_trees_that_the_head_cannot_fill(method: str) -> None:
    head = fresh_head(method, draft_vocab_size=len(DRAFT_VOCAB))
    assert head.default_shape == Tree.chain(K)
    for refused in (propose, lambda head, context, shape: head.check_shape(shape)):
        for shape in (Tree.chain(4), BestFirst(9, max_depth=4)):
            with pytest.raises(InvalidTree, match="4 deep but the head has 3 heads"):
                refused(head, random_context(2), shape)
        with pytest.raises(InvalidTree, match="rank 8 is beyond the draft vocabulary of 8"):
            refused(head, random_context(2), Tree.from_paths([(0,), (8,)]))
    head.check_shape(Tree.from_paths([(7,)]))
    assert propose(head, random_context(2), BestFirst(600, top_k=9, beam=64)).num_nodes == 1 + 8 + 64 + 512


@pytest.mark.parametrize("name", ["embedding", "lm_head"])
@pytest.mark.parametrize("shape", [(V + 1, D), (V, D - 1)])
def test_a_target_of_another_size(name: str, shape: tuple[int, int]) -> None:
    weights = random_weights()
    other = TargetWeights(
        torch.zeros(shape) if name == "embedding" else weights.embedding,
        torch.zeros(shape) if name == "lm_head" else weights.lm_head,
    )
    head = fresh_head("hydra")
    with pytest.raises(InvalidSettings, match=f"the target's {name} is ") as caught:
        head.bind(other)
    assert str(shape) in str(caught.value)
    assert str((V, D)) in str(caught.value)


def test_a_draft_vocabulary_comes_exactly_when_it_is_asked_for() -> None:
    trimmed = fresh_head("medusa", draft_vocab_size=len(DRAFT_VOCAB))
    for head, vocab in ((trimmed, None), (fresh_head("medusa"), DRAFT_VOCAB)):
        with pytest.raises(InvalidSettings, match="exactly when draft_vocab_size is set"):
            head.initialise(random_weights(), vocab)
    with pytest.raises(InvalidSettings, match="has 3 tokens; draft_vocab_size is 8"):
        trimmed.initialise(random_weights(), DRAFT_VOCAB[:3])
