"""The acceptance rules against enumeration and slow twins, on targets where every context has its own distribution."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draft_paths import PathTable, node_numbers, number_of
from draftheads.settings import SamplingSettings
from draftheads.speculation import accept as rules
from draftheads.speculation.accept import accept
from draftheads.speculation.candidates import ancestors_of
from draftheads.speculation.draft import AcceptResult, Context, Draft
from draftheads.speculation.growing import fill
from draftheads.speculation.sampling import RowSettings, SeenTokens, choose
from draftheads.speculation.shapes import BestFirst, Shape
from draftheads.speculation.tree import Tree

CPU = torch.device("cpu")
TABLE_ROWS = 997  # contexts share distributions only where their codes collide


# --- slow twins: one row, plain Python numbers ---


def slow_distribution(
    logits: Sequence[float], text: Sequence[int], own: SamplingSettings, prompt: int = 0
) -> list[float]:
    """What a row with these settings samples from after ``text``; at temperature 0 what it would be at 1.

    The first ``prompt`` tokens of the text are no tokens of the answer.
    """
    penalty, answer = (own.repetition_penalty or 1.0), list(text[prompt:])
    scores = [(x * penalty if x < 0 else x / penalty) if token in text else x for token, x in enumerate(logits)]
    scores = [x - own.frequency_penalty * answer.count(token) for token, x in enumerate(scores)]
    scores = [x - own.presence_penalty * (token in answer) for token, x in enumerate(scores)]
    scores = [x / (own.temperature or 1.0) for x in scores]
    if own.top_k is not None:
        least = sorted(scores, reverse=True)[: own.top_k][-1]
        scores = [x if x >= least else -math.inf for x in scores]
    weights = [math.exp(x - max(scores)) for x in scores]
    probs = [weight / sum(weights) for weight in weights]
    kept, mass = set(), 0.0
    for token in sorted(range(len(probs)), key=lambda token: -probs[token]):
        if own.top_p == 1.0 or mass < own.top_p:
            kept.add(token)
        mass += probs[token]
    kept = {token for token in kept if probs[token] >= own.min_p * max(probs)}
    total = sum(probs[token] for token in kept)
    return [p / total if token in kept else 0.0 for token, p in enumerate(probs)]


def slow_choice(
    logits: Sequence[float], text: Sequence[int], own: SamplingSettings, uniform: float, prompt: int = 0
) -> int:
    probs = slow_distribution(logits, text, own, prompt)
    if own.temperature == 0:
        return max(range(len(probs)), key=lambda token: probs[token])
    mass = 0.0
    for token, p in enumerate(probs):
        mass += p
        if uniform < mass:
            return token
    raise AssertionError("the uniform number lies beyond the last token")


# --- exact, by enumeration ---

V = 3
RAGGED = Tree.from_paths([(0,), (1,), (0, 0), (1, 0), (1, 2)])  # depth 2; rank 2 at depth 1 is left out
ANSWER = 3  # tokens


@dataclass(frozen=True)
class Toy:
    """A target and a drafter that are both fixed functions of the text, with a line of a table for each."""

    logits: Tensor  # (lines, V) float64
    drafter: PathTable
    shape: Shape

    @classmethod
    def random(cls, seed: int, shape: Shape) -> "Toy":
        generator = torch.Generator().manual_seed(seed)
        lines = (2 * V ** (ANSWER + 1), V)
        logits = 1.5 * torch.randn(lines, generator=generator, dtype=torch.float64)
        return cls(logits, PathTable(logits.float() + 1.5 * torch.randn(lines, generator=generator)), shape)

    def after(self, text: Sequence[int]) -> list[float]:
        """The target's logits."""
        logits: list[float] = self.logits[number_of(text, V)].tolist()
        return logits

    def draft(self, texts: list[list[int]]) -> tuple[Draft, Tensor]:
        """The tree after each text, whose last token is the root, and the target's logits at its nodes."""
        numbers = torch.tensor([[number_of(text, V)] for text in texts])
        roots = torch.tensor([text[-1] for text in texts])
        context = Context(torch.zeros(len(texts), 1, 1), roots[:, None], torch.ones_like(roots), roots)
        draft = fill(self.drafter, self.shape, context, begin=lambda _: numbers, max_depth=2)
        return draft, self.logits[node_numbers(draft, V, numbers)]


def contexts(length: int) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for _ in range(length):
        found = [(*context, token) for context in found for token in range(V)]
    return found


