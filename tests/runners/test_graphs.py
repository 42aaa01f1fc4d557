"""Static steps equal ordinary steps, need no value from the device, and are captured as graphs.

There need be no GPU: :class:`FakeCuda` stands for ``torch.cuda``.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from draftheads.decode.engine import Engine
from draftheads.models.model import StepMode, TargetModel
from draftheads.runners import runner
from draftheads.runners import transformers_runner as target
from draftheads.runners.graphs import Outputs, StaticOnly, StepGraphs, capture_for
from draftheads.speculation.draft import AcceptResult, Draft
from draftheads.speculation.tree import Tree
from fake_cuda import GPU, FakeCuda, Place
from families import (
    EIGHT,
    FAMILIES,
    GROWING,
    PROMPTS,
    TREES,
    VOCAB,
    PlantedDrafter,
    PlantedRandomTrees,
    tiny_head,
    tiny_model,
)
from target_rows import Target
from thorough import some


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Targets of models with static steps capture them, in caches that grow and shrink often."""
    fake = FakeCuda()
    fake.install(monkeypatch)
    monkeypatch.setattr(target, "capture_for", lambda _: fake.capture)
    monkeypatch.setattr(target, "STATIC_SLOTS", 32)
    monkeypatch.setattr(runner, "BLOCK_SLOTS", 16)
    return fake


def static(model: TargetModel) -> TargetModel:
    return replace(model, step_mode=StepMode(graphs=True))


@pytest.mark.few(8)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tree", ["ragged", "64 nodes"])
def test_static_steps_equal_ordinary_ones(family: str, tree: str) -> None:
    """Three rows of different lengths; after the first tree some nodes are kept, which moves entries."""
    model, shape = tiny_model(family), TREES[tree]
    ordinary, fixed = Target(model), Target(static(model))
    tokens = torch.randint(3, VOCAB, (3, shape.num_nodes), generator=torch.Generator().manual_seed(1))
    deepest = max(shape.paths, key=len)
    path = [shape.paths.index(deepest[:depth]) for depth in range(len(deepest) + 1)]
    verdict = AcceptResult(
        torch.tensor([path, [0] * len(path), path]), torch.tensor([len(path), 1, 2]), torch.tensor([4, 5, 6])
    )
    draft = Draft.on_tree(shape, tokens)
    for each in (ordinary, fixed):
        each.prefill(PROMPTS)
    for _ in range(3):
        for expected, found in zip(ordinary.verify(draft), fixed.verify(draft), strict=True):
            assert found.shape == expected.shape
            # sums over more slots, of which the others are exactly 0, are added in another order
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=3e-5)
        for each in (ordinary, fixed):
            each.commit(verdict, verdict.num_accepted.tolist())
    assert ordinary.lengths == fixed.lengths
    assert fixed.runner.cache.shape[1] % target.STATIC_SLOTS == 0


@pytest.mark.few(10)
@pytest.mark.parametrize(
    "action",
    [
        lambda x: x.sum().item(),
        lambda x: int(x.max()),
        lambda x: bool((x > 1).any()),
        lambda x: x[x > 1],
        lambda x: x.nonzero(),
        lambda x: torch.equal(x, x),
        lambda x: x.repeat_interleave(x),
        lambda x: x.index_put_((x > 1,), x[:2]),
        lambda x: x.to("meta"),
        lambda x: torch.empty(4, device="meta").copy_(x),
        lambda x: x[0].to("meta"),
        lambda x: torch.empty(4, device="meta").copy_(x[0]),
        lambda x: torch.ops.aten.lift_fresh(torch.empty(4, device="meta")),  # what torch.tensor ends with on a GPU
        lambda x: torch.where(torch.empty(4, dtype=torch.bool, device="meta"), x[0], 1),
        lambda x: torch.empty(4, device="meta")[x],
    ],
)
@pytest.mark.parametrize("inference", [True, False])
def test_operators_that_need_the_host_are_detected(action: Callable[[Tensor], object], inference: bool) -> None:
    with torch.inference_mode(inference), pytest.raises(RuntimeError, match="needs the host"), StaticOnly():
        action(torch.arange(4))


