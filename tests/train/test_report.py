"""Measurements on held-out text: ranks and expected tokens are those of the definition."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftheads.checkpoints.checkpoint import load_head
from draftheads.cli.main import COMMANDS
from draftheads.data.batches import split_held_out
from draftheads.data.features import FeatureStore
from draftheads.data.texts import EncodedChat
from draftheads.models.model import TargetModel
from draftheads.search.tree_search import best_tree, expected_tokens
from draftheads.speculation.draft import Context
from draftheads.speculation.tree import Tree
from draftheads.train import training_data
from draftheads.train.new_head import new_head
from draftheads.train.report import NUM_RANKS, REPORTED_NODES, Measurement, Report, model_card, verdict_of
from families import propose
from training_world import measured, train_options


@pytest.mark.parametrize("method", ["medusa", "hydra"])
def test_expected_tokens_equal_drafting_along_the_true_text(
    target: TargetModel, features: Path, trained: Callable[[str], Path], method: str
):
    settings = train_options(trained(method), features, method=method)
    head = load_head(settings.out, target, dtype=torch.float32)
    tree = Tree.cartesian([4, 3, 2])
    store = FeatureStore(features)
    _, held_out = split_held_out(store.token_ids, store.loss_masks, fraction=0.2, seed=0)
    gains = []
    for document in (store[i] for i in held_out):
        text, mask, hidden = document.token_ids, document.loss_mask, document.hidden.float()
        for t in range(len(text) - 4):
            if mask[t + 1] and mask[t + 2 : t + 5].all():
                here = hidden[None, t : t + 1], text[None, t : t + 1]
                context = Context(*here, torch.ones(1).long(), text[t + 1, None])
                gains.append(walk(tree, propose(head, context, tree).token_ids[0].tolist(), text[t + 2 :].tolist()))
    found = measured(target, features, settings, head=head)
    assert len(found.joint_ranks) == len(gains) > 20
    assert found.tokens_per_step(tree) == pytest.approx(sum(gains) / len(gains))
    assert sum(gains) > len(gains) * 1.2


def test_the_best_tree_is_not_measured_on_the_text_that_it_was_chosen_on():
    """Random ranks: a tree that is chosen on the same positions seems to gain."""
    generator = torch.Generator().manual_seed(0)
    ranks = torch.randint(0, 60, (80, 2), generator=generator).clamp_max(NUM_RANKS)
    found = Measurement(torch.zeros(2), ranks, torch.ones_like(ranks, dtype=torch.bool))
    tree = found.tree(5)
    first, second = ranks[:40], ranks[40:]
    crossed = expected_tokens(first, best_tree(second, 5)) + expected_tokens(second, best_tree(first, 5))
    assert found.tokens_per_step_of_best(5) == pytest.approx(crossed / 2)
    assert found.summary()["tokens_per_step_tree"] == found.tokens_per_step_of_best(REPORTED_NODES)
    assert found.tokens_per_step_of_best(5) < found.tokens_per_step(tree) - 0.03
    single = Measurement(torch.zeros(2), ranks[:1], torch.ones(1, 2, dtype=torch.bool))
    assert single.tokens_per_step_of_best(5) == 1.0


def walk(tree: Tree, drafted: list[int], truth: list[int]) -> int:
    """Tokens of a step with this draft if the next tokens of the text are ``truth``."""
    node, gained = 0, 1
    for token in truth[: tree.max_depth]:
        children = [n for n in range(1, tree.num_nodes) if tree.parents[n] == node and drafted[n] == token]
        if not children:
            return gained
        node, gained = children[0], gained + 1
    return gained


def test_ranks_count_more_probable_tokens_and_misses(target: TargetModel, features: Path, tmp_path: Path):
    settings = train_options(tmp_path / "out", features, draft_vocab_size=20, num_heads=2)
    found = measured(target, features, settings)
    store = FeatureStore(features)
    training, held_out = split_held_out(store.token_ids, store.loss_masks, fraction=0.2, seed=0)
    head = new_head(settings, target, store, training)
    vocab = head.draft_vocab.tolist()
    expected: list[list[int]] = [[], []]
    for document in (store[i] for i in sorted(held_out, key=lambda i: store.lengths[i])):
        text, mask = document.token_ids.tolist(), document.loss_mask.tolist()
        features_of = head(document.hidden[None].float(), document.token_ids[None])[:, 0]
        for i in range(2):
            for t in range(len(text) - 2 - i):
                if mask[t + 1] and mask[t + 2 + i]:
                    logits = head.logits(features_of[i, t], i).tolist()
                    true = text[t + 2 + i]
                    rank = sum(z > logits[vocab.index(true)] for z in logits) if true in vocab else NUM_RANKS
                    expected[i].append(min(rank, NUM_RANKS))
    for i in range(2):
        assert sorted(found.ranks[found.counts[:, i], i].tolist()) == sorted(expected[i])
        assert NUM_RANKS in expected[i]
    for best in (1, 3, 10):
        shares = [sum(rank < best for rank in expected[i]) / len(expected[i]) for i in range(2)]
        assert found.accuracy(best) == pytest.approx(shares)


@pytest.mark.parametrize(
    ("tokens_per_step", "facts", "said"),  # facts: steps, held-out texts, tokens
    [
        (1.14, (999, 200, 5000), "1.14 tokens per step on held-out text (plain decoding: 1): the heads have learned"),
        (1.03, (1000, 200, 5000), "almost nothing in 1,000 steps; look at the learned tokens"),
        (1.03, (10, 1, 5000), "almost nothing; train"),  # that it learned nothing needs no proof
        (1.149, (10, 200, 5000), "1.15 tokens per step on held-out text (plain decoding: 1): a start"),
        (1.79, (10, 200, 5000), "a start; more text may add to it (`draftheads distill`"),
        (1.8, (10, 16, 1000), ": good"),
        (2.41, (10, 1, 5000), "but of only 1 held-out text with 5,000 answer tokens, so other texts may give far less"),
        (1.2, (10, 15, 5000), "but of only 15 held-out texts with 5,000 answer tokens, so"),
        (2.41, (10, 200, 999), "but of only 200 held-out texts with 999 answer tokens, so"),
    ],
)
def test_the_verdict_has_its_class_and_names_commands(tokens_per_step: float, facts: Any, said: str):
    names = ("num_steps", "num_held_out_texts", "num_held_out_tokens")
    found = verdict_of({"tokens_per_step_tree": tokens_per_step, **dict(zip(names, facts, strict=True))})
    assert said in found
    assert ("good" in found) == said.endswith("good")
    named = set(re.findall(r"`draftheads ([a-z-]+)", found))
    assert named
    assert named <= COMMANDS.keys()


def test_the_scripts_of_what_is_learned_are_counted_and_shown(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of the user's words; the tokens stand for letters of other scripts."""
    said = {8: "Да", 9: "yes", 10: "是"}
    monkeypatch.setattr(type(target.tokenizer), "decode", lambda _, ids, **__: "".join(said.get(i, "") for i in ids))
    texts = [EncodedChat((9, 8, 8, 10, 2), (False, True, True, True, True), source="a:1")]
    found = Counter[str]()
    assert [*training_data._with_scripts(iter(texts), target, found)] == texts
    assert found == {"Cyrillic": 4, "Han": 1}
    numbers: dict[str, Any] = dict.fromkeys((field.name for field in dataclasses.fields(Report)), 1)
    lists = {name: [0.5] for name in ("losses", "top1", "top3", "top10", "tree")}
    report = Report(**{**numbers, **lists, "method": "medusa", "model_id": "owner/base", "scripts": found})
    card = model_card(report, {}, {})
    assert "Scripts of the text: Cyrillic 80 %, Han 20 %." in card
    assert card.startswith("---\nbase_model: owner/base\ntags:\n- draftheads\n---\n\n# medusa head for owner/base\n")
    shown = model_card(dataclasses.replace(report, scripts=None, model_id="/a/model"), {}, {})
    assert shown.startswith("# medusa head for model\n")
    assert "Scripts" not in shown
