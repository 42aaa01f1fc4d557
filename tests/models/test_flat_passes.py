"""Passes that take the tokens of several texts in one row, as many of each as there are."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from draftheads.cpu.fused_modules import FusedAttention
from draftheads.decode.engine import Engine
from draftheads.decode.step_timer import StepTimer
from draftheads.drafters.copying import Copying
from draftheads.models.kv_target import Target
from draftheads.models.model import TargetModel
from draftheads.models.structure import check_trees
from draftheads.speculation.draft import AcceptResult, Draft
from draftheads.speculation.drafter import Drafter
from draftheads.speculation.tree import Tree
from families import FAMILIES, INVARIANT, PROMPTS, by_hand, tiny_head, tiny_model, tiny_profile
from thorough import some

OWN_ATTENTION = [name for name in FAMILIES if name != "gemma2"]  # whose soft caps only eager attention has
TEXTS = [[3 + n * n % 17 for n in range(40)], [7, 4], [9, 9, 3, 5, 8, 13, 4, 4, 6, 5, 11]]


def fast(name: str, *, batch_invariant: bool = False) -> TargetModel:
    model = tiny_model(name).sped_up(batch_invariant=batch_invariant)
    check_trees(model)
    return model


def random_draft(model: TargetModel, nodes: int, seed: int) -> Draft:
    """Three rows with trees of their own, in which parents come first."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, model.vocab_size, (3, nodes), generator=generator)
    trees = []
    for _ in range(3):
        parents = [0, *(int(torch.randint(node, (1,), generator=generator)) for node in range(1, nodes))]
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, nodes):
            paths.append((*paths[parents[node]], parents[:node].count(parents[node])))
        trees.append((parents, [len(path) for path in paths]))
    parents_of, depths = (torch.tensor(part) for part in zip(*trees, strict=True))
    ancestors = torch.eye(nodes, dtype=torch.bool).repeat(3, 1, 1)
    for node in range(1, nodes):
        for row in range(3):
            ancestors[row, node] |= ancestors[row, parents_of[row, node]]
    return Draft(tokens, parents_of, depths, ancestors, int(depths.max()))


def steps(model: TargetModel, drafts: Sequence[Draft]) -> list[list[torch.Tensor]]:
    """For each draft the logits and states of each row's own nodes; half of each path is accepted."""
    target = Target(model)
    target.prefill(TEXTS)
    results = []
    for draft in drafts:
        logits, hidden = target.verify(draft)
        counts = draft.row_nodes or (draft.num_nodes,) * 3
        results.append([part[row, :count] for part in (logits, hidden) for row, count in enumerate(counts)])
        path = draft.ancestors[torch.arange(3), torch.tensor(counts) - 1].int().topk(2, dim=1).indices.sort(1).values
        accepted = torch.tensor([min(2, int(draft.depths[row, count - 1]) + 1) for row, count in enumerate(counts)])
        target.commit(AcceptResult(path, accepted, path[:, 0]), accepted.tolist())
    return results


@pytest.mark.few(4)
@pytest.mark.parametrize("name", some(OWN_ATTENTION, "llama", "mistral", "gemma3_text", "gpt2"))
@pytest.mark.parametrize("batch_invariant", INVARIANT)
def test_nodes_without_padding_have_the_same_results(name: str, batch_invariant: bool):
    model = fast(name, batch_invariant=batch_invariant)
    assert model.takes_flat_tokens
    sizes = [(1, 6, 3), (7, 1, 2), (2, 5, 5), (1, 1, 9)]
    drafts = [random_draft(model, max(counts), seed).cut(counts) for seed, counts in enumerate(sizes)]
    assert all(draft.row_nodes == counts for draft, counts in zip(drafts, sizes, strict=True))
    flat = steps(model, drafts)
    model.step_mode.flat = False
    for step, padded in zip(flat, steps(model, drafts), strict=True):
        for part, expected in zip(step, padded, strict=True):
            if batch_invariant:
                assert torch.equal(part, expected)
            else:
                torch.testing.assert_close(part, expected, rtol=0, atol=1e-5)


