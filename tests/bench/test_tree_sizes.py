"""Static trees by size: what is measured is decoding with them, and the fastest measured one is chosen."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftheads.bench import tree_sizes
from draftheads.bench.rounds import Bench
from draftheads.bench.table import Row
from draftheads.bench.timing import PLAIN
from draftheads.bench.tree_sizes import COLUMNS, Synthetic, fastest_tree, forecast, synthetic_engine, time_trees
from draftheads.decode.engine import Engine
from draftheads.decode.step_costs import StepCosts, StepTimer, read_costs
from draftheads.drafters.mixed import Mixed
from draftheads.errors import CheckpointCorrupt
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.search.replay import Answer
from draftheads.speculation.acceptance_profile import AcceptanceProfile
from draftheads.utils.progress import NoProgress, Progress
from fake_progress import FakeProgress
from families import TREES, by_hand, ids, tiny_head, tiny_profile, tokens_per_step
from joint_world import on_disk

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[3 + row, 4, 5 + row % 7, 6] for row in range(6)]
PROFILE = tiny_profile(TREES["ragged"])
LARGEST = TREES["ragged"].num_nodes
SIZES = [size for size in (1, 2, 3, 4, 6, 8, 12, 16) if size < LARGEST] + [LARGEST]
COSTS = by_hand([("verify", 1, 1, 10.0), ("verify", 1, 2, 40.0), ("static", 1, 1, 5.0), ("static", 1, 2, 10.0)])


asked: list[StepTimer] = []  # the timers that costs were measured with


@pytest.fixture(scope="module", autouse=True)
def costs_by_hand() -> Iterator[None]:
    def measured(target: TargetModel, head: DraftHead, *, timer: StepTimer) -> StepCosts:
        assert (timer.target, timer.drafter) == (target, head)
        asked.append(timer)
        return COSTS

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_sizes, "measure_costs", measured)
        yield


@pytest.fixture(scope="module")
def head(model: TargetModel) -> DraftHead:
    return tiny_head("hydra", model)


def measured(
    model: TargetModel, head: DraftHead, folder: Path, *batch_sizes: int, progress: Progress | None = None
) -> dict[int, list[Row]]:
    """By an engine as ``tune`` leaves it: with copies, which are not measured."""
    engine = Engine(model, Mixed(head), profile=PROFILE, costs=COSTS)
    rows, problems = time_trees(engine, batch_sizes, PROMPTS, folder=folder, progress=progress or NoProgress())
    assert problems == [] or max(batch_sizes) > len(PROMPTS)
    return rows


@pytest.fixture(scope="module")
def found(model: TargetModel, head: DraftHead, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Row]]:
    return measured(model, head, tmp_path_factory.mktemp("found"), 1, 2)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_measured_rows_are_decodes_with_the_nested_trees(
    model: TargetModel, head: DraftHead, found: dict[int, list[Row]], batch_size: int
):
    rows = found[batch_size]
    assert [row.numbers["num_nodes"] for row in rows] == SIZES
    plain = Engine(model).generate(PROMPTS, max_new_tokens=64)
    assert (rows[0].name, rows[0].tokens_per_step) == (PLAIN, 1.0)
    for nodes, row in zip(SIZES[1:], rows[1:], strict=True):
        results = Engine(model, head, shape=PROFILE.tree(nodes), max_batch_size=batch_size).generate(
            PROMPTS, max_new_tokens=64
        )
        assert row.tokens_per_step == pytest.approx(tokens_per_step(results))
        assert row.tokens_per_step != row.predicted_tokens_per_step
        assert ids(results) == ids(plain)
        assert row.same_text == "6 of 6"
        assert row.num_tokens == sum(map(len, ids(plain)))
    assert rows[-1].tokens_per_step > 1.0


def test_predictions_stand_beside_them(found: dict[int, list[Row]]):
    for batch_size, rows in found.items():
        for nodes, row in zip(SIZES, rows, strict=True):
            depth = max(map(len, PROFILE.paths[: nodes - 1]), default=0)
            milliseconds = COSTS.passes(np.array([batch_size * nodes]))[0] + COSTS.draft(batch_size, depth)
            tokens = PROFILE.static_tokens[nodes - 1]
            assert row.predicted_tokens_per_step == tokens
            assert row.number("predicted_tokens_per_second") == pytest.approx(1e3 * batch_size * tokens / milliseconds)
            cells = [column.cell(row) for column in COLUMNS]
            assert cells[:3] == [str(nodes), f"{tokens:.2f}", COLUMNS[2].cell(row)]
            assert cells[3] == f"{row.number('predicted_tokens_per_second'):.1f}"
            assert cells[4].startswith(f"{row.decode_tokens_per_second:.1f}")
            assert ("(" in cells[4]) == (batch_size == 1), "six groups of one prompt, or one of six"


def test_costs_are_those_of_static_trees_and_of_texts_as_long_as_these(
    model: TargetModel, head: DraftHead, tmp_path: Path
):
    """The prompt that is in the middle, and half of an answer. Costs of the engine are not used."""
    prompts, others = [[3 + row] * length for row, length in enumerate((5, 70, 9))], StepCosts(((1, 1.0), (2, 1.0)))
    engine = Engine(model, Mixed(head), profile=PROFILE, costs=others)
    rows, _ = time_trees(engine, (1,), prompts, folder=tmp_path, progress=NoProgress())
    assert (asked[-1].length, asked[-1].grows) == (9 + 32, False)
    assert rows[1][0].number("predicted_tokens_per_second") == pytest.approx(1e3 / COSTS.passes([1])[0])


def test_costs_are_measured_before_and_after_and_the_mean_of_both_predictions_counts(
    model: TargetModel, head: DraftHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A machine that is twice as slow at the end."""
    slower = by_hand([("verify", 1, 1, 20.0), ("verify", 1, 2, 80.0), ("static", 1, 1, 10.0), ("static", 1, 2, 20.0)])
    events: list[str] = []

    def next_costs(*_: Any, **__: Any) -> StepCosts:
        events.append("costs")
        return COSTS if len(events) == 1 else slower

    def run(bench: Bench) -> Iterator[Row]:
        events.append("answers")
        yield from timed(bench)

    timed = Bench.run
    monkeypatch.setattr(tree_sizes, "measure_costs", next_costs)
    monkeypatch.setattr(Bench, "run", run)
    (rows,) = measured(model, head, tmp_path, 1).values()
    assert events == ["costs", "answers", "costs"]
    assert rows[0].number("predicted_tokens_per_second") == pytest.approx((100 + 50) / 2)
    assert rows[1].number("predicted_tokens_per_second") == pytest.approx(
        1.5 * 1e3 * PROFILE.static_tokens[1] / (40 + 5) / 2
    )


