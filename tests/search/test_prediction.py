"""Tokens per step predicted from recorded answers equal those of decoding them."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from draftheads.decode.engine import Engine
from draftheads.decode.request import GenerationResult
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.search.replay import Answer, observe
from draftheads.search.tree_search import entries, joint_order, path_counts, simulate
from draftheads.speculation.shapes import BestFirst, Shape
from draftheads.speculation.tree import Tree
from families import TREES, VOCAB, ids, tiny_model, tokens_per_step
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
    assert ids(results) == [answer.token_ids for answer in answers]
    return tokens_per_step(results)


KINDS = {"llama": ("medusa", "hydra", "hydra++"), "granite": ("trimmed hydra",), "mistral": ("trimmed medusa",)}
CASES = some_rows(
    [(family, kind, temperature) for temperature in (0.0, 0.8) for family, kinds in KINDS.items() for kind in kinds],
    *[("llama", "hydra++", 0.0), ("granite", "trimmed hydra", 0.8), ("mistral", "trimmed medusa", 0.8)],
)


@pytest.mark.parametrize(("family", "kind", "temperature"), CASES)
def test_trees_take_as_many_steps_as_predicted(family: str, kind: str, temperature: float):
    model = model_of(family)
    head, answers = head_of(kind, model), recorded(family, temperature)
    seen = [observe(head, model, one, top_k=RANKS, temperature=temperature)[0] for one in answers]
    order = joint_order(path_counts(torch.cat([one.ranks for one in seen]), top_k=RANKS), 24)
    predicted = []
    for tree in (Tree.from_paths(order[:2]), Tree.from_paths(order), TREES["ragged"]):  # the last saw nothing
        grown = order if tree != TREES["ragged"] else tree.paths[1:]
        predicted.append(simulate([entries(one.ranks, grown) for one in seen], tree.num_nodes)[0])
        assert predicted[-1] == measured(model, head, tree, answers, temperature)
    assert 1.0 < predicted[0] < predicted[1]
    # trees that grow, with room for those of a lower depth
    largest = BestFirst(260, top_k=6, beam=3, temperatures=(1.6, 2.2, 0.9))
    texts = drafted_along(head, model, answers, largest)
    predicted = []
    for size, depth in ((3, 3), (24, 2), (24, 3)):
        predicted.append(simulate([text[depth - 1] for text in texts], size)[0])
        shape = replace(largest, num_nodes=size, max_depth=depth)
        assert predicted[-1] == measured(model, head, shape, answers, temperature)
    assert 1.0 < predicted[0] < predicted[2]
