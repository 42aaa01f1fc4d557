"""Medusa and Hydra against slow twins that follow each path alone, their starting values, sizes and errors."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from draftheads.draft import Context, TargetWeights
from draftheads.errors import InvalidSettings, InvalidTree, UnknownMethod
from draftheads.heads import HEADS, head_classes
from draftheads.heads.base import DraftHead, HeadConfig
from draftheads.tree import Path, Tree
from families import propose
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


def slow_path(head: DraftHead, hidden: Tensor, root: int, path: Path) -> tuple[int, float]:
    """The token at the end of a path of ranks and its log-probability given the path, expanded alone."""
    known, log_prob = [root], 0.0
    for i, rank in enumerate(path):
        log_probs = slow_logits(head, i, slow_features(head, i, hidden, known)).log_softmax(-1)
        draft_id = int(log_probs.argsort(descending=True)[rank])
        known.append(int(DRAFT_VOCAB[draft_id]) if head.config.draft_vocab_size else draft_id)
        log_prob = float(log_probs[draft_id])
    return known[-1], log_prob


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
            token, _ = slow_path(head, hidden, int(context.root_ids[row]), path)
            assert int(draft.token_ids[row, node]) == token


@pytest.mark.parametrize("method", METHODS)
def test_a_row_is_drafted_as_if_alone(method: str) -> None:
    head, context = random_head(method, num_layers=2), random_context(5)
    with torch.no_grad():
        together = propose(head, context, TREES["ragged"])
        for row in range(5):
            alone = propose(head, context.keep(torch.tensor([row])), TREES["ragged"])
            assert torch.equal(together.token_ids[row], alone.token_ids[0])


def test_which_draft_tokens_depend_on_the_path_and_the_root() -> None:
    """Medusa's siblings' children are the same, Hydra's are their own; Medusa does not look at the root."""
    context = random_context(3)
    other_roots = Context(context.hidden, context.token_ids, context.num_accepted, (context.root_ids + 1) % V)
    tree = Tree.cartesian([3, 3])
    below = [[tree.paths.index((a, b)) for b in range(3)] for a in range(3)]
    for method, same in (("medusa", True), ("hydra", False)):
        head = random_head(method)
        with torch.no_grad():
            ids, others = (propose(head, one, tree).token_ids for one in (context, other_roots))
        assert torch.equal(ids[:, below[0]], ids[:, below[1]]) == same
        assert torch.equal(ids[:, 1:], others[:, 1:]) == same


# --- forward, the training face ---


