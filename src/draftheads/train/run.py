"""A whole training run: texts to features, features to a head, the head measured and saved.

Knows the order of the work and the output folder; shows nothing: progress goes to a :class:`Reporter`.

The output folder holds the head (see ``checkpoint``) with ``metrics.json`` and ``log.jsonl``, and while the
run is not complete ``run.json`` (what it depends on), ``checkpoints/`` and ``features/``.
"""

import contextlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from draftheads.checkpoint import save_head
from draftheads.data.batches import PlannedBatches
from draftheads.data.features import Documents, FeatureStore
from draftheads.data.live import LiveStore
from draftheads.draft import TargetWeights
from draftheads.errors import DataError, InvalidSettings, MissingDependency
from draftheads.files import locked, remove_leftovers, write_atomic
from draftheads.heads import head_classes, parse_head_options
from draftheads.heads.base import DraftHead, HeadConfig
from draftheads.provenance import provenance
from draftheads.search.grow import best_tree
from draftheads.target.model import TargetModel
from draftheads.target.pretrained import default_dtype
from draftheads.target.shard import shard_layers
from draftheads.train import processes
from draftheads.train.card import model_card
from draftheads.train.learner import Learner
from draftheads.train.losses import objective
from draftheads.train.material import Material, arrange, read_data, with_hidden_states
from draftheads.train.measure import NUM_RANKS, Measurement, measure
from draftheads.train.options import TrainOptions
from draftheads.train.page import PAGE, write_page
from draftheads.train.report import Report
from draftheads.train.start import Start, digest_of
from draftheads.train.trainer import OnStep, TrainingInterrupted, find_checkpoint, fit, require_packages
from draftheads.tree import Tree

_CHANGES_NOTHING = frozenset(
    {
        *("out", "resume", "features_budget", "keep_features", "tensorboard"),
        *("save_steps", "log_steps", "eval_steps", "eval_texts"),
    }
)
_MAY_CHANGE_ON_RESUME = frozenset(
    {
        *("out", "data", "text", "features", "features_budget", "keep_features", "resume"),
        *("save_steps", "log_steps", "eval_steps", "eval_texts", "tree_nodes", "tensorboard"),
    }
)


class Reporter(Protocol):
    """Somebody who is told how far things are."""

    def stage(self, what: str) -> None:
        """Something new begins."""

    def progress(self, done: int, total: int, loss: float | None = None) -> None:
        """So many tokens or steps of the stage are done."""


def train(options: TrainOptions, reporter: Reporter) -> Report | None:
    """Trains a head as the options say and leaves it in ``options.out``.

    Returns:
        What was found; None in every process but the first, where there are several and the run was not complete.

    Raises:
        DraftHeadsError: bad data or settings, a loss that is not finite, a full disk, Ctrl-C (it can go on).
    """
    check_place(options)
    with alone_in(options.out):
        if metrics := already_found(options, options.out):
            reporter.stage(f"{options.out} is complete already: nothing is left to do")
            if processes.is_first():
                _wind_up(options, reporter)
            return Report.of(metrics)
        check_out(options, options.out)
        processes.wait()  # nobody writes before all have looked
        say_where_it_starts(options, reporter)
        reporter.stage(f"loading {options.model}")
        if options.shard_model:
            target = _spread(TargetModel.load(options.model, dtype=default_dtype(processes.device()), device="cpu"))
        else:
            target = TargetModel.load(options.model, four_bit=options.four_bit)
        return train_for(target, options, reporter)


@contextlib.contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """No other run writes into the folder meanwhile; of several processes of one run the first sees to it.

    Raises:
        StorageError: another one does.
    """
    with locked(out, "name another --out") if processes.is_first() else contextlib.nullcontext():
        yield


