"""Comparing a plan with other ways: what is timed, in what turns, with what answers; and choices of what to measure."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftheads.decode.batch import Batch
from draftheads.decode.engine import Engine
from draftheads.decode.pace import Pace
from draftheads.decode.plain import NoDraft
from draftheads.growth import BestFirst
from draftheads.heads.base import DraftHead
from draftheads.plan import Choice, Cost, Plan
from draftheads.sampling import SamplingSettings
from draftheads.search import tune, verify
from draftheads.search.cost import Way
from draftheads.search.tune import Tuner, TuneSettings
from draftheads.search.verify import PHASES, Verifier
from draftheads.search.workbook import Workbook
from draftheads.target.model import TargetModel
from draftheads.tree import Tree
from families import tiny_head, tiny_model
from pace_world import tuned
from test_tuner import HERE, Silent

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[3 + row, 4, 5 + row % 7, 6] for row in range(16)]
PLAN = replace(
    tuned(kind="dynamic"),
    costs=[*tuned(kind="dynamic").costs, *(cost for cost in tuned().costs if cost.kind == "static")],
    confidence=[1.0] * 3,
    paths=[[0], [1], [0, 0], [0, 0, 0], [2], [0, 1], [1, 0], [3]],
    static_tokens=[1.0, 1.5, 1.7, 1.9, 2.0, 2.05, 2.1, 2.15, 2.2],
    dynamic_tokens=[1.0, 1.6, 1.8, 2.0, 2.1],
    choices=[Choice(1, "dynamic", 4, 50.0, 1.5), Choice(2, "static", 3, 90.0, 1.2), Choice(16, "none", 1, 200.0, 1.0)],
)
RECORD = {
    "static": {"expected": [1.0 + 0.1 * n for n in range(9)], "error": [0.01 * n for n in range(9)]},
    "dynamic": {"expected": [1.0 + 0.2 * n for n in range(5)], "error": [0.02 * n for n in range(5)]},
}


@pytest.fixture(scope="module")
def model() -> TargetModel:
    return tiny_model("llama")


def verifier(model: TargetModel, folder: Path, *, method: str = "hydra", temperature: float = 0.0) -> Verifier:
    return Verifier(
        model,
        tiny_head(method, model),
        Plan(Tree.chain(2), {}, PLAN),
        RECORD,
        PROMPTS,
        num_speed_prompts=4,
        settings=TuneSettings(max_new_tokens=24, batch_sizes=(1, 2), temperature=temperature),
        book=Workbook(folder / "book", {}, anew=True),
        display=Silent(),
    )


@pytest.fixture
def small(model: TargetModel, tmp_path: Path) -> Verifier:
    return verifier(model, tmp_path)


class Clock:
    """Answers that take as long as their way says, without decoding."""

    def __init__(self, speeds: dict[int, float], drift: Callable[[int], float] = lambda call: 1.0) -> None:
        self.speeds = speeds
        self.drift = drift
        self.calls: list[tuple[int, int, list[SamplingSettings]]] = []

    def __call__(
        self, engine: Engine, prompts: Sequence[Sequence[int]], settings: Sequence[SamplingSettings]
    ) -> tuple[int, int, float]:
        self.calls.append((id(engine), len(prompts), list(settings)))
        tokens = sum(one.max_new_tokens for one in settings)
        speed = self.speeds.get(engine.max_batch_size if engine.tuned else -1, 10.0)
        return tokens, tokens // 2, tokens / speed * self.drift(len(self.calls))


def test_ways_answer_the_same_prompts_by_turns(small: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({2: 20.0})
    monkeypatch.setattr(verify, "timed_answers", clock)
    ways = {name: small._ways(2)[name] for name in ("plain", "plan", "static 4")}
    rows = {row["way"]: row for row in small._compared(ways, 2)}
    warm, timed = clock.calls[:3], clock.calls[3:]
    assert all(one.max_new_tokens == 8 for _, _, settings in warm for one in settings)
    assert [count for _, count, _ in timed] == [2] * 12, "eight prompts, two at a time, three ways"
    turns = [[engine for engine, _, _ in timed[start : start + 3]] for start in range(0, 12, 3)]
    assert turns[0] == turns[2] == turns[1][::-1] == turns[3][::-1]
    assert len(set(turns[0])) == 3
    for start in range(0, 12, 3):
        assert len({tuple(map(str, settings)) for _, _, settings in timed[start : start + 3]}) == 1
    assert rows["plan"]["speedup"] == pytest.approx(2.0)
    assert rows["plan"]["error"] == pytest.approx(0.0)
    assert rows["static 4"]["speedup"] == pytest.approx(1.0)
    assert rows["plan"]["tokens_per_second"] == pytest.approx(20.0)
    tokens = sum(one.max_new_tokens for engine, _, settings in timed if engine == turns[0][0] for one in settings)
    steps = sum(
        sum(one.max_new_tokens for one in settings) // 2 for engine, _, settings in timed if engine == turns[0][0]
    )
    assert rows["plain"]["tokens_per_step"] == pytest.approx((tokens - 8) / steps), "prompts give the first tokens"
    assert rows["static 4"]["predicted_tokens_per_step"] == RECORD["static"]["expected"][3]
    assert rows["plan"]["predicted_tokens_per_step"] is None


def test_with_few_prompts_there_are_two_turns(small: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({})
    monkeypatch.setattr(verify, "timed_answers", clock)
    small.prompts = small.prompts[:3]
    rows = small._compared({"plain": small._ways(2)["plain"]}, 8)
    assert [count for _, count, _ in clock.calls[1:]] == [2, 1]
    assert rows[0]["error"] == 0.0


def test_a_machine_that_grows_slower_changes_no_comparison(small: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "timed_answers", Clock({1: 15.0}, drift=lambda call: 1.02**call))
    ways = {name: small._ways(1)[name] for name in ("plain", "plan")}
    row = {row["way"]: row for row in small._compared(ways, 1)}["plan"]
    assert row["speedup"] == pytest.approx(1.5, abs=0.02)
    assert 0 < row["error"] < 0.03


def test_answers_of_a_comparison_end_at_different_steps(small: Verifier) -> None:
    lengths = [one.max_new_tokens for one in small._of_all_lengths(16)]
    assert len(set(lengths)) > 8
    assert min(lengths) >= 24 // 4
    assert max(lengths) <= 3 * 24 // 4
    seeds = {one.seed for one in small._of_all_lengths(16)}
    assert len(seeds) == 16
    assert min(seed for seed in seeds if seed is not None) >= 1 << 31, "not those that the plan was made from"


def test_each_way_is_what_its_name_says(small: Verifier) -> None:
    ways = small._ways(1)
    assert list(ways) == [
        *("plain", "plan", "plan, not adaptive", "static 4", "static 8", "dynamic 4", f"paper {small.paper.num_nodes}")
    ]
    engines = {name: build(1) for name, build in ways.items()}
    assert isinstance(engines["plain"].drafter, NoDraft)
    assert engines["plan"].tuned == engines["plan, not adaptive"].tuned == PLAN
    assert (engines["plan"].adaptive, engines["plan, not adaptive"].adaptive) == (True, False)
    shapes = {name: engine.drafter.shape for name, engine in engines.items() if name != "plain"}  # type: ignore[attr-defined]
    assert shapes["static 4"] == PLAN.tree(4)
    assert shapes["static 8"] == PLAN.tree(8)
    assert shapes["dynamic 4"] == BestFirst(4, num_ranks=PLAN.num_ranks, beam=PLAN.beam)
    assert shapes[f"paper {small.paper.num_nodes}"] == small.paper
    assert small.paper.max_depth == 3, "as deep as the head"
    assert not any(name.startswith("dynamic") for name in small._ways(2))


def test_predictions_are_of_trees_that_were_chosen_and_of_some_others(small: Verifier) -> None:
    found = {row["way"]: row for row in small._predictions()}
    assert set(found) == {"dynamic 4", "static 3", "static 4", "static 8"}
    assert found["static 3"]["predicted"] == RECORD["static"]["expected"][2]
    assert found["dynamic 4"]["error"] == RECORD["dynamic"]["error"][3]
    head = tiny_head("hydra", small.target)
    head.tree = PLAN.tree(4)
    settings = [SamplingSettings(max_new_tokens=24)] * 16
    results = Engine(small.target, head).generate([list(prompt) for prompt in PROMPTS], settings)
    tokens = sum(len(result.token_ids) - 1 for result in results)
    assert found["static 4"]["measured"] == pytest.approx(tokens / sum(result.num_steps for result in results))


def test_a_load_that_changes_keeps_a_batch_for_each_way(small: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[tuple[int, int, int]] = []
    whole = verify.Verifier._phase

    def phase(self: Verifier, batch: Batch, number: int, batch_size: int) -> tuple[int, float]:
        met.append((id(batch), number, batch_size))
        tokens, _ = whole(self, batch, number, batch_size)
        assert not batch.sequences, "a phase ends with its last answer"
        return tokens, 2.0

    monkeypatch.setattr(verify.Verifier, "_phase", phase)
    rows = list(small._mixed_load())
    ways = {row["way"] for row in rows}
    assert {"plain", "plan", "dynamic 4", "static 3", "static 4", "static 8"} == ways
    assert len({batch for batch, _, _ in met}) == len(ways)
    assert [number for _, number, _ in met] == [n for n in range(len(PHASES)) for _ in ways] * 2
    assert [row["batch_size"] for row in rows if row["way"] == "plan"] == list(PHASES)
    order = [batch for batch, number, _ in met if number == 0]
    assert order[: len(ways)] == order[len(ways) :][::-1]
    tokens = {row["phase"]: row["tokens_per_second"] for row in rows if row["way"] == "plain"}
    for row in rows:
        assert row["tokens_per_second"] == tokens[row["phase"]], "the same answers, in the same time here"


def test_a_phase_has_as_many_rows_at_work_as_it_says(small: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    step = Batch.step

    def watched(self: Batch) -> Any:
        rows.append(len(self.sequences))
        return step(self)

    monkeypatch.setattr(Batch, "step", watched)
    small._phase(Batch(small.target, NoDraft()), 1, 4)
    assert max(rows) == 4
    assert rows.count(4) > len(rows) / 2


def test_the_plan_of_a_load_that_changes_is_adaptive(small: Verifier) -> None:
    drafter = small._mixed_ways()["plan"]()
    assert isinstance(drafter, Pace)
    assert drafter.adaptive
    shapes = {name: build() for name, build in small._mixed_ways().items() if name.startswith(("static", "dynamic"))}
    assert len({id(head) for head in shapes.values()}) == len(shapes)
    assert [head.shape for name, head in shapes.items() if name == "static 3"] == [PLAN.tree(3)]  # type: ignore[attr-defined]


def test_everything_is_found_once(small: Verifier) -> None:
    first = small.run()
    names = {path.stem.rsplit("-", 1)[0] for path in small.book.folder.glob("*.json")}
    assert {name.split("-")[0] for name in names} >= {"compared", "predictions", "mixed"}
    assert first.num_prompts == 16
    assert small.run() == first
    assert {row.batch_size for row in first.rows} == {1, 2}


def test_at_a_temperature_answers_are_drawn(model: TargetModel, tmp_path: Path) -> None:
    warm = verifier(model, tmp_path, temperature=0.8)
    assert {one.temperature for one in warm._of_all_lengths(3)} == {0.8}
    assert len({one.seed for one in warm._samplings(3)}) == 3


# --- what is measured on the way to a plan ---


FOUND = {
    "static": {
        "expected": [1.0, 1.5, 1.7, 1.9, 2.0, 2.05, 2.1, 2.15],
        "paths": [list(path) for path in PLAN.paths[:7]],
    },
    "dynamic": {"expected": [1.0, 1.6, 1.8, 2.0, 2.1, 2.15, 2.2, 2.25]},
    "dense": [{"widths": [1], "num_nodes": 2, "expected": 1.4}, {"widths": [3, 1], "num_nodes": 7, "expected": 1.9}],
}


@pytest.fixture
def tuner(model: TargetModel, tmp_path: Path) -> Tuner:
    return Tuner(
        model,
        tiny_head("hydra", model),
        PROMPTS,
        TuneSettings(max_new_tokens=24, batch_sizes=(1, 4), max_nodes=8, rounds=3),
        conditions=HERE,
        command="draftheads tune",
        folder=tmp_path,
        display=Silent(),
    )


def cost(kind: Any, num_nodes: int, seconds: float, *, batch_size: int = 1) -> Cost:
    return Cost(batch_size, kind, num_nodes, 0.0, seconds, 0.0)


class Bench:
    """Steps whose cost is known."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.seconds = seconds
        self.asked: list[tuple[str, int]] = []

    def __call__(self, *_: object) -> "Bench":
        return self

    def measure(self, way: Way, *, repeats: int) -> Cost:
        self.asked.append((way.kind, way.num_nodes))
        return cost(way.kind, way.num_nodes, self.seconds(way.num_nodes))


