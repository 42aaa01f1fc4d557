"""Guesses that are drawn: the rules keep the target's law, by enumeration and by counting."""

import itertools
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import draft_paths
from distribution import ODDS, SAMPLED, chi_square, joint_distribution, p_value, sampled_answers
from draft_paths import PathTable, node_numbers, number_of
from draftheads.decode.engine import Engine
from draftheads.drafters.draft_model import DraftModel
from draftheads.errors import InvalidTree
from draftheads.models.model import TargetModel
from draftheads.settings import SamplingSettings
from draftheads.speculation.accept import accept, block_chances, num_rejection_uniforms, sibling_chances
from draftheads.speculation.draft import AcceptResult, Context, Draft
from draftheads.speculation.growing import fill
from draftheads.speculation.sampling import RowSettings
from draftheads.speculation.shapes import Sampled, Shape
from draftheads.speculation.tree import Tree
from families import PROMPTS, VOCAB, tiny_head, tiny_model
from thorough import some, some_rows

V = 3
Path = tuple[int, ...]
SHAPES = {
    "one": Sampled(Tree.chain(1)),
    "chain": Sampled(Tree.chain(3)),
    "siblings": Sampled(Tree.cartesian([3])),
    "tree": Sampled(Tree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)])),
}


def random_laws(seed: int, *, sharpness: float = 1.5, zeros: bool = False) -> dict[Path, Tensor]:
    """A distribution of the next token after each beginning of up to three tokens."""
    chance = torch.Generator().manual_seed(seed)
    laws = {}
    for length in range(4):
        for path in itertools.product(range(V), repeat=length):
            scores = sharpness * torch.randn(V, generator=chance, dtype=torch.float64)
            if zeros and torch.rand(1, generator=chance) < 0.5:
                scores[int(torch.randint(0, V, (1,), generator=chance))] = -torch.inf
            laws[path] = scores.softmax(0)
    return laws


def whole(found: dict[Path, float], target: dict[Path, Tensor], length: int) -> dict[Path, float]:
    """What was emitted, continued by the target to that length."""
    done: dict[Path, float] = {}
    for path, mass in found.items():
        if len(path) == length:
            done[path] = done.get(path, 0.0) + mass
            continue
        longer = {(*path, token): mass * float(p) for token, p in enumerate(target[path])}
        for key, value in whole(longer, target, length).items():
            done[key] = done.get(key, 0.0) + value
    return done


def distance(found: dict[Path, float], target: dict[Path, Tensor], length: int) -> float:
    """Total variation from the target's own law of that many tokens."""
    own = whole({(): 1.0}, target, length)
    got = whole(found, target, length)
    return 0.5 * sum(abs(own.get(path, 0.0) - got.get(path, 0.0)) for path in own.keys() | got.keys())


def by_siblings(
    target: dict[Path, Tensor], drafter: dict[Path, Tensor], widths: list[int], path: Path = ()
) -> tuple[dict[Path, float], float]:
    """Everything that a step can emit with its probability, and how many guesses it keeps on average."""
    if len(path) == len(widths):
        return {(*path, token): float(p) for token, p in enumerate(target[path])}, 0.0
    emitted: dict[Path, float] = {}
    kept = 0.0
    width = widths[len(path)]
    support = [token for token in range(V) if drafter[path][token] > 0]  # no more than these can be drawn
    for drawn in itertools.permutations(support, min(width, len(support))):
        mass, left = 1.0, 1.0
        for token in drawn:
            mass *= float(drafter[path][token]) / left
            left -= float(drafter[path][token])
        absent = width - len(drawn)
        ids = torch.tensor([[*drawn, *[0] * absent]])
        present = torch.tensor([[True] * len(drawn) + [False] * absent])
        chances, rest = sibling_chances(target[path][None], drafter[path][None], ids, present)
        going = mass
        for token, accepted in zip(drawn, chances[0].tolist(), strict=False):
            below, deeper = by_siblings(target, drafter, widths, (*path, token))
            for key, value in below.items():
                emitted[key] = emitted.get(key, 0.0) + going * accepted * value
            kept += going * accepted * (1 + deeper)
            going *= 1 - accepted
        for token, p in enumerate(rest[0].tolist()):
            emitted[*path, token] = emitted.get((*path, token), 0.0) + going * p
    return emitted, kept


