"""Structured output: constrained drafting equals constrained plain decoding, which equals a slow decoder."""

import json
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from draftheads.checkpoints.checkpoint import resolve_head
from draftheads.decode.engine import Engine
from draftheads.decode.request import GenerationResult
from draftheads.drafters.draft_model import DraftModel
from draftheads.drafters.lookahead import Lookahead
from draftheads.drafters.mixed import Mixed
from draftheads.heads import HEADS
from draftheads.loading import load_drafter, load_target
from draftheads.models.model import TargetModel
from draftheads.runners.runner import Row
from draftheads.runners.transformers_runner import TransformersRunner
from draftheads.settings import Grammar, SamplingSettings
from draftheads.speculation.draft import Draft
from draftheads.speculation.drafter import Drafter
from draftheads.speculation.shapes import BestFirst, Sampled, Shape
from draftheads.speculation.tree import Tree
from families import ids, tiny_head
from structured_world import EOS, GRAMMARS, VOCAB, SlowGrammar, json_model, slow_answer
from thorough import some

PROMPT = [40, 41, 42]
PROMPTS = [PROMPT, [77, 80, 81, 90, 100, 110, 77, 80], [5], [60, 61], [200, 201, 202, 203], [9, 8, 7], [70, 71]]
RAGGED = Tree.from_paths([(0,), (1,), (4,), (0, 0), (0, 2), (4, 1), (0, 2, 0), (4, 1, 3)])
SHAPES: dict[str, Shape] = {
    "chain": Tree.chain(3),
    "ragged": RAGGED,
    "best first": BestFirst(12, top_k=4, beam=4),
    "threshold": BestFirst(24, top_k=8, beam=6, max_depth=3, threshold=0.02, temperatures=(0.7, 0.8, 0.9)),
    "sampled": Sampled(Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])),
}


def mixed(**changes: Any) -> list[SamplingSettings]:
    """A grammar in some rows, biases in others, both, and neither."""
    names = ("person", "choice", "", "call", "", "object", "sums")
    biases = [{}, {}, {}, {120: 3.5, 60: -100}, {70: 100, 71: 99.5, EOS: -100}, {97: 2.0}, {}]
    return [
        SamplingSettings(max_new_tokens=48, seed=5, grammar=GRAMMARS.get(name), logit_bias=bias, **changes)
        for name, bias in zip(names, biases, strict=True)
    ]


SETTINGS = {
    "greedy": mixed(),
    "sampled": mixed(temperature=0.8, top_p=0.9, top_k=40),
    "penalty": mixed(repetition_penalty=1.3),
    "alternating": [one for pair in zip(mixed()[::2], mixed(temperature=1.0)[1::2], strict=False) for one in pair]
    + mixed()[-1:],
}


def decode(drafter: Drafter | None, settings: str, family: str = "llama", **parts: Any) -> list[GenerationResult]:
    return Engine(json_model(family), drafter, max_batch_size=4, **parts).generate(PROMPTS, SETTINGS[settings])


@cache
def plain(settings: str, family: str = "llama") -> list[tuple[int, ...]]:
    return ids(decode(None, settings, family))


def check_answers(results: list[GenerationResult], settings: list[SamplingSettings]) -> None:
    """Every answer that ended is a whole text of its grammar, and every other one the beginning of one."""
    for result, own in zip(results, settings, strict=True):
        if own.grammar is not None:
            assert SlowGrammar(own.grammar).allows(list(result.token_ids))
            assert (result.token_ids[-1] == EOS) == (result.finish_reason == "stop")


@pytest.mark.parametrize("family", some(["llama", "gpt2", "gemma2", "qwen3"], "llama"))
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_plain_decoding_equals_a_slow_decoder(family: str, grammar: str):
    model = json_model(family)
    result, other = Engine(model).generate([PROMPT, PROMPTS[1]], grammar=GRAMMARS[grammar], max_new_tokens=30)
    assert list(result.token_ids) == slow_answer(model, PROMPT, GRAMMARS[grammar], max_new_tokens=30)
    assert list(other.token_ids) == slow_answer(model, PROMPTS[1], GRAMMARS[grammar], max_new_tokens=30)
    check_answers([result], [SamplingSettings(grammar=GRAMMARS[grammar])])


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Draft, int]]:
    """The drafts that the model of the tests verifies, and how long the text of the first row is at that time."""
    drafts: list[tuple[Draft, int]] = []
    verify = TransformersRunner.verify

    def watched(runner: TransformersRunner, rows: list[Row], draft: Draft) -> tuple[Tensor, Tensor]:
        if runner.model is json_model():
            drafts.append((draft, rows[0].length))
        return verify(runner, rows, draft)

    monkeypatch.setattr(TransformersRunner, "verify", watched)
    return drafts