def train_for(target: TargetModel, options: TrainOptions, reporter: Reporter) -> Report | None:
    """:func:`train` for a model that is loaded already, whatever ``options.model`` says."""
    start = read_start(options, target, reporter)  # before the model reads for hours
    material = _material(target, options, reporter, start)
    store, training, held_out = material.store, material.training, material.held_out
    weights = in_float32(target.weights)
    head = new_head(options, weights, store, training, target.eos_ids, layer_sizes=target.layer_sizes, start=start)
    learner = new_learner(options, head, weights)
    reporter.stage(f"training {options.method} on {len(training)} texts")
    batches = PlannedBatches(store, material.plan, skip_prompts=not head.needs_history)
    some = held_out[: options.eval_texts]

    def validate() -> dict[str, Any]:
        return in_between(measure(learner, store, some, batch_tokens=options.batch_tokens), options)

    speed = Speedometer(material.tokens_per_step)
    fit(
        learner,
        batches,
        options,
        stages=material.stages,
        on_step=speed.counting(reporter.progress),
        validate=validate,
    )
    if not processes.is_first():
        processes.wait()
        return None
    reporter.stage(f"measuring on {len(held_out)} texts kept apart")
    found = measure(learner, store, held_out, batch_tokens=options.batch_tokens)
    head.tree = chosen_tree(found, options)
    report = report_on(
        head,
        found,
        model_id=target.model_id,
        num_training_texts=len(training),
        num_held_out_texts=len(held_out),
        num_steps=material.num_steps,
        seconds=speed.seconds,
        tokens_per_second=speed.tokens_per_second,
    )
    _save(head, target, report, options, start)
    _wind_up(options, reporter)
    processes.wait()
    return report


def _spread(target: TargetModel) -> TargetModel:
    """The model over all processes."""
    if processes.count() == 1:
        raise InvalidSettings("--shard-model is for several processes: start them with accelerate launch or torchrun")
    assert target.weights_print  # taken while it is whole
    shard_layers(target, processes.device())
    return target


class Speedometer:
    """Tokens and seconds of the steps that this process made."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens  # of every step
        self.num_tokens = 0
        self.started = self.latest = time.monotonic()

    @property
    def seconds(self) -> float:
        """From the start to the last step."""
        return self.latest - self.started

    @property
    def tokens_per_second(self) -> float:
        """0 before the first step."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    def counting(self, on_step: OnStep) -> OnStep:
        """The same callback, and the step counts."""

        def counted(step: int, total: int, loss: float | None) -> None:
            self.num_tokens += self.tokens[step - 1]
            self.latest = time.monotonic()
            on_step(step, total, loss)

        return counted


def in_between(found: Measurement, options: TrainOptions) -> dict[str, Any]:
    """A line of ``validation.jsonl``."""
    tree = chosen_tree(found, options)
    return {
        "losses": found.losses.tolist(),
        "top1": found.accuracy(1),
        "top3": found.accuracy(3),
        "top10": found.accuracy(10),
        "tokens_per_step_chain": found.tokens_per_step(Tree.chain(found.ranks.shape[1])),
        "tokens_per_step_tree": found.tokens_per_step(tree),
    }


def report_on(
    head: DraftHead,
    found: Measurement,
    *,
    model_id: str,
    num_training_texts: int,
    num_held_out_texts: int,
    num_steps: int,
    seconds: float,
    tokens_per_second: float,
) -> Report:
    """What was found of a head with its tree, as plain numbers."""
    return Report(
        method=head.config.method,
        model_id=model_id,
        num_training_texts=num_training_texts,
        num_held_out_texts=num_held_out_texts,
        num_steps=num_steps,
        training_seconds=round(seconds, 1),
        tokens_per_second=round(tokens_per_second, 1),
        losses=found.losses.tolist(),
        accuracy_by_rank=[list(shares) for shares in zip(*map(found.accuracy, range(1, NUM_RANKS + 1)), strict=True)],
        top1=found.accuracy(1),
        top3=found.accuracy(3),
        top10=found.accuracy(10),
        tokens_per_step_chain=found.tokens_per_step(Tree.chain(head.config.num_heads)),
        tokens_per_step_tree=found.tokens_per_step(head.tree),
        tree=[list(path) for path in head.tree.paths[1:]],
    )


def new_learner(options: TrainOptions, head: DraftHead, weights: TargetWeights) -> Learner:
    """The head with what the options say it is to learn."""
    return Learner(
        head,
        weights,
        objective=objective(
            options.loss,
            alignment_weight=options.alignment_weight,
            lm_weight=options.lm_weight,
            lk_eta=options.lk_eta,
        ),
        depth_decay=options.depth_decay,
        noise_alpha=options.noise_alpha,
        feature_weight=options.feature_weight,
        dropout=options.dropout,
    )


