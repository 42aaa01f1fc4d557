"""The acceptance rules against slow twins, on targets where every context has its own distribution."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftheads.settings import SamplingSettings
from draftheads.speculation.accept import accept
from draftheads.speculation.draft import AcceptResult, Draft
from draftheads.speculation.sampling import RowSettings, SeenTokens
from draftheads.speculation.tree import Tree

CPU = torch.device("cpu")
WIDE = 5  # tokens: few, so that guesses are often right and siblings often equal
PROMPT = 1  # tokens of each text that belong to the prompt
TABLE_ROWS = 997  # contexts share distributions only where their codes collide


# --- slow twins: one row, plain Python numbers ---


def slow_distribution(logits: Sequence[float], text: Sequence[int], own: SamplingSettings) -> list[float]:
    """What a row with these settings samples from after ``text``; at temperature 0 what it would be at 1."""
    penalty, answer = (own.repetition_penalty or 1.0), list(text[PROMPT:])
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


def slow_choice(logits: Sequence[float], text: Sequence[int], own: SamplingSettings, uniform: float) -> int:
    probs = slow_distribution(logits, text, own)
    if own.temperature == 0:
        return max(range(len(probs)), key=lambda token: probs[token])
    mass = 0.0
    for token, p in enumerate(probs):
        mass += p
        if uniform < mass:
            return token
    raise AssertionError("the uniform number lies beyond the last token")


# --- any rule on any tree ---


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
        codes = torch.zeros(self.num_rows, self.num_nodes, dtype=torch.long)
        for row in range(self.num_rows):
            for node in range(self.num_nodes):
                code = 0
                for token in self.path_tokens(row, node):
                    code = code * (WIDE + 1) + token + 1
                codes[row, node] = code % TABLE_ROWS
        return table[codes]

    @property
    def draft(self) -> Draft:
        depths = [
            [len(self.ancestry(row, node)) - 1 for node in range(self.num_nodes)] for row in range(len(self.parents))
        ]
        ancestors = torch.zeros(len(self.parents), self.num_nodes, self.num_nodes, dtype=torch.bool)
        for row in range(len(self.parents)):
            for node in range(self.num_nodes):
                ancestors[row, node, self.ancestry(row, node)] = True
        tokens, parents = torch.tensor(self.tokens), torch.tensor(self.parents)
        return Draft(tokens, parents, torch.tensor(depths), ancestors, max(map(max, depths)))

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
        seen = seen_in(self.texts) if rows.any_penalty else None
        return accept(draft, self.logits, rows, uniforms, seen)


def seen_in(texts: list[list[int]]) -> SeenTokens:
    in_prompt = [[token in text[:PROMPT] for token in range(WIDE)] for text in texts]
    in_answer = [[text[PROMPT:].count(token) for token in range(WIDE)] for text in texts]
    return SeenTokens(torch.tensor(in_prompt), torch.tensor(in_answer, dtype=torch.int32))


def kept_nodes(verdict: AcceptResult, row: int) -> list[int]:
    nodes: list[int] = verdict.path[row, : verdict.num_accepted[row]].tolist()
    return nodes


def outcomes(world: World, verdict: AcceptResult) -> list[tuple[list[int], int]]:
    """Per row the nodes that are kept and the token after them."""
    return [(kept_nodes(verdict, row), int(verdict.next_ids[row])) for row in range(world.num_rows)]


def slow_exact(world: World, row: int) -> tuple[list[int], int]:
    """A row's outcome by walking."""
    own, node, logits = world.settings[row], 0, world.logits[row].tolist()
    while True:
        path = world.ancestry(row, node)
        text = [*world.texts[row], *world.path_tokens(row, node)[1:]]  # the root is in the text
        token = slow_choice(logits[node], text, own, float(world.uniforms[row, len(path) - 1]))
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
        probs = slow_distribution(logits[parent], text, own)
        entropy = -sum(p * math.log(p) for p in probs if p > 0)
        likelihood = probs[world.tokens[row][node]]
        if likelihood > min(own.typical_epsilon, delta * math.exp(-entropy)):
            log_probs[node] = log_probs[parent] + math.log(likelihood)
    best = max(log_probs, key=lambda node: (len(world.ancestry(row, node)), log_probs[node]))
    path = world.ancestry(row, best)
    text = [*world.texts[row], *world.path_tokens(row, best)[1:]]
    after = own if own.acceptance == "typical-sampled" else replace(own, temperature=0.0)  # greedy
    return path, slow_choice(logits[best], text, after, float(world.uniforms[row, len(path) - 1]))


