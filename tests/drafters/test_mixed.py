"""Copies in the trees of heads and draft models, and alone: the same text in fewer steps."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from draftheads.decode.engine import Engine
from draftheads.decode.request import GenerationResult, Request
from draftheads.drafters.draft_model import DraftModel
from draftheads.drafters.lookahead import Lookahead
from draftheads.drafters.mixed import Mixed
from draftheads.drafters.sources import Corpus, TextSoFar
from draftheads.errors import InvalidSettings
from draftheads.heads import HEADS
from draftheads.settings import SamplingSettings
from draftheads.speculation.draft import Context, Draft
from draftheads.speculation.drafter import Drafter
from draftheads.speculation.shapes import ROOT_ONLY, BestFirst, Sampled, Shape
from draftheads.speculation.tree import Tree
from families import TREES, VOCAB, IntegerTokenizer, PlantedDrafter, ids, propose, tiny_head, tiny_model
from thorough import some_rows

FAMILIES = ["llama", "mistral", "mixtral", "gpt2", "gemma3_text", "qwen3"]
# of many lengths, with much to copy; more than fit in a batch, so rows join and leave
PROMPTS = [
    [5, 6, 7, 8, 5, 6, 7, 8, 5, 6],
    [3],
    [9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 9, 10, 11],
    [4, 5, 4, 5],
    [22, 3, 9, 4],
    [8, 8, 8, 8, 8, 8],
]
SHAPES: dict[str, Shape] = {
    "chain": TREES["chain"],
    "ragged": TREES["ragged"],
    "best first": BestFirst(10, top_k=6, beam=4),
    "sure ones": BestFirst(20, top_k=6, beam=4, threshold=0.05),
}
some_model = cache(tiny_model)


def decode(
    name: str, drafter: Any, *, shape: Shape | None = None, batch_size: int = 3, **options: Any
) -> list[GenerationResult]:
    engine = Engine(some_model(name), drafter, shape=shape, max_batch_size=batch_size)
    return engine.generate(PROMPTS, **{"max_new_tokens": 40, "ignore_eos": True, **options})


@cache
def plain(name: str, temperature: float = 0.0) -> list[tuple[int, ...]]:
    return ids(decode(name, None, temperature=temperature, seed=5))


def copied(results: list[GenerationResult]) -> int:
    return sum(result.num_copied for result in results)


def num_steps(results: list[GenerationResult]) -> int:
    return sum(result.num_steps for result in results)


# --- the same text ---


def drafter_of(kind: str, name: str) -> Drafter:
    if kind == "draft model":
        return DraftModel(tiny_model("llama", seed=3, num_hidden_layers=1), some_model(name))
    return tiny_head(kind, some_model(name))


@pytest.mark.parametrize(
    ("kind", "name", "shape"),
    some_rows(
        [
            *(("hydra", name, shape) for name in FAMILIES for shape in SHAPES),
            *((method, "llama", "best first") for method in HEADS if method != "hydra"),
            *(("draft model", name, shape) for name in ("gpt2", "gemma3_text") for shape in ("ragged", "best first")),
        ],
        *[("hydra", "mistral", "sure ones"), ("hydra", "gpt2", "ragged"), ("eagle3", "llama", "best first")],
        *[("amphista", "llama", "best first"), ("draft model", "gemma3_text", "best first")],
    ),
)
def test_copies_change_nothing_but_the_number_of_steps(kind: str, name: str, shape: str) -> None:
    """Greedy and sampled text is plain's, and something was copied."""
    drafter = drafter_of(kind, name)
    results = decode(name, Mixed(drafter), shape=SHAPES[shape])
    assert ids(results) == plain(name)
    assert copied(results) > 0, "tiny models repeat themselves"
    assert ids(decode(name, Mixed(drafter), shape=SHAPES[shape], temperature=0.8, seed=5)) == plain(name, 0.8)
    without = decode(name, drafter, shape=SHAPES[shape])
    assert num_steps(results) < num_steps(without)
    assert copied(without) == 0


# --- what is drafted ---


