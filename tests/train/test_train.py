"""A training run: it learns, it can be repeated, stopped and resumed bit for bit, and says what is wrong."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from draftheads.checkpoint import load_head, read_head
from draftheads.cli import train as command
from draftheads.data import extract
from draftheads.data.batches import choose_texts, collate, plan_batches, split_held_out
from draftheads.data.extract import build_features, load_texts
from draftheads.data.features import FeatureStore, shard_path
from draftheads.draft import Context
from draftheads.errors import DataError, InvalidSettings, NonFiniteLoss, StorageError, UnknownMethod
from draftheads.files import locked
from draftheads.heads import HEADS, has_blocks
from draftheads.heads.hydra import FusionBlock
from draftheads.heads.layers import ResidualBlock
from draftheads.models.model import TargetModel
from draftheads.progress import NoProgress
from draftheads.train import processes, run
from draftheads.train.folder import alone_in
from draftheads.train.joint_options import JointOptions
from draftheads.train.learner import Learner, with_noise
from draftheads.train.losses import objective
from draftheads.train.measure import NUM_RANKS, Measurement, measure
from draftheads.train.new_head import frequent_tokens, new_head
from draftheads.train.options import TrainOptions
from draftheads.train.report import Report
from draftheads.train.trainer import StepLog, TrainingInterrupted, find_checkpoint
from draftheads.tree import Tree
from families import fitting, propose
from training_world import EOS, TEMPLATE, chat, chat_model, counting_chats, distilled_chats, write_chats


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return chat_model()


@pytest.fixture(scope="module")
def features(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    records = distilled_chats(target) + counting_chats(20)
    texts = load_texts(target, [write_chats(folder / "chats.jsonl", records)], max_length=64)
    build_features(target, texts, folder / "features", NoProgress())
    return folder / "features"


class Silent:
    """A reporter; may be told to do something after a number of steps."""

    def __init__(self, after: int = -1, action: Any = None) -> None:
        self.after, self.action = after, action
        self.stages: list[str] = []

    def stage(self, what: str) -> None:
        self.stages.append(what)

    def progress(self, done: int, total: int, loss: float | None = None) -> None:
        if done == self.after and self.stages[-1].startswith("training"):
            self.action()


def options(out: Path, features: Path | None, **changes: Any) -> TrainOptions:
    values: dict[str, Any] = {
        "method": "medusa",
        "model": "tiny-chat",
        "num_heads": 3,
        "draft_vocab_size": 48,
        "epochs": 2,
        "batch_tokens": 128,
        "learning_rate": 0.02,
        "tree_nodes": 8,
        "held_out": 0.2,
        "log_steps": 1,
        "save_steps": 1000,
    }
    return TrainOptions(out=out, features=features, **{**values, **changes})


def tensors(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def lines(out: Path, name: str = "log.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


def without_time(report: Report) -> Report:
    return replace(report, training_seconds=0.0, tokens_per_second=0.0)


@pytest.mark.parametrize(
    ("method", "loss"), [*((method, "teacher") for method in HEADS), ("medusa", "hard"), ("hydra", "hard")]
)
def test_training_makes_heads_that_guess_better(
    target: TargetModel, features: Path, tmp_path: Path, method: str, loss: Any
) -> None:
    heads = fitting(method, num_heads=3)
    settings = options(tmp_path / "out", features, method=method, loss=loss, epochs=12, **heads)
    run.train_for(target, settings, Silent())
    head = load_head(tmp_path / "out", target, dtype=torch.float32)
    trained, untrained = (measured(target, features, settings, head=made, on="training") for made in (head, None))
    chain = Tree.chain(3)
    assert trained.tokens_per_step(chain) > untrained.tokens_per_step(chain) + 0.1
    assert float(trained.losses.sum()) < 0.7 * float(untrained.losses.sum())
    losses = [line["loss"] for line in lines(tmp_path / "out")]
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])


def measured(
    target: TargetModel, features: Path, settings: TrainOptions, *, head: Any = None, on: str = "held out"
) -> Measurement:
    """What is measured of a head (an untrained one by default) on the texts that a run holds out or trains on."""
    store = FeatureStore(features)
    training, held_out = split_held_out(
        store.token_ids, store.loss_masks, fraction=settings.held_out, at_most=200, seed=settings.seed
    )
    head = head or new_head(settings, target.weights, store, training, target.eos_ids)
    learner = Learner(head, target.weights, objective=objective(settings.loss), depth_decay=0.8)
    return measure(learner, store, training if on == "training" else held_out, batch_tokens=100)


def test_the_folder_holds_the_head_and_how_it_was_made(target: TargetModel, features: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = run.train_for(target, options(out, features), Silent())
    names = {"README.md", "acceptance.json", "config.json", "model.safetensors"}  # the head
    names |= {"log.jsonl", "metrics.json", "validation.jsonl"}  # its history
    assert {path.name for path in out.iterdir()} == names
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["options"]["learning_rate"] == 0.02
    assert metrics["provenance"]["torch"] == torch.__version__
    assert Report(**{name: metrics[name] for name in vars(report)}) == report
    head = load_head(out, target, dtype=torch.float32)
    assert Tree.from_paths(report.tree).num_nodes == 8
    profile = read_head(out).profile
    assert head.default_shape == profile.tree(10)
    assert profile.num_texts >= 2
    assert profile.num_tokens > 0
    assert 1.0 < profile.static_tokens[9] <= 4.0
    assert 1.0 < profile.dynamic_tokens[9] <= 4.0
    # the saved head (bf16) guesses as well as the one that was measured
    assert measured(target, features, options(out, features), head=head).accuracy(1) == pytest.approx(
        report.top1, abs=0.03
    )
    assert f"{report.tokens_per_step_tree:.2f}" in (out / "README.md").read_text()
    line = lines(out)[0]
    assert line.keys() == {"step", "loss", "learning_rate", "grad_norm", "head_losses"}
    weighted = sum(0.8**i * loss for i, loss in enumerate(line["head_losses"]))
    assert line["loss"] == pytest.approx(weighted, rel=1e-5)


def test_the_head_is_measured_while_it_is_trained(target: TargetModel, features: Path, tmp_path: Path) -> None:
    settings = options(tmp_path / "out", features, eval_steps=3, eval_texts=1000)
    report = run.train_for(target, settings, Silent())
    found = lines(settings.out, "validation.jsonl")
    assert [line["step"] for line in found] == [*range(0, report.num_steps, 3), report.num_steps]
    assert report.num_steps % 3, "the last measurement is not at a multiple"
    untrained = measured(target, features, settings)
    assert found[0]["losses"] == pytest.approx(untrained.losses.tolist(), rel=1e-6)
    assert found[0]["tokens_per_step_chain"] == untrained.tokens_per_step(Tree.chain(3))
    last = {key: value for key, value in found[-1].items() if key != "step"}
    assert last == {key: getattr(report, key) for key in last}
    assert {"losses", "top1", "top3", "top10", "tokens_per_step_chain", "tokens_per_step_tree"} == last.keys()
    assert [shares[0] for shares in report.accuracy_by_rank] == report.top1
    assert [shares[-1] for shares in report.accuracy_by_rank] == report.top10
    assert report.tokens_per_second > 0


def test_fewer_texts_or_none_in_between(target: TargetModel, features: Path, tmp_path: Path) -> None:
    few = options(tmp_path / "few", features, eval_steps=1000, eval_texts=1)
    report = run.train_for(target, few, Silent())
    assert lines(few.out, "validation.jsonl")[-1]["losses"] != report.losses
    none = options(tmp_path / "none", features, eval_steps=0)
    run.train_for(target, none, Silent())
    assert not lines(none.out, "validation.jsonl")
    assert tensors(few.out).keys() == tensors(none.out).keys()
    assert all(torch.equal(tensor, tensors(none.out)[name]) for name, tensor in tensors(few.out).items())


def test_noise_is_for_training_only(target: TargetModel, features: Path) -> None:
    store = FeatureStore(features)
    settings = options(Path("out"), features)
    head = new_head(settings, target.weights, store, range(20), target.eos_ids)
    batch = vars(collate([store[0], store[1]], skip_prompts=False))
    losses = {}
    for alpha in (0.0, 75.0):
        learner = Learner(head, target.weights, objective=objective("hard"), depth_decay=0.8, noise_alpha=alpha)
        losses[alpha] = [learner.train(mode)(**batch)["loss"].item() for mode in (False, True, True)]
    assert len({*losses[0.0], losses[75.0][0]}) == 1
    assert len(set(losses[75.0])) == 3, "drawn anew each time"


@pytest.mark.parametrize("method", HEADS)
def test_dropout_is_for_training_only(target: TargetModel, features: Path, tmp_path: Path, method: str) -> None:
    store = FeatureStore(features)
    batch = collate(list(store)[:6], skip_prompts=False)
    sizes = fitting(method, num_heads=2)
    given = {"method": method, "loss": "teacher", **sizes}
    if not has_blocks(method):
        with pytest.raises(InvalidSettings, match=rf"--dropout is 0.3, but {method} heads have no MLP"):
            options(tmp_path, features, **given, dropout=0.3)
    losses = {}
    for part in (0.0, 0.3):
        settings = options(tmp_path, features, **given)
        head = new_head(settings, target.weights, store, range(len(store)), target.eos_ids)
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        if has_blocks(method):
            settings = replace(settings, dropout=part)
        learner = run.new_learner(settings, head, target.weights)
        learner.train()
        torch.manual_seed(3)
        with torch.no_grad():
            one, two = (learner(**vars(batch))["loss"] for _ in range(2))
        assert (one == two) == (part == 0 or not has_blocks(method))
        losses[part] = measure(learner, store, range(6), batch_tokens=100).losses.tolist()
        assert learner.training, "as it was"
        learner.eval()
        assert measure(learner, store, range(6), batch_tokens=100).losses.tolist() == losses[part]
        assert not learner.training
    torch.manual_seed(0)


def test_blocks_drop_inputs_and_keep_their_mean() -> None:
    for block in (ResidualBlock(4), FusionBlock(8, 4)):
        block.dropout = 0.25
        x = torch.ones(20000, 8 if isinstance(block, FusionBlock) else 4)
        said = block(x).detach()  # as they start: what comes in
        torch.testing.assert_close(said.unique(), torch.tensor([0.0, 4 / 3]))
        assert float(said.mean()) == pytest.approx(1.0, abs=0.02)
        block.eval()
        assert torch.equal(block(x), x[:, :4])


def test_noise_is_uniform_and_small_in_long_texts() -> None:
    torch.manual_seed(0)
    noise = with_noise(torch.zeros(3, 40, 50), 75.0)
    bound = 75 / (40 * 50) ** 0.5
    assert noise.abs().max() <= bound
    assert noise.abs().max() > 0.99 * bound
    assert abs(float(noise.var()) - bound**2 / 3) < 0.05 * bound**2  # of a uniform distribution


@pytest.mark.parametrize("method", ["medusa", "hydra"])
def test_expected_tokens_are_those_that_drafting_on_the_true_text_gives(
    target: TargetModel, features: Path, tmp_path: Path, method: str
) -> None:
    settings = options(tmp_path / "out", features, method=method)
    run.train_for(target, settings, Silent())
    head = load_head(tmp_path / "out", target, dtype=torch.float32)
    tree = Tree.cartesian([4, 3, 2])
    store = FeatureStore(features)
    _, held_out = split_held_out(store.token_ids, store.loss_masks, fraction=0.2, at_most=200, seed=0)
    gains = []
    for document in (store[i] for i in held_out):
        text, mask = document.token_ids, document.loss_mask
        for t in range(len(text) - 4):
            if mask[t + 1] and mask[t + 2 : t + 5].all():
                context = Context(
                    document.hidden[None, t : t + 1].float(),
                    text[None, t : t + 1],
                    torch.ones(1).long(),
                    text[t + 1, None],
                )
                gains.append(walk(tree, propose(head, context, tree).token_ids[0].tolist(), text[t + 2 :].tolist()))
    found = measured(target, features, settings, head=head)
    assert len(found.joint_ranks) == len(gains) > 20
    assert found.tokens_per_step(tree) == pytest.approx(sum(gains) / len(gains))
    assert sum(gains) > len(gains) * 1.2


def walk(tree: Tree, drafted: list[int], truth: list[int]) -> int:
    """Tokens that a step with this draft gains when the text goes on with ``truth``."""
    node, gained = 0, 1
    for token in truth[: tree.max_depth]:
        children = [n for n in range(1, tree.num_nodes) if tree.parents[n] == node and drafted[n] == token]
        if not children:
            return gained
        node, gained = children[0], gained + 1
    return gained


def test_ranks_count_better_guesses_and_misses(target: TargetModel, features: Path, tmp_path: Path) -> None:
    settings = options(tmp_path / "out", features, draft_vocab_size=20, num_heads=2)
    found = measured(target, features, settings)
    store = FeatureStore(features)
    training, held_out = split_held_out(store.token_ids, store.loss_masks, fraction=0.2, at_most=200, seed=0)
    head = new_head(settings, target.weights, store, training, target.eos_ids)
    vocab = head.draft_vocab.tolist()
    expected = {0: [], 1: []}  # type: dict[int, list[int]]
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


@pytest.mark.parametrize("method", ["medusa", "hydra"])
@pytest.mark.parametrize("loss", ["teacher", "hard"])
def test_losses_are_those_of_the_definition(
    target: TargetModel, features: Path, tmp_path: Path, method: str, loss: Any
) -> None:
    settings = options(tmp_path / "out", features, method=method, loss=loss, draft_vocab_size=20)
    store = FeatureStore(features)
    head = new_head(settings, target.weights, store, range(len(store)), target.eos_ids)
    for block in head.parameters():
        torch.nn.init.normal_(block, std=0.1)
    vocab = head.draft_vocab.tolist()
    expected: list[list[float]] = [[], [], []]
    for document in list(store)[:6]:
        hidden, text, mask = document.hidden.float(), document.token_ids, document.loss_mask
        teacher = target.logits(hidden)[:, head.draft_vocab].softmax(-1)
        features_of = head(hidden[None], text[None])[:, 0].detach()
        for i in range(3):
            for t in range(len(text) - 2 - i):
                if mask[t + 1] and mask[t + 2 + i]:
                    log_probs = head.logits(features_of[i, t], i).log_softmax(-1)
                    if loss == "teacher":
                        expected[i].append(-float(teacher[t + 1 + i] @ log_probs))
                    elif int(text[t + 2 + i]) in vocab:
                        expected[i].append(-float(log_probs[vocab.index(int(text[t + 2 + i]))]))
    means = [sum(losses) / len(losses) for losses in expected]
    learner = Learner(head, target.weights, objective=objective(loss), depth_decay=0.5)
    for skip_prompts in (False, True):
        batch = collate(list(store)[:6], skip_prompts=skip_prompts)
        found = learner(**vars(batch))
        assert found["head_losses"].tolist() == pytest.approx(means, rel=1e-5)
        assert found["loss"].item() == pytest.approx(means[0] + means[1] / 2 + means[2] / 4, rel=1e-5)
    measured_losses = measure(learner, store, range(6), batch_tokens=100).losses
    assert measured_losses.tolist() == pytest.approx(means, rel=1e-5)


def test_a_head_that_is_the_same_at_all_depths_is_taught_once(
    target: TargetModel, features: Path, tmp_path: Path
) -> None:
    store = FeatureStore(features)
    losses = {}
    for depth in (1, 3):
        settings = options(tmp_path / "out", features, method="small-llama", num_heads=depth)
        head = new_head(settings, target.weights, store, range(len(store)), target.eos_ids)
        learner = Learner(head, target.weights, objective=objective("teacher"), depth_decay=0.8)
        losses[depth] = learner(**vars(collate(list(store)[:6], skip_prompts=False)))
    assert losses[1]["loss"].item() == pytest.approx(losses[3]["loss"].item(), rel=1e-6)
    for found in losses.values():
        assert found["head_losses"].tolist() == pytest.approx([losses[1]["loss"].item()], rel=1e-6)


@pytest.mark.parametrize("lm_head", ["shared", "own", "low_rank"])
def test_every_kind_of_lm_head_learns(target: TargetModel, features: Path, tmp_path: Path, lm_head: Any) -> None:
    settings = options(tmp_path / "out", features, lm_head=lm_head, lm_head_rank=8, draft_vocab_size=0)
    report = run.train_for(target, settings, Silent())
    untrained = measured(target, features, settings)
    assert sum(report.losses) < 0.9 * float(untrained.losses.sum())
    names = {name.split(".")[0] for name in tensors(tmp_path / "out")}
    assert names == ({"blocks"} if lm_head == "shared" else {"blocks", "lm_heads"})


@pytest.mark.parametrize("method", ["medusa", "hydra"])
@pytest.mark.parametrize("lm_head", ["shared", "own"])
def test_a_batch_without_a_word_that_can_be_guessed_changes_nothing(
    target: TargetModel, features: Path, method: str, lm_head: Any
) -> None:
    settings = options(Path("out"), features, method=method, lm_head=lm_head, draft_vocab_size=2)
    store = FeatureStore(features)
    head = new_head(settings, target.weights, store, range(len(store)), target.eos_ids)
    learner = Learner(head, target.weights, objective=objective("hard"), depth_decay=0.8)
    batch = vars(collate([store[0], store[1]], skip_prompts=False))
    unknown = next(i for i in range(10) if not learner.in_vocab[i])
    found = learner(**{**batch, "token_ids": torch.full_like(batch["token_ids"], unknown)})
    assert found["loss"].item() == 0
    assert found["head_losses"].tolist() == [0, 0, 0]
    found["loss"].backward()
    gradients = [parameter.grad for parameter in learner.parameters()]
    assert gradients
    assert all(gradient is not None and not gradient.any() for gradient in gradients)
    with pytest.raises(DataError, match="no two assistant tokens in a row"):
        learner(**{**batch, "loss_mask": torch.zeros_like(batch["loss_mask"])})


def test_training_goes_on_over_texts_without_a_word_that_can_be_guessed(
    target: TargetModel, features: Path, tmp_path: Path
) -> None:
    """Every text is a batch by itself, and most have none of the two words."""
    settings = options(tmp_path / "out", features, loss="hard", draft_vocab_size=2, batch_tokens=1, epochs=1)
    report = run.train_for(target, settings, Silent())
    losses = [line["loss"] for line in lines(tmp_path / "out")]
    assert len(losses) == report.num_steps
    assert 0 < losses.count(0.0) < report.num_steps
    assert all(torch.isfinite(tensor).all() for tensor in tensors(tmp_path / "out").values())


def test_the_same_seed_gives_the_same_head(target: TargetModel, features: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.rand(7)  # whatever was drawn before must not matter
        run.train_for(target, options(tmp_path / name, features, seed=seed), Silent())
    a, b, c = (tensors(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not all(torch.equal(a[name], c[name]) for name in a)


def stop_by_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


class KilledError(Exception):
    """Stands for whatever ends a process."""


def stop_by_crash() -> None:
    raise KilledError


@pytest.mark.parametrize("method", ["medusa", "hydra"])
@pytest.mark.parametrize("stop", [stop_by_ctrl_c, stop_by_crash])
def test_stopped_and_resumed_is_bit_equal_to_uninterrupted(
    target: TargetModel, features: Path, tmp_path: Path, method: str, stop: Any
) -> None:
    whole, parts = options(tmp_path / "a", features, method=method, save_steps=4, epochs=1), tmp_path / "b"
    expected = run.train_for(target, whole, Silent())
    settings = replace(whole, out=parts)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises((TrainingInterrupted, KilledError)):
        run.train_for(target, settings, Silent(6, stop))
    assert signal.getsignal(signal.SIGINT) is before
    last = {stop_by_ctrl_c: 6, stop_by_crash: 4}[stop]
    assert (parts / "checkpoints" / f"checkpoint-{last}").is_dir()
    assert not (parts / "model.safetensors").exists()
    with pytest.raises(InvalidSettings, match="add --resume"):
        run.train(settings, Silent())
    steps: list[int] = []
    reporter = Silent(last + 1, lambda: steps.append(last + 1))
    found = run.train_for(target, replace(settings, resume=True), reporter)
    assert steps
    assert without_time(found) == without_time(expected)
    assert (parts / "model.safetensors").read_bytes() == (tmp_path / "a" / "model.safetensors").read_bytes()
    for name in ("log.jsonl", "validation.jsonl"):
        assert lines(parts, name) == lines(tmp_path / "a", name)


def test_a_checkpoint_that_was_cut_short_is_passed_over(tmp_path: Path) -> None:
    for step in (4, 12, 8):
        folder = tmp_path / "checkpoints" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        if step != 12:
            (folder / "trainer_state.json").write_text("{}")
    assert find_checkpoint(tmp_path) == str(tmp_path / "checkpoints" / "checkpoint-8")
    assert find_checkpoint(tmp_path / "checkpoints") is None


def test_a_full_disk_under_a_checkpoint_leaves_the_earlier_ones(
    target: TargetModel, features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = options(tmp_path / "out", features, save_steps=4, epochs=1)
    expected = run.train_for(target, replace(settings, out=tmp_path / "whole"), Silent())

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        reporter = Silent(6, lambda: patch.setattr(torch, "save", full))
        with pytest.raises(StorageError, match="a checkpoint cannot be saved"):
            run.train_for(target, settings, reporter)
    assert [path.name for path in (settings.out / "checkpoints").iterdir()] == ["checkpoint-4"]
    found = run.train_for(target, replace(settings, resume=True), Silent())
    assert without_time(found) == without_time(expected)


def test_the_message_of_a_stopped_run_says_how_to_go_on(target: TargetModel, features: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingInterrupted, match=r"after step 2 of \d+; .* --resume goes on"):
        run.train_for(target, options(tmp_path / "out", features), Silent(2, stop_by_ctrl_c))


def test_a_run_that_was_stopped_while_saving_is_resumed(
    target: TargetModel, features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = options(tmp_path / "out", features)
    expected = run.train_for(target, replace(settings, out=tmp_path / "whole"), Silent())

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(run, "measure", lambda *a, **k: (patch.setattr(os, "fsync", full), measure(*a, **k))[1])
        with pytest.raises(StorageError, match="no space left"):
            run.train_for(target, settings, Silent())
    assert not list((tmp_path / "out").glob("*.safetensors"))
    found = run.train_for(target, replace(settings, resume=True), Silent())
    assert without_time(found) == without_time(expected)


def test_resuming_with_other_settings_is_an_error(target: TargetModel, features: Path, tmp_path: Path) -> None:
    settings = options(tmp_path / "out", features)
    with pytest.raises(TrainingInterrupted):
        run.train_for(target, settings, Silent(2, stop_by_ctrl_c))
    with pytest.raises(InvalidSettings, match=r"learning_rate was 0\.02 and is 0\.5"):
        run.train_for(target, replace(settings, resume=True, learning_rate=0.5), Silent())


def test_the_text_of_the_chat_template_belongs_to_a_run_and_its_head(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place does not: the same text in another file is the same run."""

    def load(*_: object, chat_template: str | None = None, **__: object) -> TargetModel:
        return replace(target, chat_template=chat_template)

    monkeypatch.setattr(TargetModel, "load", load)
    one, other = tmp_path / "one.jinja", tmp_path / "other.jinja"
    one.write_text(TEMPLATE.replace("m['role']", "'w1' if m['role'] == 'user' else m['role']"), encoding="utf-8")
    other.write_text(one.read_text(encoding="utf-8"), encoding="utf-8")
    data = write_chats(tmp_path / "chats.jsonl", counting_chats(40))
    settings = options(tmp_path / "out", None, data=(data,), chat_template=str(one), epochs=1)
    with pytest.raises(TrainingInterrupted):
        run.train(settings, Silent(2, stop_by_ctrl_c))
    with pytest.raises(DataError, match=r"holds features of|have changed since"):
        run.train(replace(settings, resume=True, chat_template=None), Silent())
    run.train(replace(settings, resume=True, chat_template=str(other)), Silent())
    assert read_head(settings.out).chat_template == one.read_text(encoding="utf-8")
    one.write_text("changed", encoding="utf-8")
    with pytest.raises(InvalidSettings, match=r"holds a trained head .*chat_template was"):
        run.train(replace(settings, resume=True), Silent())


