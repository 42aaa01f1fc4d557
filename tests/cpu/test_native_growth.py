"""Candidates that are found in one native call are those that are found step by step."""

from typing import Any

import pytest
import torch

from draftheads.cpu.drafts import best_tree
from draftheads.cpu.kernels import pack
from draftheads.heads.base import DraftHead
from draftheads.speculation.candidates import _best_tree
from draftheads.speculation.draft import Context, Draft
from draftheads.speculation.shapes import BestFirst, Shape
from families import needs_library, tiny_head, tiny_model

pytestmark = needs_library
SHAPES: dict[str, Shape] = {
    "ten": BestFirst(10),
    "many": BestFirst(30, beam=5, top_k=6),
    "likely only": BestFirst(20, min_level_probability=0.5),
    "every level": BestFirst(20, min_level_probability=None),
    "temperatures": BestFirst(12, temperatures=(0.5, 1.5, 2.0)),
    "one": BestFirst(2),
}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "hydra": ("hydra", {}),
    "deep hydra": ("hydra", {"num_layers": 3, "draft_vocab_size": 12}),
    "hydra of own lm_heads": ("hydra", {"lm_head": "own"}),
    "hydra++": ("hydra++", {}),
    "medusa": ("medusa", {"num_layers": 2}),
    "medusa of own lm_heads": ("medusa", {"lm_head": "own", "draft_vocab_size": 10}),
}


def context_of(head: DraftHead, rows: int) -> Context:
    """Rows that accepted different numbers of tokens."""
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 3, head.config.hidden_size, generator=generator)
    tokens = torch.randint(head.config.vocab_size, (rows, 3), generator=generator)
    counts = torch.tensor([1 + row % 3 for row in range(rows)])
    return Context(hidden, tokens, counts, torch.randint(head.config.vocab_size, (rows,), generator=generator))


def drafted(head: DraftHead, shape: Shape, rows: int) -> Draft:
    with torch.inference_mode():
        return head.start().propose(context_of(head, rows), shape)


def assert_same(found: Draft, expected: Draft) -> None:
    for name in ("token_ids", "parents", "ancestors", "depths"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    torch.testing.assert_close(found.path_log_probs, expected.path_log_probs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 3])
def test_candidates_are_as_step_by_step(kind: str, shape: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    method, options = HEADS[kind]
    # a number that int8 rounds to the other side changes the rest
    monkeypatch.setattr("draftheads.heads.base.pack", lambda layers, **_: pack(layers))
    head = tiny_head(method, tiny_model("llama"), num_heads=3, **options)
    head.speed_up()
    assert head.growth is not None
    found = drafted(head, SHAPES[shape], rows)
    head.growth = None
    assert_same(found, drafted(head, SHAPES[shape], rows))


@pytest.mark.parametrize("is_tied", [False, True])
def test_candidates_of_an_embedding_in_8_bits(is_tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftheads.heads.base.pack", lambda layers, **_: pack(layers))
    head = tiny_head("hydra", tiny_model("llama", tie_word_embeddings=is_tied).sped_up(bits=4), num_heads=3)
    assert head.target_embedding is None
    head.speed_up()
    assert head.growth is not None
    found = drafted(head, SHAPES["ten"], 3)
    head.growth = None
    assert_same(found, drafted(head, SHAPES["ten"], 3))


@pytest.mark.usefixtures("instructions", "threads")
def test_a_rows_candidates_depend_on_no_other_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftheads.heads.base.pack", lambda layers, **_: pack(layers, portable=True))
    head = tiny_head("hydra", tiny_model("llama"), num_heads=3, num_layers=2)
    head.speed_up()
    shape, context = BestFirst(12, min_level_probability=None), context_of(head, 4)
    with torch.inference_mode():
        together = head.start().propose(context, shape)
        for row in range(4):
            alone = head.start().propose(context.keep([row]), shape)
            assert torch.equal(alone.token_ids[0], together.token_ids[row])
            torch.testing.assert_close(alone.path_log_probs[0], together.path_log_probs[row], rtol=0, atol=0)


def test_a_damaged_head_drafts_nothing_likely() -> None:
    head = tiny_head("hydra", tiny_model("llama"), num_heads=3)
    for parameter in head.parameters():
        parameter.data.fill_(float("nan"))
    head.speed_up()
    draft = drafted(head, BestFirst(6), 2)
    assert draft.path_log_probs is not None
    assert (draft.path_log_probs[:, 1:] == -float("inf")).all()


def test_other_heads_are_asked_step_by_step() -> None:
    for method in ("markov-medusa", "mlp-speculator", "eagle"):
        head = tiny_head(method, tiny_model("llama"))
        head.speed_up()
        assert head.growth is None


@pytest.mark.parametrize("count", [1, 5, 14, 40])
def test_the_best_candidates_become_a_tree(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    rows, parents, priority = 3, torch.zeros(3, 40, dtype=torch.int64), torch.zeros(3, 40)
    for node in range(1, 40):
        parents[:, node] = torch.randint(node, (rows,), generator=generator)
        step = torch.randint(3, (rows,), generator=generator) * 0.5  # many are equal
        priority[:, node] = priority.gather(1, parents[:, node : node + 1])[:, 0] - step
    found = best_tree(priority, parents, count)
    assert found is not None
    for part, expected in zip(found, _best_tree(priority, parents, count, count - 1), strict=True):
        assert torch.equal(part, expected)
