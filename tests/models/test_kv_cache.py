"""The KV cache and the masks equal slow references; memory is measured in bytes."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftheads.decode.engine import Engine
from draftheads.models import kv_target
from draftheads.models.kv_cache import BLOCK_SLOTS, SlotCache
from draftheads.models.kv_target import Target
from draftheads.models.masks import as_float_mask, tree_visibility, within_window
from draftheads.models.model import TargetModel
from draftheads.speculation.draft import AcceptResult, Draft
from draftheads.speculation.tree import Tree
from families import PROMPTS, TREES, PlantedDrafter, tiny_model

LAYERS, KV_HEADS, HEAD_SIZE = 2, 2, 8  # of the tiny llama


def expected_bytes(rows: int, slots: int, *, itemsize: int = 4) -> int:
    """Keys and values of all layers, in whole blocks of slots."""
    blocks = -(-slots // BLOCK_SLOTS)
    return rows * blocks * BLOCK_SLOTS * LAYERS * 2 * KV_HEADS * HEAD_SIZE * itemsize


@pytest.fixture(scope="module")
def model() -> TargetModel:
    """Made for long texts: what a cache of the model's maximum would need is far above what a test sees."""
    return tiny_model("llama", max_position_embeddings=8192)


def advance(target: Target) -> None:
    """One plain step: the root alone is read and kept."""
    rows = target.num_rows
    zeros = torch.zeros(rows, 1, dtype=torch.long)
    target.verify(Draft.on_tree(Tree.chain(0), zeros + 5))
    target.commit(AcceptResult(zeros, zeros[:, 0] + 1, zeros[:, 0]), [1] * rows)


# --- bytes ---


def test_memory_depends_on_the_text_not_on_the_models_maximum(model: TargetModel):
    for num_tokens in (1, 100, BLOCK_SLOTS, BLOCK_SLOTS + 1, 300):
        target = Target(model)
        target.prefill([[5] * num_tokens])
        assert target.cache.num_bytes == expected_bytes(1, num_tokens)
    assert target.cache.num_bytes < expected_bytes(1, 8192) / 20


def test_memory_is_reserved_for_every_row_and_type():
    for dtype, itemsize in ((torch.float32, 4), (torch.bfloat16, 2)):
        target = Target(tiny_model("llama", dtype=dtype))
        assert target.cache.num_bytes == 0
        target.prefill([[5, 6, 7], [8] * 130])
        assert target.cache.num_bytes == expected_bytes(2, 130, itemsize=itemsize)
        target.prefill([[9]])
        assert target.cache.num_bytes == expected_bytes(3, 130, itemsize=itemsize)


def test_memory_grows_in_blocks(model: TargetModel):
    target = Target(model)
    target.prefill([[5] * (BLOCK_SLOTS - 3), [6]])
    sizes = []
    for _ in range(6):
        advance(target)
        sizes.append(target.cache.num_bytes)
    one, two = expected_bytes(2, BLOCK_SLOTS), expected_bytes(2, BLOCK_SLOTS + 1)
    assert sizes == [one, one, one, two, two, two]
    assert target.lengths == [BLOCK_SLOTS + 3, 7]


def test_memory_shrinks_when_less_than_half_of_it_is_needed(model: TargetModel):
    target = Target(model)
    target.prefill([[5] * 3, [6] * 300, [7] * 140])
    assert target.cache.num_bytes == expected_bytes(3, 300)
    target.keep([0, 1])
    assert target.cache.num_bytes == expected_bytes(3, 300)
    keys = target.cache.layers[0].keys
    target.prefill([[8] * 2])
    assert target.cache.layers[0].keys is keys, "a row that joins takes the place of one that left"
    target.keep([0, 1])
    target.keep([0])
    assert target.cache.num_bytes == expected_bytes(1, 3)
    target.keep([])
    assert target.cache.num_bytes == 0
    target.prefill([[5] * 3])
    assert target.cache.num_bytes == expected_bytes(1, 3)


def test_prompts_that_are_read_in_parts_get_their_memory_at_once(model: TargetModel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kv_target, "PREFILL_TOKENS", 8)
    target = Target(model)
    target.prefill([[5] * 6, [6] * 7, [7] * 140])
    assert target.cache.num_bytes == expected_bytes(3, 140)
    assert target.cache.generation == 1, "the cache was copied"


