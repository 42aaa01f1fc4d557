"""Losslessness in fp32: every drafter, tree, batch and family gives plain's tokens, and plain gives transformers'."""

from functools import cache
from itertools import pairwise, product
from typing import Any, Self

import pytest
import torch

from draftheads.cpu.optimise import speed_up
from draftheads.decode.engine import Engine
from draftheads.decode.request import GenerationResult
from draftheads.drafters.lookahead import Lookahead
from draftheads.drafters.mixed import Mixed
from draftheads.heads import HEADS
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.runners.structure import check_trees
from draftheads.settings import SamplingSettings
from draftheads.speculation.draft import Context, Draft
from draftheads.speculation.drafter import Drafter, DraftSession
from draftheads.speculation.shapes import BestFirst, Shape
from draftheads.speculation.tree import Tree
from families import (
    EIGHT,
    FAMILIES,
    FURTHER_FAMILIES,
    GROWING,
    PROMPTS,
    RECURRENT_FAMILIES,
    TREES,
    VOCAB,
    Answer,
    PlantedDrafter,
    PlantedRandomTrees,
    fitting,
    ids,
    tiny_head,
    tiny_model,
)
from thorough import some, some_rows

NEW_TOKENS = 28
ALL = [*FAMILIES, *RECURRENT_FAMILIES]


def decode(engine: Engine, prompts: list[list[int]], **settings: object) -> list[GenerationResult]:
    return engine.generate(prompts, **{"max_new_tokens": NEW_TOKENS, "ignore_eos": True, **settings})


some_model = cache(tiny_model)


@cache
def plain_text(name: str, temperature: float = 0.0) -> list[Answer]:
    return ids(decode(Engine(some_model(name), max_batch_size=1), EIGHT, temperature=temperature, seed=5))