def context_of(texts: list[list[int]], num_nodes: int | None = None) -> Context:
    """Rows that have just joined; the last token of a text is its root."""
    width = max(map(len, texts)) - 1
    tokens = torch.tensor([[*text[:-1], *[0] * (width + 1 - len(text))] for text in texts])
    hidden = torch.randn(len(texts), width, 32, generator=torch.Generator().manual_seed(0))
    roots = torch.tensor([text[-1] for text in texts])
    return Context(hidden, tokens, torch.tensor([len(text) - 1 for text in texts]), roots, num_nodes=num_nodes)


def copied_below_a_root(text: list[int], num_nodes: int, **options: Any) -> Draft:
    """What is drafted for one text without a head."""
    copying = Mixed(tiny_head("medusa", some_model("llama")), **options)
    return propose(copying, context_of([text], 1 + num_nodes), ROOT_ONLY)


TEXTS = [[3, 4, 5, 6, 7, 8, 3, 4, 5], [9, 10, 11]]  # the first has something to copy


@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("shape", ["ragged", "best first"])
def test_a_draft_keeps_to_its_budget(shape: str, extra: int) -> None:
    head, context = tiny_head("medusa", some_model("llama")), context_of(TEXTS, SHAPES[shape].num_nodes + extra)
    draft = propose(Mixed(head, probs=[[0.99, 0.98, 0.97, 0.96, 0.95]]), context, SHAPES[shape])
    assert draft.num_nodes == propose(head, context, SHAPES[shape]).num_nodes + extra
    assert draft.copied is not None
    assert draft.token_ids[0, :6].tolist() == [5, 6, 7, 8, 3, 4]
    assert draft.depths[0, :6].tolist() == [0, 1, 2, 3, 4, 5]
    assert not draft.copied[1].any()
    assert (draft.depths[1, 1:] > 0).sum() == draft.num_nodes - 1 - extra
    assert draft.first(4).copied is not None
    assert draft.first(4).copied.shape == (2, 4)  # type: ignore[union-attr]


def test_without_a_head_only_copies_are_drafted() -> None:
    """And the head takes note of the text."""
    head = tiny_head("eagle", some_model("llama"))
    session = Mixed(head).start()
    draft = session.propose(context_of(TEXTS, 4), ROOT_ONLY)
    assert draft.token_ids[0].tolist() == [5, 6, 7, 8]
    assert draft.depths.tolist() == [[0, 1, 2, 3], [0, 0, 0, 0]]
    assert session.session.num_rows == 2  # type: ignore[attr-defined]
    assert propose(Mixed(head), context_of(TEXTS), ROOT_ONLY).num_nodes == 1


def test_drawn_trees_are_left_as_they_are() -> None:
    shape = Sampled(Tree.chain(2))
    head = tiny_head("hydra", some_model("llama"))
    options: dict[str, Any] = {"shape": shape, "temperature": 0.7, "seed": 5, "acceptance": "rejection"}
    found = decode("llama", Mixed(head), **options)
    assert ids(found) == ids(decode("llama", head, **options))
    assert copied(found) == 0


def test_copies_branch_where_the_same_tokens_were_followed_by_different_ones() -> None:
    draft = copied_below_a_root([1, 2, 3, 9, 1, 2, 4, 8, 1, 2], 4)
    tokens, parents = draft.token_ids[0].tolist(), draft.parents[0].tolist()
    edges = {(tokens[parent], token) for parent, token in zip(parents[1:], tokens[1:], strict=True)}
    assert edges == {(2, 3), (3, 9), (2, 4), (4, 8)}


def test_sixteen_tokens_are_copied_at_most() -> None:
    draft = copied_below_a_root([*range(3, 23), 3, 4], 18)
    assert draft.depths.tolist() == [[*range(17)]]
    assert draft.token_ids[0].tolist() == [4, *range(5, 21)]


