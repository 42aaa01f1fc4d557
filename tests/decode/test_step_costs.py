"""Costs of steps: what is measured, what lies between, and what is kept."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from draftheads.decode import step_costs as module
from draftheads.decode.request import Request
from draftheads.decode.step_costs import StepCosts, StepTimer, costs_of, measure_costs, read_costs
from draftheads.errors import CacheWarning
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.runners.native_runner import NativeRunner
from draftheads.speculation.shapes import BestFirst
from draftheads.speculation.tree import Tree
from families import needs_library, tiny_head, tiny_model
from thorough import some_rows

STILL_RIGHT = module._still_right  # which is replaced for all other tests


@pytest.fixture
def target() -> TargetModel:
    return tiny_model("llama")


@pytest.fixture
def head(target: TargetModel) -> DraftHead:
    return tiny_head("hydra", target)


class FakeTimer:
    """A pass takes 10 ms and half a millisecond for each token, a level 1 ms and 0.1 ms for each row."""

    def __init__(self, *disturbed: int, slower: float = 1.0, text: float = 0.0) -> None:
        self.disturbed, self.slower, self.text, self.now, self.calls = set(disturbed), slower, text, 0.0, 0

    def _takes(self, milliseconds: float) -> float:
        self.calls += 1
        milliseconds *= 20.0 if self.calls in self.disturbed else 1.0
        self.now += milliseconds / 1e3
        return milliseconds

    def verify(self, rows: int, nodes: int) -> float:
        return self._takes(10.0 + 0.5 * self.slower * rows * nodes + self.text * (rows - 1))

    def levels(self, rows: int, depth: int) -> float:
        return self._takes((1.0 + 0.1 * rows) * depth)


@pytest.mark.parametrize("disturbed", [(), (1, 2, 3, 40), range(1, 6)])
def test_what_is_measured_and_what_lies_between(target: TargetModel, head: DraftHead, disturbed: Any) -> None:
    """What disturbs the machine for a while counts nowhere."""
    costs = measure_costs(target, head, timer=FakeTimer(*disturbed))
    assert costs.passes([1, 2, 10, 64, 200]).tolist() == pytest.approx([10.5, 11.0, 15.0, 42.0, 110.0])
    for rows, levels in ((1, 1), (1, 2), (2, 3), (4, 1), (9, 2), (1, 6)):
        assert costs.draft(rows, levels) == pytest.approx((1.0 + 0.1 * rows) * levels)
    assert costs.draft(4, 0) == 0.0


def test_each_further_text_costs_the_same(cache: Path, target: TargetModel, head: DraftHead) -> None:
    """Beyond its tokens; the costs in a file have it, too, and without it they are of one text."""
    costs = measure_costs(target, head, timer=FakeTimer(1, 2, 3, text=0.75))
    assert costs.passes([1, 8, 64]).tolist() == pytest.approx([10.5, 14.0, 42.0]), "of one text"
    assert costs.passes([8, 64], 4).tolist() == pytest.approx([14.0 + 2.25, 42.0 + 2.25])
    assert costs.of_texts == pytest.approx(0.75)
    assert measure_costs(target, head, timer=FakeTimer(text=-0.75)).of_texts == 0.0
    path = cache.parent / "costs.json"
    path.write_text(json.dumps({"format_version": 13, **asdict(costs)}))
    assert read_costs(path) == costs
    with pytest.raises(ValueError, match=r"of_texts is -1"):
        StepCosts(((1, 10.0),), of_texts=-1.0)


def test_fewer_tokens_cost_no_more() -> None:
    costs = StepCosts(((1, 30.0), (4, 20.0), (8, 24.0)))
    assert costs.passes([1, 2, 4, 6]).tolist() == [20.0, 20.0, 20.0, 22.0]
    assert costs.draft(1, 3) == 0.0
    assert StepCosts(((1, 30.0),)).passes([5]).tolist() == [30.0]


@pytest.mark.parametrize(
    "points", [(), ((2, 10.0),), ((1, 0.0),), ((1, float("nan")),), ((1, 10.0), (4, -1.0)), ((1, float("inf")),)]
)
def test_impossible_costs(points: Any) -> None:
    with pytest.raises(ValueError, match="costs"):
        StepCosts(points)


@pytest.mark.parametrize(
    ("family", "method"),
    some_rows(
        [(f, m) for f in ("llama", "gpt2", "gemma3_text") for m in ("medusa", "hydra", "eagle3", "small-llama")],
        *[("gpt2", "medusa"), ("gemma3_text", "eagle3")],
    ),
)
def test_real_steps_are_measured(family: str, method: str) -> None:
    """Also of a model that knows few positions, and heads that read all of the text."""
    model = tiny_model(family)
    head = tiny_head(method, model)
    costs = measure_costs(model, head, sweeps=1)
    assert [tokens for tokens, _ in costs.of_passes] == [1, 2, 4, 8, 12, 24, 64]
    assert {(rows, levels) for rows, levels, _ in costs.of_drafts} == {
        (rows, min(levels, head.depth_limit or levels)) for rows, levels in module._DRAFTS
    }


@needs_library
def test_the_pass_of_greedy_steps_is_timed(head: DraftHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one that writes all logits, where the model finds the most likely tokens alone."""
    target = tiny_model("llama").sped_up()
    assert target.finds_most_likely
    monkeypatch.delattr(NativeRunner, "verify")
    assert StepTimer(target, head).verify(2, 5) > 0.0