def test_resuming_with_other_data_is_an_error(target: TargetModel, tmp_path: Path) -> None:
    data = write_chats(tmp_path / "chats.jsonl", counting_chats(40))
    settings = options(tmp_path / "out", None, data=(data,))
    with pytest.raises(TrainingInterrupted):
        run.train_for(target, settings, Silent(2, stop_by_ctrl_c))
    write_chats(data, counting_chats(39))
    with pytest.raises(DataError, match=r"texts or the model have changed since .* start anew with another --out"):
        run.train_for(target, replace(settings, resume=True), Silent())


def test_ctrl_c_while_the_target_reads_keeps_what_it_read(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extract, "DOCUMENTS_PER_SHARD", 15)
    data = write_chats(tmp_path / "chats.jsonl", counting_chats(40))
    settings = options(tmp_path / "out", None, data=(data,), keep_features=True)

    class Impatient(Silent):
        def progress(self, done: int, total: int, loss: float | None = None) -> None:
            if done > total / 2 and self.stages[-1].startswith("hidden"):
                raise KeyboardInterrupt

    with pytest.raises(TrainingInterrupted, match="goes on from there"):
        run.train_for(target, settings, Impatient())
    made = shard_path(tmp_path / "out" / "features", 0).stat().st_mtime_ns
    run.train_for(target, replace(settings, resume=True), Silent())
    assert shard_path(tmp_path / "out" / "features", 0).stat().st_mtime_ns == made