def test_a_static_tree_gives_up_its_least_likely_nodes() -> None:
    head, context = tiny_head("medusa", some_model("llama")), context_of(TEXTS)
    tree = Tree.from_paths([(0,), (1,), (0, 0), (2,)])
    values = {(0,): 0.6, (1,): 0.1, (0, 0): 0.5, (2,): 0.4}
    whole = propose(head, context, tree)
    draft = propose(Mixed(head, probs=[[0.45, 0.2]], values=values), context, tree)
    token = {path: int(whole.token_ids[0, node]) for node, path in enumerate(tree.paths)}
    assert 6 not in token.values(), "the copied token is another one"
    unlikely = propose(Mixed(head, probs=[[0.02, 0.001]], values=dict.fromkeys(tree.paths, 0.5)), context, tree)
    assert sorted(unlikely.token_ids[0].tolist()) == sorted(whole.token_ids[0].tolist())
    assert draft.token_ids[0].tolist() == [5, token[0,], token[0, 0], 6, token[2,]]


class Watching(PlantedDrafter):
    """Asks for the tokens of the drafts that it watches."""

    def on_verify(self, draft: Draft, best: Callable[[], torch.Tensor]) -> torch.Tensor:
        assert draft.token_ids.shape == best().shape
        self.seen.append(draft.token_ids.tolist())
        return draft.token_ids

    def on_read(self, values: Sequence[Sequence[int]]) -> None:
        self.learnt.append(values)


def test_a_drafter_that_watches_sees_what_was_checked_and_learns_what_it_asked_for() -> None:
    answers = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, plain("llama"), strict=True)}
    watching: Any = Watching(Tree.chain(2), answers)
    watching.seen, watching.learnt = [], []
    found = decode("llama", Mixed(watching), batch_size=1)
    assert len(watching.seen) == num_steps(found)
    assert watching.learnt == watching.seen


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"probs": []}, r"probs .*\[\]"),
        ({"probs": [[]]}, r"probs .*\[0\]"),
        ({"probs": [[0.5], [0.5, 0.4]]}, r"probs .*\[1, 2\]"),
        *(({"probs": [row]}, "probs .* match of 1") for row in ([0.5, 0.5], [0.5, 0.0], [float("nan")])),
        ({"probs": [[0.5], [1.0]]}, "probs .* match of 2"),
        ({"num_tokens": 0}, "num_tokens is 0"),
    ],
)
def test_impossible_settings(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidSettings, match=named):
        Mixed(tiny_head("medusa", some_model("llama")), **options)


@pytest.mark.parametrize("drafter", [Lookahead(), Mixed(None)], ids=["lookahead", "copies"])
def test_copies_are_not_added_to_trees_that_a_drafter_makes_itself(drafter: Drafter) -> None:
    """Such a drafter is given no shape, so nothing would be drafted at all."""
    with pytest.raises(InvalidSettings, match=type(drafter).__name__):
        Mixed(drafter)


# --- a corpus ---


@pytest.mark.parametrize("kind", ["hydra", "draft model", "copies"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_corpus_that_holds_the_answers_saves_steps_and_changes_no_text(kind: str, temperature: float) -> None:
    answers = plain("llama", temperature)
    corpus = Corpus([token for answer in answers for token in answer], VOCAB)
    drafter = None if kind == "copies" else drafter_of(kind, "llama")
    shape = None if drafter is None else SHAPES["best first"]
    options: dict[str, Any] = {"shape": shape, "temperature": temperature, "seed": 5}
    found = decode("llama", Mixed(drafter, [TextSoFar(), corpus]), **options)
    without = decode("llama", Mixed(drafter), **options)
    assert ids(found) == ids(without) == answers
    assert num_steps(found) < 0.7 * num_steps(without)
    assert ids(decode("llama", Mixed(drafter, [Corpus([3], VOCAB)]), **options)) == answers, "it holds nothing"


# --- counting ---


@pytest.mark.parametrize(("room", "drafted", "copies"), [(9, 4, 2), (4, 4, 2), (3, 3, 1), (2, 2, 0), (1, 1, 0)])
def test_copied_tokens_beyond_the_end_are_not_counted(room: int, drafted: int, copies: int) -> None:
    """Of five tokens the last two draft tokens are copied; the fifth is the target's own."""
    request = Request(
        [3], SamplingSettings(max_new_tokens=room), tokenizer=IntegerTokenizer(), eos_ids=frozenset(), max_length=None
    )
    event = request.append([4, 5, 6, 7, 8], num_drafted=4, num_copied=2)
    assert (event.num_drafted, event.num_copied, request.num_copied) == (drafted, copies, copies)