@pytest.fixture(params=some(ALL, "llama", "mistral", "gpt2", "gemma3_text", *RECURRENT_FAMILIES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def family(name: str) -> TargetModel:
    return some_model(name)


@pytest.fixture
def plain(name: str) -> list[Answer]:
    return plain_text(name)


def by_prompt(answers: list[Answer]) -> dict[tuple[int, ...], tuple[int, ...]]:
    return {tuple(prompt): answer for prompt, answer in zip(EIGHT, answers, strict=True)}


def by_transformers(family: TargetModel, prompts: list[list[int]]) -> list[Answer]:
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    # Zamba2's step of one token leaves out the limit of dt that its passes over texts have (transformers 5.23, 5.24)
    options["use_cache"] = family.config.model_type != "zamba2"
    texts = [family.model.generate(torch.tensor([prompt]), **options)[0].tolist() for prompt in prompts]
    return [tuple(text[len(prompt) :]) for text, prompt in zip(texts, prompts, strict=True)]


@pytest.mark.parametrize("name", ALL)
def test_plain_equals_transformers(name: str) -> None:
    plain = ids(decode(Engine(some_model(name), max_batch_size=1), PROMPTS))
    assert plain == by_transformers(some_model(name), PROMPTS)
    assert len({token for answer in plain for token in answer}) > 5, "a model that says one thing tests nothing"


@pytest.mark.thorough
@pytest.mark.parametrize("name", FURTHER_FAMILIES)
def test_plain_trees_and_fast_modules_equal_transformers_in_further_families(name: str) -> None:
    model = tiny_model(name)
    check_trees(model)
    expected = by_transformers(model, EIGHT)
    assert len({token for answer in expected for token in answer}) > 5, "a model that says one thing tests nothing"
    answers = by_prompt(expected)
    for target in (model, tiny_model(name).sped_up()):
        assert ids(decode(Engine(target, max_batch_size=3), EIGHT)) == expected
        for drafter in (PlantedDrafter(TREES["ragged"], answers), PlantedRandomTrees(answers, max_nodes=24)):
            results = decode(Engine(target, drafter, max_batch_size=3), EIGHT)
            assert ids(results) == expected
            assert sum(result.tokens_per_step for result in results) / len(results) > 1.4
        head = tiny_head("hydra", target)
        assert ids(decode(Engine(target, head, shape=GROWING["best first"], max_batch_size=3), EIGHT)) == expected


@pytest.mark.parametrize("batch_size", some([1, 8], 8))
@pytest.mark.parametrize("shape", some([*TREES, "best first"], "64 nodes", "best first"))
@pytest.mark.parametrize("method", ["medusa", "hydra"])
def test_heads_equal_plain(family: TargetModel, plain: list[Answer], method: str, shape: str, batch_size: int) -> None:
    head = tiny_head(method, family)
    engine = Engine(family, head, shape={**TREES, **GROWING}[shape], max_batch_size=batch_size)
    results = decode(engine, EIGHT[:batch_size])
    assert ids(results) == plain[:batch_size]


@pytest.mark.few(19)
@pytest.mark.parametrize(
    ("name", "shape"),
    some_rows(
        product(["llama", "mixtral", "gpt2", "gemma3_text", *RECURRENT_FAMILIES], ["ragged", "64 nodes", "best first"]),
        *[("llama", "best first"), ("mixtral", "ragged"), ("gpt2", "64 nodes"), ("gemma3_text", "best first")],
    ),
)
@pytest.mark.parametrize("method", HEADS)
def test_every_head_equals_plain_in_batches(method: str, name: str, shape: str) -> None:
    """Rows join and leave at different steps. Sampled text is equal, too, with another shape at each step."""
    model = some_model(name)
    engine = Engine(model, tiny_head(method, model), shape={**TREES, **GROWING}[shape], max_batch_size=3)
    assert ids(decode(engine, EIGHT)) == plain_text(name)
    engine = Engine(model, ShapeChanger(tiny_head(method, model)), max_batch_size=3)
    assert ids(decode(engine, EIGHT, temperature=0.8, seed=5)) == plain_text(name, 0.8)


DEEP: dict[str, Shape] = {
    "static": Tree.from_paths([(0,), (1,), *((0,) * depth for depth in range(2, 7)), (1, 0), (0, 0, 0, 1)]),
    "growing": BestFirst(24, top_k=4, beam=3, max_depth=7),
    "as deep as its temperatures": BestFirst(20, top_k=3, beam=2, temperatures=(0.5,) * 6),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma3_text"])
@pytest.mark.parametrize("method", ["eagle", "eagle3", "small-llama", "mtp"])
def test_trees_deeper_than_the_head_was_trained_equal_plain_in_batches(method: str, name: str) -> None:
    model = some_model(name)
    head = tiny_head(method, model)
    for shape in DEEP.values():
        assert ids(decode(Engine(model, head, shape=shape, max_batch_size=3), EIGHT)) == plain_text(name)
    engine = Engine(model, head, shape=DEEP["growing"], max_batch_size=3)
    assert ids(decode(engine, EIGHT, temperature=0.8, seed=5)) == plain_text(name, 0.8)


@pytest.mark.parametrize("batch_size", some([1, 3, 8], 3))
@pytest.mark.parametrize("tree", some([*TREES, "random trees"], "ragged", "64 nodes", "random trees"))
def test_any_accepted_path_equals_plain(family: TargetModel, plain: list[Answer], tree: str, batch_size: int) -> None:
    """Eight prompts through batches of three: rows leave and join at different steps."""
    answers = by_prompt(plain)
    planted, least = (
        (PlantedDrafter(TREES[tree], answers), 1.4)
        if tree in TREES
        else (PlantedRandomTrees(answers, max_nodes=24), 2.0)
    )
    results = decode(Engine(family, planted, max_batch_size=batch_size), EIGHT)
    assert ids(results) == plain
    assert sum(result.tokens_per_step for result in results) / len(results) > least


class ShapeChanger(Drafter, DraftSession):
    """A head with another shape at each step: a static tree, one that grows, one cut short, or none."""

    def __init__(self, head: DraftHead, *, seed: int = 0) -> None:
        self.head = head
        self.needs_history, self.hidden_layers = head.needs_history, head.hidden_layers
        self.generator = torch.Generator().manual_seed(seed)
        self.met: set[object] = set()

    fills_shapes = False

    def start(self) -> Self:
        self.session = self.head.start()
        return self

    def propose(self, context: Context, shape: Shape) -> Draft:
        shapes = [None, *TREES.values(), *GROWING.values()]
        chosen = shapes[self._below(len(shapes))]
        self.met.add(chosen)
        if chosen is None:
            self.session.observe(context)
            return Draft.on_tree(Tree.chain(0), context.root_ids[:, None])
        return self.session.propose(context, chosen).first(1 + self._below(40))

    def observe(self, context: Context) -> None:
        self.session.observe(context)

    def keep(self, rows: torch.Tensor) -> None:
        self.session.keep(rows)

    def _below(self, limit: int) -> int:
        return int(torch.randint(0, limit, (1,), generator=self.generator))


@pytest.mark.parametrize("method", ["medusa", "hydra"])
def test_shapes_that_change_from_step_to_step_equal_plain(
    family: TargetModel, plain: list[Answer], method: str
) -> None:
    changer = ShapeChanger(tiny_head(method, family))
    results = decode(Engine(family, changer, max_batch_size=3), EIGHT)
    assert ids(results) == plain
    assert len(changer.met) > 6, "static and growing shapes, and no draft"


KINDS: dict[str, dict[str, object]] = {
    "own": {"lm_head": "own"},
    "low rank": {"lm_head": "low_rank", "lm_head_rank": 4},
    "trimmed": {"draft_vocab_size": 12},
    "deep": {"num_layers": 2},
    "own, trimmed, deep": {"lm_head": "own", "draft_vocab_size": 12, "num_layers": 3},
}


@pytest.mark.few(9)
@pytest.mark.parametrize("method", HEADS)
@pytest.mark.parametrize("kind", some(KINDS, "low rank", "own, trimmed, deep"))
def test_every_kind_of_head_equals_plain(method: str, kind: str) -> None:
    model = some_model("llama")
    head = tiny_head(method, model, **fitting(method, **KINDS[kind]))
    plain = plain_text("llama")[: len(PROMPTS)]
    found = decode(Engine(model, head, shape=TREES["cartesian"]), PROMPTS)
    assert ids(found) == plain
    assert max(result.tokens_per_step for result in found) > 1.0, "nothing was ever accepted"
    for rule in GROWING.values():
        assert ids(decode(Engine(model, head, shape=rule), PROMPTS)) == plain


def test_the_fast_path_equals_the_stock_model() -> None:
    stock = decode(Engine(tiny_model("llama")), EIGHT)
    fast = tiny_model("llama")
    speed_up(fast.model)
    assert ids(decode(Engine(fast), EIGHT)) == ids(stock)
    head = tiny_head("hydra", fast)
    for shape in (TREES["64 nodes"], *GROWING.values()):
        assert ids(decode(Engine(fast, head, shape=shape), EIGHT)) == ids(stock)
    planted = PlantedRandomTrees(by_prompt(ids(stock)), max_nodes=24)
    assert ids(decode(Engine(fast, planted), EIGHT)) == ids(stock)


NEIGHBOURS: list[tuple[Drafter | None, str | None]] = [  # None: hydra, alone and with copies
    *((None, shape) for shape in ("chain", "cartesian", "ragged", "best first", "sure ones")),
    (Mixed(None, num_tokens=4), None),
    (Lookahead(window=3, ngram=3, guesses=2), None),
]


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("acceptance", ["exact", "typical"])
@pytest.mark.parametrize(("drafter", "shape"), NEIGHBOURS)
@pytest.mark.few(14)
def test_a_row_does_not_depend_on_its_neighbours(
    drafter: Drafter | None, shape: str | None, acceptance: Any, copies: bool
) -> None:
    """Neither its tokens nor its steps; but a threshold is for all rows of a step together."""
    model = tiny_model("qwen2")
    head = tiny_head("hydra", model)
    made = drafter or (Mixed(head) if copies else head)
    engine = Engine(model, made, shape=shape and {**TREES, **GROWING}[shape], max_batch_size=4)
    acceptance = "exact" if shape == "sure ones" else acceptance
    each = [
        SamplingSettings(max_new_tokens=24, temperature=0.9 * (row % 2), seed=row, acceptance=acceptance)
        for row in range(8)
    ]
    together = engine.generate(EIGHT, each, ignore_eos=True)
    alone = [engine.generate([prompt], own, ignore_eos=True)[0] for prompt, own in zip(EIGHT, each, strict=True)]
    assert ids(together) == ids(alone)
    for one, other in zip(together, alone, strict=True):
        assert shape == "sure ones" or (one.num_steps, one.num_copied) == (other.num_steps, other.num_copied)


def test_a_long_prompt_is_read_in_chunks_without_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("mistral")
    prompt = [3 + n * n % 20 for n in range(100)]
    whole = ids(decode(Engine(model), [prompt, [4, 5]]))
    monkeypatch.setattr("draftheads.runners.transformers_runner.CHUNK_TOKENS", 16)
    assert ids(decode(Engine(model), [prompt, [4, 5]])) == whole


@pytest.mark.parametrize("name", ALL)
def test_scoring_the_answer_in_one_pass_gives_the_same_logits(name: str) -> None:
    """One pass over prompt and answer must find each token the best: catches cache, mask and position bugs at once."""
    model = some_model(name)
    engine = Engine(model, tiny_head("medusa", model), shape=TREES["64 nodes"])
    for prompt, result in zip(PROMPTS, decode(engine, PROMPTS), strict=True):
        text = torch.tensor([[*prompt, *result.token_ids]])
        logits = model.model(text).logits[0, len(prompt) - 1 : -1]
        gaps = logits.amax(-1) - logits[torch.arange(NEW_TOKENS), text[0, len(prompt) :]]
        assert float(gaps.max()) < 1e-4


def test_text_up_to_the_last_position_of_the_model() -> None:
    model = tiny_model("gpt2", n_positions=24)
    head = tiny_head("medusa", model)
    results = decode(Engine(model, head, shape=TREES["cartesian"]), [[5, 6, 7]])
    assert len(results[0].token_ids) == 21
    assert results[0].finish_reason == "length"
    assert ids(results) == ids(decode(Engine(model), [[5, 6, 7]]))


@pytest.mark.parametrize(
    ("method", "shapes"),
    [
        ("hydra", [Tree.cartesian([6] * depth) for depth in range(4)]),
        # nested in their number of nodes
        ("medusa", [BestFirst(num_nodes, top_k=VOCAB) for num_nodes in (1, 2, 4, 16, 64, 256)]),
    ],
)
def test_larger_trees_need_no_more_steps(method: str, shapes: list[Shape]) -> None:
    model = some_model("llama")
    head = tiny_head(method, model)
    steps = []
    for shape in shapes:
        results = decode(Engine(model, head, shape=shape), EIGHT)
        assert ids(results) == plain_text("llama")
        steps.append(sum(result.num_steps for result in results))
    assert all(before >= after for before, after in pairwise(steps))
    assert steps[0] == len(EIGHT) * (NEW_TOKENS - 1)
    assert steps[-1] < 0.9 * steps[0]