def test_the_fastest_tree_is_the_fastest_measured_one(model: TargetModel, head: DraftHead, tmp_path: Path, clock: Any):
    """A step takes 2.5 seconds with any tree; the costs predict that nodes are expensive."""
    (rows,) = measured(model, head, tmp_path, 1).values()
    for row in rows:
        assert row.decode_tokens_per_second == pytest.approx(row.tokens_per_step / 2.5)
    assert fastest_tree(rows, "predicted_tokens_per_second")[0] == 1
    nodes, best = fastest_tree(rows)
    assert nodes > 1
    assert best.tokens_per_step == max(row.tokens_per_step for row in rows)
    assert best.numbers["num_nodes"] == nodes


def saved_files(folder: Path) -> Sequence[Path]:
    return sorted(folder.glob("*/timed-*.json"))


def test_a_stopped_measurement_continues_with_the_prompts_that_are_left(
    model: TargetModel, head: DraftHead, tmp_path: Path
):
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(model, head, tmp_path, 1, progress=FakeProgress(after=2, action=stop, stage="timing"))
    assert len(saved_files(tmp_path)) == 2
    slow = json.loads(saved_files(tmp_path)[0].read_text())
    for answers in slow.values():
        answers[0]["seconds"] += 1e6
    saved_files(tmp_path)[0].write_text(json.dumps(slow))
    (rows,) = measured(model, head, tmp_path, 1).values()
    assert all(row.decode_tokens_per_second < 1e-2 for row in rows), "what was saved is used"
    assert saved_files(tmp_path) == [], "the next measurement is a new one"


def test_a_batch_size_that_the_prompts_cannot_fill_is_a_problem(model: TargetModel, head: DraftHead, tmp_path: Path):
    engine = Engine(model, head, profile=PROFILE, costs=COSTS)
    rows, problems = time_trees(engine, (1, 8), PROMPTS[:3], folder=tmp_path, progress=NoProgress())
    assert list(rows) == [1, 8]
    assert [each["problem"] for each in problems] == ["batch size 8: 3 prompts cannot fill it"]


def test_a_head_without_an_accepted_token_has_no_trees_to_time(model: TargetModel, head: DraftHead, tmp_path: Path):
    profile = tiny_profile(TREES["ragged"], paths=[], static_tokens=[1.0])
    engine = Engine(model, head, profile=profile, costs=COSTS)
    rows, [problem] = time_trees(engine, (1,), PROMPTS, folder=tmp_path, progress=NoProgress())
    assert rows == {}
    assert "no draft token of the head was accepted" in problem["problem"]


def test_trees_are_timed_at_the_temperature_of_the_profile(model: TargetModel, head: DraftHead, tmp_path: Path):
    engine = Engine(model, head, profile=tiny_profile(TREES["ragged"], temperature=0.8), costs=COSTS)
    rows, _ = time_trees(engine, (1,), PROMPTS[:3], folder=tmp_path, progress=NoProgress())
    assert [row.settings["temperature"] for row in rows[1]] == [0.8] * len(SIZES)
    assert [row.num_different for row in rows[1]] == [0] * len(SIZES), "the same seeds"


# --- a head that nobody has trained ---

RATES = [0.8, 0.6, 0.5]
OF_RATES = AcceptanceProfile.of_rates(RATES)
PRINTED = Path(__file__).parents[2] / "examples" / "costs"


