"""The tree that is grown from ranks is the best of its size, and decoding with it is foreseen step by step."""

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftheads.errors import InvalidSettings
from draftheads.speculation.tree import Path, Tree
from draftheads.speculation.tree_search import (
    best_tree,
    entries,
    expected_tokens,
    joint_order,
    path_counts,
    path_shares,
    product_order,
    simulate,
)

pytestmark = pytest.mark.usefixtures("one_thread")
DEPTH, MOST_NODES = 3, 8  # of the trees that are searched through


@lru_cache
def paths_of(width: int) -> list[Path]:
    """All paths of a full tree, the root left out."""
    return [path for depth in range(1, DEPTH + 1) for path in itertools.product(range(width), repeat=depth)]


@lru_cache
def every_tree(width: int) -> list[Tensor]:
    """Of 1 … MOST_NODES nodes: each (trees, paths), 1 where the path is in the tree. Each grows by one node."""
    paths = paths_of(width)
    parent = [paths.index(path[:-1]) if len(path) > 1 else None for path in paths]
    trees, found = {0}, []
    for _ in range(MOST_NODES):
        found.append(torch.tensor([[tree >> i & 1 for i in range(len(paths))] for tree in sorted(trees)]).double())
        trees = {
            tree | 1 << i
            for tree in trees
            for i, above in enumerate(parent)
            if not tree >> i & 1 and (above is None or tree >> above & 1)
        }
    return found


def best_by_search(width: int, values: Mapping[Path, float]) -> list[float]:
    """For trees of 1 … MOST_NODES nodes: what the best one is worth, the root as 1."""
    worth = torch.tensor([values.get(path, 0.0) for path in paths_of(width)], dtype=torch.float64)
    return [1.0 + float((trees @ worth).max()) for trees in every_tree(width)]


def steps_through(truth: Sequence[Sequence[int]], tree: set[Path]) -> int:
    """Steps of decoding an answer: truth[j] are the ranks of what follows token j."""
    place = steps = 0
    while place < len(truth) - 1:
        depth = 0
        while depth < len(truth[place]) and tuple(truth[place][: depth + 1]) in tree:
            depth += 1
        place += depth + 1
        steps += 1
    return steps


def slow_expected_tokens(ranks: Tensor, tree: Tree) -> float:
    """By walking down the tree at every position."""
    total = 0
    for row in ranks.tolist():
        path: Path = ()
        total += 1
        for rank in row:
            path = (*path, rank)
            if path not in tree.paths:
                break
            total += 1
    return total / len(ranks)


def all_trees(depth: int, width: int, num_nodes: int) -> Iterator[Tree]:
    every = [path for d in range(1, depth + 1) for path in itertools.product(range(width), repeat=d)]
    for chosen in itertools.combinations(every, num_nodes - 1):
        if all(path[:-1] in chosen or len(path) == 1 for path in chosen):
            yield Tree.from_paths(chosen)


rank_tables = st.integers(1, 3).flatmap(
    lambda width: st.lists(st.lists(st.integers(0, 4), min_size=width, max_size=width), min_size=1, max_size=30)
)


@given(rank_tables, st.integers(0, 3), st.integers(1, 3))
def test_expected_tokens_is_the_mean_of_the_walks(table: list[list[int]], depth: int, width: int) -> None:
    tree = Tree.cartesian([width] * min(depth, len(table[0])))
    ranks = torch.tensor(table)
    assert expected_tokens(ranks, tree) == pytest.approx(slow_expected_tokens(ranks, tree))


def test_a_miss_ends_a_path() -> None:
    ranks = torch.tensor([[10, 0], [0, 10]])
    assert path_counts(ranks, top_k=10) == {(): 2, (0,): 1}


def test_ties_go_to_the_shallower_then_the_better_rank() -> None:
    ranks = torch.tensor([[1, 0], [0, 0]])
    assert best_tree(ranks, 3).paths == ((), (0,), (1,))