def breakpoints(toy: Toy, own: SamplingSettings, place: int) -> Tensor:
    """Where the choice at a place of the answer can change: all steps of all cumulative distributions there."""
    points = {0.0, 1.0}
    for context in contexts(place):
        probs = slow_distribution(toy.after(context), context, own)
        points |= {min(1.0, sum(probs[: token + 1])) for token in range(V)}
    return torch.tensor(sorted(points), dtype=torch.float64)


def cells(toy: Toy, own: SamplingSettings, *, where: float) -> tuple[Tensor, Tensor]:
    """A point in each cell of the product grid, (C, 3), ``where`` of the way through it, and the cells' measures."""
    edges = [breakpoints(toy, own, place) for place in range(ANSWER)]
    points = torch.cartesian_prod(*(edge[:-1] + where * edge.diff() for edge in edges))
    measures = torch.cartesian_prod(*(edge.diff() for edge in edges)).prod(-1)
    return points, measures


def seen_in(texts: list[list[int]], num_tokens: int = V, prompt: int = 0) -> SeenTokens:
    in_prompt = [[token in text[:prompt] for token in range(num_tokens)] for text in texts]
    in_answer = [[text[prompt:].count(token) for token in range(num_tokens)] for text in texts]
    return SeenTokens(torch.tensor(in_prompt), torch.tensor(in_answer, dtype=torch.int32))


def answers(toy: Toy, own: SamplingSettings, points: Tensor) -> list[tuple[int, ...]]:
    """Speculative decoding of three tokens from each row of uniform numbers."""
    every = RowSettings.of([own] * len(points), vocab_size=V, device=CPU)
    start = toy.logits[1:2].expand(len(points), -1)
    roots = choose(start, every, seen_in([[]] * len(points)), points[:, 0])
    texts = [[root] for root in roots.tolist()]
    uniforms = torch.cat([points, torch.full_like(points, 0.5)], 1)  # numbers past the third token do not matter
    while going := [row for row, text in enumerate(texts) if len(text) < ANSWER]:
        texts_now = [texts[row] for row in going]
        draft, logits = toy.draft(texts_now)
        rows = RowSettings.of([own] * len(going), vocab_size=V, device=CPU)
        numbers = torch.stack([uniforms[row, len(texts[row]) : len(texts[row]) + draft.max_depth + 1] for row in going])
        verdict = accept(draft, logits, rows, numbers, seen_in(texts_now))
        for i, row in enumerate(going):
            kept = verdict.path[i, 1 : verdict.num_accepted[i]]
            texts[row] += [*draft.token_ids[i, kept].tolist(), int(verdict.next_ids[i])]
    return [tuple(text[:ANSWER]) for text in texts]


SHAPES = {"static": RAGGED, "best first": BestFirst(5, top_k=3, beam=2), "fewer nodes than depths": BestFirst(2)}
EXACT = {
    "plain softmax": SamplingSettings(temperature=1.0),
    "temperature": SamplingSettings(temperature=0.6),
    "top-k": SamplingSettings(temperature=1.3, top_k=2),
    "top-p": SamplingSettings(temperature=1.0, top_p=0.8),
    "min-p": SamplingSettings(temperature=1.2, min_p=0.3),
    "all": SamplingSettings(temperature=0.8, top_k=2, top_p=0.85, repetition_penalty=1.25),
    "counts": SamplingSettings(temperature=0.8, min_p=0.1, frequency_penalty=0.75, presence_penalty=-0.5),
}


@pytest.mark.few(16)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", EXACT)
def test_exact_gives_the_targets_distribution(name: str, shape: str, seed: int) -> None:
    own, toy = EXACT[name], Toy.random(seed, SHAPES[shape])
    points, measures = cells(toy, own, where=0.5)
    found = answers(toy, own, points)
    assert answers(toy, own, cells(toy, own, where=0.02)[0]) == found, "a cell holds two outcomes"
    output: dict[tuple[int, ...], float] = defaultdict(float)
    for answer, measure in zip(found, measures.tolist(), strict=True):
        output[answer] += measure
    distance = 0.0
    for answer in contexts(ANSWER):
        expected = 1.0
        for place, token in enumerate(answer):
            expected *= slow_distribution(toy.after(answer[:place]), answer[:place], own)[token]
        distance += abs(output.pop(answer, 0.0) - expected) / 2
    assert not output
    assert distance < 1e-9


# --- any rule on any tree, against slow twins ---

WIDE = 5  # tokens: few, so that guesses are often right and siblings often equal
PROMPT = 1  # tokens of each text that belong to the prompt