def test_rows_have_256_tokens_of_text_or_half_of_what_the_model_knows(target: TargetModel, head: DraftHead) -> None:
    assert StepTimer(target, head).length == StepTimer(target, head, 4096).length == 128
    larger = tiny_model("llama", max_position_embeddings=2048)
    assert StepTimer(larger, head, 90).length == 90
    timer = StepTimer(larger, head)
    timer.verify(2, 3)
    batch, given = timer._batches[2]
    seen, verify = [], batch.runner.verify

    def noted(rows: Any, draft: Any) -> Any:
        seen.append(([row.length for row in rows], draft is given.draft, draft.num_nodes))
        return verify(rows, draft)

    batch.runner.verify = noted  # type: ignore[method-assign]
    assert [timer.verify(2, nodes) > 0.0 for nodes in (5, 9)] == [True, True]
    assert seen == [([256, 256], True, 5), ([256, 256], True, 9)]
    assert batch.runner.num_bytes == 2 * 384 * 2 * 2 * 2 * 8 * 4


def test_a_whole_step_is_timed(target: TargetModel, head: DraftHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens become text of requests that never end, and that is in the time."""
    timer, texts = StepTimer(target, head), []
    timer.verify(2, 5)
    append = Request.append
    now, times = 0.0, property(lambda _: now)

    def slow(request: Request, ids: Any, **what: Any) -> Any:
        nonlocal now
        now += 2.0
        texts.append(ids)
        return append(request, ids, **what)

    monkeypatch.setattr(Request, "append", slow)
    monkeypatch.setattr(StepTimer, "now", times)
    for _ in range(target.max_positions or 300):  # more tokens than the model has positions
        assert timer.verify(2, 5) == 4000.0
    assert len(texts) == 2 * (target.max_positions or 300)
    assert all(texts)


def test_levels_are_of_the_trees_that_are_drafted(
    target: TargetModel, head: DraftHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[Any] = []
    monkeypatch.setattr(StepTimer, "draft", lambda _, rows, shape: shapes.append((rows, shape)) or 1.0)
    for grows in (True, False):
        timer = StepTimer(target, head, grows=grows)
        assert [timer.levels(2, depth) for depth in (1, 3)] == [1.0, 1.0]
    assert [rows for rows, _ in shapes] == [2] * 4
    assert [type(shape) for _, shape in shapes] == [BestFirst, BestFirst, Tree, Tree]
    assert [shape.max_depth for _, shape in shapes] == [1, 3, 1, 3]


# --- the cache ---


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path))
    return tmp_path / "costs"


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> list[FakeTimer]:
    """The one that is used next comes last."""
    made: list[FakeTimer] = []
    monkeypatch.setattr(module, "StepTimer", lambda *_: made[-1])
    return made


def test_costs_are_kept_for_each_model_and_head(cache: Path, target: TargetModel, timers: list[FakeTimer]) -> None:
    timers.append(FakeTimer())
    for method in ("hydra", "medusa", "hydra"):
        costs_of(target, tiny_head(method, target))
    costs_of(tiny_model("llama", num_hidden_layers=3), tiny_head("hydra", target))
    assert len(list(cache.iterdir())) == 3
    costs_of(target, tiny_head("eagle", target), keep=False)
    assert len(list(cache.iterdir())) == 3
    assert json.loads(next(cache.iterdir()).read_text())["format_version"] == 13


def test_kept_costs_are_looked_at_again(
    cache: Path, target: TargetModel, head: DraftHead, timers: list[FakeTimer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is twice as slow is no other one; one on which nodes cost more is."""
    monkeypatch.setattr(module, "_still_right", STILL_RIGHT)
    timers.append(FakeTimer())
    first = costs_of(target, head)
    timers.append(FakeTimer(slower=1.02))
    assert costs_of(target, head) == first
    assert timers[-1].calls == 5 * (1 + 2) + 3 * (1 + 2 * 3), "one to begin with, then two, thrice of few tokens"
    timers.append(FakeTimer(slower=3.0))
    again = costs_of(target, head)
    assert again.passes(64) == pytest.approx(10.0 + 1.5 * 64)
    timers.append(FakeTimer(slower=3.0))
    assert costs_of(target, head) == again


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format_version": 12, "of_passes": [[2, 1.0]], "of_drafts": []}'])
def test_a_damaged_file_is_measured_again(
    cache: Path, target: TargetModel, head: DraftHead, timers: list[FakeTimer], text: str
) -> None:
    timers.append(FakeTimer())
    expected = costs_of(target, head)
    [file] = cache.iterdir()
    file.write_text(text)
    with pytest.warns(CacheWarning, match="cannot be read"):
        assert costs_of(target, head) == expected
    assert costs_of(target, head) == expected


def test_a_cache_that_cannot_be_written(
    cache: Path, target: TargetModel, head: DraftHead, timers: list[FakeTimer]
) -> None:
    timers.append(FakeTimer())
    cache.write_text("in the way")
    with pytest.warns(CacheWarning, match=r"are not kept|cannot be read"):
        costs_of(target, head)