WAYS: list[tuple[str, str, str]] = [  # a drafter, a shape, and a family
    *((method, shape, "llama") for method in HEADS for shape in SHAPES),
    *(("hydra", "best first", family) for family in ("gpt2", "gemma2", "mistral", "phi3")),
    # most tokens cannot be drafted, so often no allowed token can
    *((method, shape, "llama") for method in ("trimmed", "trimmed medusa") for shape in SHAPES),
    *((name, "", "llama") for name in ("prompt lookup", "lookahead", "copying", "copying static", "draft model")),
]


@pytest.mark.few(34)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("name", "shape", "family"), WAYS)
def test_texts_are_those_of_plain_decoding(name: str, shape: str, family: str, settings: str):
    drafter, parts = other_drafter(name, json_model(family))
    results = decode(drafter, settings, family, **({"shape": SHAPES[shape]} if shape else parts))
    assert ids(results) == plain(settings, family)
    check_answers(results, SETTINGS[settings])


def other_drafter(name: str, model: TargetModel) -> tuple[Drafter, dict[str, Any]]:
    if name.startswith("trimmed"):
        return tiny_head("medusa" if name.endswith("medusa") else "hydra", model, draft_vocab_size=40), {}
    if name in HEADS:
        return tiny_head(name, model), {}
    if name == "prompt lookup":
        return Mixed(None, num_tokens=5), {}
    if name == "lookahead":
        return Lookahead(), {}
    if name == "draft model":
        return DraftModel(json_model(seed=1), model), {"shape": SHAPES["best first"]}
    return Mixed(tiny_head("hydra", model)), {"shape": RAGGED if name == "copying static" else SHAPES["best first"]}


@pytest.mark.few(7)
@pytest.mark.parametrize("acceptance", ["rejection", "block", "typical"])
@pytest.mark.parametrize("shape", [Sampled(Tree.chain(3)), SHAPES["sampled"], SHAPES["best first"]])
@pytest.mark.parametrize("vocabulary", [None, 40])
def test_other_acceptance_rules_keep_to_the_grammar(acceptance: str, shape: Shape, vocabulary: int | None):
    model = json_model()
    head = tiny_head("hydra", model, **({} if vocabulary is None else {"draft_vocab_size": vocabulary}))
    settings = mixed(acceptance=acceptance, temperature=1.0)
    results = Engine(model, head, shape=shape, max_batch_size=4).generate(PROMPTS, settings)
    check_answers(results, settings)
    assert sum(map(sum, (result.drafted for result in results)))  # some draft tokens are accepted


def test_nothing_is_drawn_where_no_token_of_the_draft_vocabulary_is_allowed(verified: list[tuple[Draft, int]]):
    model = json_model()
    engine = Engine(model, tiny_head("hydra", model, draft_vocab_size=40), shape=SHAPES["sampled"])
    engine.generate([PROMPT], grammar=GRAMMARS["person"], temperature=1.0, seed=1, max_new_tokens=12)
    probs = [draft.probs for draft, _ in verified if draft.probs is not None]
    assert any((one.sum(2) == 0).any() for one in probs)
    assert all(one.isfinite().all() for one in probs)


def num_allowed_nodes(draft: Draft, grammar: Grammar, text: list[int]) -> int:
    """How many draft tokens the first row has; all of them continue the text as the grammar allows."""
    slow, tokens, count = SlowGrammar(grammar), draft.token_ids[0].tolist(), 0
    for node in range(1, draft.num_nodes):
        if draft.depths[0, node]:
            path = [tokens[above] for above in draft.ancestors[0, node].nonzero()[:, 0].tolist()]
            assert slow.allows(text + path), (text, path)
            count += 1
    return count