def test_memory_of_a_generation_is_bounded_at_every_step(model: TargetModel, monkeypatch: pytest.MonkeyPatch):
    """Rows of different lengths join, grow by several tokens a step, and leave; nothing is left in the end."""
    prompts = [*PROMPTS, [4] * 125, [8, 9]]
    sampling = {"max_new_tokens": 12, "ignore_eos": True}
    plain = [result.token_ids for result in Engine(model).generate(prompts, **sampling)]
    tree = TREES["64 nodes"]
    seen: list[tuple[int, int]] = []
    targets: list[Target] = []
    verify = Target.verify

    def watched(target: Target, draft: Draft) -> Any:
        result = verify(target, draft)
        bound = expected_bytes(target.num_rows, max(target.lengths) + draft.num_nodes)
        seen.append((target.cache.num_bytes, bound))
        targets.append(target)
        return result

    monkeypatch.setattr(Target, "verify", watched)
    planted = PlantedDrafter(tree, {tuple(prompt): answer for prompt, answer in zip(prompts, plain, strict=True)})
    results = Engine(model, planted, max_batch_size=2).generate(prompts, **sampling)
    assert [result.token_ids for result in results] == plain
    assert all(bound <= measured < 2 * bound for measured, bound in seen)
    assert len({bound for _, bound in seen}) > 2, "rows never grew or left"
    assert targets[-1].cache.num_bytes == 0


# --- the cache against a dictionary ---


class DictionaryCache:
    """What the cache must do, a slot at a time."""

    def __init__(self) -> None:
        self.num_rows = self.held_rows = self.capacity = 0
        self.entries: dict[tuple[int, int], float] = {}  # (row, slot) -> key; slots never written are absent

    def reserve(self, num_rows: int, num_slots: int, block: int) -> None:
        self.num_rows = num_rows
        if num_rows > self.held_rows or num_slots > self.capacity:
            self.held_rows = num_rows
        while self.capacity < num_slots:
            self.capacity += block

    def write(self, rows: range, slots: list[list[int]], values: list[list[float]]) -> None:
        for row, places, numbers in zip(rows, slots, values, strict=True):
            self.entries.update({(row, slot): number for slot, number in zip(places, numbers, strict=True)})

    def move(self, source: list[list[int]], target: list[list[int]]) -> None:
        old = dict(self.entries)
        for row in range(self.num_rows):
            for here, there in zip(source[row], target[row], strict=True):
                self.entries.pop((row, there), None)
                if (row, here) in old:
                    self.entries[row, there] = old[row, here]

    def keep(self, rows: list[int], num_slots: int, block: int) -> None:
        self.entries = {
            (new, slot): value
            for new, old in enumerate(rows)
            for (row, slot), value in self.entries.items()
            if row == old
        }
        self.num_rows = len(rows)
        needed = self.capacity
        while needed - block >= num_slots:
            needed -= block
        if self.num_rows * needed <= self.held_rows * self.capacity / 2:
            self.held_rows, self.capacity = self.num_rows, needed
        self.entries = {place: value for place, value in self.entries.items() if place[1] < self.capacity}


def as_states(values: list[list[float]], heads: int) -> Tensor:
    """(b, T) numbers as (b, heads, T, size) states; head h adds h/10 and the second place negates."""
    numbers = torch.tensor(values)[:, None, :, None] + torch.arange(heads)[None, :, None, None] / 10
    return torch.cat([numbers, -numbers], -1)


def check_equal(cache: SlotCache, twin: DictionaryCache, heads: int) -> None:
    assert (cache.num_rows, cache.capacity) == (twin.num_rows, twin.capacity)
    for number, layer in enumerate(cache.layers):
        if not layer.is_initialized:
            assert not twin.entries
            continue
        assert layer.keys.shape == layer.values.shape == (twin.held_rows, heads, twin.capacity, 2)
        for (row, slot), value in twin.entries.items():
            expected = as_states([[value + 1000 * number]], heads)[0, :, 0]
            assert torch.equal(layer.keys[row, :, slot], expected)
            assert torch.equal(layer.values[row, :, slot], expected * 2)
    buffers = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if layer.is_initialized)
    assert cache.num_bytes == buffers