@dataclass(frozen=True)
class World:
    """A batch of filled trees, the target's logits at their nodes, and the rows' settings."""

    parents: list[list[int]]  # of each row's nodes; a single list where all rows share a tree
    tokens: list[list[int]]  # of each row's nodes
    texts: list[list[int]]  # of each row, root included
    settings: list[SamplingSettings]
    seeds: list[int]  # of the rows' uniform numbers
    seed: int  # of the target

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    @property
    def num_nodes(self) -> int:
        return len(self.tokens[0])

    def tree(self, row: int) -> list[int]:
        return self.parents[row if len(self.parents) > 1 else 0]

    def ancestry(self, row: int, node: int) -> list[int]:
        """Node indices from the root to the node."""
        return ([] if node == 0 else self.ancestry(row, self.tree(row)[node])) + [node]

    def path_tokens(self, row: int, node: int) -> list[int]:
        return [self.tokens[row][n] for n in self.ancestry(row, node)]

    @property
    def logits(self) -> Tensor:
        """(B, N, V) float64, as a target gives them: a function of the tokens up to the node."""
        generator = torch.Generator().manual_seed(self.seed)
        table = 1.5 * torch.randn(TABLE_ROWS, WIDE, generator=generator, dtype=torch.float64)
        roots = torch.tensor(self.tokens)[:, :1] + WIDE
        return table[node_numbers(self.draft, WIDE, roots) % TABLE_ROWS]

    @property
    def draft(self) -> Draft:
        parents = torch.tensor(self.parents)
        ancestors = ancestors_of(parents, self.num_nodes)
        depths = ancestors.sum(2) - 1
        return Draft(torch.tensor(self.tokens), parents, depths, ancestors, int(depths.max()))

    @property
    def uniforms(self) -> Tensor:
        """(B, N): enough for any depth."""
        generators = [torch.Generator().manual_seed(seed) for seed in self.seeds]
        numbers = [torch.rand(self.num_nodes, generator=g, dtype=torch.float64) for g in generators]
        return torch.stack(numbers)

    def verdict(self, draft: Draft | None = None) -> AcceptResult:
        draft = self.draft if draft is None else draft
        rows = RowSettings.of(self.settings, vocab_size=WIDE, device=CPU)
        uniforms = self.uniforms[:, : draft.max_depth + 1]
        seen = seen_in(self.texts, WIDE, PROMPT) if rows.any_penalty else None
        return accept(draft, self.logits, rows, uniforms, seen)


def kept_nodes(verdict: AcceptResult, row: int) -> list[int]:
    nodes: list[int] = verdict.path[row, : verdict.num_accepted[row]].tolist()
    return nodes


def outcomes(world: World, verdict: AcceptResult | None = None) -> list[tuple[list[int], int]]:
    """Per row the nodes that are kept and the token after them."""
    verdict = verdict or world.verdict()
    return [(kept_nodes(verdict, row), int(verdict.next_ids[row])) for row in range(world.num_rows)]


def slow_exact(world: World, row: int) -> tuple[list[int], int]:
    """A row's outcome by walking."""
    own, node, logits = world.settings[row], 0, world.logits[row].tolist()
    while True:
        path = world.ancestry(row, node)
        text = [*world.texts[row], *world.path_tokens(row, node)[1:]]  # the root is in the text
        token = slow_choice(logits[node], text, own, float(world.uniforms[row, len(path) - 1]), PROMPT)
        children = [n for n in range(1, world.num_nodes) if world.tree(row)[n] == node]
        fitting = [n for n in children if world.tokens[row][n] == token]
        if not fitting:
            return path, token
        node = fitting[0]


def slow_typical(world: World, row: int) -> tuple[list[int], int]:
    """The same by judging node after node: p(x) > min(ε, δ·exp(−H))."""
    own, logits = world.settings[row], world.logits[row].tolist()
    delta = math.sqrt(own.typical_epsilon) if own.typical_delta is None else own.typical_delta
    log_probs = {0: 0.0}  # of the nodes whose whole path is typical
    for node in range(1, world.num_nodes):
        parent = world.tree(row)[node]
        if parent not in log_probs:
            continue
        text = [*world.texts[row], *world.path_tokens(row, parent)[1:]]
        probs = slow_distribution(logits[parent], text, own, PROMPT)
        entropy = -sum(p * math.log(p) for p in probs if p > 0)
        likelihood = probs[world.tokens[row][node]]
        if likelihood > min(own.typical_epsilon, delta * math.exp(-entropy)):
            log_probs[node] = log_probs[parent] + math.log(likelihood)
    best = max(log_probs, key=lambda node: (len(world.ancestry(row, node)), log_probs[node]))
    path = world.ancestry(row, best)
    text = [*world.texts[row], *world.path_tokens(row, best)[1:]]
    after = replace(own, temperature=0.0)  # greedy
    return path, slow_choice(logits[best], text, after, float(world.uniforms[row, len(path) - 1]), PROMPT)


