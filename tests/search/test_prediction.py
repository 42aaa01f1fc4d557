"""Tokens per step predicted from recorded answers equal those of decoding them."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from draftheads.decode.engine import Engine
from draftheads.decode.request import GenerationResult
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.search.calibrate import Answer, Observation, observe
from draftheads.speculation.shapes import BestFirst, Shape
from draftheads.speculation.tree import Tree
from draftheads.speculation.tree_search import entries, joint_order, path_counts, simulate
from families import TREES, VOCAB, tiny_model
from observed_heads import drafted_along, head_of
from thorough import some_rows

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_PROMPTS, NEW_TOKENS, BATCH, RANKS = 8, 32, 4, 10
model_of = cache(tiny_model)


def prompts() -> list[list[int]]:
    chance = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 16, (NUM_PROMPTS,), generator=chance).tolist()
    return [torch.randint(3, VOCAB, (length,), generator=chance).tolist() for length in lengths]


def decoded(
    model: TargetModel, head: DraftHead | None, temperature: float, shape: Shape | None = None
) -> list[GenerationResult]:
    """All prompts, a few at a time; some answers end before they are cut off."""
    engine = Engine(model, head, shape=shape, max_batch_size=BATCH)
    return engine.generate(prompts(), max_new_tokens=NEW_TOKENS, temperature=temperature, seed=11)


@cache
def recorded(family: str, temperature: float) -> list[Answer]:
    results = decoded(model_of(family), None, temperature)
    return [Answer(tuple(prompt), result.token_ids) for prompt, result in zip(prompts(), results, strict=True)]


def measured(model: TargetModel, head: DraftHead, shape: Shape, answers: list[Answer], temperature: float) -> float:
    """Tokens per step of decoding the same answers."""
    results = decoded(model, head, temperature, shape)
    assert [result.token_ids for result in results] == [answer.token_ids for answer in answers]
    return sum(len(result.token_ids) - 1 for result in results) / sum(result.num_steps for result in results)


def observed(head: DraftHead, model: TargetModel, answers: list[Answer], temperature: float) -> list[Observation]:
    return [observe(head, model, one, top_k=RANKS, temperature=temperature)[0] for one in answers]


CASES = some_rows(
    [
        (family, kind, temperature)
        for temperature in (0.0, 0.8)
        for family, kind in (
            ("llama", "medusa"),
            ("llama", "hydra"),
            ("llama", "remembering"),
            ("granite", "trimmed hydra"),
            ("gemma2", "hydra"),
            ("mistral", "trimmed medusa"),
        )
    ],
    *[("llama", "remembering", 0.0), ("granite", "trimmed hydra", 0.8), ("mistral", "trimmed medusa", 0.8)],
)


@pytest.mark.parametrize(("family", "kind", "temperature"), CASES)
def test_static_trees_take_as_many_steps_as_predicted(family: str, kind: str, temperature: float):
    model = model_of(family)
    head, answers = head_of(kind, model), recorded(family, temperature)
    if family == "llama":
        assert any(len(answer.token_ids) < NEW_TOKENS for answer in answers), "some answers end by themselves"
    seen = observed(head, model, answers, temperature)
    order = joint_order(path_counts(torch.cat([one.ranks for one in seen]), top_k=RANKS), 24)
    tables = [entries(one.ranks, order) for one in seen]
    predicted = []
    for size in (3, 24):
        predicted.append(simulate(tables, size)[0])
        assert predicted[-1] == measured(model, head, Tree.from_paths(order[: size - 1]), answers, temperature)
    assert 1.0 < predicted[0] < predicted[1]
    tree = TREES["ragged"]  # that grew from nothing that was seen
    tables = [entries(one.ranks, tree.paths[1:]) for one in seen]
    assert simulate(tables, tree.num_nodes)[0] == measured(model, head, tree, answers, temperature)


@pytest.mark.parametrize(("family", "kind", "temperature"), CASES)
def test_growing_trees_take_as_many_steps_as_predicted(family: str, kind: str, temperature: float):
    model = model_of(family)
    head, answers = head_of(kind, model), recorded(family, temperature)
    # with room for the trees of a lower depth
    largest = BestFirst(260, top_k=6, beam=3, temperatures=(1.6, 2.2, 0.9))
    texts = drafted_along(head, model, answers, largest)
    predicted = []
    for size, depth in ((3, 3), (24, 2), (24, 3)):
        predicted.append(simulate([text[depth - 1] for text in texts], size)[0])
        shape = replace(largest, num_nodes=size, max_depth=depth)
        assert predicted[-1] == measured(model, head, shape, answers, temperature)
    assert 1.0 < predicted[0] < predicted[2]


@pytest.mark.few(2)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("family", "kind"), [("llama", "eagle"), ("gpt2", "small-llama"), ("mistral", "eagle")])
def test_trees_deeper_than_trained_take_as_many_steps_as_predicted(family: str, kind: str, temperature: float):
    """Of a head that was trained three deep, with trees of depth 5."""
    model = model_of(family)
    head, answers = head_of(kind, model), recorded(family, temperature)
    deep = head.with_depth(5)
    seen = observed(deep, model, answers, temperature)
    order = joint_order(path_counts(torch.cat([one.ranks for one in seen]), top_k=3), 60)
    order += [path for path in Tree.chain(5).paths[1:] if path not in order]
    predicted = simulate([entries(one.ranks, order) for one in seen], len(order) + 1)[0]
    assert predicted == measured(model, head, Tree.from_paths(order), answers, temperature)
    largest = BestFirst(90, top_k=6, beam=3, temperatures=(1.6, 2.2, 0.9, 1.1, 1.0))
    texts = drafted_along(deep, model, answers, largest)
    predicted_by_depth = []
    for depth in (3, 5):
        predicted_by_depth.append(simulate([text[depth - 1] for text in texts], 24)[0])
        shape = replace(largest, num_nodes=24, max_depth=depth)
        assert predicted_by_depth[-1] == measured(model, head, shape, answers, temperature)
    assert predicted_by_depth[1] == measured(model, head, replace(largest, num_nodes=24), answers, temperature)
