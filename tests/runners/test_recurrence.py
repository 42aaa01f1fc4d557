"""Recurrent layers in trees: bits of a node, states of rows, failures, other threads, and names in transformers."""

import importlib
import threading
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from draftheads.errors import UnsupportedModel
from draftheads.models.model import TargetModel
from draftheads.models.model_layers import FAMILIES, recurrent_modules
from draftheads.runners import bytes_of_states, runner_for
from draftheads.runners.mixers import convolution, delta_rule, mamba1, mamba2
from draftheads.runners.recurrence import Pass, StateCache, tree_pass
from draftheads.runners.transformers_runner import TransformersRunner
from families import HAS_RECURRENT, RECURRENT_FAMILIES, IntegerTokenizer, tiny_model

pytestmark = pytest.mark.skipif(not HAS_RECURRENT, reason="transformers has no functions that trees can follow")
ROWS, NODES, HEADS, SIZE = 2, 20, 4, 8
LONG = [(3 * n) % 20 for n in range(40)]
PLACES = slice(0, ROWS)
Function = Callable[[Pass, Tensor], Tensor]  # numbers of nodes (B, N, …) to their outputs (B, N, …)


def run_convolution(run: Pass, x: Tensor) -> Tensor:
    weight = torch.randn(x.shape[2], 4, generator=torch.Generator().manual_seed(1))
    return convolution(run, str, x.transpose(1, 2), weight, weight[:, 0], activation="silu").transpose(1, 2)


def run_delta_rule(run: Pass, x: Tensor) -> Tensor:
    query, key = x[..., :16].unflatten(2, (2, SIZE)), x[..., 16:32].unflatten(2, (2, SIZE))
    value, decay, beta = x[..., 32:64].unflatten(2, (HEADS, SIZE)), -x[..., 64:68].abs(), x[..., 68:72].sigmoid()
    return delta_rule(run, str, query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)[0]


def run_kimi_rule(run: Pass, x: Tensor) -> Tensor:
    query, key, value, decay = (x[..., 16 * i : 16 * (i + 1)].unflatten(2, (2, SIZE)) for i in range(4))
    return delta_rule(run, str, query, key, value, g=-decay.abs(), beta=x[..., 70:].sigmoid())[0]


def run_mamba2(run: Pass, x: Tensor) -> Tensor:
    inputs, key, query = x[..., :32].unflatten(2, (HEADS, SIZE)), x[..., None, 32:40], x[..., None, 40:48]
    options = {"D": torch.ones(HEADS), "dt_bias": torch.full((HEADS,), 0.3), "dt_softplus": True, "chunk_size": 8}
    return mamba2(run, str, inputs, x[..., 48:52], -torch.arange(1.0, 1 + HEADS), key, query, **options)[0]


def run_mamba1(run: Pass, x: Tensor) -> Tensor:
    inputs, dt, gate, key, query = (x[..., 16 * i : 16 * i + 16].transpose(1, 2) for i in (0, 1, 2, 3, 3))
    decay = -torch.arange(1.0, 1 + 16 * 16).view(16, 16) / 50
    return mamba1(run, str, inputs, dt, decay, key, query, torch.ones(16), z=gate, delta_softplus=True)[0].mT


FUNCTIONS: dict[str, Function] = {
    "convolution": run_convolution,
    "delta rule": run_delta_rule,
    "kimi rule": run_kimi_rule,
    "mamba2": run_mamba2,
    "mamba1": run_mamba1,
}


def random_trees(random: Random) -> tuple[Tensor, Tensor]:
    """Parents and depths (B, N) of trees; some nodes only fill up their row."""
    parents = [[0, *(random.randrange(max(0, node - 4), node) for node in range(1, NODES))] for _ in range(ROWS)]
    depths = [[0] * NODES for _ in range(ROWS)]
    for row in range(ROWS):
        for node in range(1, NODES - row):  # the last one of the second row fills up
            depths[row][node] = depths[row][parents[row][node]] + 1
    return torch.tensor(parents), torch.tensor(depths)


