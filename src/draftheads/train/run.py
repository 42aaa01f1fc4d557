"""A whole training run: texts to features, features to a head, the head measured and saved.

Knows the order of the work and the output folder; shows nothing: progress goes to a :class:`Reporter`.
"""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from draftheads.checkpoint import save_head
from draftheads.data.batches import PlannedBatches, plan_batches, split_held_out
from draftheads.data.extract import build_features, load_texts
from draftheads.data.features import FeatureStore
from draftheads.draft import TargetWeights
from draftheads.errors import DataError, InvalidSettings
from draftheads.files import write_atomic
from draftheads.heads import head_classes
from draftheads.heads.base import DraftHead
from draftheads.provenance import provenance
from draftheads.search.grow import best_tree
from draftheads.target.model import TargetModel
from draftheads.train.card import model_card
from draftheads.train.learner import Learner
from draftheads.train.measure import Measurement, measure
from draftheads.train.options import TrainOptions
from draftheads.train.report import Report
from draftheads.train.trainer import find_checkpoint, fit
from draftheads.tree import Tree

HELD_OUT_AT_MOST = 200


class Reporter(Protocol):
    """Somebody who is told how far things are."""

    def stage(self, what: str) -> None:
        """Something new begins."""

    def progress(self, done: int, total: int, loss: float | None = None) -> None:
        """So many tokens or steps of the stage are done."""


def train(options: TrainOptions, reporter: Reporter) -> Report:
    """Trains a head as the options say and leaves it in ``options.out``.

    Raises:
        DraftHeadsError: bad data or settings, a loss that is not finite, Ctrl-C (a checkpoint is left), a full disk.
    """
    _check_out(options)
    reporter.stage(f"loading {options.model}")
    target = TargetModel.load(options.model, dtype=None if torch.cuda.is_available() else torch.float32)
    store = _features(target, options, reporter)
    training, held_out = split_held_out(
        len(store), fraction=options.held_out, at_most=HELD_OUT_AT_MOST, seed=options.seed
    )
    weights = _as_float32(target.weights)
    head = new_head(options, weights, store, training, target.eos_ids).to(target.device)
    head.bind(weights)
    learner = Learner(head, weights, loss=options.loss, depth_decay=options.depth_decay)
    plan = plan_batches(
        training, store.lengths, max_tokens=options.batch_tokens, num_epochs=options.epochs, seed=options.seed
    )
    _remember(options, store, plan)
    reporter.stage(f"training {options.method} on {len(training)} texts")
    started = time.monotonic()
    fit(learner, PlannedBatches(store, plan), options, on_step=reporter.progress)
    seconds = time.monotonic() - started
    reporter.stage(f"measuring on {len(held_out)} held-out texts")
    found = measure(learner, store, held_out, batch_tokens=options.batch_tokens)
    head.tree = best_tree(found.complete, options.tree_nodes)
    report = _report(options, target, found, head.tree, (len(training), len(held_out), len(plan)), seconds)
    _save(head, target, report, options)
    return report


def new_head(
    options: TrainOptions,
    weights: TargetWeights,
    store: FeatureStore,
    documents: Sequence[int],
    eos_ids: frozenset[int],
) -> DraftHead:
    """An untrained head with its starting values, the same for the same seed."""
    torch.manual_seed(options.seed)
    vocab_size, hidden_size = weights.lm_head.shape
    vocab = None
    if 0 < options.draft_vocab_size < vocab_size:
        vocab = frequent_tokens(
            store, documents, options.draft_vocab_size, vocab_size=vocab_size, always=eos_ids
        )
    config_class, head_class = head_classes(options.method)
    config = config_class(
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_heads=options.num_heads,
        num_layers=options.num_layers,
        lm_head=options.lm_head,
        lm_head_rank=options.lm_head_rank,
        draft_vocab_size=None if vocab is None else len(vocab),
    )
    head = head_class(config)
    head.initialise(weights, vocab)
    return head


def frequent_tokens(
    store: FeatureStore, documents: Sequence[int], num_tokens: int, *, vocab_size: int, always: frozenset[int]
) -> Tensor:
    """The ids (V',) of the assistant's most frequent tokens, rising; ``always`` are among them, ties go to the lower id."""
    said = torch.cat([store.token_ids[i][store.loss_masks[i]] for i in documents])
    counts = torch.bincount(said, minlength=vocab_size)
    counts[sorted(always)] = len(said) + 1
    return counts.sort(descending=True, stable=True).indices[:num_tokens].sort().values