@pytest.mark.parametrize("keep", [False, True])
def test_features_in_the_output_folder_go_when_they_are_done_with(
    target: TargetModel, tmp_path: Path, keep: bool
) -> None:
    data = write_chats(tmp_path / "chats.jsonl", counting_chats(20))
    run.train_for(target, options(tmp_path / "out", None, data=(data,), keep_features=keep, epochs=1), Silent())
    assert (tmp_path / "out" / "features").exists() == keep


@pytest.mark.parametrize("loss", ["teacher", "hard"])
def test_a_loss_that_is_no_number_names_step_and_texts(
    target: TargetModel, features: Path, tmp_path: Path, loss: Any
) -> None:
    broken = tmp_path / "features"
    broken.mkdir()
    for path in features.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    store = FeatureStore(features)
    training, _ = choose_texts(store.token_ids, store.loss_masks, held_out=0.2, seed=0)
    index = training[len(training) // 2]
    content = load_file(shard_path(broken, 0))
    start = int(content["lengths"][:index].sum())
    content["hidden"][start : start + int(content["lengths"][index])] = float("nan")
    with safe_open(shard_path(features, 0), framework="pt") as file:
        metadata = file.metadata()
    is_known = loss == "teacher"  # where the texts are from
    save_file(content, shard_path(broken, 0), metadata=metadata if is_known else None)
    settings = options(tmp_path / "out", broken, loss=loss)
    place = rf"chats\.jsonl:{index + 1}\b" if is_known else rf"text {index} of the features\b"
    with pytest.raises(NonFiniteLoss, match=rf"nan at step \d+, on .*{place}") as caught:
        run.train_for(target, settings, Silent())
    plan = plan_batches(training, store.lengths, max_tokens=128, num_epochs=1, seed=0)
    step = next(n for n, batch in enumerate(plan, start=1) if index in batch)
    assert f"at step {step}," in str(caught.value)


def test_an_exploding_run_is_stopped(target: TargetModel, features: Path, tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLoss, match="lower --learning-rate"):
        run.train_for(target, options(tmp_path / "out", features, learning_rate=1e37, warmup=0.0), Silent())


def test_a_trained_head_is_not_written_over(target: TargetModel, features: Path, tmp_path: Path) -> None:
    settings = options(tmp_path / "out", features, epochs=1)
    run.train_for(target, settings, Silent())
    with pytest.raises(InvalidSettings, match="holds a trained head"):
        run.train(settings, Silent())


def test_two_runs_cannot_write_one_folder(
    target: TargetModel, features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TargetModel, "load", lambda *_, **__: target)
    settings = options(tmp_path / "out", features, epochs=1)
    silent = Silent()
    with locked(settings.out, ""), pytest.raises(StorageError, match=r"another process is writing .*out: wait for it"):
        run.train(settings, silent)
    assert silent.stages == []
    assert run.train(settings, Silent()) is not None
    with locked(settings.out, ""), pytest.raises(StorageError, match="another process"):
        run.train(replace(settings, resume=True), Silent())  # it tidies up what the other may be writing
    assert run.train(replace(settings, resume=True), Silent()) is not None


def test_of_several_processes_the_first_sees_to_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "is_first", lambda: False)
    with locked(tmp_path, ""), alone_in(tmp_path):
        pass