def path_to(node: int, parents: list[int], depths: list[int]) -> list[int]:
    path = [node]
    while depths[path[-1]]:
        path.append(parents[path[-1]])
    return path[::-1]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_node_has_the_bits_of_its_path_one_token_at_a_time(name: str) -> None:
    """Random trees of two rows, one after the other: each accepts a random path, one row sometimes nothing."""
    random, function = Random(3), FUNCTIONS[name]  # noqa: S311
    generator = torch.Generator().manual_seed(4)
    trees, steps = StateCache(1), [StateCache(1) for _ in range(ROWS)]
    trees.resize(ROWS, 128)
    for cache in steps:
        cache.resize(1, 128)
    for turn in range(6):
        parents, depths = random_trees(random)
        numbers = torch.randn(ROWS, NODES, 72, generator=generator)
        run = tree_pass(trees, PLACES, parents, depths)
        found = function(run, numbers)
        paths = []
        for row, cache in enumerate(steps):
            known = {key: state.clone() for key, state in cache.states.items()}
            chosen: list[int] = []
            for node in [*random.sample(range(1, NODES - 1), 6), random.randrange(NODES - 1)]:  # the last is accepted
                chosen = path_to(node, parents[row].tolist(), depths[row].tolist())
                for key, state in cache.states.items():
                    state.copy_(known.get(key, torch.zeros(())))
                for place in chosen:
                    single = tree_pass(cache, slice(0, 1), torch.tensor([[0]]), torch.tensor([[0]]))
                    out = function(single, numbers[row : row + 1, place : place + 1])
                    single.commit([[0]])
                assert torch.equal(out[0, 0], found[row, node])
            if row == turn == 1:  # nothing is accepted
                chosen = []
                for key, state in cache.states.items():
                    state.copy_(known[key])
            paths.append(chosen)
        run.commit(paths)
        for key, state in trees.states.items():
            assert torch.equal(state, torch.cat([cache.states[key] for cache in steps])), key


@pytest.fixture(params=RECURRENT_FAMILIES)
def model(request: pytest.FixtureRequest) -> TargetModel:
    return tiny_model(request.param)


def states_of(runner: TransformersRunner) -> dict[Any, Tensor]:
    assert isinstance(runner.cache, StateCache)
    return runner.cache.states