def chosen_tree(found: Measurement, options: TrainOptions) -> Tree:
    """What is saved with the head: the best tree of so many nodes for the ranks that were found, or a chain."""
    if options.chain:
        return Tree.chain(min(options.num_heads, options.tree_nodes - 1))
    return best_tree(found.joint_ranks, options.tree_nodes)


def new_head(
    options: TrainOptions,
    weights: TargetWeights,
    store: Documents,
    documents: Sequence[int],
    eos_ids: frozenset[int],
    *,
    layer_sizes: Mapping[str, float] = MappingProxyType({}),
    start: Start | None = None,
) -> DraftHead:
    """An untrained head with its starting values, on the weights' device, the same for the same seed.

    ``layer_sizes`` are those of the target's layers, for heads that have some of their own. Of ``start`` it has what
    fits, its draft vocabulary, and its scale of embeddings, without which the weights mean something else.
    """
    torch.manual_seed(options.seed)
    vocab_size, hidden_size = weights.lm_head.shape
    config_class, head_class = head_classes(options.method)
    vocab, scale = None, 1.0
    if start is not None:
        vocab = start.vocab(options.draft_vocab_size)
    elif 0 < options.draft_vocab_size < vocab_size:
        vocab = frequent_tokens(store, documents, options.draft_vocab_size, vocab_size=vocab_size, always=eos_ids)
    if config_class.reads_embeddings:
        known = None if start is None else start.embedding_scale
        scale = embedding_scale(weights, store, documents) if known is None else known
    config = _head_config(
        options,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=None if vocab is None else len(vocab),
        embedding_scale=scale,
        layer_sizes=layer_sizes,
    )
    head = head_class(config).to(weights.lm_head.device)
    head.initialise(weights, None if vocab is None else vocab.to(weights.lm_head.device))
    if start is not None:
        start.give(head)
    return head


def _head_config(
    options: TrainOptions,
    *,
    hidden_size: int,
    vocab_size: int,
    draft_vocab_size: int | None,
    embedding_scale: float,
    layer_sizes: Mapping[str, float],
) -> HeadConfig:
    """What the options say, for a model of these sizes."""
    config_class, _ = head_classes(options.method)
    measured: dict[str, Any] = {}
    if config_class.has_layers:
        measured |= layer_sizes
    if config_class.reads_embeddings:
        measured["embedding_scale"] = embedding_scale
    return config_class(
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_heads=options.num_heads,
        num_layers=options.num_layers,
        lm_head=options.lm_head,
        lm_head_rank=options.lm_head_rank,
        draft_vocab_size=draft_vocab_size,
        **{**measured, **parse_head_options(options.method, options.head_options)},
    )


def read_start(options: TrainOptions, target: TargetModel, reporter: Reporter) -> Start | None:
    """The head that ``--start-from`` names, if any; says what it gives.

    Raises:
        DraftHeadsError: it is none for this model, or nothing of it fits.
    """
    if options.start_from is None:
        return None
    start = Start.read(options.start_from, target)
    vocab = start.vocab(options.draft_vocab_size)
    config = _head_config(
        options,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=None if vocab is None else len(vocab),
        embedding_scale=1.0,  # decides no shape
        layer_sizes=target.layer_sizes,
    )
    _, head_class = head_classes(options.method)
    with torch.device("meta"):
        head = head_class(config)
    part = start.part_of(head)
    if not (options.resume and find_checkpoint(options.out)):
        reporter.stage(f"starting from {start.name}, which gives {part:.0%} of the head's numbers")
    return start


def embedding_scale(weights: TargetWeights, store: Documents, documents: Sequence[int]) -> float:
    """How much larger hidden states are than embeddings (root mean squares); they are often ten times larger.

    A head that reads both side by side would hardly see the embeddings: Adam's steps are the same for all weights.
    """
    hidden = torch.cat([store[i].hidden.float() for i in documents[:16]])
    ratio = hidden.square().mean().sqrt() / weights.embedding.float().square().mean().sqrt().cpu()
    return round(float(ratio), 3)


