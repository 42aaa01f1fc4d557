"""Recurrent layers of native passes: trees, chunks, copies and failures have the bits of plain texts."""

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from cpu.test_native import HYBRIDS, PRECISIONS, sped_up
from draftheads.decode.engine import Engine
from draftheads.models.model import TargetModel
from draftheads.runners import bytes_of_states, runner_for
from draftheads.runners.native_runner import NativeRunner
from draftheads.speculation.draft import AcceptResult, Draft
from families import GROWING, HAS_RECURRENT, PROMPTS, TREES, VOCAB, PlantedRandomTrees, needs_library, tiny_head
from runners.test_recurrence import NODES, ROWS, path_to, random_trees

pytestmark = [needs_library, pytest.mark.skipif(not HAS_RECURRENT, reason="transformers is too old")]
EXACT = ["fp32", "int8", "int4"]
LONG = [(3 * n) % 20 for n in range(40)]
LAYERS = (0, 1)


@pytest.fixture(params=[(family, precision) for family in HYBRIDS for precision in EXACT], ids="-".join)
def model(request: pytest.FixtureRequest) -> TargetModel:
    return sped_up(*request.param)[0]


def runner_of(model: TargetModel) -> NativeRunner:
    runner = runner_for(model, LAYERS)
    assert isinstance(runner, NativeRunner)
    return runner


def draft_of(tokens: Tensor, parents: Tensor, depths: Tensor) -> Draft:
    ancestors = torch.zeros(*parents.shape, parents.shape[1], dtype=torch.bool)
    for row in range(len(parents)):
        for node in range(parents.shape[1]):
            ancestors[row, node, path_to(node, parents[row].tolist(), depths[row].tolist())] = True
    return Draft(tokens, parents, depths, ancestors, int(depths.max()))


def accepting(paths: list[list[int]]) -> tuple[AcceptResult, list[int]]:
    width = max(map(len, paths))
    path = torch.tensor([[*path, *[0] * (width - len(path))] for path in paths])
    counts = [len(path) for path in paths]
    nothing = torch.zeros(len(paths), dtype=torch.long)
    return AcceptResult(path, torch.tensor(counts), nothing), counts


def states_of(runner: NativeRunner, row: Any) -> Tensor:
    [state] = runner.states(row).values()
    return state


def test_random_trees_have_the_bits_of_one_token_at_a_time(model: TargetModel, instructions: str, threads: int) -> None:
    """Two rows, tree after tree; each accepts a random path. Then both are read on, in chunks."""
    random, generator = Random(3), torch.Generator().manual_seed(4)  # noqa: S311
    together, alone = runner_of(model), [runner_of(model) for _ in range(ROWS)]
    rows = together.prefill([LONG[:7], LONG[:30]])[0]
    single = [runner.prefill([LONG[:7], LONG[:30]][row : row + 1])[0][0] for row, runner in enumerate(alone)]
    for turn in range(4):
        parents, depths = random_trees(random)
        tokens = torch.randint(0, VOCAB, (ROWS, NODES), generator=generator)
        hidden = together.verify(rows, draft_of(tokens, parents, depths))[1]
        paths = []
        for row, runner in enumerate(alone):
            chosen: list[int] = []
            for node in [*random.sample(range(1, NODES - 1), 3), random.randrange(NODES - 1)]:  # the last is accepted
                chosen = path_to(node, parents[row].tolist(), depths[row].tolist())
                copy = runner.open(200, runner.entries(single[row], single[row].length), runner.states(single[row]))
                for place in chosen:
                    root = draft_of(tokens[row, place].view(1, 1), *torch.zeros(2, 1, 1, dtype=torch.long))
                    assert torch.equal(runner.verify([copy], root)[1][0, 0], hidden[row, place])
                    runner.commit([copy], *accepting([[0]]))
            single[row] = copy
            paths.append(chosen)
        together.commit(rows, *accepting(paths))
        for row, runner in enumerate(alone):
            if turn % 2:  # so that records are also those of two trees
                assert torch.equal(states_of(together, rows[row]), states_of(runner, single[row]))
    found = together.read(rows, [LONG, LONG[:9]])
    for row, runner in enumerate(alone):
        for start in range(0, 40, 7):
            if part := [LONG, LONG[:9]][row][start : start + 7]:
                [(last, _)] = runner.read([single[row]], [part])
                assert torch.equal(last, found[row][0][start : start + 7])
        assert torch.equal(states_of(together, rows[row]), states_of(runner, single[row]))


def test_a_tree_that_nothing_was_taken_of_changes_nothing(model: TargetModel) -> None:
    random = Random(5)  # noqa: S311
    runner = runner_of(model)
    rows = runner.prefill([LONG[:7], LONG[:30]])[0]
    before = [states_of(runner, row) for row in rows]
    draft = draft_of(torch.arange(2 * NODES).view(2, -1) % VOCAB, *random_trees(random))
    first = runner.verify(rows, draft)
    for _ in range(2):
        assert all(map(torch.equal, first, runner.verify(rows, draft)))
        assert all(torch.equal(states_of(runner, row), state) for row, state in zip(rows, before, strict=True))


def test_a_text_goes_on_from_a_copy_of_another_one(model: TargetModel) -> None:
    runner = runner_of(model)
    _, row = runner.prefill([[4, 5], LONG])[0]
    known, states = runner.entries(row, row.length), runner.states(row)
    assert sum(state.nbytes for state in states.values()) == bytes_of_states(model, 1)
    expected = runner.read([row], [[7, 8, 9]])[0][0]
    for _ in range(2):  # the first one changes nothing that the second one begins with
        assert torch.equal(runner.read([runner.open(60, known, states)], [[7, 8, 9]])[0][0], expected)
    whole = runner.num_bytes
    runner.drop([row])
    assert whole - runner.num_bytes == row.memory.nbytes + bytes_of_states(model, 1)


def test_reading_that_fails_leaves_states_as_they_were(model: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftheads.runners.native_runner.CHUNK_TOKENS", 4)
    runner = runner_of(model)
    rows = runner.prefill([LONG[:7], LONG[:30]])[0]
    root = draft_of(torch.tensor([[3], [4]]), *torch.zeros(2, 2, 1, dtype=torch.long))
    runner.verify(rows, root)
    runner.commit(rows, *accepting([[0], [0]]))
    with pytest.raises(IndexError):
        runner.read(rows, [[1] * 9, [2] * 6 + [VOCAB]])
    other = runner_of(model)
    expected = other.prefill([[*LONG[:7], 3, 5, 6], [*LONG[:30], 4, 7]])[0]
    found = runner.read(rows, [[5, 6], [7]])
    assert len(found) == 2
    for row, right in zip(rows, expected, strict=True):
        assert torch.equal(states_of(runner, row), states_of(other, right))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", HYBRIDS)
def test_drafted_texts_are_plain_texts(family: str, precision: str) -> None:
    model, _ = sped_up(family, precision)
    settings: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
    plain = Engine(model).generate(PROMPTS, **settings)
    expected = {tuple(prompt): tuple(one.token_ids) for prompt, one in zip(PROMPTS, plain, strict=True)}
    shapes = [TREES["chain"], TREES["ragged"], *GROWING.values()]
    engines = [Engine(model, tiny_head("hydra", model), shape=shape) for shape in shapes]
    for engine in (*engines, Engine(model, PlantedRandomTrees(expected, max_nodes=12))):
        found = engine.generate(PROMPTS, **settings)
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in plain]
