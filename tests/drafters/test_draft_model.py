"""A small model as drafter changes no text and predicts each node from its own path; rows of drafters without heads."""

from typing import Any

import pytest
import torch

from draftheads.decode.engine import Engine
from draftheads.drafters.draft_model import DraftModel, DraftModelSession
from draftheads.drafters.lookahead import Lookahead
from draftheads.drafters.mixed import Mixed, MixedSession
from draftheads.errors import InvalidTree
from draftheads.models.model import TargetModel
from draftheads.speculation.draft import Context
from draftheads.speculation.drafter import Drafter
from draftheads.speculation.shapes import ROOT_ONLY, BestFirst, Shape
from draftheads.speculation.tree import Tree
from families import HAS_RECURRENT, PROMPTS, TREES, VOCAB, ids, tiny_head, tiny_model
from thorough import some

RECURRENT = ["qwen3_5_text", "mamba2"] if HAS_RECURRENT else []  # trees need a newer transformers
SHAPES: dict[str, Shape] = {
    "chain": TREES["chain"],
    "ragged": TREES["ragged"],
    "best first": BestFirst(12, top_k=4, beam=3, max_depth=4),
}


def runner_with_rows(drafter: Drafter, *counts: int) -> Any:
    """The runner of a draft model's session that has read rows of so many tokens."""
    session, shape = drafter.start(), (len(counts), max(counts))
    tokens = torch.ones(shape, dtype=torch.long)
    session.observe(Context(torch.zeros(*shape, 32), tokens, torch.tensor(counts), tokens[:, 0]))
    assert isinstance(session, MixedSession)
    assert isinstance(session.session, DraftModelSession)
    return session.session._runner


@pytest.mark.parametrize("graphs", [False, True])
def test_the_memory_of_a_token_is_that_of_its_cache(model: TargetModel, *, graphs: bool) -> None:
    small = tiny_model("llama", seed=3, num_hidden_layers=1, num_key_value_heads=4)
    small.step_mode.graphs = graphs
    drafter = Mixed(DraftModel(small, model))
    runner = runner_with_rows(drafter, 200, 3, 9)
    rows, slots = runner.cache.shape
    assert drafter.bytes_per_slot == runner.num_bytes / (rows * slots) == 2 * 4 * 8 * 4
    assert Mixed(tiny_head("medusa", model)).bytes_per_slot == 0


@pytest.mark.parametrize("family", RECURRENT)
def test_the_states_of_a_recurrent_draft_model_are_in_the_memory_of_its_rows(model: TargetModel, family: str) -> None:
    small = tiny_model(family)
    drafter = Mixed(DraftModel(small, model))
    runner = runner_with_rows(drafter, 20, 3, 9)
    rows, slots = runner.cache.shape
    held = runner.num_bytes - rows * slots * drafter.bytes_per_slot
    assert drafter.bytes_of_rows(3) == runner.state_bytes == held > 0
    engine, without = Engine(model, drafter), Engine(model)
    reserved = engine.num_bytes([20, 3, 9], draft_nodes=0) - without.num_bytes([20, 3, 9], draft_nodes=0)
    assert reserved >= runner.num_bytes
    assert Mixed(tiny_head("medusa", model)).bytes_of_rows(3) == 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", [*some(["llama", "gpt2", "gemma2"], "gemma2"), *RECURRENT])
def test_a_model_that_drafts_for_itself_greedily_is_always_right(family: str, shape: str) -> None:
    target = tiny_model(family)
    options: dict[str, Any] = {"max_new_tokens": 25, "ignore_eos": True}
    engine = Engine(target, DraftModel(target, target), shape=SHAPES[shape], max_batch_size=2)
    results = engine.generate([*PROMPTS, [4, 5]], **options)
    assert ids(results) == ids(Engine(target).generate([*PROMPTS, [4, 5]], **options))
    for result in results:
        if shape == "ragged":  # its first ranks are two deep, then the third is rank 2's
            assert result.tokens_per_step >= 3.0
        elif shape == "chain":
            assert result.num_steps == 24 / (1 + 3)
        else:
            assert result.tokens_per_step > 2.0