def test_padding_is_not_computed(monkeypatch: pytest.MonkeyPatch):
    model = replace(fast("llama"), native=None)
    counts: list[int] = []
    run = TargetModel.run

    def counted(self: TargetModel, layers: Sequence[int], **inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        counts.append(inputs["input_ids"].numel())
        return run(self, layers, **inputs)

    monkeypatch.setattr(TargetModel, "run", counted)
    steps(model, [random_draft(model, 6, 0).cut((1, 6, 3)), random_draft(model, 4, 0).cut((4, 4, 4))])
    assert counts[1:] == [10, 12]


def test_a_model_that_does_not_take_flat_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """Its attention mixes tokens of different texts."""
    model = replace(tiny_model("llama").sped_up(), native=None)
    for module in model.model.modules():
        if isinstance(module, FusedAttention):
            attend = module.attention
            monkeypatch.setattr(module, "attention", partial(_first_text, attend))
    check_trees(model)
    assert not model.takes_flat_tokens
    steps(model, [random_draft(model, 6, 0).cut((1, 6, 3))])  # with padding


def _first_text(attend: Any, module: Any, query: torch.Tensor, key: torch.Tensor, *others: Any, **options: Any) -> Any:
    return attend(module, query, key[: len(query)], others[0][: len(query)], *others[1:], **options)


def test_stock_attention_takes_no_flat_tokens():
    model = tiny_model("llama")
    check_trees(model)
    assert not model.takes_flat_tokens


COSTS = by_hand(
    [
        *(("verify", rows, nodes, 20.0 + 0.6 * rows * nodes) for rows in (1, 8) for nodes in (1, 16)),
        ("dynamic", 1, 2, 1.0),
    ]
)
PROFILE = tiny_profile(Tree.chain(0), dynamic_tokens=[1.0, *(1.0 + 0.5 * n**0.7 for n in range(1, 24))])


@pytest.mark.few(4)
@pytest.mark.parametrize("name", some(OWN_ATTENTION, "llama", "mistral", "qwen3", "gpt2"))
@pytest.mark.parametrize("drafter", ["hydra", "eagle", "copying"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "seed": 5}])
def test_rows_with_trees_of_different_sizes_have_plain_answers(
    name: str, drafter: str, settings: dict[str, float], monkeypatch: pytest.MonkeyPatch
):
    model = fast(name)
    head: Drafter = Copying(tiny_head("hydra", model)) if drafter == "copying" else tiny_head(drafter, model)
    sizes: set[tuple[int, ...]] = set()
    cut = Draft.cut

    def noted(draft: Draft, row_nodes: Sequence[int]) -> Draft:
        sizes.add(tuple(row_nodes))
        return cut(draft, row_nodes)

    expected = Engine(tiny_model(name)).generate(PROMPTS, max_new_tokens=40, ignore_eos=True, **settings)
    monkeypatch.setattr(Draft, "cut", noted)
    engine = Engine(model, head, profile=PROFILE, cost=COSTS)
    answers = engine.generate(PROMPTS, max_new_tokens=40, ignore_eos=True, **settings)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert any(len(set(counts)) > 1 for counts in sizes)


def test_costs_are_those_of_trees_of_different_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fast("llama")
    seen: list[Sequence[int] | None] = []
    verify = Target.verify

    def noted(target: Target, draft: Draft) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(draft.row_nodes)
        return verify(target, draft)

    monkeypatch.setattr(Target, "verify", noted)
    timer = StepTimer(model, tiny_head("medusa", model))
    for rows, nodes in ((1, 4), (4, 1), (4, 4)):
        timer.milliseconds("verify", rows, nodes)
    assert seen == [None, None, (2, 6, 2, 6)]