@pytest.mark.few(18)
@pytest.mark.parametrize("grammar", ["person", "sums"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["medusa", "hydra", "trimmed", "copying", "prompt lookup", "draft model"])
def test_forbidden_tokens_are_never_verified(name: str, shape: str, grammar: str, verified: list[tuple[Draft, int]]):
    model = json_model()
    drafter = other_drafter(name, model)[0]
    parts = {} if name == "prompt lookup" else {"shape": SHAPES[shape]}
    prompt = PROMPTS[1]
    (result,) = Engine(model, drafter, **parts).generate([prompt], grammar=GRAMMARS[grammar], max_new_tokens=24)
    texts = [list(result.token_ids)[: length - len(prompt)] for _, length in verified]
    counts = [
        num_allowed_nodes(draft, GRAMMARS[grammar], text) for (draft, _), text in zip(verified, texts, strict=True)
    ]
    assert counts
    assert sum(counts) or name in ("prompt lookup", "trimmed")


def spelt(token_ids: list[int]) -> str:
    """In llguidance's notation."""
    return " ".join(f"<[{token}]>" for token in token_ids)


@pytest.mark.parametrize("shape", ["chain", "best first", "sampled"])
@pytest.mark.parametrize("method", ["medusa", "hydra"])
def test_text_without_a_choice_is_drafted_as_deep_as_the_tree(method: str, shape: str):
    """One token is allowed at each place, so every draft token is right."""
    model = json_model()
    ids = model.tokenizer("red green blue 12 San Francisco yes")["input_ids"]
    grammar = Grammar.lark(f"start: {spelt(ids)}")
    own = SHAPES[shape] if shape != "sampled" else Sampled(Tree.chain(3))
    (result,) = Engine(model, tiny_head(method, model), shape=own).generate([PROMPT], grammar=grammar)
    assert list(result.token_ids) == [*ids, EOS]
    assert result.num_steps == -(-len(ids) // 4)


def test_free_rows_are_drafted_as_without_their_neighbours(verified: list[tuple[Draft, int]]):
    model = json_model()
    head = tiny_head("hydra", model)
    firsts = []
    for grammar in (None, GRAMMARS["person"]):
        settings = [SamplingSettings(max_new_tokens=12, grammar=own) for own in (None, grammar)]
        Engine(model, head, shape=SHAPES["best first"]).generate(PROMPTS[:2], settings)
        firsts.append(verified[0][0])
        verified.clear()
    alone, beside = firsts
    assert torch.equal(alone.token_ids[0], beside.token_ids[0])
    assert alone.num_nodes == beside.num_nodes == 12


@pytest.mark.parametrize("method", ["medusa", "hydra", "trimmed"])
def test_a_strong_bias_is_drafted(method: str):
    model = json_model()
    token = VOCAB - 3  # a draft vocabulary has the last tokens
    head, _ = other_drafter(method, model)
    (result,) = Engine(model, head, shape=Tree.chain(3)).generate([PROMPT], max_new_tokens=13, logit_bias={token: 100})
    assert set(result.token_ids) == {token}
    assert result.num_steps == 3


def test_forbidden_copies_take_no_place_in_the_tree(verified: list[tuple[Draft, int]]):
    """The copy after the root is forbidden, and the tree has no place for both."""
    model = json_model()
    yes, no = (model.tokenizer(text)["input_ids"] for text in ("yes", "no"))
    prompt = [*yes, *no, *yes, *no]
    grammar = Grammar.lark(f"start: {spelt(yes)} DIGITS\nDIGITS: /[0-9]{{3}}/")
    drafter = Mixed(tiny_head("hydra", model), probs=((0.9, 0.8, 0.7),) * 4)
    Engine(model, drafter, shape=BestFirst(3, top_k=2)).generate([prompt], grammar=grammar)
    assert [draft.num_nodes for draft, _ in verified][: len(yes)] == [3] * len(yes)


MODEL = "smollm2-135m"
REAL_SETTINGS = [
    SamplingSettings(grammar=GRAMMARS["person"], max_new_tokens=80),
    SamplingSettings(max_new_tokens=16),
    SamplingSettings(grammar=GRAMMARS["person"], max_new_tokens=80, temperature=0.8, seed=1),
]
REAL_PROMPTS = [
    "Ada Moreno is 41 and smiles. Answer with JSON.",
    "Why is the sky blue?",
    "Bruno, 30, is in tears: JSON?",
]


@cache
def real_model() -> TargetModel:
    return load_target(MODEL, precision="fp32")


@cache
def real_plain() -> list[tuple[int, ...]]:
    return ids(Engine(real_model()).generate(REAL_PROMPTS, REAL_SETTINGS))


@pytest.mark.real
@pytest.mark.parametrize("head", ["hydra", "medusa"])
def test_on_the_real_model(head: str):
    engine = Engine(real_model(), load_drafter(resolve_head(head, MODEL), real_model()), shape=BestFirst(10))
    results = engine.generate(REAL_PROMPTS, REAL_SETTINGS)
    assert ids(results) == real_plain()
    for result in (results[0], results[2]):
        assert list(json.loads(result.text)) == ["name", "age", "tags"]
    assert results[0].tokens_per_step > 1.5