def test_no_positions_give_the_root_alone() -> None:
    none = torch.zeros(0, 4, dtype=torch.long)
    assert best_tree(none, 8) == Tree.chain(0)
    assert expected_tokens(none, Tree.chain(4)) == 1.0


def test_a_tree_without_room_for_its_root_is_an_error() -> None:
    with pytest.raises(InvalidSettings, match="num_nodes is 0"):
        best_tree(torch.zeros(1, 1, dtype=torch.long), 0)


small_tables = st.integers(2, 3).flatmap(
    lambda width: st.tuples(
        st.just(width), st.lists(st.tuples(*[st.integers(0, width)] * DEPTH), min_size=1, max_size=40)
    )
)


def test_the_search_through_all_trees_misses_none() -> None:
    by_sets = [sum(1 for _ in all_trees(DEPTH, 2, num_nodes)) for num_nodes in range(1, 6)]
    assert [len(trees) for trees in every_tree(2)[:5]] == by_sets
    # those of a root, each of whose w children is missing or a tree: as many as the coefficients of a power of it
    for width in (2, 3):
        sizes = {1: 1.0}
        for _ in range(DEPTH):
            power = {0: 1.0}
            for _ in range(width):
                grown: dict[int, float] = {}
                for (a, x), (b, y) in itertools.product(power.items(), {0: 1.0, **sizes}.items()):
                    grown[a + b] = grown.get(a + b, 0.0) + x * y
                power = grown
            sizes = {size + 1: number for size, number in power.items()}
        assert [len(trees) for trees in every_tree(width)] == [sizes[size] for size in range(1, MOST_NODES + 1)]


@settings(max_examples=40, deadline=None)
@given(small_tables)
def test_joint_trees_are_the_best_of_all_trees_of_their_size(case: tuple[int, list[tuple[int, ...]]]) -> None:
    width, table = case
    on_truth = {path: sum(row[: len(path)] == path for row in table) / len(table) for path in paths_of(width)}
    ranks = torch.tensor(table)
    order = joint_order(path_counts(ranks, top_k=width), MOST_NODES)
    for num_nodes, best in enumerate(best_by_search(width, on_truth), 1):
        tree = best_tree(ranks, num_nodes, top_k=width)
        assert tree == Tree.from_paths(order[: num_nodes - 1])
        assert tree.num_nodes <= num_nodes
        assert slow_expected_tokens(ranks, tree) == expected_tokens(ranks, tree) == pytest.approx(best)


@settings(max_examples=40, deadline=None)
@given(small_tables)
def test_trees_are_nested_and_promise_more_and_more(case: tuple[int, list[tuple[int, ...]]]) -> None:
    width, table = case
    ranks = torch.tensor(table)
    counts = path_counts(ranks, top_k=width)
    orders = [joint_order(counts, num_nodes) for num_nodes in range(1, 45)]
    for num_nodes, (smaller, larger) in enumerate(itertools.pairwise(orders), 1):
        assert len(smaller) <= num_nodes - 1
        assert larger[: len(smaller)] == smaller
        assert len(larger) <= len(smaller) + 1
        assert all(path[:-1] in larger[:place] or len(path) == 1 for place, path in enumerate(larger))
    promised = [expected_tokens(ranks, best_tree(ranks, size, top_k=width)) for size in range(1, 45)]
    assert promised == sorted(promised)
    assert promised[-1] == sum(counts.values()) / len(ranks), "in the end every path that was true is there"


def head_accuracies(ranks: Tensor, *, top_k: int) -> list[list[float]]:
    """(K, R): how often each rank of each head is the true one."""
    return [[float((column == rank).double().mean()) for rank in range(top_k)] for column in ranks.unbind(1)]