def test_a_draft_model_predicts_each_node_from_its_own_path(model: TargetModel) -> None:
    """At the first step, after rows have kept different numbers of tokens, and after one has left."""
    small, tree = tiny_model("llama", seed=5, num_hidden_layers=1), Tree.cartesian([3, 2, 2])
    session = DraftModel(small, model).start()
    tokens = torch.randint(0, VOCAB, (3, 20), generator=torch.Generator().manual_seed(1))
    read = [0, 0, 0]
    for counts in ([11, 6, 1], [2, 4, 1], [1, 3]):
        if len(counts) == 2:
            session.keep(torch.tensor([2, 0]))
            tokens, read = tokens[[2, 0]], [read[2], read[0]]
        ends = [before + count for before, count in zip(read, counts, strict=True)]
        accepted = torch.zeros(len(counts), max(counts), dtype=torch.long)
        for row, (start, end) in enumerate(zip(read, ends, strict=True)):
            accepted[row, : end - start] = tokens[row, start:end]
        states = torch.zeros(*accepted.shape, model.hidden_size)
        roots = tokens[torch.arange(len(ends)), ends]
        draft = session.propose(Context(states, accepted, torch.tensor(counts), roots), tree)
        for row, end in enumerate(ends):
            for node, path in enumerate(tree.paths):
                children = [child for child, parent in enumerate(tree.parents) if parent == node and child]
                if not children:
                    continue
                on_path = [tree.paths.index(path[:length]) for length in range(1, len(path) + 1)]
                text = [*tokens[row, : end + 1].tolist(), *draft.token_ids[row, on_path].tolist()]
                best = small.model(torch.tensor([text])).logits[0, -1].topk(len(children)).indices
                assert draft.token_ids[row, children].tolist() == best.tolist()
        read = ends


@pytest.mark.parametrize(
    ("shape", "depth"), [(BestFirst(8, top_k=1), 2), (BestFirst(12, top_k=1, beam=1, max_depth=8), 8)]
)
def test_draft_models_are_as_deep_as_shape_or_max_depth_says(shape: Shape, depth: int, model: TargetModel) -> None:
    """The shape may be deeper than ``max_depth``, which is for shapes without a depth."""
    drafter = DraftModel(model, model, max_depth=2)
    (result,) = Engine(model, drafter, shape=shape).generate([PROMPTS[0]], max_new_tokens=19, ignore_eos=True)
    assert result.num_steps == 18 / (1 + depth)


def test_a_draft_model_fills_no_tree_that_is_wider_than_its_vocabulary(model: TargetModel) -> None:
    drafter = DraftModel(tiny_model("llama", seed=5), model)
    with pytest.raises(InvalidTree, match=f"rank {VOCAB} "):
        Engine(model, drafter, shape=Tree.from_paths([(VOCAB,)])).generate([[3, 4]])
    drafter.check_shape(BestFirst(8, top_k=VOCAB + 4))


@pytest.mark.parametrize("kind", ["draft model", "prompt lookup", "lookahead", "head"])
def test_a_missing_row_that_was_not_dropped_raises(kind: str, model: TargetModel) -> None:
    drafter = {
        "draft model": DraftModel(tiny_model("llama", seed=5), model),
        "prompt lookup": Mixed(None),
        "lookahead": Lookahead(),
        "head": tiny_head("hydra++", model),
    }[kind]
    session, roots = drafter.start(), torch.tensor([3, 4, 5])

    def context(rows: int, count: int) -> Context:
        tokens = torch.full((rows, count), 7)
        return Context(torch.zeros(rows, count, 32), tokens, torch.full((rows,), count), roots[:rows])

    session.propose(context(3, 6), ROOT_ONLY)
    with pytest.raises(ValueError, match=r"2 rows but 3 "):
        session.propose(context(2, 1), ROOT_ONLY)
    session.keep(torch.tensor([2, 0]))
    assert session.propose(context(2, 1), ROOT_ONLY).token_ids[:, 0].tolist() == [3, 4]