def test_features_of_another_model_are_refused(features: Path, tmp_path: Path) -> None:
    other = replace(chat_model(), model_id="another")
    with pytest.raises(DataError, match=r"of tiny-chat .* not of another"):
        run.train_for(other, options(tmp_path / "out", features), Silent())


def test_one_text_is_too_few(target: TargetModel, tmp_path: Path) -> None:
    data = write_chats(tmp_path / "chats.jsonl", [chat("w1", "w2 w3 w4")])
    with pytest.raises(DataError, match="only one text"):
        run.train_for(target, options(tmp_path / "out", None, data=(data,)), Silent())


def test_answers_of_one_token_teach_nothing(target: TargetModel, tmp_path: Path) -> None:
    data = write_chats(tmp_path / "chats.jsonl", [chat("w1", "w2", finished=False)] * 9)
    with pytest.raises(DataError, match="no two assistant tokens in a row"):
        run.train_for(target, options(tmp_path / "out", None, data=(data,)), Silent())


def test_the_draft_vocabulary_is_the_most_frequent_and_the_end(target: TargetModel, tmp_path: Path) -> None:
    records = [chat("w9 w9 w9", "w5 w5 w5 w3 w3 w8 w7", finished=False), chat("w1", "w5", finished=False)]
    texts = load_texts(target, [write_chats(tmp_path / "chats.jsonl", records)], max_length=64)
    store = build_features(target, texts, tmp_path / "features", NoProgress())
    vocab = frequent_tokens(store, [0, 1], 4, vocab_size=64, always=frozenset({EOS}))
    word = 7  # the id of w0
    assert vocab.tolist() == [EOS, word + 3, word + 5, word + 7]  # w7 before w8: as frequent, lower id
    assert frequent_tokens(store, [1], 3, vocab_size=64, always=frozenset({EOS})).tolist() == [
        0,
        EOS,
        word + 5,
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "--epochs is 0"),
        ({"batch_tokens": 0}, "--batch-tokens is 0"),
        ({"tree_nodes": 0}, "--tree-nodes is 0"),
        ({"held_out": 1.0}, "--held-out is 1.0"),
        ({"warmup": -0.1}, "--warmup is -0.1"),
        ({"learning_rate": 0.0}, "--learning-rate is 0.0"),
        ({"learning_rate": float("nan")}, "--learning-rate is nan"),
        ({"depth_decay": -1.0}, "--depth-decay is -1.0"),
        ({"draft_vocab_size": -1}, "--draft-vocab-size is -1"),
        ({"max_tokens": 0}, "--max-tokens is 0"),
        ({"loss": "soft"}, "--loss is 'soft'"),
        ({"seed": -1}, "--seed is -1: must be at least 0 and below"),
        ({"seed": 2**32}, "--seed is 4294967296"),
        ({"seed": 10**23}, "--seed is 1000"),
        ({"seed": 1e23}, r"--seed is 1e\+23"),
        ({"features": None}, "--data FILE"),
    ],
)
def test_settings_out_of_range_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSettings, match=message):
        options(tmp_path / "out", **{"features": tmp_path, **changes})