@pytest.mark.parametrize("kind", ["shared", "deep", "own"])
@pytest.mark.parametrize("method", METHODS)
def test_forward_equals_direct_maths(method: str, kind: str) -> None:
    head = random_head(method, **KINDS[kind])
    hidden, token_ids = normal(2, 7, D), tokens(2, 7)
    with torch.no_grad():
        features = head(hidden, token_ids)
    assert features.shape == (K, 2, 7, D)
    for i in range(K):
        for row in range(2):
            for t in range(7 - 2 - i):
                following = token_ids[row, t + 1 :].tolist()
                expected = slow_features(head, i, hidden[row, t], following)
                assert torch.allclose(features[i, row, t], expected, atol=1e-5)
                with torch.no_grad():
                    logits = head.logits(features[i, row, t], i)
                assert torch.allclose(logits, slow_logits(head, i, expected), atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_a_position_reads_only_its_state_and_the_tokens_before_it(method: str) -> None:
    """Head i at t may use h_t and, if it is grounded, x_{t+1} … x_{t+1+i}; x_{t+2+i} is what it guesses."""
    head = random_head(method)
    hidden, token_ids = normal(1, 8, D), torch.arange(8)[None]
    with torch.no_grad():
        before = head(hidden, token_ids)
        for place in range(8):
            changed_ids, changed_hidden = token_ids.clone(), hidden.clone()
            changed_ids[0, place] = 19
            changed_hidden[0, place] += 1.0
            after_ids, after_hidden = head(hidden, changed_ids), head(changed_hidden, token_ids)
            for i in range(K):
                for t in range(8 - 2 - i):
                    sees = method == "hydra" and place - t in range(1, i + 2)
                    assert torch.equal(before[i, 0, t], after_ids[i, 0, t]) != sees
                    assert torch.equal(before[i, 0, t], after_hidden[i, 0, t]) == (place != t)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_training_moves_every_parameter_and_nothing_of_the_target(method: str, kind: str) -> None:
    weights = random_weights()
    weights.lm_head.requires_grad_()
    weights.embedding.requires_grad_()
    head = fresh_head(method, weights, **KINDS[kind])
    features = head(normal(2, 6, D), tokens(2, 6))
    loss = torch.stack([head.logits(features[i], i).square().sum() for i in range(K)]).sum()
    loss.backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert weights.lm_head.grad is None
    assert weights.embedding.grad is None


@pytest.mark.parametrize("method", METHODS)
def test_layers_are_distinct(method: str) -> None:
    """Reference code repeats one block L times: its layers are one."""
    head = fresh_head(method, num_layers=3, lm_head="own")
    names = [name for name, _ in head.named_parameters(remove_duplicate=False)]
    assert len({parameter.data_ptr() for parameter in head.parameters()}) == len(names)
    assert [f"blocks.2.{j}.linear.weight" in names for j in range(4)] == [True, True, True, False]
    hidden, token_ids = normal(1, 6, D), tokens(1, 6)
    with torch.no_grad():
        before = head(hidden, token_ids)
        head.get_parameter("blocks.1.1.linear.weight").add_(0.5)
        moved = [not torch.equal(old, new) for old, new in zip(before, head(hidden, token_ids), strict=True)]
    assert moved == [False, True, False]


# --- starting values ---


@pytest.mark.parametrize("kind", ["shared", "deep", "own", "trimmed", "trimmed, own, deep"])
@pytest.mark.parametrize("method", METHODS)
def test_a_new_head_predicts_the_targets_next_token(method: str, kind: str) -> None:
    # own lm_heads have no bias but in Hydra
    weights = random_weights(bias=kind in ("shared", "deep", "trimmed") or method == "hydra")
    head = fresh_head(method, weights, **KINDS[kind])
    hidden = normal(2, 5, D)
    target = hidden @ weights.lm_head.T
    if weights.lm_head_bias is not None:
        target = target + weights.lm_head_bias
    target = target * weights.logit_scale
    expected = target[..., DRAFT_VOCAB] if head.config.draft_vocab_size else target
    with torch.no_grad():
        features = head(hidden, tokens(2, 5))
        for i in range(K):
            assert torch.equal(features[i], hidden)
            assert torch.allclose(head.logits(features[i], i), expected, atol=1e-5)


@pytest.mark.parametrize("trimmed", [False, True])
def test_a_low_rank_lm_head_of_full_rank_is_the_targets(*, trimmed: bool) -> None:
    weights = random_weights(bias=False)
    options = {"draft_vocab_size": len(DRAFT_VOCAB)} if trimmed else {}
    rank = min(D, len(DRAFT_VOCAB)) if trimmed else D
    head = fresh_head("medusa", weights, lm_head="low_rank", lm_head_rank=rank, **options)
    hidden = normal(6, D)
    rows = DRAFT_VOCAB if trimmed else torch.arange(V)
    for i in range(K):
        expected = hidden @ weights.lm_head[rows].T * weights.logit_scale
        with torch.no_grad():
            assert torch.allclose(head.logits(hidden, i), expected, atol=1e-4)


def test_a_low_rank_lm_head_is_the_best_of_its_rank() -> None:
    weights = random_weights(bias=False)
    head = fresh_head("medusa", weights, lm_head="low_rank", lm_head_rank=4)
    matrix = weights.lm_head * weights.logit_scale
    with torch.no_grad():
        found = torch.stack([head.logits(each, 0) for each in torch.eye(D)], 1)
    # Eckart and Young: what is missing is the smaller singular values
    missing = math.sqrt(float(torch.linalg.svdvals(matrix)[4:].square().sum()))
    assert float(torch.linalg.matrix_norm(matrix - found)) == pytest.approx(missing, rel=1e-4)


def test_a_shared_lm_head_is_the_targets_own_memory() -> None:
    weights = random_weights()
    shared = fresh_head("medusa", weights).lm_heads.shared
    assert shared is not None
    assert shared.data_ptr() == weights.lm_head.data_ptr()


def test_own_lm_heads_do_not_share_memory_with_the_target() -> None:
    weights = random_weights()
    kept = weights.lm_head.clone()
    head = fresh_head("medusa", weights, lm_head="own")
    for parameter in head.parameters():
        parameter.data.zero_()
    assert torch.equal(weights.lm_head, kept)


# --- sizes, at those of Vicuna-7B ---

VICUNA_D, VICUNA_V = 4096, 32000
SQUARE = VICUNA_D * VICUNA_D + VICUNA_D  # a linear layer with its bias


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("medusa", {"lm_head": "own"}, 4 * (SQUARE + VICUNA_V * VICUNA_D)),
        ("medusa", {"num_layers": 2}, 4 * 2 * SQUARE),
        ("medusa", {"lm_head": "low_rank", "lm_head_rank": 64}, 4 * (SQUARE + 64 * (VICUNA_D + VICUNA_V))),
        ("medusa", {"lm_head": "own", "draft_vocab_size": 8000}, 4 * (SQUARE + 8000 * VICUNA_D)),
        ("hydra", {}, sum(2 * ((i + 2) * VICUNA_D**2 + VICUNA_D) for i in range(4))),
        ("hydra", {"num_layers": 4}, sum(2 * (i + 2) * VICUNA_D**2 + 2 * VICUNA_D + 3 * SQUARE for i in range(4))),
    ],
)
def test_number_of_parameters(method: str, options: dict[str, Any], expected: int) -> None:
    config_class, head_class = head_classes(method)
    with torch.device("meta"):
        head = head_class(config_class(hidden_size=VICUNA_D, vocab_size=VICUNA_V, num_heads=4, **options))
    assert sum(parameter.numel() for parameter in head.parameters()) == expected