@given(data=st.data(), heads=st.integers(1, 2), num_layers=st.integers(1, 2))
@settings(deadline=None, max_examples=250)
def test_the_cache_equals_a_dictionary_of_entries(data: st.DataObject, heads: int, num_layers: int):
    block = 4
    with patch("draftheads.models.kv_cache.BLOCK_SLOTS", block):
        cache, twin = SlotCache(num_layers), DictionaryCache()
        number = 0.0
        for _ in range(data.draw(st.integers(1, 8))):
            kind = data.draw(st.sampled_from(["reserve", "write", "write", "move", "keep"]))
            if kind == "reserve" or not twin.num_rows or not twin.capacity:
                rows = twin.num_rows + data.draw(st.integers(0, 2))  # rows only join; keep() lets them leave
                slots = data.draw(st.integers(1, 11))
                cache.reserve(rows, slots)
                twin.reserve(rows, slots, block)
            elif kind == "write":
                start = data.draw(st.integers(0, twin.num_rows - 1))
                stop = data.draw(st.integers(start + 1, twin.num_rows))
                count = data.draw(st.integers(1, twin.capacity))
                places = [data.draw(st.permutations(range(twin.capacity)))[:count] for _ in range(start, stop)]
                values = [[number := number + 1 for _ in range(count)] for _ in range(start, stop)]
                window = cache.window
                window.rows, window.row_index = slice(start, stop), torch.arange(start, stop)[:, None]
                window.slots, window.span = torch.tensor(places), data.draw(st.integers(1, twin.capacity))
                twin.write(range(start, stop), places, values)
                for index, layer in enumerate(cache.layers):
                    states = as_states([[value + 1000 * index for value in row] for row in values], heads)
                    keys, read = layer.update(states, states * 2)
                    assert torch.equal(keys, layer.keys[start:stop, :, : window.span])
                    assert torch.equal(read, layer.values[start:stop, :, : window.span])
                assert cache.get_seq_length() == window.span
            elif kind == "move":
                count = data.draw(st.integers(1, twin.capacity))
                source = [
                    data.draw(st.lists(st.integers(0, twin.capacity - 1), min_size=count, max_size=count))
                    for _ in range(twin.num_rows)
                ]
                target = [data.draw(st.permutations(range(twin.capacity)))[:count] for _ in range(twin.num_rows)]
                cache.move(torch.tensor(source), torch.tensor(target))
                twin.move(source, target)
            else:
                kept = data.draw(st.permutations(range(twin.num_rows)))[: data.draw(st.integers(0, twin.num_rows))]
                slots = data.draw(st.integers(0, twin.capacity))
                cache.keep(kept, slots)
                twin.keep(kept, slots, block)
            check_equal(cache, twin, heads)


def test_commit_moves_the_accepted_path_behind_the_text(model: TargetModel):
    """Entries of the accepted nodes end where plain reading of the same tokens puts them, in value and place."""
    tree = TREES["ragged"]
    path = [tree.paths.index((0, 2, 0)[:depth]) for depth in range(4)]
    tokens = torch.stack([torch.arange(tree.num_nodes) % 20, torch.arange(tree.num_nodes).flip(0) % 20])
    target = Target(model)
    target.prefill([[5, 6, 7], [9]])
    target.verify(Draft.on_tree(tree, tokens))
    target.commit(AcceptResult(torch.tensor([path, [0, 0, 0, 0]]), torch.tensor([4, 1]), torch.tensor([1, 1])), [4, 1])
    assert target.lengths == [7, 2]
    for row, text in enumerate([[5, 6, 7, *tokens[0, path].tolist()], [9, int(tokens[1, 0])]]):
        plain = Target(model)
        plain.prefill([text])
        found, expected = target.cache.entries(row, len(text)), plain.cache.entries(0, len(text))
        torch.testing.assert_close(found.layers, expected.layers, rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float_masks_are_zero_or_the_lowest_number(dtype: torch.dtype):
    visible = torch.tensor([[[True, False, True]], [[False, True, True]]])
    mask = as_float_mask(visible, dtype)
    assert mask.shape == (2, 1, 1, 3)
    assert mask.dtype == dtype
    lowest = torch.finfo(dtype).min
    assert mask[:, 0, 0].tolist() == [[0.0, lowest, 0.0], [lowest, 0.0, 0.0]]
