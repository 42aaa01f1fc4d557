"""The KV cache and the masks equal slow references; memory is measured in bytes."""

from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftheads.decode.engine import Engine
from draftheads.models.model import TargetModel
from draftheads.runners import bytes_of_states, bytes_per_slot, num_slots, runner_for, transformers_runner
from draftheads.runners.runner import BLOCK_SLOTS
from draftheads.runners.transformers_runner import TransformersRunner, held_rows, tree_visibility, within_window
from draftheads.speculation.draft import AcceptResult, Draft
from draftheads.speculation.tree import Tree
from families import FAMILIES, PROMPTS, RECURRENT_FAMILIES, TREES, VOCAB, PlantedDrafter, tiny_model
from target_rows import Target

LAYERS, KV_HEADS, HEAD_SIZE = 2, 2, 8  # of the tiny llama


def expected_bytes(rows: int, slots: int, *, itemsize: int = 4) -> int:
    """Keys and values of all layers, in whole blocks of slots."""
    blocks = -(-slots // BLOCK_SLOTS)
    return rows * blocks * BLOCK_SLOTS * LAYERS * 2 * KV_HEADS * HEAD_SIZE * itemsize


@pytest.fixture(scope="module")
def model() -> TargetModel:
    """Made for long texts: what a cache of the model's maximum would need is far above what a test sees."""
    return tiny_model("llama", max_position_embeddings=8192)


# --- bytes ---


def test_memory_is_reserved_for_every_row_and_type():
    for dtype, itemsize in ((torch.float32, 4), (torch.bfloat16, 2)):
        target = Target(tiny_model("llama", dtype=dtype))
        assert target.num_bytes == 0
        target.prefill([[5, 6, 7], [8] * 130])
        assert target.num_bytes == expected_bytes(2, 130, itemsize=itemsize)
        target.prefill([[9]])
        assert target.num_bytes == expected_bytes(held_rows(3), 130, itemsize=itemsize)


def test_memory_grows_in_blocks(model: TargetModel):
    target = Target(model)
    target.prefill([[5] * (BLOCK_SLOTS - 3), [6]])
    sizes = []
    zeros = torch.zeros(2, 1, dtype=torch.long)
    for _ in range(6):  # plain steps: the root alone is read and kept
        target.verify(Draft.on_tree(Tree.chain(0), zeros + 5))
        target.commit(AcceptResult(zeros, zeros[:, 0] + 1, zeros[:, 0]), [1, 1])
        sizes.append(target.num_bytes)
    one, two = expected_bytes(2, BLOCK_SLOTS), expected_bytes(2, BLOCK_SLOTS + 1)
    assert sizes == [one, one, one, two, two, two]
    assert target.lengths == [BLOCK_SLOTS + 3, 7]


def test_memory_shrinks_with_the_rows(model: TargetModel):
    target = Target(model)
    target.prefill([[5] * 3, [6] * 300, [7] * 140])
    assert target.num_bytes == expected_bytes(4, 300)
    buffer = target.runner.cache.buffers[0]
    target.prefill([[8] * 2])
    assert target.runner.cache.buffers[0] is buffer, "there was room for a row"
    for rows, held, longest in (([0, 1, 3], 4, 300), ([0, 1], 2, 300), ([0], 1, 3), ([], 0, 0)):
        target.keep(rows)
        assert target.num_bytes == expected_bytes(held, longest)
    target.prefill([[5] * 3])
    assert target.num_bytes == expected_bytes(1, 3)


@pytest.mark.parametrize("name", [*FAMILIES, *RECURRENT_FAMILIES])
@pytest.mark.parametrize("fast", [False, True])
def test_bytes_are_known_from_the_configuration(name: str, fast: bool):
    """Of tokens, and of the states of recurrent layers."""
    model = tiny_model(name)
    model = model.sped_up() if fast else model
    target = Target(model)
    target.prefill([[5] * 3, [6] * 130, [7]])
    of_tokens, of_states = num_slots(model, [3, 130, 1]) * bytes_per_slot(model), bytes_of_states(model, 3)
    assert target.num_bytes == of_tokens + of_states > of_states
    assert bool(of_states) == (name in RECURRENT_FAMILIES)
    model.step_mode.graphs = True
    assert model.has_static_steps == (not of_states)


@pytest.mark.parametrize("fast", [False, True])
def test_rows_keep_their_entries_whatever_order_they_are_asked_in(fast: bool):
    """Rows that are read, stepped, dropped and begun from others' entries, in any order."""
    model = tiny_model("llama")
    model = model.sped_up() if fast else model
    runner, texts, random = runner_for(model), {}, Random(1)  # noqa: S311
    tokens = partial(random.randrange, 3, 20)
    for _ in range(60):
        action = random.choice(["open", "copy", "read", "step", "drop"])
        rows = random.sample(list(texts), min(len(texts), random.randrange(1, 4)))
        if action == "open" or not rows:
            row = runner.open(500)
            texts[row] = [tokens() for _ in range(random.randrange(1, 140))]
            runner.read([row], [texts[row]])
        elif action == "copy":
            count = random.randrange(1, len(texts[rows[0]]) + 1)
            texts[runner.open(500, runner.entries(rows[0], count))] = texts[rows[0]][:count]
        elif action == "read":
            more = [[tokens() for _ in range(random.randrange(1, 20))] for _ in rows]
            for row, ids, (hidden, _) in zip(rows, more, runner.read(rows, more), strict=True):
                texts[row] = texts[row] + ids
                check_states(model, texts[row], hidden[-1])
        elif action == "step":
            chosen = torch.tensor([[tokens(), tokens(), tokens()] for _ in rows])
            hidden = runner.verify(rows, Draft.on_tree(Tree.from_paths([(0,), (1,)]), chosen))[1]
            path = torch.tensor([[0, 2]] * len(rows))
            runner.commit(rows, AcceptResult(path, path[:, 0] + 2, path[:, 0]), [2] * len(rows))
            for row, ids, states in zip(rows, chosen[:, [0, 2]].tolist(), hidden, strict=True):
                texts[row] = texts[row] + ids
                check_states(model, texts[row], states[2])
        else:
            runner.drop(rows)
            for row in rows:
                del texts[row]
        assert {row: row.length for row in texts} == {row: len(ids) for row, ids in texts.items()}


def check_states(model: TargetModel, text: list[int], last: Tensor) -> None:
    expected = model.hidden_states(torch.tensor([text]))[0, -1]
    torch.testing.assert_close(last, expected, rtol=0, atol=1e-4)


def test_memory_of_a_generation_is_bounded_at_every_step(model: TargetModel, monkeypatch: pytest.MonkeyPatch):
    """Rows of different lengths join, grow by several tokens a step, and leave; nothing is left in the end."""
    prompts = [*PROMPTS, [4] * 125, [8, 9]]
    sampling = {"max_new_tokens": 12, "ignore_eos": True}
    plain = [result.token_ids for result in Engine(model).generate(prompts, **sampling)]
    tree = TREES["64 nodes"]
    seen: list[tuple[int, int]] = []
    targets: list[TransformersRunner] = []
    verify = TransformersRunner.verify

    def watched(target: TransformersRunner, rows: Any, draft: Draft) -> Any:
        result = verify(target, rows, draft)
        bound = expected_bytes(held_rows(len(target.order)), max(row.length for row in target.order) + draft.num_nodes)
        seen.append((target.num_bytes, bound))
        targets.append(target)
        return result

    monkeypatch.setattr(TransformersRunner, "verify", watched)
    planted = PlantedDrafter(tree, {tuple(prompt): answer for prompt, answer in zip(prompts, plain, strict=True)})
    results = Engine(model, planted, max_batch_size=2).generate(prompts, **sampling)
    assert [result.token_ids for result in results] == plain
    assert all(bound <= measured < 2 * bound for measured, bound in seen)
    assert len({bound for _, bound in seen}) > 2, "rows never grew or left"
    assert targets[-1].num_bytes == 0


def test_prompts_are_read_in_groups(monkeypatch: pytest.MonkeyPatch):
    """Neighbours share a pass until it is full; a longer prompt has its own."""
    monkeypatch.setattr(transformers_runner, "PASS_TOKENS", 60)
    model = tiny_model("llama")
    prompts = [[(3 * token + row) % VOCAB for token in range(length)] for row, length in enumerate((9, 10, 20, 21, 70))]
    alone = [Target(model).prefill([prompt]) for prompt in prompts]
    read: list[tuple[int, ...]] = []
    run = TargetModel.run

    def spying(target: TargetModel, layers: Any, **inputs: Any) -> Any:
        read.append(tuple(inputs["input_ids"].shape))
        return run(target, layers, **inputs)

    monkeypatch.setattr(TargetModel, "run", spying)
    target = Target(model)
    logits, hidden = target.prefill(prompts)
    assert read == [(3, 20), (1, 21), (1, 70)]
    assert target.lengths == [9, 10, 20, 21, 70]
    assert hidden.shape[:2] == (5, 70)
    for row, (expected, states) in enumerate(alone):
        torch.testing.assert_close(logits[row], expected[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(hidden[row, : states.shape[1]], states[0], rtol=1e-4, atol=1e-4)


# --- the masks against loops ---


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[int], list[list[int]], int]:
    """Lengths of rows; parents of nodes, for each row or shared by all; the span."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    nodes = draw(st.integers(1, 5))
    trees = 1 if draw(st.booleans()) else len(lengths)
    parents = [[0, *(draw(st.integers(0, node - 1)) for node in range(1, nodes))] for _ in range(trees)]
    span = max(lengths) + nodes + draw(st.integers(0, 3))
    return lengths, parents, span


def paths_of(parents: list[int]) -> list[set[int]]:
    """Each node's ancestors, itself included."""
    paths = [{0}]
    for node in range(1, len(parents)):
        paths.append({*paths[parents[node]], node})
    return paths


def ancestors_of(trees: list[list[int]]) -> Tensor:
    return torch.tensor([[[m in path for m in range(len(tree))] for path in paths_of(tree)] for tree in trees])


@given(world=worlds())
@settings(deadline=None)
def test_a_node_attends_to_the_text_and_its_path(world: tuple[list[int], list[list[int]], int]):
    lengths, trees, span = world
    found = tree_visibility(torch.tensor(lengths), ancestors_of(trees), span)
    for row, length in enumerate(lengths):
        for node, path in enumerate(paths_of(trees[row % len(trees)])):
            expected = [slot < length or slot - length in path for slot in range(span)]
            assert found[row, node].tolist() == expected


@given(world=worlds(), window=st.integers(1, 8))
@settings(deadline=None)
def test_a_sliding_layer_attends_to_the_last_positions(world: tuple[list[int], list[list[int]], int], window: int):
    """Positions go by depth: two nodes of one depth stand at one position, wherever their slots are."""
    lengths, trees, span = world
    depths = torch.tensor([[len(path) - 1 for path in paths_of(tree)] for tree in trees])
    found = within_window(torch.tensor(lengths), depths, span, window)
    for row, length in enumerate(lengths):
        own = depths[row % len(trees)].tolist()
        for node, depth in enumerate(own):
            for slot in range(length + len(own)):  # slots beyond are no one's, and never visible
                position = slot if slot < length else length + own[slot - length]
                assert bool(found[row, node, slot]) == (length + depth - position < window)