@settings(max_examples=60, deadline=None)
@given(small_tables)
def test_joint_trees_gain_at_least_as_much_as_those_by_the_product_of_accuracies(
    case: tuple[int, list[tuple[int, ...]]],
) -> None:
    width, table = case
    ranks = torch.tensor(table)
    order = product_order(head_accuracies(ranks, top_k=width), MOST_NODES)
    assert all(path[:-1] in order[:place] or len(path) == 1 for place, path in enumerate(order))
    for num_nodes in range(1, MOST_NODES + 1):
        by_product = expected_tokens(ranks, Tree.from_paths(order[: num_nodes - 1]))
        assert expected_tokens(ranks, best_tree(ranks, num_nodes, top_k=width)) >= by_product - 1e-9


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=DEPTH, max_size=DEPTH))
def test_both_gain_the_same_where_heads_are_independent(heads: list[list[int]]) -> None:
    """Every rank of a head comes with every rank of the others equally often; rank 3 is a miss."""
    ranks = torch.tensor(list(itertools.product(*heads)))
    order = product_order(head_accuracies(ranks, top_k=3), MOST_NODES)
    for num_nodes in range(1, MOST_NODES + 1):
        by_product = expected_tokens(ranks, Tree.from_paths(order[: num_nodes - 1]))
        assert by_product == pytest.approx(expected_tokens(ranks, best_tree(ranks, num_nodes, top_k=3)))


def test_the_joint_search_sees_that_heads_fail_together() -> None:
    """Each head ranks the truth first or second equally often, but always both heads alike."""
    ranks = torch.tensor([[0, 0], [1, 1]])
    by_product = Tree.from_paths(product_order(head_accuracies(ranks, top_k=2), 5))
    assert set(by_product.paths) == {(), (0,), (1,), (0, 0), (0, 1)}
    assert expected_tokens(ranks, by_product) == 2.5
    assert expected_tokens(ranks, best_tree(ranks, 5)) == 3.0


@settings(max_examples=50, deadline=None)
@given(small_tables, st.randoms(use_true_random=False))
def test_the_order_in_which_positions_come_does_not_matter(
    case: tuple[int, list[tuple[int, ...]]], chance: random.Random
) -> None:
    width, table = case
    shuffled = chance.sample(table, len(table))
    values = path_counts(torch.tensor(table), top_k=width)
    others = path_counts(torch.tensor(shuffled), top_k=width)
    others = dict(chance.sample(sorted(others.items()), len(others)))
    assert joint_order(values, 30) == joint_order(others, 30)


# --- shares of sampled texts ---


class Language:
    """Texts of three tokens out of four behind one of five contexts, with chances of fifths, and guesses of them.

    The drafter ranks the tokens anew after each beginning; its three best are guesses, so that there are misses.
    """

    vocab, top_k, length, contexts = 4, 3, 3, 5

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)  # noqa: S311 - tests
        self.fifths: dict[tuple[int, Path], list[int]] = {}
        self.guesses: dict[tuple[int, Path], list[int]] = {}
        for context in range(self.contexts):
            for depth in range(self.length):
                for text in itertools.product(range(self.vocab), repeat=depth):
                    walls = sorted(chance.choices(range(6), k=self.vocab - 1))
                    bounds = [0, *walls, 5]
                    self.fifths[context, text] = [b - a for a, b in itertools.pairwise(bounds)]
                    self.guesses[context, text] = chance.sample(range(self.vocab), self.top_k)

    def rows(self, context: int, text: Path) -> tuple[list[int], list[list[float]]]:
        """Ranks of a text's tokens, and the chances of the guesses along it."""
        ranks, probs = [], []
        for depth, token in enumerate(text):
            guesses = self.guesses[context, text[:depth]]
            ranks.append(guesses.index(token) if token in guesses else self.top_k)
            probs.append([self.fifths[context, text[:depth]][guess] / 5 for guess in guesses])
        return ranks, probs

    def texts(self) -> Iterator[tuple[int, Path, int]]:
        """Every context with every text, and how often it comes in all of them written out: 125 times its chance."""
        for context in range(self.contexts):
            for text in itertools.product(range(self.vocab), repeat=self.length):
                number = math.prod(self.fifths[context, text[:depth]][token] for depth, token in enumerate(text))
                yield context, text, number

    def chance_of(self, context: int, path: Path) -> float:
        """That the text takes this way, token by token."""
        chance, text = 1.0, ()
        for rank in path:
            token = self.guesses[context, text][rank]
            chance *= self.fifths[context, text][token] / 5
            text = (*text, token)
        return chance

    def truth(self) -> dict[Path, float]:
        """Of every path of guesses: the mean chance over contexts that it is kept."""
        paths = [path for depth in range(4) for path in itertools.product(range(self.top_k), repeat=depth)]
        return {path: sum(self.chance_of(c, path) for c in range(self.contexts)) / self.contexts for path in paths}