def test_operators_on_the_device_are_allowed() -> None:
    x = torch.arange(4)
    with StaticOnly():
        x[torch.tensor([0, 2])] = x[torch.tensor([1, 3])]
        x[x > 2] = 0
        assert x.to(torch.float32).dtype == torch.float32
        assert (torch.empty(4, device="meta") * torch.tensor(0.5)).is_meta, "a number is an argument of the kernel"
    assert x.tolist() == [1, 1, 0, 0]


# --- decoding ---


def decode(engine: Engine, **settings: object) -> list[tuple[int, ...]]:
    results = engine.generate(EIGHT, **{"max_new_tokens": 24, "ignore_eos": True, **settings})
    return [result.token_ids for result in results]


@pytest.mark.parametrize("batch_size", some([1, 3], 3))
@pytest.mark.parametrize("family", some(["llama", "mistral", "gpt2", "gemma3_text"], "mistral", "gpt2"))
def test_captured_steps_are_lossless(family: str, batch_size: int, cuda: FakeCuda) -> None:
    """Rows join and leave; trees change with every step; buffers move. Each path of a tree is accepted at some time."""
    model = tiny_model(family)
    plain = decode(Engine(model, max_batch_size=1))
    answers = {tuple(prompt): answer for prompt, answer in zip(EIGHT, plain, strict=True)}
    captured = static(model)
    assert decode(Engine(captured, max_batch_size=batch_size)) == plain
    for drafter, shape in (
        (PlantedDrafter(TREES["ragged"], answers), None),
        (PlantedRandomTrees(answers, max_nodes=24), None),
        (tiny_head("hydra", model), GROWING["best first"]),
        (tiny_head("eagle", model), None),
        (tiny_head("eagle3", model), None),
    ):
        before = len(cuda.tapes)
        assert decode(Engine(captured, drafter, shape=shape, max_batch_size=batch_size)) == plain
        assert len(cuda.tapes) > before
    assert sum(tape.num_replays for tape in cuda.tapes) > 100
    sampled = {"temperature": 1.0, "seed": 3}
    expected = decode(Engine(model, max_batch_size=1), **sampled)
    assert decode(Engine(captured, tiny_head("hydra", model), max_batch_size=batch_size), **sampled) == expected


