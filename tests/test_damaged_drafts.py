"""Draft logits that are not finite, as of a damaged or overflowing head, cost speed only. No text changes or fails."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from torch import Tensor

from distribution import ODDS, SAMPLED, joint_distribution, p_value
from draftheads.decode.engine import Engine
from draftheads.decode.request import GenerationResult
from draftheads.drafters.draft_model import DraftModel, DraftModelSession
from draftheads.drafters.mixed import Mixed
from draftheads.heads.base import DraftHead
from draftheads.settings import SamplingSettings
from draftheads.speculation.drafter import Drafter
from draftheads.speculation.shapes import BestFirst, Sampled, Shape
from families import GROWING, PROMPTS, TREES, ids, tiny_head, tiny_model
from structured_world import GRAMMARS, json_model
from thorough import some

NAN, INF = float("nan"), float("inf")
SHAPES: dict[str, Shape] = {
    **GROWING,
    "two nodes": BestFirst(2),
    "calibrated": BestFirst(12, temperatures=(0.9, 1.1, 1.0)),
    "static": TREES["ragged"],
    "drawn": Sampled(TREES["cartesian"]),
}
# logits (B, W, V') of the first rows, changed in place
DAMAGE: dict[str, Callable[[Tensor], object]] = {
    "nan": lambda logits: logits.fill_(NAN),
    "one nan": lambda logits: logits[..., 7].fill_(NAN),
    "one infinite": lambda logits: logits[..., 7].fill_(INF),
    "both": lambda logits: logits[..., 5].fill_(INF) + logits[..., 7].fill_(NAN),
    "minus infinity": lambda logits: logits.fill_(-INF),
    "largest": lambda logits: logits.mul_(3e38),
    "first node": lambda logits: logits[:, :1].fill_(NAN),
}
FEW_SHAPES = some(SHAPES, "best first", "two nodes", "static", "drawn")
FEW_KINDS = some(DAMAGE, "one nan", "one infinite")
Own = Callable[[Any, Any, int], Tensor]
some_model = cache(tiny_model)


def damaged(own: Own, kind: str, *, rows: int = 1, from_depth: int = 0) -> Own:
    def predict(drafter: Any, state: Any, depth: int) -> Tensor:
        logits = own(drafter, state, depth).float().clone()
        if depth >= from_depth:
            DAMAGE[kind](logits[:rows])
        return logits

    return predict


def damaged_head(method: str, kind: str, **options: Any) -> DraftHead:
    head = tiny_head(method, some_model("llama"))
    predict = damaged(type(head).predict, kind, **options)
    head.predict = lambda state, depth: predict(head, state, depth)
    return head


def decode(drafter: Drafter | None, shape: Shape | None, **settings: Any) -> list[GenerationResult]:
    """Greedy and sampled rows, rows with a penalty, and rows that join late."""
    own = [
        SamplingSettings(**{"max_new_tokens": 24, "temperature": t, "repetition_penalty": r, "seed": 5, **settings})
        for t, r in [(0.0, 1.0), (0.8, 1.0), (0.0, 1.2)]
    ]
    return Engine(some_model("llama"), drafter, shape=shape, max_batch_size=4).generate(
        [prompt for prompt in PROMPTS for _ in own], own * len(PROMPTS), ignore_eos=True
    )


@cache
def plain() -> list[tuple[int, ...]]:
    return ids(decode(None, None))


@pytest.mark.few(5)
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("method", ["hydra", "medusa"])
@pytest.mark.parametrize("shape", FEW_SHAPES)
@pytest.mark.parametrize("kind", FEW_KINDS)
def test_texts_are_plain_decodings(kind: str, shape: str, method: str, copies: bool) -> None:
    for options in ({}, {"rows": 4}, {"from_depth": 1}):
        head = damaged_head(method, kind, **options)
        found = decode(Mixed(head) if copies else head, SHAPES[shape])
        assert ids(found) == plain()
        if options != {"rows": 4}:
            assert max(result.tokens_per_step for result in found) > 1.0, "other rows and depths draft as before"


@pytest.mark.parametrize("shape", FEW_SHAPES)
@pytest.mark.parametrize("kind", FEW_KINDS)
def test_a_draft_model(kind: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = some_model("llama")
    monkeypatch.setattr(DraftModelSession, "predict", damaged(DraftModelSession.predict, kind))
    assert ids(decode(DraftModel(model, model), SHAPES[shape])) == plain()


@pytest.mark.parametrize("shape", FEW_SHAPES)
@pytest.mark.parametrize("kind", FEW_KINDS)
def test_grammars_and_biases(kind: str, shape: str) -> None:
    model = json_model("llama")
    head = tiny_head("hydra", model)
    predict = damaged(type(head).predict, kind, rows=2)
    own = [
        SamplingSettings(max_new_tokens=24, grammar=GRAMMARS["person"]),
        SamplingSettings(max_new_tokens=24, grammar=GRAMMARS["sums"], temperature=0.8, seed=5),
        SamplingSettings(max_new_tokens=24, logit_bias={120: 3.5, 60: -100}),
    ]
    expected = ids(Engine(model).generate([[40, 41, 42]] * 3, own))
    head.predict = lambda state, depth: predict(head, state, depth)
    for drafter in (head, Mixed(head)):
        assert ids(Engine(model, drafter, shape=SHAPES[shape]).generate([[40, 41, 42]] * 3, own)) == expected


@pytest.mark.few(2)
@pytest.mark.parametrize("from_depth", [0, 1])
@pytest.mark.parametrize("kind", FEW_KINDS)
@pytest.mark.parametrize(
    ("acceptance", "tree"), [("rejection", "cartesian"), ("block", "cartesian"), ("block", "chain")]
)
def test_drawn_drafts_keep_the_distribution(acceptance: Any, tree: str, kind: str, from_depth: int) -> None:
    model, rows = some_model("llama"), 1500
    head = damaged_head("hydra", kind, rows=rows // 2, from_depth=from_depth)
    own = [replace(SAMPLED, acceptance=acceptance, seed=seed) for seed in range(rows)]
    results = Engine(model, head, shape=Sampled(TREES[tree]), max_batch_size=rows).generate([[5, 6, 7]] * rows, own)
    assert p_value(Counter(ids(results)), joint_distribution(model)) > ODDS
    broken, whole = results[: rows // 2], results[rows // 2 :]
    assert sum(result.num_steps for result in broken) >= sum(result.num_steps for result in whole)


@pytest.mark.few(4)
@pytest.mark.parametrize("shape", FEW_SHAPES)
@pytest.mark.parametrize("kind", FEW_KINDS)
def test_typical_acceptance_ends_every_text(kind: str, shape: str) -> None:
    """Its texts depend on the drafts; those of greedy rows do not."""
    found = decode(damaged_head("hydra", kind), SHAPES[shape], acceptance="typical")
    assert {len(result.token_ids) for result in found} == {24}
    assert ids(found)[::3] == plain()[::3]


def test_damaged_weights() -> None:
    """Of a whole head, and in fp16, in which large weights overflow."""
    for value in (NAN, INF, 6e4):
        head = tiny_head("eagle", some_model("llama"))
        for weight in head.parameters():
            weight.data.flatten()[0] = value
        assert ids(decode(head, BestFirst(12))) == plain()
    model = some_model("llama")
    half = tiny_head("hydra", model)
    for weight in half.parameters():
        weight.data *= 1e4
    predict = type(half).predict
    half.predict = lambda state, depth: predict(half, state, depth).half()
    assert ids(decode(half, BestFirst(12))) == plain()