def test_an_unknown_method_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnknownMethod, match="'medussa'"):
        options(tmp_path / "out", tmp_path, method="medussa")


def test_a_log_goes_on_after_the_last_checkpoint(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "log.jsonl", keep_until=0)
    for step in (1, 2, 3):
        log.add({"step": step})
    (tmp_path / "log.jsonl").open("a").close()
    StepLog(tmp_path / "log.jsonl", keep_until=2).add({"step": 3, "new": True})
    assert lines(tmp_path) == [{"step": 1}, {"step": 2}, {"step": 3, "new": True}]


def test_the_command_prints_a_table(
    target: TargetModel,
    features: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(TargetModel, "load", lambda *_, **__: target)
    command.run(options(tmp_path / "out", features, num_heads=2, epochs=1))
    printed = capfd.readouterr()
    assert printed.err == ""
    assert all(
        word in printed.out
        for word in ("top-1", "top-3", "top-10", "expected tokens per step", "tokens of text a second", "saved in")
    )
    assert "tree of 8 nodes" in printed.out
    assert f"wrote {tmp_path / 'out' / 'report.html'}\n" in printed.out


def test_a_fresh_process_warns_of_nothing(features: Path, tmp_path: Path) -> None:
    """Warnings of transformers and accelerate belong in no user's terminal."""
    program = f"""
import sys; sys.path[:0] = {[*map(str, Path(__file__).parents[1:3]), str(Path(run.__file__).parents[2])]!r}
from pathlib import Path
from tests.train.test_train import options
from training_world import chat_model
from draftheads.cli import train
from draftheads.models.model import TargetModel
TargetModel.load = lambda *_, **__: chat_model()
train.run(options(Path({str(tmp_path / "out")!r}), Path({str(features)!r}), epochs=1))
"""
    done = subprocess.run([sys.executable, "-W", "default", "-c", program], capture_output=True, text=True, check=True)
    # what bitsandbytes says when peft imports it is not ours to silence
    foreign = re.compile(r"Failed to load CPU gemm|DeprecationWarning: `torch\.jit|^  warnings\.warn\($")
    assert [line for line in done.stderr.splitlines() if not foreign.search(line)] == []
    assert "saved in" in done.stdout
    assert "grad_norm" not in done.stdout  # the Trainer's own lines


# --- what only some heads have ---


@pytest.mark.parametrize("method", ["hydra++", "amphista", "eagle"])
def test_layers_are_as_large_as_the_targets(target: TargetModel, features: Path, tmp_path: Path, method: str) -> None:
    run.train_for(target, options(tmp_path / "out", features, method=method, num_heads=4, epochs=1), Silent())
    config = read_head(tmp_path / "out").config
    assert {name: getattr(config, name) for name in target.layer_sizes} == target.layer_sizes
    assert getattr(config, "embedding_scale") != 1.0  # noqa: B009 - not every config has it


def test_options_of_one_architecture_are_trained_with_and_saved(
    target: TargetModel, features: Path, tmp_path: Path
) -> None:
    own = ("num_auto_embedding_blocks=2", "sampled_token=false")
    run.train_for(
        target,
        options(tmp_path / "out", features, method="amphista", num_heads=4, head_options=own, epochs=1),
        Silent(),
    )
    config: Any = read_head(tmp_path / "out").config
    assert (config.num_auto_embedding_blocks, config.sampled_token) == (2, False)
    with pytest.raises(InvalidSettings, match="head option 'depth=1': medusa has none"):
        options(tmp_path, features, head_options=("depth=1",))


def test_a_chain_is_saved_where_it_was_asked_for(target: TargetModel, features: Path, tmp_path: Path) -> None:
    run.train_for(target, options(tmp_path / "out", features, chain=True, epochs=1), Silent())
    assert load_head(tmp_path / "out", target).default_shape == Tree.chain(3)


def test_features_are_drawn_to_the_hidden_states_that_come(target: TargetModel, features: Path, tmp_path: Path) -> None:
    store = FeatureStore(features)
    document = store[0]
    hidden, text, mask = document.hidden[None].float(), document.token_ids[None], document.loss_mask[None]
    settings = options(tmp_path / "out", features, method="eagle", num_heads=2)
    head = new_head(settings, target.weights, store, range(len(store)), target.eos_ids)
    for parameter in head.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)

    @torch.no_grad()
    def loss(weight: float) -> float:
        learner = Learner(
            head, target.weights, objective=objective("teacher"), depth_decay=0.5, feature_weight=weight
        ).eval()
        return float(learner(hidden, text, mask)["loss"])

    found = head(hidden, text).detach()
    expected = 0.0
    for i, decay in enumerate((1.0, 0.5)):
        gaps = [
            F.smooth_l1_loss(found[i, 0, t], hidden[0, t + 1 + i])
            for t in range(text.shape[1] - 2 - i)
            if mask[0, t + 1 : t + 3 + i][[0, -1]].all()
        ]
        expected += decay * float(torch.stack(gaps).mean())
    assert loss(3.0) - loss(0.0) == pytest.approx(3.0 * expected, rel=1e-3)

    def gap(out: Path, weight: float) -> float:
        changed = options(out, features, method="eagle", num_heads=2, epochs=6, feature_weight=weight)
        run.train_for(target, changed, Silent())
        trained = load_head(out, target, dtype=torch.float32)(hidden, text)
        return float(F.smooth_l1_loss(trained[0, 0, :-2], hidden[0, 1:-1]))

    assert gap(tmp_path / "drawn", 30.0) < 0.9 * gap(tmp_path / "free", 0.0)


def test_betas_are_adams(target: TargetModel, features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[Any] = []
    step = torch.optim.AdamW.step

    def watched(self: torch.optim.AdamW, *arguments: Any) -> Any:
        met.append(self.param_groups[0]["betas"])
        return step(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    run.train_for(target, options(tmp_path / "out", features, epochs=1, betas=(0.8, 0.95)), Silent())
    assert set(met) == {(0.8, 0.95)}
    with pytest.raises(InvalidSettings, match=r"--betas is \(0\.9, 1\.0\): both must be at least 0 and below 1"):
        options(tmp_path, features, betas=(0.9, 1.0))


def test_features_that_are_no_hidden_states_are_not_drawn_to_them(features: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match=r"--feature-weight is 2\.0, but features of mlp-speculator heads are no"):
        options(tmp_path, features, method="mlp-speculator", feature_weight=2.0)
    with pytest.raises(InvalidSettings, match=r"--feature-weight is 2\.0: hidden states of the model change here"):
        JointOptions(out=tmp_path, data=(tmp_path,), feature_weight=2.0)