def row_settings() -> st.SearchStrategy[SamplingSettings]:
    return st.builds(
        SamplingSettings,
        temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        top_k=st.sampled_from([None, None, 1, 2, 3, 9]),
        top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5]),
        min_p=st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.25, 2.0, 0.5]),
        frequency_penalty=st.sampled_from([0.0, 0.0, 0.5, 2.0, -0.75]),
        presence_penalty=st.sampled_from([0.0, 0.0, 0.25, 1.5, -2.0]),
        acceptance=st.sampled_from(["exact", "typical"]),
        typical_epsilon=st.sampled_from([0.01, 0.09, 0.3, 1.0]),
        typical_delta=st.sampled_from([None, 0.05, 0.5, 2.0]),
    )


@st.composite
def worlds(draw: st.DrawFn, own: st.SearchStrategy[SamplingSettings]) -> World:
    num_rows, num_nodes, seed = draw(st.integers(1, 4)), draw(st.integers(1, 10)), draw(st.integers(0, 2**20))
    num_trees = 1 if draw(st.booleans()) else num_rows
    generator = torch.Generator().manual_seed(seed)

    def integers(rows: int, columns: int, below: Tensor | int) -> list[list[int]]:
        numbers: list[list[int]] = (torch.rand(rows, columns, generator=generator) * below).long().tolist()
        return numbers

    tokens = integers(num_rows, num_nodes, WIDE)
    return World(
        parents=integers(num_trees, num_nodes, torch.arange(num_nodes)),  # any tree whose parents come first
        tokens=tokens,
        texts=[[*text, row[0]] for text, row in zip(integers(num_rows, 2, WIDE), tokens, strict=True)],
        settings=draw(st.lists(own, min_size=num_rows, max_size=num_rows)),
        seeds=[row[0] for row in integers(num_rows, 1, 2**20)],
        seed=seed,
    )


@settings(deadline=None, max_examples=300)
@given(worlds(row_settings()) | worlds(st.just(SamplingSettings())))
def test_each_row_equals_walking_or_the_typical_formula(world: World) -> None:
    """Greedy, exact and typical rows in one batch, on a shared tree or on a tree each; typical at 0 is greedy."""
    for row, (nodes, token) in enumerate(outcomes(world)):
        is_typical = world.settings[row].acceptance == "typical" and world.settings[row].temperature > 0
        expected, expected_token = (slow_typical if is_typical else slow_exact)(world, row)
        # where siblings are equal typical may keep either: what counts is the tokens, and that they are a path
        assert nodes == (world.ancestry(row, nodes[-1]) if is_typical else expected)
        assert world.path_tokens(row, nodes[-1]) == world.path_tokens(row, expected[-1])
        assert token == expected_token


@settings(deadline=None)
@given(worlds(row_settings()), st.integers(0, 9))
def test_a_tree_may_be_shallower_than_its_max_depth(world: World, depth: int) -> None:
    """As grown trees may be, whose depth is not asked for; it is never as deep as it has nodes."""
    draft = world.draft
    deep = replace(draft, max_depth=min(max(depth, draft.max_depth), draft.num_nodes - 1))
    verdict = world.verdict(deep)
    assert outcomes(world, verdict) == outcomes(world)
    assert verdict.path.shape == (world.num_rows, deep.max_depth + 1)
    assert int(verdict.path.max()) < world.num_nodes, "what is not accepted is looked up, too"


# --- single cases ---


def judge(
    tree: Tree, tokens: list[int], target: Tensor, own: SamplingSettings, uniform: float = 0.5
) -> tuple[list[int], int]:
    """The kept nodes and the next token. ``target`` has the logits (N, V) at each node."""
    logits = target[None]
    rows = RowSettings.of([own], vocab_size=logits.shape[-1], device=CPU)
    uniforms = torch.full((1, tree.max_depth + 1), uniform, dtype=torch.float64)
    verdict = accept(Draft.on_tree(tree, torch.tensor([tokens])), logits, rows, uniforms)
    return kept_nodes(verdict, 0), int(verdict.next_ids[0])


TYPICAL = SamplingSettings(temperature=1.0, acceptance="typical")


