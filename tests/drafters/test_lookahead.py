"""Lookahead decoding: what is tried was said by the model, what is read is a tree, and no text changes."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import draftheads
from draft_paths import paths_of
from draftheads.decode.engine import Engine
from draftheads.drafters.draft_model import DraftModel
from draftheads.drafters.lookahead import Lookahead
from draftheads.drafters.mixed import Mixed
from draftheads.errors import InvalidSettings
from draftheads.speculation.draft import Context, Draft
from draftheads.speculation.shapes import ROOT_ONLY, BestFirst, Sampled
from draftheads.speculation.tree import Tree
from families import PROMPTS, tiny_model


def after(token: int) -> int:
    """A language in which each token has one successor."""
    return (3 * token + 1) % 17


def said(draft: Draft) -> Tensor:
    """Logits of that language."""
    return torch.nn.functional.one_hot((3 * draft.token_ids + 1) % 17, 17).float()


def last_step(text: list[int]) -> Context:
    """The last token is the root, the one before is accepted."""
    return Context(torch.zeros(1, 1, 1), torch.tensor([text[-2:-1]]), torch.tensor([1]), torch.tensor(text[-1:]))


@pytest.mark.parametrize(("window", "ngram", "guesses"), [(5, 4, 3), (1, 3, 2), (4, 2, 4), (3, 5, 1)])
def test_ngrams_of_the_pool_are_the_models_outputs(window: int, ngram: int, guesses: int) -> None:
    lookahead = Lookahead(window=window, ngram=ngram, guesses=guesses)
    session, text = lookahead.start(), [2, 9]
    for _ in range(40):
        draft = session.propose(last_step(text), ROOT_ONLY)
        assert int(draft.depths.max()) == draft.max_depth
        assert draft.num_nodes <= lookahead.default_shape.num_nodes
        session.on_read(session.on_verify(draft, lambda draft=draft: said(draft).argmax(-1)).tolist())
        row = session._rows[0]
        assert {len(level) for level in row.levels} == {window}
        for known in row.pool.values():
            assert len(known) <= guesses
            assert {len(rest) for rest in known} == {ngram - 1}
            assert all(after(a) == b for rest in known for a, b in pairwise(rest))
        text.append(after(text[-1]))
    met = [after(first) == rest[0] for first, known in row.pool.items() for rest in known]
    assert window == 1 or any(met), "no n-gram follows its first token"


@pytest.mark.parametrize(("window", "ngram"), [(5, 4), (4, 3), (3, 2), (1, 4), (2, 6)])
def test_a_column_is_read_below_the_columns_before_it(window: int, ngram: int) -> None:
    """Figure 2 of the paper; the model says something that depends on the whole path."""
    lookahead = Lookahead(window=window, ngram=ngram, guesses=40)
    session = lookahead.start()
    weights = torch.tensor([11, 7, 5, 3, 2, 1, 13, 4, 9, 6])

    def says(path: list[int]) -> int:
        return sum(int(weight) * token for weight, token in zip(weights, reversed(path), strict=False)) % 1009

    text = [2, 9, 4]
    for step in range(12):
        root = text[-1]
        draft = session.propose(last_step(text), ROOT_ONLY)
        paths = [[root, *path] for path in paths_of(draft, 0)]
        row = session._rows[0]
        levels = [list(level) for level in row.levels]
        assert len(levels) == min(step + 1, ngram - 1)
        answers = [says(path) for path in paths]
        expected = []  # of each column, its n-gram
        for column, end in enumerate(row.ends):
            beside = [root, *levels[0][1 : column + 1]]
            above = [level[column] for level in levels[1:]]
            assert paths[end] == beside + above
            expected.append((beside[-1], *above, says(beside + above)))
        session.on_read(session.on_verify(draft, lambda answers=answers: torch.tensor([answers])).tolist())
        assert row.levels[-1] == [ngram_said[-1] for ngram_said in expected]
        for first, *rest in expected:
            assert (tuple(rest) in row.pool.get(first, {})) == (len(levels) == ngram - 1)
        text.append(answers[0])


@pytest.mark.few(3)
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2", "gemma3_text"])
@pytest.mark.parametrize("kind", ["lookahead", "prompt lookup", "draft model", "draft model that grows"])
def test_drafters_without_a_head_change_nothing(kind: str, family: str) -> None:
    target = tiny_model(family)
    small = tiny_model("llama", seed=3, num_hidden_layers=1)
    drafter, shape = {
        "lookahead": (Lookahead(), None),
        "prompt lookup": (Mixed(None), None),
        "draft model": (DraftModel(small, target), Tree.cartesian([3, 2])),
        "draft model that grows": (DraftModel(small, target), BestFirst(12, top_k=4)),
    }[kind]
    prompts = [*PROMPTS, [4, 5], [22, 3, 9, 4]]
    options: dict[str, Any] = {"max_new_tokens": 44, "ignore_eos": True, "seed": 5}
    for temperature, batch_size in ((0.0, 1), (0.0, 3), (0.7, 2)):
        expected = Engine(target).generate(prompts, **options, temperature=temperature)
        engine = Engine(target, drafter, shape=shape, max_batch_size=batch_size)
        results = engine.generate(prompts, **options, temperature=temperature)
        assert [result.token_ids for result in results] == [result.token_ids for result in expected]
        least = 1.2 if shape is None and temperature == 0.0 else 1.0  # tiny models repeat themselves
        assert max(result.tokens_per_step for result in results) > least


@pytest.mark.parametrize(("name", "value"), [("window", 0), ("ngram", 1), ("guesses", 0)])
def test_impossible_numbers(name: str, value: int) -> None:
    with pytest.raises(InvalidSettings, match=f"{name} is {value}"):
        Lookahead(**{name: value})


# --- by name ---


@pytest.mark.parametrize(("name", "kind"), [("prompt-lookup", Mixed), ("lookahead", Lookahead)])
def test_drafters_without_training_are_loaded_by_name(world: Path, name: str, kind: type) -> None:
    engine = draftheads.load(world / "model", name, precision="fp32")
    assert isinstance(engine.drafter, kind)
    with pytest.raises(InvalidSettings, match=f"3 nodes: {name}"):
        draftheads.load(world / "model", name, tree=Tree.chain(2))
    with pytest.raises(InvalidSettings, match="hydra"):
        draftheads.load(world / "model", name, tree=world / "hydra")


def test_a_draft_model_is_loaded_by_name(world: Path) -> None:
    options: dict[str, Any] = {"precision": "fp32"}
    engine = draftheads.load(world / "model", draft_model=world / "model", tree=Sampled(Tree.chain(3)), **options)
    assert isinstance(engine.drafter, Mixed)
    assert isinstance(engine.drafter.drafter, DraftModel)
    alone = draftheads.load(world / "model", draft_model=world / "model", copy=False, **options)
    assert isinstance(alone.drafter, DraftModel)
    found = engine.generate(["a dog"], max_new_tokens=25, temperature=0.8, acceptance="block", ignore_eos=True, seed=1)
    assert found[0].tokens_per_step == 4.0