def test_a_model_that_cannot_be_captured_has_no_graphs(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    """One line in the log, and no further attempt, by this batch or a later one."""
    model = tiny_model("llama")
    plain = decode(Engine(model))
    model.model.model.norm.register_forward_hook(lambda _, __, out: out if bool(out.isfinite().all()) else None)
    captured = static(model)
    assert decode(Engine(captured, max_batch_size=3)) == plain  # warnings are errors
    (line,) = caplog.messages
    assert re.search("without CUDA graphs: .* needs the host", line)
    assert not captured.has_static_steps
    assert decode(Engine(captured, max_batch_size=3)) == plain
    assert len(caplog.messages) == 1
    assert not cuda.tapes


@pytest.mark.parametrize("place", get_args(Place))
def test_entries_move_once_if_a_capture_fails(place: Place, cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    """The function has run by then. Moved again, the entries of other nodes would come to the places of the text."""
    model, tree = tiny_model("llama"), Tree.from_paths([(0,), (1,), (1, 0)])
    ordinary, captured = Target(model), Target(static(model))
    for each in (ordinary, captured):
        each.prefill([[5, 6, 7]])
    for step in range(3):
        draft = Draft.on_tree(tree, torch.tensor([[3 + step, 4, 5, 6]]))
        verdict = AcceptResult(torch.tensor([[0, 2, 3]]), torch.tensor([3]), torch.tensor([9]))
        expected, found = ordinary.verify(draft)[0], captured.verify(draft)[0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=3e-5)
        ordinary.commit(verdict, [3])
        if step == 1:  # the second time, which captures
            cuda.fails_at = place
        captured.commit(verdict, [3])
    assert caplog.messages == ["decoding goes on without CUDA graphs: CUDA out of memory"]
    assert not captured.model.has_static_steps


def test_a_capture_uses_the_device_of_the_model_and_a_stream_of_its_own(cuda: FakeCuda) -> None:
    graphs = StepGraphs(cuda.capture)
    for _ in range(2):
        graphs.run("a", 0, Doubling(), torch.ones(1))
    (tape,), usual = cuda.tapes, cuda.current_stream(GPU)
    assert tape.stream.device == GPU != cuda.current_stream().device
    assert tape.stream is not usual
    assert (tape.stream.waits_for, usual.waits_for) == ([usual], [tape.stream])


# --- bookkeeping ---


class Doubling:
    """A function, and how often it was run."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Outputs:
        self.calls += 1
        return (2 * x,)


def test_the_second_run_of_a_key_captures_and_further_ones_replay(cuda: FakeCuda) -> None:
    double = Doubling()
    graphs = StepGraphs(cuda.capture)
    found = [graphs.run("a", 0, double, torch.tensor([number]))[0] for number in range(5)]
    assert [int(one) for one in found] == [0, 2, 4, 6, 8], "results are copies"
    assert double.calls == 3, "once more for the capture, which computes nothing"
    assert cuda.tapes[0].num_replays == 3
    assert graphs.run("b", 0, double, torch.tensor([1.0, 2.0]))[0].tolist() == [2.0, 4.0]
    assert graphs.run("b", 0, double, torch.tensor([3.0, 2.0]))[0].tolist() == [6.0, 4.0]
    assert len(graphs) == 2
    assert cuda.pools == [None, "a pool"]


def test_graphs_are_dropped_with_their_generation(cuda: FakeCuda) -> None:
    double = Doubling()
    graphs = StepGraphs(cuda.capture)
    for generation in (0, 0, 0, 1, 1):
        graphs.run("a", generation, double, torch.ones(1))
    assert len(cuda.tapes) == 2
    assert cuda.pools == [None, None], "the pool of dropped graphs is gone"
    graphs.run("a", 2, double, torch.ones(1))
    assert len(graphs) == 0


def test_the_least_recently_used_graph_is_dropped(cuda: FakeCuda) -> None:
    graphs = StepGraphs(cuda.capture, limit=2)
    for key in "aabbacc":
        graphs.run(key, 0, Doubling(), torch.ones(1))
    assert len(graphs) == 2
    graphs.run("a", 0, Doubling(), torch.ones(1))
    assert len(cuda.tapes) == 3
    graphs.run("b", 0, Doubling(), torch.ones(1))
    assert len(cuda.tapes) == 4


def test_only_cuda_is_captured() -> None:
    assert capture_for(torch.device("cpu")) is None
    assert capture_for(torch.device("cuda", 0)) is not None
    assert not tiny_model("llama").has_static_steps


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graphs_give_the_results_of_the_function() -> None:
    model = tiny_model("llama")
    model.model.to("cuda")
    captured, plain = Target(static(model)), Target(replace(model, step_mode=StepMode(graphs=False)))
    tokens = torch.full((3, 8), 5, device="cuda")
    for each in (captured, plain):
        each.prefill(PROMPTS)
    for step in range(4):
        draft = Draft.on_tree(Tree.chain(7), (tokens + step) % VOCAB)
        for found, expected in zip(captured.verify(draft), plain.verify(draft), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        counts = torch.tensor([3, 1, 8], device="cuda")
        path = torch.arange(8, device="cuda").repeat(3, 1)
        for each in (captured, plain):
            each.commit(AcceptResult(path, counts, counts), counts.tolist())
    assert len(captured.runner.graphs) == 2
