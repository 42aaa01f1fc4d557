"""A whole training run: texts to features, features to a head, the head measured and saved.

Knows the order of the work; shows nothing: progress goes to a :class:`~draftheads.progress.Progress`.
"""

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from draftheads.acceptance_profile import AcceptanceProfile
from draftheads.chat_template import read_template
from draftheads.checkpoint import copy_for, save_head
from draftheads.data.batches import PlannedBatches
from draftheads.data.features import FeatureStore
from draftheads.data.live import LiveStore
from draftheads.data.records import check_readable
from draftheads.draft import TargetWeights
from draftheads.errors import DataError, InvalidSettings
from draftheads.files import write_atomic
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.models.pretrained import default_dtype
from draftheads.models.shard import shard_layers
from draftheads.progress import NoProgress, Progress
from draftheads.search.profile import NUM_TEXTS, measured_profile, recorded, static_profile
from draftheads.search.replay import ReplaySettings
from draftheads.train import processes
from draftheads.train.card import model_card
from draftheads.train.folder import (
    alone_in,
    already_found,
    as_json,
    check_out,
    check_place,
    how_it_was_made,
    remember,
    say_where_it_starts,
    tidy_up,
)
from draftheads.train.learner import Learner
from draftheads.train.losses import objective
from draftheads.train.material import Material, arrange, read_data, with_hidden_states
from draftheads.train.measure import NUM_RANKS, Measurement, measure
from draftheads.train.new_head import in_float32, new_head, read_start
from draftheads.train.options import TrainOptions
from draftheads.train.report import Report
from draftheads.train.start import Start
from draftheads.train.trainer import OnStep, TrainingInterrupted, fit
from draftheads.tree import Tree
from draftheads.tree_search import best_tree


def train(options: TrainOptions, reporter: Progress) -> Report | None:
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
                _wind_up(options)
            return Report.of(metrics)
        check_out(options, options.out)
        check_readable((*options.data, *options.text))
        processes.wait()  # nobody writes before all have looked
        say_where_it_starts(options, reporter)
        reporter.stage(f"loading {options.model}")
        template = read_template(options.chat_template)
        if options.shard_model:
            dtype = default_dtype(processes.device())
            target = _spread(TargetModel.load(options.model, dtype=dtype, device="cpu", chat_template=template))
        else:
            target = TargetModel.load(options.model, four_bit=options.four_bit, chat_template=template)
        return train_for(target, options, reporter)


def train_for(target: TargetModel, options: TrainOptions, reporter: Progress) -> Report | None:
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
        on_step=speed.counting(reporter),
        validate=validate,
    )
    if not processes.is_first():
        processes.wait()
        return None
    reporter.stage(f"measuring on {len(held_out)} texts kept apart")
    found = measure(learner, store, held_out, batch_tokens=options.batch_tokens)
    report = report_on(
        head,
        found,
        tree=chosen_tree(found, options),
        model_id=target.model_id,
        num_training_texts=len(training),
        num_held_out_texts=len(held_out),
        num_steps=material.num_steps,
        seconds=speed.seconds,
        tokens_per_second=speed.tokens_per_second,
    )
    profile = acceptance(target, head, material=material, found=found, options=options, reporter=reporter)
    _save(head, target, report=report, profile=profile, options=options, start=start)
    _wind_up(options)
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

    def counting(self, progress: Progress) -> OnStep:
        """Counts each step and reports it with its loss."""

        def counted(step: int, total: int, loss: float | None) -> None:
            self.num_tokens += self.tokens[step - 1]
            self.latest = time.monotonic()
            progress.progress(step, total, "" if loss is None else f"loss {loss:.3f}")

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
    tree: Tree,
    model_id: str,
    num_training_texts: int,
    num_held_out_texts: int,
    num_steps: int,
    seconds: float,
    tokens_per_second: float,
) -> Report:
    """What was found of a head, as plain numbers."""
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
        tokens_per_step_tree=found.tokens_per_step(tree),
        tree=[list(path) for path in tree.paths[1:]],
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
    """What the report shows: the best tree of so many nodes for the ranks that were found, or a chain."""
    if options.chain:
        return Tree.chain(min(options.num_heads, options.tree_nodes - 1))
    return best_tree(found.joint_ranks, options.tree_nodes)


def _material(target: TargetModel, options: TrainOptions, reporter: Progress, start: Start | None) -> Material:
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
            return replace(material, store=with_hidden_states(target, texts, options, reporter))
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


def acceptance(
    target: TargetModel,
    head: DraftHead,
    *,
    material: Material,
    found: Measurement,
    options: TrainOptions,
    reporter: Progress,
) -> AcceptanceProfile:
    """The head's profile on some held-out texts; of static trees alone where there are too few.

    A model that is spread over processes cannot be used in one of them.
    """
    store = material.store
    texts = material.held_out[:NUM_TEXTS]
    answers = recorded([(store.token_ids[i], store.loss_masks[i]) for i in texts])
    if len(answers) < 2 or options.chain or options.shard_model:
        return static_profile(found.joint_ranks, num_ranks=NUM_RANKS, only_chain=options.chain)
    reporter.stage(f"acceptance profile from {len(answers)} held-out texts")
    return measured_profile(target, copy_for(head, target), answers, ReplaySettings(), progress=NoProgress())[0]


def _save(
    head: DraftHead,
    target: TargetModel,
    *,
    report: Report,
    profile: AcceptanceProfile,
    options: TrainOptions,
    start: Start | None,
) -> None:
    """The head last of all: where it is, the run is complete."""
    made = how_it_was_made(options, start)
    write_atomic(options.out / "metrics.json", as_json({**asdict(report), **made}))
    card = model_card(report, made["options"], made["provenance"])
    save_head(head, options.out, base=target, card=card, profile=profile)


def _wind_up(options: TrainOptions) -> None:
    """What is left to do once the head is saved."""
    tidy_up(options)
    if not options.keep_features and options.features is None:
        shutil.rmtree(options.out / "features", ignore_errors=True)