@pytest.mark.parametrize("seed", range(4))
def test_over_all_texts_shares_are_the_target_s_own_probabilities_of_paths(seed: int) -> None:
    language = Language(seed)
    rows = [language.rows(context, text) for context, text, number in language.texts() for _ in range(number)]
    assert len(rows) == 125 * language.contexts
    ranks, probs = torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows], dtype=torch.float64)
    truth = {path: chance for path, chance in language.truth().items() if chance > 0}
    assert len(truth) > 15
    assert path_shares(ranks, probs) == pytest.approx(truth)
    counted = {path: number / len(ranks) for path, number in path_counts(ranks, top_k=3).items()}
    assert counted == pytest.approx(truth), "with all texts there is no chance left, so counting says the same"


def test_shares_of_few_texts_are_right_on_average_and_vary_less_than_counts() -> None:
    language = Language(0)
    every = list(language.texts())
    rows = [language.rows(context, text) for context, text, _ in every]
    all_ranks = torch.tensor([row[0] for row in rows])
    all_probs = torch.tensor([row[1] for row in rows], dtype=torch.float64)
    weights = torch.tensor([float(number) for *_, number in every])
    truth = language.truth()
    common = [path for path, chance in truth.items() if path and chance > 0.02]
    assert {len(path) for path in common} == {1, 2, 3}
    chance = torch.Generator().manual_seed(1)
    shared, counted = [], []
    for _ in range(400):
        drawn = torch.multinomial(weights, 60, replacement=True, generator=chance)
        shares = path_shares(all_ranks[drawn], all_probs[drawn])
        counts = path_counts(all_ranks[drawn], top_k=3)
        shared.append([shares.get(path, 0.0) for path in common])
        counted.append([counts[path] / 60 for path in common])
    shares_, counts_ = torch.tensor(shared), torch.tensor(counted)
    expected = torch.tensor([truth[path] for path in common])
    assert float(((shares_.mean(0) - expected).abs() / (shares_.std(0) / 20)).max()) < 4, "standard errors"
    assert bool((shares_.var(0) < counts_.var(0)).all())
    assert float(shares_.sum(1).var()) < 0.7 * float(counts_.sum(1).var())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=30))
def test_where_the_target_is_certain_shares_are_counts(table: list[tuple[int, ...]]) -> None:
    ranks = torch.tensor(table)
    probs = torch.nn.functional.one_hot(ranks, 4)[:, :, :3].float()  # rank 3 is a miss
    shares = path_shares(ranks, probs)
    assert shares == pytest.approx({path: n / len(ranks) for path, n in path_counts(ranks, top_k=3).items()})


def test_chance_makes_no_path_more_frequent_than_its_beginning() -> None:
    # the text took a way of a tenth, from where the next guess is nearly sure
    ranks = torch.tensor([[1, 0, 0]])
    probs = torch.tensor([[[0.9, 0.1], [0.8, 0.2], [0.99, 0.01]]])
    shares = path_shares(ranks, probs)
    assert shares[1,] == pytest.approx(0.1)
    assert all(share <= shares[path[:-1]] for path, share in shares.items() if path)
    order = joint_order(shares, 6)
    assert all(path[:-1] in order[:place] or len(path) == 1 for place, path in enumerate(order))