def frequent_tokens(
    store: Documents,
    documents: Sequence[int],
    num_tokens: int,
    *,
    vocab_size: int,
    always: frozenset[int],
) -> Tensor:
    """The ids (V',) of the assistant's most frequent tokens, rising.

    ``always`` are among them as far as there is room; ties go to the lower id.
    """
    said = torch.cat([store.token_ids[i][store.loss_masks[i]] for i in documents])
    counts = torch.bincount(said, minlength=vocab_size)
    counts[sorted(always)] = len(said) + 1
    return counts.sort(descending=True, stable=True).indices[:num_tokens].sort().values


def check_place(options: TrainOptions) -> None:
    """Keeps a run from failing late."""
    require_packages(options)
    if options.out.exists() and not options.out.is_dir():
        raise InvalidSettings(f"--out is {options.out}, which is a file: name a folder")


def check_out(options: TrainOptions, head: Path) -> None:
    """Keeps a run from writing over another one, whose head is in the folder ``head``."""
    if (head / "config.json").exists():  # of a head's files the last one to be there
        changes = _changes(options, head) if options.resume else []
        how = f" ({', '.join(changes)})" if changes else ""
        raise InvalidSettings(f"{options.out} holds a trained head{how}: name another --out, or delete it")
    if not options.resume and find_checkpoint(options.out):
        raise InvalidSettings(
            f"{options.out} holds a run that is not complete: add --resume to go on with it, or delete it"
        )


def already_found(options: TrainOptions, head: Path) -> dict[str, Any] | None:
    """What ``metrics.json`` holds where ``--resume`` asks for a run that is complete, its head in the folder ``head``.

    The same command may come once more after a kill that hit the very end, or from a loop that knows no better.
    """
    metrics = _metrics(options, head)
    return metrics if options.resume and metrics is not None and not _changes(options, head) else None


def _metrics(options: TrainOptions, head: Path) -> dict[str, Any] | None:
    """What ``metrics.json`` of a complete run holds."""
    path = options.out / "metrics.json"
    if not ((head / "config.json").exists() and path.exists()):
        return None
    metrics: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return metrics


def _changes(options: TrainOptions, head: Path) -> list[str]:
    """In what a complete run was asked for otherwise, as far as its outcome goes."""
    before = (_metrics(options, head) or {}).get("options", {})
    now = plain(options)
    named = now.keys() - _CHANGES_NOTHING
    if options.data or options.text:
        named -= {"features"}  # hidden states of that text, wherever they lie
    # what an older version did not know had the effect that its default has now
    defaults = json.loads(json.dumps({field.name: field.default for field in fields(options)}, default=str))
    before = {**defaults, **before}
    changes = [f"{key} was {before[key]!r} and is {now[key]!r}" for key in sorted(named) if before[key] != now[key]]
    if options.start_from is not None and before["start_from"] == options.start_from:
        then, here = (_metrics(options, head) or {}).get("start_digest"), digest_of(options.start_from, options.model)
        if here is not None and here != then:
            changes.append(f"the weights of {options.start_from} were {then} and are {here}")
    return changes


def say_where_it_starts(options: TrainOptions, reporter: Reporter) -> None:
    """With ``--resume``, which may be there from the first start on: so a mistyped --out is seen."""
    if options.resume:
        checkpoint = find_checkpoint(options.out)
        if checkpoint is None:
            reporter.stage(f"no checkpoint in {options.out}: training starts from the beginning")
        else:
            reporter.stage(f"going on from {checkpoint}")


def _material(target: TargetModel, options: TrainOptions, reporter: Reporter, start: Start | None) -> Material:
    """The data with its hidden states, or the features in ``--features`` as they are.

    Batches are decided, and compared with those of the run that goes on, before the model reads for hours.
    """
    folder = options.features or options.out / "features"
    if options.data or options.text:
        try:
            reporter.stage("reading data")
            texts = read_data(target, options)
            material = arrange(LiveStore(target, texts), options)
            remember(options, material, model=target.model_id, start=start)
            reporter.stage(f"hidden states of {len(texts)} texts")
            return replace(material, store=with_hidden_states(target, texts, options, reporter.progress))
        except KeyboardInterrupt:
            raise TrainingInterrupted(
                f"stopped before training; hidden states so far are in {folder}: the same command goes on from there"
            ) from None
    store = FeatureStore(folder)
    if (store.meta.model_id, store.meta.hidden_size) != (target.model_id, target.hidden_size):
        raise DataError(
            f"{folder} holds hidden states of {store.meta.model_id} (size {store.meta.hidden_size}), "
            f"not of {target.model_id} (size {target.hidden_size})"
        )
    material = arrange(store, options)
    remember(options, material, model=target.model_id, start=start)
    return material