def by_blocks(target: dict[Path, Tensor], drafter: dict[Path, Tensor], length: int) -> tuple[dict[Path, float], float]:
    """The same for a chain that is judged as a whole."""
    emitted: dict[Path, float] = {}
    kept = 0.0
    for drawn in itertools.product(range(V), repeat=length):
        mass = 1.0
        for i, token in enumerate(drawn):
            mass *= float(drafter[drawn[:i]][token])
        if mass == 0:
            continue
        p = torch.stack([target[drawn[:i]] for i in range(length + 1)])[None]
        q = torch.stack([drafter[drawn[:i]] for i in range(length)])[None]
        chances, left = block_chances(p, q, torch.tensor([drawn]))
        going = mass
        for count in range(length, -1, -1):
            accepted = going * (float(chances[0, count - 1]) if count else 1.0)
            for token, share in enumerate(left[0, count].tolist()):
                key = (*drawn[:count], token)
                emitted[key] = emitted.get(key, 0.0) + accepted * share
            kept += accepted * count
            going -= accepted
    return emitted, kept


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("widths", [[2], [3], [2, 1], [1, 2, 1], [3, 2]])
@pytest.mark.parametrize("seed", some(range(3), 0))
def test_siblings_keep_the_targets_law(seed: int, widths: list[int], zeros: bool) -> None:
    target, drafter = random_laws(seed, zeros=zeros), random_laws(seed + 100, zeros=zeros)
    emitted, kept = by_siblings(target, drafter, widths)
    assert sum(emitted.values()) == pytest.approx(1.0)
    assert distance(emitted, target, len(widths) + 1) < 1e-12
    same, all_kept = by_siblings(target, target, widths)
    assert distance(same, target, len(widths) + 1) < 1e-12
    assert all_kept == pytest.approx(len(widths)), "what is drawn from the target itself is always kept"
    assert kept < len(widths) or zeros or V in widths


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("seed", some(range(4), 0))
def test_block_acceptance_keeps_the_target_distribution_and_accepts_more(seed: int, length: int, zeros: bool) -> None:
    target, drafter = random_laws(seed, zeros=zeros), random_laws(seed + 100, zeros=zeros)
    emitted, kept = by_blocks(target, drafter, length)
    assert sum(emitted.values()) == pytest.approx(1.0)
    assert distance(emitted, target, length + 1) < 1e-12
    _, one_by_one = by_siblings(target, drafter, [1] * length)
    assert kept >= one_by_one - 1e-12
    if length == 3 and not zeros:
        assert kept > one_by_one + 1e-4


def test_siblings_that_are_not_there_are_not_tried() -> None:
    p, q = random_laws(0)[()][None], random_laws(1)[()][None]
    ids = torch.tensor([[1, 0]])
    chances, left = sibling_chances(p, q, ids, torch.tensor([[True, False]]))
    alone, rest = sibling_chances(p, q, ids[:, :1], torch.tensor([[True]]))
    assert float(chances[0, 1]) == 0.0
    torch.testing.assert_close(chances[:, :1], alone)
    torch.testing.assert_close(left, rest)
    none, same = sibling_chances(p, q, ids[:, :0], torch.zeros(1, 0).bool())
    assert none.shape == (1, 0)
    assert torch.equal(same, p)


# --- the rules at work ---


def table_of(laws: dict[Path, Tensor]) -> Tensor:
    """Log-probabilities (paths, V) by number."""
    table = torch.zeros(2 * V**3, V, dtype=torch.float64)
    for path, law in laws.items():
        table[number_of(path, V)] = law.log()
    return table


def sample(laws: dict[Path, Tensor], shape: Shape, context: Context) -> Draft:
    """By a drafter over V tokens whose laws are known."""
    start = torch.ones(len(context.root_ids), 1, dtype=torch.long)
    return fill(PathTable(table_of(laws)), shape, context, begin=lambda _: start, max_depth=3)


COUNT = 2500


def many(settings: SamplingSettings, seed: int) -> Context:
    """A context of many equal rows with their random numbers."""
    chance = torch.Generator().manual_seed(seed)
    rows = RowSettings.of([settings] * COUNT, vocab_size=V, device=torch.device("cpu"))
    draws = partial(torch.rand, COUNT, generator=chance, dtype=torch.float64)
    one = torch.zeros(COUNT, 1, dtype=torch.long)
    return Context(torch.zeros(COUNT, 1, 1), one, one[:, 0] + 1, one[:, 0], rows, draws)


def paths_of(draft: Draft) -> list[list[Path]]:
    return [draft_paths.paths_of(draft, row) for row in range(len(draft.token_ids))]