row_settings = st.builds(
    SamplingSettings,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([None, None, 1, 2, 3, 9]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.25, 2.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5, 2.0, -0.75]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.25, 1.5, -2.0]),
    acceptance=st.sampled_from(["exact", "typical", "typical-sampled"]),
    typical_epsilon=st.sampled_from([0.01, 0.09, 0.3, 1.0]),
    typical_delta=st.sampled_from([None, 0.05, 0.5, 2.0]),
)


@st.composite
def worlds(draw: st.DrawFn) -> World:
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
        settings=draw(st.lists(row_settings, min_size=num_rows, max_size=num_rows)),
        seeds=[row[0] for row in integers(num_rows, 1, 2**20)],
        seed=seed,
    )


@settings(deadline=None, max_examples=300)
@given(worlds())
def test_each_row_is_judged_by_its_rule(world: World) -> None:
    """Greedy, exact and typical rows in one batch, on a shared tree or on a tree each."""
    for row, (nodes, token) in enumerate(outcomes(world, world.verdict())):
        own = world.settings[row]
        if own.acceptance == "exact" or own.temperature == 0.0:
            assert (nodes, token) == slow_exact(world, row)
            continue
        expected, expected_token = slow_typical(world, row)
        # where siblings are equal either may be kept: what counts is the tokens, and that they are a path
        assert nodes == world.ancestry(row, nodes[-1])
        assert world.path_tokens(row, nodes[-1]) == world.path_tokens(row, expected[-1])
        assert token == expected_token


@settings(deadline=None)
@given(worlds(), st.integers(0, 9))
def test_a_tree_may_be_shallower_than_its_max_depth(world: World, depth: int) -> None:
    """As grown trees may be, whose depth is not asked for; it is never as deep as it has nodes."""
    draft = world.draft
    deep = replace(draft, max_depth=min(max(depth, draft.max_depth), draft.num_nodes - 1))
    verdict = world.verdict(deep)
    assert outcomes(world, verdict) == outcomes(world, world.verdict())
    assert verdict.path.shape == (world.num_rows, deep.max_depth + 1)
    assert int(verdict.path.max()) < world.num_nodes, "what is not accepted is looked up, too"


# --- single cases ---


def judge(tokens: list[int], logits: Tensor, own: SamplingSettings, uniform: float = 0.5) -> tuple[list[int], int]:
    """The kept nodes of a chain and the next token; logits (N, V) at each node."""
    rows = RowSettings.of([own], vocab_size=logits.shape[-1], device=CPU)
    uniforms = torch.full((1, len(tokens)), uniform, dtype=torch.float64)
    draft = Draft.on_tree(Tree.chain(len(tokens) - 1), torch.tensor([tokens]))
    verdict = accept(draft, logits[None], rows, uniforms)
    return kept_nodes(verdict, 0), int(verdict.next_ids[0])


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
    for rule, number in (("typical", 0.0), ("typical", 0.999), ("typical-sampled", 0.999)):
        own = SamplingSettings(temperature=1.0, acceptance=rule, typical_epsilon=epsilon)
        next_id = last if rule == "typical-sampled" else best[is_accepted]
        assert judge([0, last], logits, own, number) == ([0, 1][: 1 + is_accepted], next_id)


def test_as_likely_as_the_threshold_is_not_enough() -> None:
    own = SamplingSettings(temperature=1.0, acceptance="typical", typical_epsilon=0.5, typical_delta=9.0)
    assert judge([0, 1], torch.zeros(2, 2), own)[0] == [0]


def test_the_callers_record_of_seen_tokens_is_left_alone() -> None:
    rows = RowSettings.of([SamplingSettings(repetition_penalty=1.25)], vocab_size=WIDE, device=CPU)
    seen = seen_in([[]])
    draft = Draft.on_tree(Tree.chain(2), torch.tensor([[0, 1, 2]]))
    verdict = accept(draft, 20.0 * torch.eye(WIDE)[None, 1:4], rows, torch.zeros(1, 3, dtype=torch.float64), seen)
    assert kept_nodes(verdict, 0) == [0, 1, 2]
    assert not seen.in_prompt.any()
    assert not seen.in_answer.any()