def _check_out(options: TrainOptions) -> None:
    if (options.out / "model.safetensors").exists():
        raise InvalidSettings(f"{options.out} already holds a trained head: name another --out, or delete it")
    if not options.resume and find_checkpoint(options.out):
        raise InvalidSettings(
            f"{options.out} holds an unfinished run: add --resume to go on with it, or delete it"
        )


def _features(target: TargetModel, options: TrainOptions, reporter: Reporter) -> FeatureStore:
    folder = options.features or options.out / "features"
    if options.data:
        reporter.stage("reading data")
        texts = load_texts(target, options.data, max_length=options.max_length, max_tokens=options.max_tokens)
        reporter.stage(f"hidden states of {len(texts)} texts")
        return build_features(target, texts, folder, reporter.progress)
    store = FeatureStore(folder)
    if store.meta.model_id != target.model_id or store.meta.hidden_size != target.hidden_size:
        raise DataError(
            f"{folder} holds hidden states of {store.meta.model_id} (size {store.meta.hidden_size}), "
            f"not of {target.model_id} (size {target.hidden_size})"
        )
    return store


def _remember(options: TrainOptions, store: FeatureStore, plan: Sequence[Sequence[int]]) -> None:
    """Notes what a run depends on, or on resuming checks that it is still the same."""
    path = options.out / "run.json"
    same = {name: value for name, value in _plain(asdict(options)).items() if name not in _FREE_TO_CHANGE}
    now = {**same, "features_fingerprint": store.meta.fingerprint, "num_steps": len(plan)}
    if options.resume and path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        changed = [
            f"{name} was {before.get(name)!r}, is {now[name]!r}"
            for name in now
            if before.get(name) != now[name]
        ]
        if changed:
            raise InvalidSettings(f"--resume goes on with the same run, but {'; '.join(changed)}")
        return
    write_atomic(path, (json.dumps(now, indent=2) + "\n").encode())


_FREE_TO_CHANGE = (
    "out",
    "resume",
    "features",
    "keep_features",
    "data",
    "save_steps",
    "log_steps",
    "tree_nodes",
)


def _report(
    options: TrainOptions,
    target: TargetModel,
    found: Measurement,
    tree: Tree,
    numbers: tuple[int, int, int],
    seconds: float,
) -> Report:
    return Report(
        method=options.method,
        model_id=target.model_id,
        num_training_texts=numbers[0],
        num_held_out_texts=numbers[1],
        num_steps=numbers[2],
        training_seconds=round(seconds, 1),
        losses=found.losses.tolist(),
        top1=found.accuracy(1),
        top3=found.accuracy(3),
        top10=found.accuracy(10),
        tokens_per_step_chain=found.tokens_per_step(Tree.chain(options.num_heads)),
        tokens_per_step_tree=found.tokens_per_step(tree),
        tree=[list(path) for path in tree.paths[1:]],
    )


def _save(head: DraftHead, target: TargetModel, report: Report, options: TrainOptions) -> None:
    made: dict[str, dict[str, Any]] = {"options": _plain(asdict(options)), "provenance": dict(provenance())}
    write_atomic(
        options.out / "metrics.json", (json.dumps({**asdict(report), **made}, indent=2) + "\n").encode()
    )
    save_head(
        head,
        options.out,
        base=target,
        card=model_card(report, made["options"], made["provenance"]),
        plan_details={
            "tokens_per_step": report.tokens_per_step_tree,
            "num_held_out_texts": report.num_held_out_texts,
        },
    )
    if options.features is None and not options.keep_features:
        shutil.rmtree(options.out / "features", ignore_errors=True)


def _as_float32(weights: TargetWeights) -> TargetWeights:
    """Heads are trained in fp32 whatever the target computes in."""
    embedding = weights.embedding.detach().float()
    lm_head = embedding if weights.lm_head is weights.embedding else weights.lm_head.detach().float()
    bias = weights.lm_head_bias
    return TargetWeights(
        embedding, lm_head, None if bias is None else bias.detach().float(), weights.logit_scale
    )


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Paths as text, tuples as lists: what JSON gives back."""
    result: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return result
