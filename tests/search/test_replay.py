"""Tokens per step with trees of all sizes: found on one half of recorded answers, measured on the other."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftheads.decode.engine import Engine
from draftheads.errors import DataError
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.search import replay
from draftheads.search.replay import Answer, Observation, Replay, accuracies, encoded, own_answers
from draftheads.search.settings import ReplaySettings
from draftheads.settings import SamplingSettings
from draftheads.speculation.shapes import BestFirst
from draftheads.speculation.tree import Path as RankPath
from draftheads.utils.progress import NoProgress
from families import PROMPTS, tiny_head, tiny_model, tokens_per_step
from observed_heads import steps_through

pytestmark = pytest.mark.usefixtures("one_thread")
K, R = 2, 3


def replay_of(model: TargetModel, head: DraftHead, **settings: Any) -> Replay:
    return Replay(model, head, ReplaySettings(**settings), progress=NoProgress())


def answered(one: Replay, folder: Path, prompts: Sequence[list[int]] = PROMPTS) -> list[Answer]:
    ids = encoded(one.target, prompts, one.settings)
    return own_answers(one.target, ids, one.settings, folder=folder, progress=NoProgress())


@pytest.fixture
def small(model: TargetModel) -> Replay:
    """For two heads and three ranks."""
    return replay_of(model, tiny_head("medusa", model, num_heads=K), top_k=R, max_nodes=8)


def seen_as(table: list[tuple[int, int]], probs: Tensor | None = None) -> Observation:
    """An observation with these ranks, of a greedy answer unless probabilities are given."""
    ranks = torch.tensor(table)
    hits = torch.nn.functional.one_hot(ranks, R + 1)[:, :, :R].float()
    return Observation(ranks, hits if probs is None else probs, torch.zeros(len(table), K, R), torch.zeros(0))


def random_answers(count: int, seed: int, *, ease: float = 1.0) -> list[Observation]:
    chance = torch.Generator().manual_seed(seed)
    weights = torch.tensor([[4.0, 2.0, 1.0, 2.0], [3.0, 1.0, 1.0, 4.0]]) ** ease
    found = []
    for _ in range(count):
        length = int(torch.randint(4, 30, (1,), generator=chance))
        ranks = torch.multinomial(weights, length, replacement=True, generator=chance).T
        ranks[-1], ranks[-2, 1] = R, R  # the answer has ended
        found.append(seen_as([(a, b) for a, b in ranks.tolist()]))
    return found


def steps_with(seen: Observation, tree: set[RankPath]) -> tuple[int, int]:
    """Tokens and steps of decoding an answer."""
    return len(seen.ranks) - 1, steps_through(seen.ranks.tolist(), tree)


def by_count(seen: list[Observation]) -> list[RankPath]:
    """All paths, the most frequent first, counted where every head has something to guess."""
    counts: dict[RankPath, int] = {}
    for one in seen:
        for row in one.ranks.tolist()[:-K]:
            for depth in range(1, K + 1):
                if max(row[:depth]) < R:
                    counts[tuple(row[:depth])] = counts.get(tuple(row[:depth]), 0) + 1
    return sorted(counts, key=lambda path: (-counts[path], len(path), path))


def crossed(seen: list[Observation], size: int) -> float:
    """Tokens per step when each half meets the tree that grew on the other."""
    halves, tokens, steps = [seen[0::2], seen[1::2]], 0, 0
    for mine, other in (halves, halves[::-1]):
        tree = set(by_count(other)[: size - 1])
        for one in mine:
            more = steps_with(one, tree)
            tokens, steps = tokens + more[0], steps + more[1]
    return tokens / steps


def test_each_half_is_measured_with_trees_from_the_other_half(small: Replay):
    # answers of two kinds, by turns
    easy, hard = random_answers(6, seed=1), random_answers(6, seed=2, ease=-0.5)
    seen = [one for pair in zip(easy, hard, strict=True) for one in pair]
    found = small._static(seen)
    assert found["paths"] == [list(path) for path in by_count(seen)[:7]]
    sizes = range(1, 9)
    assert found["expected"] == pytest.approx([crossed(seen, size) for size in sizes])
    assert len(found["error"]) == 8
    assert all(error > 0 for error in found["error"][1:])
    own = [sum(x) for x in zip(*(steps_with(one, set(by_count(seen)[:3])) for one in seen), strict=True)]
    assert found["expected"][3] < own[0] / own[1], "on what it grew on, a tree does too well"
    rows = [tuple(row) for one in seen for row in one.ranks.tolist()[:-K]]
    shares = [sum(row[: len(path)] == tuple(path) for row in rows) / len(rows) for path in found["paths"]]
    assert found["shares"] == pytest.approx([1.0, *shares])


def test_a_half_with_fewer_paths_gives_smaller_trees(small: Replay):
    rich = seen_as([(a, b) for one in random_answers(4, seed=4) for a, b in one.ranks.tolist()])
    poor = seen_as([(0, 3)] * 8 + [(3, 3)])
    found = small._static([rich, poor])
    assert len(found["paths"]) == 7
    short = small._static([seen_as([(0, 3), (3, 3)])] * 2)
    assert (short["paths"], short["expected"]) == ([[0]], [1.0, 1.0]), "fewer observations than heads"
    # the rich half is judged with the one path of the poor one, whatever the size
    for size in range(2, 9):
        tree = set(by_count([rich])[: size - 1])
        pairs = [steps_with(rich, {(0,)}), steps_with(poor, tree)]
        assert found["expected"][size - 1] == pytest.approx(sum(t for t, _ in pairs) / sum(s for _, s in pairs))


def test_at_a_temperature_probabilities_count_and_the_drawn_answer_is_decoded(model: TargetModel):
    head = tiny_head("medusa", model, num_heads=K)
    sampled = replay_of(model, head, top_k=R, max_nodes=4, temperature=0.8)
    # rank 2 was drawn by chance; the target itself is for rank 1
    probs = torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.05, 0.05]]).expand(6, K, R)
    drawn = seen_as([(2, 0), (2, 0), (2, 0), (2, 0), (2, R), (R, R)], probs)
    found = sampled._static([drawn, drawn])
    assert found["paths"] == [[1], [2], [0]]
    assert found["shares"] == pytest.approx([1.0, 0.5, 0.3, 0.2])
    assert found["expected"] == pytest.approx([1.0, 1.0, 5 / 3, 5 / 3])
    assert accuracies([drawn, drawn]) == [pytest.approx(row) for row in ([0.2, 0.5, 0.3], [0.1, 0.05, 0.05])]


def test_accuracies_are_counted_where_the_answer_goes_on():
    first, second = seen_as([(0, 1), (1, 3), (2, 3), (3, 3)]), seen_as([(0, 3), (3, 3)])
    # the first head at 3 and 1 places, the second at 2 and none
    assert accuracies([first, second]) == [[2 / 4, 1 / 4, 1 / 4], [0.0, 1 / 2, 0.0]]
    assert accuracies([second]) == [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]], "without places nothing is right"
    chances = torch.rand(3, K, R, generator=torch.Generator().manual_seed(0))
    found = accuracies([seen_as([(0, 0)] * 3, chances)])
    assert found == [pytest.approx(chances[:2, 0].mean(0).tolist()), pytest.approx(chances[0, 1].tolist())]


@pytest.mark.parametrize(
    ("method", "beam", "most"),
    [("medusa", 1, 1 + 2 + 4 + 8), ("hydra", 1, 1 + 2 + 2 + 2), ("hydra", 3, 1 + 2 + 4 + 6)],
)
def test_growing_trees_are_measured_up_to_their_largest_size(model: TargetModel, method: str, beam: int, most: int):
    head = tiny_head(method, model)
    options = {"top_k": 2, "beam": beam}
    assert replay_of(model, head, **options, max_nodes=1000)._most_grown(head) == (most, most)
    spare = min(most, 12 if head.reads_path else 4)  # for trees of a lower depth
    assert replay_of(model, head, **options, max_nodes=4)._most_grown(head) == (4, spare)


def decoded(one: Replay, shape: BestFirst) -> float:
    """Tokens per step of decoding the answers of a case."""
    own, engine = one.settings, Engine(one.target, one.head, shape=shape)
    first = SamplingSettings(max_new_tokens=own.max_new_tokens, temperature=own.temperature)
    return tokens_per_step(engine.generate(PROMPTS, [replace(first, seed=seed) for seed in range(len(PROMPTS))]))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_replay_in_parts_equals_one_in_a_piece_and_predicts_decoding(
    model: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
):
    head = tiny_head("hydra", model)
    options = {"top_k": 5, "beam": 3, "max_nodes": 12, "max_new_tokens": 12, "temperature": temperature}
    one = replay_of(model, head, **options)
    answers = answered(one, tmp_path)
    found = one.run(answers)
    monkeypatch.setattr(replay, "_ROWS_AT_ONCE", 2)
    parts = one.run(answers)
    assert parts["dynamic"]["expected"] == found["dynamic"]["expected"]
    assert parts["static"] == found["static"]
    shape = BestFirst(12, top_k=5, beam=3, temperatures=tuple(found["confidence"]["temperatures"]))
    assert found["dynamic"]["expected"][11] == decoded(one, shape)


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["eagle", "eagle3", "small-llama"])
def test_heads_without_a_limit_are_replayed_deeper_as_far_as_it_gains(
    model: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
):
    head = tiny_head(method, model)
    options = {"top_k": 5, "beam": 3, "max_nodes": 16, "max_new_tokens": 40}
    one = replay_of(model, head, **options)
    answers = answered(one, tmp_path)
    found = {}
    assert replay._SMALLEST_STEP == 1.005, "docs/trees.md: 0.5 %"
    for step in (0.0, 1.0 + 1e-9, 2.0):  # every level is kept; those that gain; none
        monkeypatch.setattr(replay, "_SMALLEST_STEP", step)
        found[step] = one.run(answers)
    depths = [len(one["confidence"]["temperatures"]) for one in found.values()]
    assert depths[0] == 8 >= depths[1] >= 3 == depths[2]
    assert head.config.num_heads == 3
    for kept, depth in zip(found.values(), depths, strict=True):
        assert len(kept["accuracy"]) == depth
        assert max(map(len, kept["static"]["paths"])) <= depth
        by_depth = [*kept["dynamic"]["shallower"], kept["dynamic"]["expected"]]
        assert len(by_depth) == depth
        confidence = tuple(kept["confidence"]["temperatures"])
        for limit in {2, depth}:
            shape = BestFirst(16, top_k=5, beam=3, max_depth=limit, temperatures=confidence)
            assert by_depth[limit - 1][15] == decoded(one, shape)
    short = [Answer(answer.prompt_ids, answer.token_ids[:7]) for answer in answers]
    mixed = [*short, answers[0]]
    assert len(answers[0].token_ids) > 7
    assert one._deep_head(mixed).config.num_heads == 5, "no deeper than most answers"
    own = replay_of(model, tiny_head("hydra", model), **options)
    assert own._deep_head(answers) is own.head


def test_answers_are_those_of_plain_decoding(model: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replay, "_ANSWERS_AT_ONCE", 2)
    one = replay_of(model, tiny_head("medusa", model), num_prompts=3, max_new_tokens=9)
    plain = Engine(model).generate(PROMPTS, max_new_tokens=9)
    expected = [Answer(tuple(p), r.token_ids) for p, r in zip(PROMPTS, plain, strict=True) if len(r.token_ids) > 1]
    assert answered(one, tmp_path, [*PROMPTS, [4, 5]]) == expected


def test_too_little_to_calibrate_on_is_an_error(model: TargetModel, tmp_path: Path):
    with pytest.raises(DataError, match="1 prompt"):
        encoded(model, PROMPTS[:1], ReplaySettings())
    ended = tiny_model("llama", eos_token_id=list(range(24)))
    with pytest.raises(DataError, match=ended.model_id):
        answered(replay_of(ended, tiny_head("medusa", ended)), tmp_path)
