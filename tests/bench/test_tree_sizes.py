"""Static trees by size: what is measured is decoding with them, and the fastest measured one is chosen."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftheads.bench.table import Row
from draftheads.bench.timing import PLAIN
from draftheads.bench.tree_sizes import COLUMNS, fastest_tree, time_trees
from draftheads.decode.engine import Engine
from draftheads.drafters.mixed import Mixed
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.utils.progress import NoProgress, Progress
from fake_progress import FakeProgress
from families import TREES, by_hand, ids, tiny_head, tiny_profile, tokens_per_step

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[3 + row, 4, 5 + row % 7, 6] for row in range(6)]
PROFILE = tiny_profile(TREES["ragged"])
LARGEST = TREES["ragged"].num_nodes
SIZES = [size for size in (1, 2, 3, 4, 6, 8, 12, 16) if size < LARGEST] + [LARGEST]
COSTS = by_hand([("verify", 1, 1, 10.0), ("verify", 1, 2, 40.0), ("static", 1, 1, 5.0), ("static", 1, 2, 10.0)])


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