def remember(options: TrainOptions, material: Material, *, model: str, start: Start | None = None) -> None:
    """Notes in the output folder what the run depends on; a resumed run must find the same."""
    if not processes.is_first():
        return
    path = options.out / "run.json"
    facts = {
        "model": model,
        "num_steps": material.num_steps,
        "data": material.store.fingerprint,
        "processes": processes.count(),
        "start_digest": start and start.saved.digest,
    }
    settings = {key: value for key, value in plain(options).items() if key not in _MAY_CHANGE_ON_RESUME}
    now = {**settings, **facts}
    if options.resume and path.exists() and find_checkpoint(options.out):
        before = json.loads(path.read_text(encoding="utf-8"))
        changes = [f"{key} was {before.get(key)!r} and is {now[key]!r}" for key in now if before.get(key) != now[key]]
        if before.get("data") != now["data"]:
            raise DataError(
                "--resume goes on with the same run, but the texts or the model have changed since (fingerprint "
                f"{before.get('data')}, now {now['data']}; {before.get('num_steps')} steps, now {now['num_steps']}): "
                "give the data as it was, or start anew with another --out"
            )
        if changes:
            raise InvalidSettings(f"--resume goes on with the same run, but {', '.join(changes)}")
    write_atomic(path, as_json(now))


def how_it_was_made(options: TrainOptions, start: Start | None) -> dict[str, Any]:
    """For ``metrics.json``, JSON values."""
    return {
        "options": plain(options),
        "start_digest": start and start.saved.digest,
        "provenance": dict(provenance()),
    }


def _save(head: DraftHead, target: TargetModel, report: Report, options: TrainOptions, start: Start | None) -> None:
    """The head last of all: where it is, the run is complete."""
    made = how_it_was_made(options, start)
    write_atomic(options.out / "metrics.json", as_json({**asdict(report), **made}))
    measured = {
        "tokens_per_step": report.tokens_per_step_tree,
        "num_held_out_texts": report.num_held_out_texts,
    }
    card = model_card(report, made["options"], made["provenance"])
    save_head(head, options.out, base=target, card=card, plan_details=measured)


def tidy_up(options: TrainOptions, *names: str) -> None:
    """Removes what a complete run needs no more, and what kills left of writing its files, those of ``names`` too."""
    shutil.rmtree(options.out / "checkpoints", ignore_errors=True)
    (options.out / "run.json").unlink(missing_ok=True)
    for name in ("run.json", "metrics.json", "log.jsonl", "validation.jsonl", PAGE, ".incoming", *names):
        remove_leftovers(options.out / name)


def _wind_up(options: TrainOptions, reporter: Reporter) -> None:
    """What is left to do once the head is saved."""
    tidy_up(options)
    if not options.keep_features and options.features is None:
        shutil.rmtree(options.out / "features", ignore_errors=True)
    try:
        write_page(options.out)
    except MissingDependency as error:  # the head is what counts
        reporter.stage(f"no report.html: {error}")


def in_float32(weights: TargetWeights) -> TargetWeights:
    """Heads' weights are fp32 in training whatever the target computes in; tied matrices stay tied."""
    embedding = weights.embedding.detach().float()
    is_tied = weights.lm_head is weights.embedding
    lm_head = embedding if is_tied else weights.lm_head.detach().float()
    bias = None if weights.lm_head_bias is None else weights.lm_head_bias.detach().float()
    return TargetWeights(embedding, lm_head, bias, weights.logit_scale, weights.logit_softcap)


def plain(options: TrainOptions) -> dict[str, Any]:
    """The options as JSON gives them back: paths as text, tuples as lists."""
    result: dict[str, Any] = json.loads(json.dumps(asdict(options), default=str))
    return result


def as_json(value: dict[str, Any]) -> bytes:
    """The bytes of a JSON file for people, too."""
    return (json.dumps(value, indent=2) + "\n").encode()