@pytest.mark.parametrize("method", ["hydra", "eagle", "dspark"])
def test_synthetic_drafts_are_accepted_as_often_as_said_and_change_no_text(model: TargetModel, method: str) -> None:
    """Also in batches; heads that read the whole text draft, too."""
    plain = Engine(model).generate(PROMPTS, max_new_tokens=90)
    answers = [Answer(tuple(ids), result.token_ids) for ids, result in zip(PROMPTS, plain, strict=True)]
    drafter = Synthetic(tiny_head(method, model), RATES, answers)
    for nodes, batch_size in ((2, 1), (4, 3), (8, 1)):
        engine = Engine(model, drafter, shape=OF_RATES.tree(nodes), max_batch_size=batch_size)
        found = engine.generate(PROMPTS, max_new_tokens=90)
        assert [each.token_ids for each in found] == [each.token_ids for each in plain]
        per_step = sum(len(each.token_ids) - 1 for each in found) / sum(each.num_steps for each in found)
        assert per_step == pytest.approx(OF_RATES.static_tokens[nodes - 1], rel=0.06)


def test_a_profile_of_rates_has_the_most_frequent_paths() -> None:
    profile = AcceptanceProfile.of_rates([0.8, 0.5], 5)
    assert profile.paths == [[0], [0, 0], [0, 1], [1]]
    assert profile.static_tokens == pytest.approx([1.0, 1.8, 2.2, 2.4, 2.56])


def test_an_untrained_head_is_timed_with_its_predictions(tmp_path: Path) -> None:
    name = on_disk(tmp_path / "model")
    engine = synthetic_engine(name, "hydra", AcceptanceProfile.of_rates(RATES, 6), tmp_path / "head", "fp32")
    plain = Engine(engine.model).generate(PROMPTS, max_new_tokens=64)
    answers = [Answer(tuple(ids), result.token_ids) for ids, result in zip(PROMPTS, plain, strict=True)]
    assert isinstance(engine.drafter, DraftHead)
    drafter = Synthetic(engine.drafter, RATES, answers)
    rows, problems = time_trees(engine, [1], PROMPTS, folder=tmp_path, progress=NoProgress(), drafter=drafter)
    assert not problems
    assert [row.numbers["num_nodes"] for row in rows[1]] == [1, 2, 3, 4, 6]
    assert [row.tokens_per_step for row in rows[1]] == pytest.approx([1, 1.8, 2.28, 2.52, 2.87], rel=0.08)
    assert all(row.num_different == 0 for row in rows[1])


def test_a_forecast_is_tokens_per_millisecond_of_the_costs() -> None:
    costs = StepCosts(((1, 10.0), (4, 12.0)), ((1, 1, 1.0), (1, 3, 2.0)))
    rows = {int(row.numbers["num_nodes"]): row for row in forecast(OF_RATES, costs)}
    assert rows[1].numbers["predicted_tokens_per_second"] == pytest.approx(100.0)
    assert rows[4].predicted_tokens_per_step == pytest.approx(2.52)
    assert rows[4].numbers["predicted_speedup"] == pytest.approx(2.52 * 10 / 14)


@pytest.mark.parametrize(
    ("file", "tokens_per_step", "speedup"),
    [("hydra", 3.58, 2.70), ("medusa", 2.52, 2.70 / 1.27)],  # Amphista, table 5; Hydra, section 6
)
def test_printed_costs_and_acceptance_give_the_printed_speedups(
    file: str, tokens_per_step: float, speedup: float
) -> None:
    costs = read_costs(PRINTED / f"a100-vicuna-7b-{file}.json")
    step = float(costs.passes(64)) + costs.draft(1, 4)
    assert tokens_per_step * float(costs.passes(1)) / step == pytest.approx(speedup, rel=0.1)


@pytest.mark.parametrize(
    ("rows", "candidates", "milliseconds", "tokens_per_step"),
    [(2, 1, 6.32, 2.21), (2, 4, 5.91, 2.67), (2, 16, 7.62, 2.96), (4, 1, 6.78, 2.21), (4, 4, 6.95, 2.67)],
)
def test_costs_of_one_request_give_those_of_batches_of_the_same_tokens(
    rows: int, candidates: int, milliseconds: float, tokens_per_step: float
) -> None:
    """MLP Speculator, table 1, prompts of 64 tokens. With four rows and 8 candidates or more it is 12 to 15 % more."""
    costs = read_costs(PRINTED / "a100-llama2-7b-ibm.json")
    found = float(costs.passes(rows * candidates * 4)) / tokens_per_step
    assert found == pytest.approx(milliseconds, rel=0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format_version": 12, "of_passes": [[2, 1.0]], "of_drafts": []}', "the milliseconds of a pass of one token"),
        ('{"format_version": 12, "of_passes": [[1, 1.0]]}', "of_drafts"),
        ('{"format_version": 12, "of_passes": [[1, -1.0]], "of_drafts": []}', "must be above 0"),
        ('{"format_version": 12, "of_passes": [[1, 1.0]], "of_drafts": [], "speed": 2}', "speed"),
    ],
)
def test_a_file_of_costs_that_cannot_be_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(CheckpointCorrupt, match=message):
        read_costs(tmp_path / "costs.json")