@pytest.mark.parametrize("penalty", [1.0, 1.2])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_typical_nodes_are_the_same_bits_if_only_those_that_are_reached_are_judged(
    num_rows: int, penalty: float, two_threads: None
) -> None:
    """The sum of so many tokens is shared by threads where a row is alone. All nodes are judged on other devices."""
    num_tokens, num_nodes = 40_000, 16
    generator = torch.Generator().manual_seed(num_rows)
    logits = 4 * torch.randn(num_rows, num_nodes, num_tokens, generator=generator)
    parents = torch.tensor([[max(0, (n - 1) // 3) for n in range(num_nodes)]])
    root, places = torch.tensor([0]), (torch.arange(num_nodes) - 1) % 3
    tokens = logits.topk(3).indices[:, parents[0], places]  # (B, N): each node's three best
    ancestors = ancestors_of(parents, num_nodes)
    draft = Draft(tokens, parents, ancestors.sum(2) - 1, ancestors, 3)
    own = replace(TYPICAL, temperature=0.9, repetition_penalty=penalty)
    rows = RowSettings.of([own, replace(own, typical_epsilon=0.3), own][:num_rows], vocab_size=num_tokens, device=CPU)
    seen = seen_in([[7, int(row[0])] for row in tokens], num_tokens, PROMPT) if penalty != 1.0 else None
    all_chances, all_kept = rules._judged_all(draft, logits, rows, seen)
    chances, kept = rules._judged_reached(draft, logits, rows, seen)
    assert kept.tolist() == all_kept.tolist()
    assert 0 < kept[:, 1:].sum() < kept[:, 1:].numel()
    judged = kept.gather(1, parents.expand_as(kept)) & (draft.depths > 0)
    assert chances[judged].tolist() == all_chances[judged].tolist()
    assert set(chances[~judged].tolist()) == {1.0}
    alone, together = (rules._thresholds(part, rows.at(root))[1] for part in (logits[0, :1], logits[0]))
    assert alone.tolist() == together[:1].tolist()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("probs", "epsilon", "is_accepted"),
    [
        # H = 0.6·ln(1/0.6) + 0.3·ln(1/0.3) + 0.1·ln(1/0.1) = 0.897946, exp(-H) = 0.407406, times √0.09: 0.122222
        ([0.6, 0.3, 0.1], 0.09, True),  # 0.1 > min(0.09, 0.122222)
        # H = 0.3065 + 0.3646 + 0.2021 = 0.873158, exp(-H) = 0.417631, times √0.09: 0.125289
        ([0.6, 0.32, 0.08], 0.09, False),  # 0.08 < min(0.09, 0.125289)
        # H = 3·ln(10) · 0.1 + 0.7·ln(1/0.7) = 0.940448, exp(-H) = 0.390453, times √0.04: 0.078091
        ([0.7, 0.1, 0.1, 0.1], 0.04, True),  # 0.1 > min(0.04, 0.078091)
        # eight tokens of 1/8: exp(-H) = 1/8, times √0.25: 0.0625
        ([0.125] * 8, 0.25, True),  # 0.125 > min(0.25, 0.0625)
    ],
)
def test_typical_acceptance_by_hand(probs: list[float], epsilon: float, is_accepted: bool) -> None:
    """Medusa, section 3.3.1, δ = √ε: the last token is drafted, and the greedy token follows, whatever the number."""
    logits = torch.tensor([probs, probs[::-1]]).double().log()
    best, last = [probs.index(max(probs)), probs[::-1].index(max(probs))], len(probs) - 1
    own = replace(TYPICAL, typical_epsilon=epsilon)
    for number in (0.0, 0.999):
        found = judge(Tree.chain(1), [0, last], logits, own, number)
        assert found == ([0, 1][: 1 + is_accepted], best[is_accepted])


def test_as_likely_as_the_threshold_is_not_enough() -> None:
    own = replace(TYPICAL, typical_epsilon=0.5, typical_delta=9.0)
    assert judge(Tree.chain(1), [0, 1], torch.zeros(2, 2), own)[0] == [0]


def test_the_callers_record_of_seen_tokens_is_left_alone() -> None:
    rows = RowSettings.of([SamplingSettings(repetition_penalty=1.25)], vocab_size=10, device=CPU)
    seen = seen_in([[]], 10)
    draft = Draft.on_tree(Tree.chain(2), torch.tensor([[5, 6, 7]]))
    best = 20.0 * torch.nn.functional.one_hot(torch.tensor([[6, 7, 8]]), 10).double()
    verdict = accept(draft, best, rows, torch.zeros(1, 3, dtype=torch.float64), seen)
    assert kept_nodes(verdict, 0) == [0, 1, 2]
    assert not seen.in_prompt.any()
    assert not seen.in_answer.any()