@pytest.mark.parametrize("method", METHODS)
def test_nothing_of_the_target_is_saved(method: str) -> None:
    keys = set(fresh_head(method, draft_vocab_size=len(DRAFT_VOCAB)).state_dict())
    assert keys == {
        "draft_vocab",
        *(f"blocks.{i}.0.linear.{part}" for i in range(K) for part in ("weight", "bias")),
        *(f"blocks.{i}.0.residual.{part}" for i in range(K) for part in ("weight", "bias") if method == "hydra"),
    }
    assert "draft_vocab" not in fresh_head(method).state_dict()


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


# --- errors ---


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", 0),
        ("vocab_size", 0),
        ("num_heads", 0),
        ("num_layers", 0),
        ("lm_head_rank", 0),
        ("num_heads", -2),
        ("lm_head", "tied"),
        ("draft_vocab_size", 0),
        ("draft_vocab_size", V + 1),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_an_impossible_option_is_named_with_its_value(method: str, name: str, value: Any) -> None:
    config_class, _ = head_classes(method)
    with pytest.raises(InvalidSettings, match=f"^{name} is {value!r}"):
        config_class(**{"hidden_size": D, "vocab_size": V, name: value})


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
        with pytest.raises(InvalidTree, match="4 deep but the head has 3 heads"):
            refused(head, random_context(2), Tree.chain(4))
        with pytest.raises(InvalidTree, match="rank 8 is beyond the draft vocabulary of 8"):
            refused(head, random_context(2), Tree.from_paths([(0,), (8,)]))
    head.check_shape(Tree.from_paths([(7,)]))


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
    trimmed, whole = fresh_head("medusa", draft_vocab_size=len(DRAFT_VOCAB)), fresh_head("medusa")
    with pytest.raises(InvalidSettings, match="exactly when draft_vocab_size is set"):
        trimmed.initialise(random_weights())
    with pytest.raises(InvalidSettings, match="exactly when draft_vocab_size is set"):
        whole.initialise(random_weights(), DRAFT_VOCAB)
    with pytest.raises(InvalidSettings, match="has 3 tokens; draft_vocab_size is 8"):
        trimmed.initialise(random_weights(), DRAFT_VOCAB[:3])


def test_the_table_of_methods() -> None:
    assert all(config.method == name for name, (config, _) in HEADS.items())
    assert list(HEADS) == sorted(HEADS)
    assert all(issubclass(config, HeadConfig) for config, _ in HEADS.values())
    with pytest.raises(UnknownMethod, match=r"unknown method 'medus'; choose one of .*hydra.*medusa"):
        head_classes("medus")