def test_a_token_whose_probability_rounds_to_zero_ends_its_paths() -> None:
    shares = path_shares(torch.tensor([[0, 1], [1, 1]]), torch.tensor([[[0.0, 1.0], [0.5, 0.5]], [[0, 1], [0, 1]]]))
    assert shares == {(): 1.0, (1,): 1.0, (1, 1): 1.0}


# --- decoding, simulated ---

answers = st.lists(st.lists(st.tuples(*[st.integers(0, 3)] * 3), max_size=12), min_size=1, max_size=6)


def as_ranks(answer: list[tuple[int, ...]]) -> Tensor:
    """(m, 3), also of an answer without tokens."""
    return torch.tensor(answer, dtype=torch.long).reshape(-1, 3)


@settings(max_examples=50, deadline=None)
@given(answers, st.integers(1, 14))
def test_simulated_decoding_takes_the_steps_of_a_walk(told: list[list[tuple[int, ...]]], num_nodes: int) -> None:
    order = joint_order(path_counts(torch.cat([as_ranks(answer) for answer in told]), top_k=3), 10)
    tree = set(order[: num_nodes - 1])
    steps = sum(steps_through(answer, tree) for answer in told)
    tokens = sum(max(0, len(answer) - 1) for answer in told)
    found, _ = simulate([entries(as_ranks(answer), order) for answer in told], num_nodes)
    assert found == pytest.approx(tokens / steps if steps else 1.0)


@settings(max_examples=50, deadline=None)
@given(answers, st.integers(1, 10))
def test_an_entry_is_the_first_size_whose_tree_holds_the_true_path(
    told: list[list[tuple[int, ...]]], num_nodes: int
) -> None:
    ranks = torch.cat([as_ranks(answer) for answer in told])
    order = joint_order(path_counts(ranks, top_k=3), num_nodes)
    for row, found in zip(ranks.tolist(), entries(ranks, order).tolist(), strict=True):
        for depth, size in enumerate(found):
            for count in range(1, 20):
                assert (size <= count) == (tuple(row[: depth + 1]) in order[: count - 1])


def test_more_nodes_than_there_are_paths_keep_no_more() -> None:
    ranks = torch.tensor([[0, 0], [3, 3], [1, 1], [0, 1], [3, 3], [3, 3]])
    table = entries(ranks, [(0,), (0, 1)])
    # steps at the tokens 0, 2, 3
    assert [simulate([table], size)[0] for size in (1, 2, 3, 4, 5, 100)] == [1.0, *[pytest.approx(5 / 3)] * 5]


def test_answers_without_a_step_count_for_nothing() -> None:
    none, one = torch.zeros(0, 2, dtype=torch.long), torch.full((1, 2), 2)
    some = torch.tensor([[2, 9], [9, 9], [9, 9]])
    assert simulate([], 4) == (1.0, 0.0)
    assert simulate([none, one], 4) == (1.0, 0.0)
    assert simulate([some], 4) == (2.0, 0.0)  # the first step keeps a guess, and what comes after it ends the answer
    assert simulate([none, some, one], 4) == (2.0, 0.0)
    assert entries(none, [(0,)]).shape == (0, 2)


def test_the_standard_error_is_that_of_drawing_answers_anew() -> None:
    chance = torch.Generator().manual_seed(3)
    texts = []
    for _ in range(40):
        length = int(torch.randint(2, 60, (1,), generator=chance))
        ease = float(torch.rand(1, generator=chance))  # answers differ in how easily they are guessed
        hits = (torch.rand(length, 3, generator=chance) < ease).long().cumprod(1)
        texts.append(3 - hits)  # kept by trees of two nodes, or of three
    ratio, error = simulate(texts, 2)
    drawn = torch.randint(0, 40, (1500, 40), generator=chance)
    tokens = torch.tensor([float(len(text) - 1) for text in texts])
    single = [simulate([text], 2)[0] for text in texts]
    steps = tokens / torch.tensor(single)
    again = tokens[drawn].sum(1) / steps[drawn].sum(1)
    assert error == pytest.approx(float(again.std()), rel=0.12)
    assert ratio == pytest.approx(float(tokens.sum() / steps.sum()))