@pytest.mark.parametrize("rule", ["rejection", "block", "exact"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_emits_by_the_targets_law(shape: str, rule: Any) -> None:
    target, drafter = random_laws(3), random_laws(4)
    context = many(SamplingSettings(temperature=1.0, acceptance=rule), seed=7)
    draft = sample(drafter, SHAPES[shape], context)
    verdict = judged(draft, target, context)
    emitted: Counter[Path] = Counter()
    for row, paths in enumerate(paths_of(draft)):
        count = int(verdict.num_accepted[row])
        last = paths[int(verdict.path[row, count - 1])]
        assert len(last) == count - 1
        assert [paths[node] for node in verdict.path[row, :count].tolist()] == [last[:n] for n in range(count)]
        emitted[*last, int(verdict.next_ids[row])] += 1
    # what follows is the target's by construction, so the first token and the second one after it tell all
    assert obeys(first_tokens(draft, verdict), target[()])
    for token in range(V):
        second: Counter[int] = Counter()
        for path, n in emitted.items():
            if path[0] == token and len(path) > 1:
                second[path[1]] += n
        if second.total() > 200 and rule != "block":  # given that the first is kept, the second is by the law, too
            assert obeys(second, target[token,])
    mean = sum((len(path) - 1) * n for path, n in emitted.items()) / COUNT
    tree = SHAPES[shape].tree
    if rule == "block" and tree.num_nodes == tree.max_depth + 1:
        expected = by_blocks(target, drafter, tree.max_depth)[1]
    elif rule != "exact" and shape != "tree":
        expected = by_siblings(target, drafter, {"one": [1], "chain": [1] * 3, "siblings": [3]}[shape])[1]
    else:
        return
    assert mean == pytest.approx(expected, abs=4 * (tree.max_depth / COUNT) ** 0.5)


def obeys(counts: Counter[int], law: Tensor) -> bool:
    """Whether tokens come as often as a law (V,) says."""
    cells = [(counts[token], mass * counts.total()) for token, mass in enumerate(law.tolist()) if mass > 0]
    return chi_square(cells) > ODDS


def judged(draft: Draft, target: dict[Path, Tensor], context: Context) -> AcceptResult:
    logits, draws = table_of(target)[node_numbers(draft, V)], context.draws
    uniforms = draws(draft.max_depth + 1)
    more = draws(num_rejection_uniforms(draft))
    return accept(draft, logits, context.rows, uniforms, None, rejection_uniforms=more)


def first_tokens(draft: Draft, verdict: AcceptResult) -> Counter[int]:
    """The tokens after the roots, drafted or drawn."""
    drafted = draft.token_ids[torch.arange(COUNT), verdict.path[:, 1]]
    return Counter(torch.where(verdict.num_accepted > 1, drafted, verdict.next_ids).tolist())


@pytest.mark.parametrize("shape", SHAPES)
def test_drawn_tokens_have_the_drafters_distribution(shape: str) -> None:
    """Drawn as often as the drafter says, siblings never twice, each with its probability given those before."""
    drafter = random_laws(4)
    draft = sample(drafter, SHAPES[shape], many(SamplingSettings(temperature=1.0, acceptance="rejection"), seed=1))
    assert draft.sampled
    paths = paths_of(draft)
    law = drafter[()]
    assert obeys(Counter(row[1][0] for row in paths), law)
    for row in range(0, COUNT, 500):
        assert len(set(paths[row])) == len(paths[row])
        torch.testing.assert_close(draft.probs[row, 0], law.float())
        assert float(draft.log_probs[row, 1]) == pytest.approx(float(law[paths[row][1][0]].log()), abs=1e-5)
    if shape in ("siblings", "tree"):
        second = [row for row, path in enumerate(paths) if path[1] == (0,)]
        law = law.clone()
        law[0] = 0
        law /= law.sum()
        assert obeys(Counter(paths[row][2][0] for row in second), law)
        row = second[0]
        assert float(draft.log_probs[row, 2]) == pytest.approx(float(law[paths[row][2][0]].log()), abs=1e-5)


def test_a_drafter_without_further_tokens_leaves_children_out() -> None:
    laws = {path: torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64) for path in random_laws(0)}
    context = many(SamplingSettings(temperature=1.0, acceptance="rejection"), seed=1)
    draft = sample(laws, Sampled(Tree.cartesian([2])), context)
    assert (draft.log_probs[:, 1] == 0).all()
    assert (draft.log_probs[:, 2] == -torch.inf).all()
    target = random_laws(3)
    assert obeys(first_tokens(draft, judged(draft, target, context)), target[()])


@pytest.mark.parametrize(("paths", "named"), [([(0,), (0, 1)], "below [0]"), ([(0,), (2,)], "[0, 2]")])
def test_ranks_of_drawn_children_have_no_gaps(paths: list[Path], named: str) -> None:
    with pytest.raises(InvalidTree) as caught:
        Sampled(Tree.from_paths(paths))
    assert named in str(caught.value)


def test_to_draw_tokens_random_numbers_are_needed() -> None:
    with pytest.raises(ValueError, match="draws"):
        sample(random_laws(0), SHAPES["one"], Context(*[torch.zeros(1, 1)] * 3, torch.zeros(1).long()))  # type: ignore[call-arg]


# --- whole answers ---


RULES = ("exact", "rejection", "block", "typical")


def drafter_of(model: TargetModel, kind: str) -> Any:
    if kind == "draft model":
        return DraftModel(tiny_model("llama", seed=5, num_hidden_layers=1), model)
    return tiny_head(kind, model)


@pytest.mark.parametrize(
    ("kind", "shape", "rule", "penalty"),
    some_rows(
        [
            *(("hydra", "tree", "rejection", penalty) for penalty in (1.0, 1.6)),
            *(("medusa", "chain", rule, 1.6) for rule in ("rejection", "block")),
            *((kind, "tree", "rejection", 1.0) for kind in ("draft model", "hydra++")),
            ("eagle", "chain", "block", 1.0),
        ],
        *[("hydra", "tree", "rejection", 1.6), ("eagle", "chain", "block", 1.0)],
    ),
)
def test_answers_have_the_models_law(model: TargetModel, kind: str, shape: str, rule: Any, penalty: float) -> None:
    expected = joint_distribution(model, penalty)
    own = replace(SAMPLED, acceptance=rule, repetition_penalty=penalty)
    counts = sampled_answers(model, own, drafter=drafter_of(model, kind), shape=SHAPES[shape])
    assert set(counts) <= set(expected)
    assert p_value(counts, expected) > ODDS


@pytest.mark.parametrize("kind", ["hydra", "eagle", "draft model"])
@pytest.mark.parametrize(
    ("rule", "temperature"),
    some_rows([*((rule, 0.0) for rule in RULES), ("exact", 0.9)], ("block", 0.0), ("exact", 0.9)),
)
def test_drawn_drafts_change_no_decided_token(model: TargetModel, kind: str, rule: Any, temperature: float) -> None:
    own = SamplingSettings(max_new_tokens=30, ignore_eos=True, acceptance=rule, temperature=temperature, seed=3)
    expected = [result.token_ids for result in Engine(model).generate(PROMPTS, own)]
    for shape in SHAPES.values():
        found = Engine(model, drafter_of(model, kind), shape=shape).generate(PROMPTS, own)
        assert [result.token_ids for result in found] == expected


@pytest.mark.parametrize(
    ("temperature", "rule", "penalty"),
    [(0.0, "rejection", 1.0), *((0.9, rule, penalty) for rule in ("rejection", "block") for penalty in (1.0, 1.3))],
)
def test_a_model_is_its_own_best_drafter(model: TargetModel, temperature: float, rule: Any, penalty: float) -> None:
    """Greedy rows are drafted their best tokens; the draft model knows no penalty."""
    own = SamplingSettings(
        max_new_tokens=41, ignore_eos=True, temperature=temperature, acceptance=rule, repetition_penalty=penalty, seed=1
    )
    for result in Engine(model, DraftModel(model, model), shape=SHAPES["chain"]).generate(PROMPTS, own):
        assert (result.tokens_per_step == 4.0) == (penalty == 1.0)


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"top_k": 20}])
def test_a_drafter_of_fewer_tokens_draws_among_those(model: TargetModel, options: dict[str, Any]) -> None:
    """Beside a row of its own settings, and a greedy one."""
    settings = SamplingSettings(max_new_tokens=20, temperature=0.8, acceptance="rejection", ignore_eos=True, seed=1)
    rows = [replace(settings, **options), settings, replace(settings, temperature=0.0)]
    head = tiny_head("hydra", model, draft_vocab_size=12)
    small = DraftModel(tiny_model("llama", seed=5, vocab_size=VOCAB - 4), model)
    plain = Engine(model).generate(PROMPTS, rows)[2].token_ids
    for drafter in (head, small):
        results = Engine(model, drafter, shape=SHAPES["tree"]).generate(PROMPTS, rows)
        assert results[2].token_ids == plain
        assert max(result.tokens_per_step for result in results) > 1.0


def test_a_tree_cut_to_siblings_is_no_chain() -> None:
    """The deepest node is gone, the tree says it could still be there."""
    target, drafter = random_laws(3), random_laws(4)
    context = many(SamplingSettings(temperature=1.0, acceptance="block"), seed=7)
    draft = sample(drafter, Sampled(Tree.from_paths([(0,), (1,), (0, 0)])), context).first(3)
    assert draft.num_nodes == draft.max_depth + 1 == 3
    verdict = judged(draft, target, context)
    assert int(verdict.num_accepted.max()) == 2
    assert obeys(first_tokens(draft, verdict), target[()])