def test_sizes_next_to_the_best_one_are_measured(tuner: Tuner) -> None:
    bench = Bench(lambda nodes: 0.03)
    costs = [cost("none", 1, 0.03), cost("static", 2, 0.03), cost("static", 4, 0.03), cost("static", 8, 0.06)]
    found = tuner._between(bench, costs, FOUND, 1, 2)  # type: ignore[arg-type]
    assert sorted({one.num_nodes for one in found}) == [3, 6]
    assert {one.kind for one in found} == {"static", "dynamic"}
    assert tuner._between(bench, costs[:1], FOUND, 1, 2) == []  # type: ignore[arg-type]


def test_sizes_are_measured_up_to_where_they_are_hopeless(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner.head.config  # noqa: B018 - bound
    bench = Bench(lambda nodes: 0.03 if nodes < 8 else 1.0)
    monkeypatch.setattr(tune, "StepBench", bench)
    found = {kind: {"expected": [1.0 + 0.1 * n for n in range(40)]} for kind in ("static", "dynamic")}
    found["static"]["paths"] = [[n] for n in range(39)]  # type: ignore[assignment]
    costs = tuner._costs(1, [], found)
    assert max(one["num_nodes"] for one in costs) == 8
    assert bench.asked[0] == bench.asked[-1] == ("none", 1), "at both ends"
    sizes = [size for kind, size in bench.asked if kind == "static"]
    assert sizes[:6] == [2, 3, 4, 5, 6, 8]
    assert sizes[-6:] == [8, 6, 5, 4, 3, 2], "and backwards"
    again = tuner._costs(1, [], found)
    assert again == costs
    assert len(bench.asked) == len(bench.asked[:]), "kept in the workbook"


def test_whole_answers_are_timed_with_what_promises_most(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def speeds(target: object, head: object, ways: Sequence[Way], prompts: object, **options: Any) -> list[Any]:
        asked.update(options, ways=[(way.kind, way.num_nodes) for way in ways])
        return []

    monkeypatch.setattr(tune, "measure_speeds", speeds)
    costs = [
        cost("none", 1, 0.03),
        *(cost("static", n, 0.03 + 0.002 * n) for n in (2, 4, 8)),
        *(cost("dynamic", n, 0.09) for n in (2, 4, 8)),
        cost("static", 3, 0.001, batch_size=4),
    ]
    tuner._speeds(1, FOUND, costs)
    rates = {n: FOUND["static"]["expected"][n - 1] / (0.03 + 0.002 * n) for n in (2, 4, 8)}  # type: ignore[call-overload]
    best = sorted(rates, key=lambda n: -rates[n])[:2]
    assert asked["ways"] == [("none", 1), *(("static", n) for n in best), ("dynamic", 8)], "one of the other kind, too"
    assert asked["rounds"] == 3
    assert asked["num_tokens"] == 24 * 6 // 3
    assert asked["batch_size"] == 1
    tuner._speeds(4, FOUND, costs)
    assert asked["ways"] == [("none", 1), ("static", 3)]


def test_rates_are_tokens_by_seconds(tuner: Tuner) -> None:
    plan = replace(
        PLAN,
        paths=[list(path) for path in PLAN.paths[:7]],
        static_tokens=FOUND["static"]["expected"],
        dynamic_tokens=FOUND["dynamic"]["expected"],
        costs=[
            *(Cost(b, "none", 1, 0.0, 0.03, 0.0) for b in (1, 4)),
            *(Cost(b, "static", n, 0.001, 0.03 * b, 0.0) for b in (1, 4) for n in (2, 8)),
            Cost(1, "dynamic", 4, 0.002, 0.04, 0.0),
        ],
        choices=[Choice(1, "static", 2, 1.0, 1.0)],
    )
    rates = list(tuner._rates(FOUND, plan))
    assert [(row["batch_size"], row["kind"]) for row in rates] == list(
        itertools.product((1, 4), ("static", "dynamic", "dense"))
    )
    static, dynamic, dense = rates[:3]
    assert static["num_nodes"] == [2, 8]
    assert static["tokens_per_second"] == pytest.approx([1.5 / 0.031, 2.15 / 0.031])
    assert dynamic["tokens_per_second"] == pytest.approx([2.0 / 0.042])
    assert dense["num_nodes"] == [2, 7]
    assert dense["tokens_per_second"] == pytest.approx([1.4 / 0.031, 1.9 / 0.031])
    assert rates[3]["tokens_per_second"] == pytest.approx([4 * 1.5 / 0.121, 4 * 2.15 / 0.121])
    assert asdict(plan.costs[0])["batch_size"] == 1
    assert isinstance(tuner.head, DraftHead)
    assert torch.is_tensor(tuner.head.target_embedding)