def test_texts_of_any_length_are_read_together_in_chunks(model: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """No padding enters a state, and chunks end anywhere."""
    monkeypatch.setattr("draftheads.runners.transformers_runner.CHUNK_TOKENS", 4)
    texts = [[5, 6, 7], [(3 * n) % 20 for n in range(23)], [9], [(7 * n) % 20 for n in range(12)]]
    runner = runner_for(model)
    rows, logits, _ = runner.prefill(texts)
    runner.read(rows[2:], [[4, 5], [6, 8, 2, 3, 1, 7]])
    texts = [texts[0], texts[1], [*texts[2], 4, 5], [*texts[3], 6, 8, 2, 3, 1, 7]]
    for row, text in enumerate(texts):
        if row < 2:
            expected = model.model(torch.tensor([text])).logits[0, -1]
            torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-4)
        alone = runner_for(model)
        alone.prefill([text])
        place = runner.order.index(rows[row])
        for key, state in states_of(runner).items():
            torch.testing.assert_close(state[place], states_of(alone)[key][0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", *RECURRENT_FAMILIES])
def test_rows_that_nothing_was_read_into_are_dropped_and_move(family: str) -> None:
    """The buffers do not have them yet, and one of them comes into the place of a row that has a state."""
    model = tiny_model(family)
    runner = runner_for(model)
    first, second = runner.prefill([[5, 6, 7], [8, 9]])[0]
    empty = [runner.open(500) for _ in range(4)]
    runner.drop([first, *empty[:2]])
    results = runner.read([second, *empty[2:]], [[4], [11, 12], [13]])
    for (hidden, _), text in zip(results, ([8, 9, 4], [11, 12], [13]), strict=True):
        expected = model.model(torch.tensor([text])).logits[0, -1]
        torch.testing.assert_close(model.logits(hidden[-1:])[0], expected, rtol=1e-4, atol=1e-4)


def test_reading_that_fails_leaves_states_as_they_were(model: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftheads.runners.transformers_runner.CHUNK_TOKENS", 4)
    runner = runner_for(model)
    rows, _, _ = runner.prefill([[5, 6, 7], [8, 9]])
    before = {key: state.clone() for key, state in states_of(runner).items()}
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:  # in the second chunk, behind the layer with a state
            raise MemoryError

    handle = model.layers[-1].register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        runner.read(rows, [[1] * 9, [2] * 7])
    handle.remove()
    for key, state in states_of(runner).items():
        assert torch.equal(state, before[key])


@pytest.mark.parametrize("num_old", [1, 2])
def test_a_new_row_has_no_state_of_others_after_reading_that_failed(num_old: int, model: TargetModel) -> None:
    """The row had no place when the pass began, which then made room for it."""

    def fail(*_: Any) -> None:
        raise MemoryError

    runner = runner_for(model)
    old, _, _ = runner.prefill([[5, 6, 7], [8, 9]][:num_old])
    before = {key: state[:num_old].clone() for key, state in states_of(runner).items()}
    new = runner.open(9)
    handle = model.layers[-1].register_forward_pre_hook(fail)
    for rows in ([*old[-1:], new], [new]):
        with pytest.raises(MemoryError):
            runner.read(rows, [[4] * 6] * len(rows))
    handle.remove()
    for key, state in states_of(runner).items():
        assert torch.equal(state[:num_old], before[key])
        assert not state[num_old].any()
    [(hidden, _)] = runner.read([new], [[3, 11, 12]])
    expected = model.model(torch.tensor([[3, 11, 12]])).logits[0, -1]
    torch.testing.assert_close(model.logits(hidden[-1]), expected, rtol=1e-4, atol=1e-4)


def test_a_text_goes_on_from_a_copy_of_another_one(model: TargetModel) -> None:
    """Bit for bit, in another runner that has states or none yet, whatever becomes of the first text."""
    runner = runner_for(model)
    _, row = runner.prefill([[4, 5], LONG])[0]
    known, states = runner.entries(row, row.length), runner.states(row)
    assert sum(state.nbytes for state in states.values()) == bytes_of_states(model, 1)
    expected = runner.read([row], [[7, 8, 9]])[0]
    for other in (runner_for(model), runner):
        if other is not runner:
            assert torch.equal(other.read([other.open(60, known, states)], [[7, 8, 9]])[0][0], expected[0])
        other.prefill([[9, 8, 7]])
        rows = [other.open(60, known, states) for _ in range(2)]
        assert [row.length for row in rows] == [len(LONG)] * 2
        for row in rows:  # the first one changes nothing that the second one begins with
            assert torch.equal(other.read([row], [[7, 8, 9]])[0][0], expected[0])
        assert all(
            torch.equal(state, known)
            for state, known in zip(other.states(rows[0]).values(), other.states(rows[1]).values(), strict=True)
        )


def test_other_threads_use_the_stock_functions(model: TargetModel) -> None:
    """A thread computes in the middle of our pass, with a cache of its own."""
    text = torch.tensor([[5, 6, 7, 8, 9]])
    modules = recurrent_modules(model.decoder)
    names = {(module, name): getattr(module, name, None) for module in modules for name in dir(module)}
    expected, found = model.model(text).logits, []

    def compute() -> None:
        handle.remove()
        found.append(model.model(text).logits)

    def meanwhile(*_: Any) -> None:
        assert any(getattr(module, name) is not stock for (module, name), stock in names.items())
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()

    handle = model.layers[-1].register_forward_pre_hook(meanwhile)
    runner_for(model).prefill([[5, 6, 7]])
    assert torch.equal(found[0], expected)
    assert all(getattr(module, name) is stock for (module, name), stock in names.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_functions_have_their_names(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a release of transformers renames one."""
    folder = family.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    assert all(hasattr(module, name) for name in FAMILIES[family])
    if family in RECURRENT_FAMILIES:
        stock = tiny_model(family).model
        monkeypatch.delattr(module, FAMILIES[family][-1])
        with pytest.raises(UnsupportedModel, match=f"its layers do not call {FAMILIES[family][-1]} in transformers"):
            TargetModel(stock, IntegerTokenizer(), "renamed")
