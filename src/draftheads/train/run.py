"""A whole training run: texts to hidden states, hidden states to a head, the head measured and saved.

:class:`Run` has the order of the work, :class:`HeadRun` the steps of training heads for a frozen model, and
``joint/run.py`` those of training heads and model together. Nothing is printed.
"""

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from draftheads.checkpoints.checkpoint import copy_for, save_head
from draftheads.data.batches import PlannedBatches, PlannedTexts
from draftheads.data.features import FeatureStore, LiveStore, read_meta
from draftheads.data.files import check_readable
from draftheads.data.records import NO_ANSWER, read_chats
from draftheads.data.texts import LeftOut, left_out_lines
from draftheads.data.texts import read_texts as plain_texts
from draftheads.errors import DataError, InvalidSettings, MissingDependency
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.models.model_names import model_name
from draftheads.search.measure_acceptance import NUM_TEXTS, measured_profile, recorded, static_profile
from draftheads.search.settings import ReplaySettings
from draftheads.speculation.acceptance_profile import AcceptanceProfile
from draftheads.speculation.tree import Tree
from draftheads.train import processes
from draftheads.train.learner import Learner, head_learner
from draftheads.train.likeness import share_in_other_texts
from draftheads.train.memory import check_sizes, reading_dtype
from draftheads.train.new_head import Start, in_float32, layers_read, new_head
from draftheads.train.options import TrainOptions
from draftheads.train.recipes import defaults_from
from draftheads.train.report import NUM_RANKS, Measurement, Report, measure, model_card
from draftheads.train.run_folder import RunFolder, as_json, chat_template_text
from draftheads.train.schedule import staged_rate
from draftheads.train.trainer import Steps, TrainingInterrupted, fit, head_optimizer
from draftheads.train.training_data import TrainingData, plan_training, read_texts, with_hidden_states
from draftheads.utils.counts import counted
from draftheads.utils.files import write_atomic
from draftheads.utils.progress import NoProgress, Progress, shown


def train_head(
    *, out: str | Path, data: str | Path | Sequence[str | Path] = (), progress: Progress | bool = True, **settings: Any
) -> Report | None:
    """Trains a draft head, as ``draftheads train`` does.

    >>> import draftheads
    >>> report = draftheads.train_head(
    ...     model="smollm2-135m", method="hydra", recipe="small", data="chats.jsonl", out="my-head"
    ... )  # doctest: +SKIP

    Args:
        out: folder for the head, its metrics and the checkpoints on the way.
        data: chat files, one ``{"messages": [...]}`` per line.
        progress: True shows bars in a notebook or on a terminal; or receives the stages and steps.
        settings: all other options of ``draftheads train`` by name, such as ``model``, ``method``, ``recipe``,
            ``start_from``, ``epochs`` and ``resume``. See ``draftheads train --help``.

    Returns:
        The losses, accuracies and expected tokens per step on held-out text. None in every process but the first, if
        there are several and the run was not complete.

    Raises:
        DraftHeadsError: bad data or settings, a missing package, a loss that is not finite, a full disk, Ctrl-C
            (``resume=True`` then continues).
    """
    defaults = defaults_from({"model": TrainOptions.model, **settings})
    files = data if isinstance(data, Sequence) and not isinstance(data, str) else [data]
    given = {**defaults, **settings, "out": _path(out, "out"), "data": tuple(_path(file, "data") for file in files)}
    given |= {
        name: _path(given[name], name) for name in ("features", "extracted", "head") if given.get(name) is not None
    }
    if "model" in given:
        given["model"] = model_name(given["model"])
    if "method" not in given:
        raise InvalidSettings("give method=…, or a recipe that has one")
    return train(TrainOptions.of(**given), shown(False if progress is True and not processes.is_first() else progress))


def _path(value: object, what: str) -> Path:
    if isinstance(value, str | Path) and str(value).strip():
        return Path(value)
    raise InvalidSettings(f"{what} is {value!r}; give a path")


def train(options: TrainOptions, progress: Progress) -> Report | None:
    """Trains a head with these options; results and errors as of :func:`train_head`."""
    from draftheads.train.joint.run import JointRun  # noqa: PLC0415 - it is built on this module

    report: Report | None = (JointRun if options.joint else HeadRun)(options, progress).run()
    return report


class Run:
    """The steps of a training run in their order; what is trained, and on what, is up to the subclasses."""

    options: TrainOptions
    head_folder = ""  # of the head within the output folder
    report_class: type[Report] = Report

    target: TargetModel  # the model before training
    start_head: Start | None  # of --start-from
    data: TrainingData
    head: DraftHead
    features: Path | None = None  # where hidden states are stored, as soon as there may be some
    reading_seconds = 0.0  # for them

    def __init__(self, options: TrainOptions, progress: Progress) -> None:
        self.options = options
        self.progress = progress
        self.folder = RunFolder(options, self.head_folder)
        self.left_out: LeftOut = {}

    def run(self) -> Any:
        """The whole run; returns the report, in the first process at least."""
        self.check_packages()
        with self.folder.lock():
            metrics = self.folder.complete_metrics()
            if metrics is not None:
                self.progress.stage(f"{self.options.out} is complete already: nothing is left to do")
                if processes.is_first():
                    self.tidy_up()
                return self.report_class.of(metrics)
            self.check_files()
            processes.wait()  # no process writes before all have checked
            if self.options.resume:
                checkpoint = self.folder.checkpoint()
                nothing = f"no checkpoint in {self.options.out}: training starts from the beginning"
                self.progress.stage(f"resuming from {checkpoint}" if checkpoint else nothing)
            self.progress.stage(f"loading {self.options.model}")
            return self.run_for(self.load_target())

    def run_for(self, target: TargetModel) -> Any:
        """The run with a model that is loaded already, in a folder that is free."""
        try:
            return self._run_for(target)
        except KeyboardInterrupt:
            raise TrainingInterrupted(f"stopped; {self.folder.kept(self.features)}") from None

    def _run_for(self, target: TargetModel) -> Any:
        self.target = target
        self.start_head = self.read_start()
        self.data = self.read_data()
        self.head = self.make_head()
        speed = self.train()
        if not processes.is_first():
            processes.wait()
            return None
        report = self.measure_and_save(speed)
        self.tidy_up()
        processes.wait()
        return report

    def check_packages(self) -> None:
        if self.options.optimizer.optimizer == "adamw-8bit" and find_spec("bitsandbytes") is None:
            raise MissingDependency("--optimizer adamw-8bit needs bitsandbytes: pip install 'draftheads[quantised]'")
        if self.options.report.tensorboard and find_spec("tensorboard") is None:
            raise MissingDependency("tensorboard=on needs tensorboard: pip install 'draftheads[tensorboard]'")

    def check_files(self) -> None:
        """Reads the start of all text files, before the model is loaded.

        Raises:
            DataError: a file cannot be read, is empty, or is of another kind.
        """
        check_readable(self.options.chats.data)
        for path in self.options.chats.data:
            problem = NO_ANSWER
            for chat in read_chats(path):
                if not (problem := chat.problem):  # up to the first one
                    break
            if problem:
                raise DataError(problem, path=path)

    def load_target(self) -> TargetModel:
        raise NotImplementedError

    def read_start(self) -> Start | None:
        """The head of ``--start-from``, checked before hours of work."""
        heads = self.options.heads
        if heads.start_from is None:
            return None
        start = Start.read(heads.start_from, self.target)
        part = start.part_of_new(heads, self.target)
        if self.folder.checkpoint() is None:
            self.progress.stage(f"starting from {start.name}, which gives {part:.0%} of the head's parameters")
        return start

    def read_data(self) -> TrainingData:
        """Texts and batches; :meth:`claim` is called for them before hours of work."""
        raise NotImplementedError

    def claim(self, data: TrainingData) -> TrainingData:
        self.folder.claim(data, model=self.target.model_id, start=self.start_head)
        return data

    def make_head(self) -> DraftHead:
        return new_head(
            self.options.heads,
            self.target,
            self.data.store,
            self.data.training,
            seed=self.options.schedule.seed,
            start=self.start_head,
        )

    def train(self) -> dict[str, Any]:
        self.progress.stage(f"training {self.head.config.method} on {counted(len(self.data.training), 'text')}")
        started = time.monotonic()
        first_step = fit(
            self.module(),
            self.optimizer(),
            self.steps(),
            self.batches(),
            self.folder,
            epoch_ends=self.data.epoch_ends,
            progress=self.progress,
            validate=self.validate,
        )
        seconds = time.monotonic() - started
        num_tokens = sum(self.data.tokens_per_step[first_step:])
        return {
            "reading_seconds": round(self.reading_seconds, 1),
            "training_seconds": round(seconds, 1),
            "tokens_per_second": round(num_tokens / seconds, 1),
        }

    def module(self) -> nn.Module:
        raise NotImplementedError

    def optimizer(self) -> Optimizer:
        return head_optimizer(self.options, self.head)

    def steps(self) -> Steps:
        warmup, final = self.options.schedule.warmup, self.options.schedule.final_learning_rate
        return Steps([partial(staged_rate, stages=self.data.stages, warmup=warmup, final=final)])

    def batches(self) -> PlannedTexts:
        raise NotImplementedError

    def validate(self) -> dict[str, Any]:
        measured, tree = self.measure(self.data.held_out[: self.options.report.eval_texts])
        return measured.summary(tree)

    def measure(self, documents: Sequence[int]) -> tuple[Measurement, Tree]:
        settings, batch_tokens = self.options.report, self.options.schedule.batch_tokens
        measured = measure(self.measured_learner(), self.data.store, documents, batch_tokens=batch_tokens)
        return measured, measured.tree(settings.tree_nodes, chain=settings.chain)

    def measured_learner(self) -> Learner:
        """The head as it is now, with the objective for the model that it decodes with."""
        raise NotImplementedError

    @property
    def decoding_model(self) -> TargetModel:  # that the head is for
        return self.target

    def measure_and_save(self, speed: dict[str, Any]) -> Report:
        self.progress.stage(f"measuring on {counted(len(self.data.held_out), 'held-out text')}")
        measured, tree = self.measure(self.data.held_out)
        held_out, training = map(self.data.texts, (self.data.held_out, self.data.training))
        report = Report(
            method=self.head.config.method,
            model_id=self.decoding_model.model_id,
            num_training_texts=len(self.data.training),
            num_held_out_texts=len(self.data.held_out),
            num_training_tokens=sum(len(token_ids) for token_ids, _ in training),
            num_answer_tokens=sum(int(mask.sum()) for _, mask in training),
            num_held_out_tokens=sum(int(mask.sum()) for _, mask in held_out),
            share_in_other_texts=share_in_other_texts(held_out, training),
            num_steps=self.data.num_steps,
            **speed,
            accuracy_by_rank=[
                list(part) for part in zip(*map(measured.accuracy, range(1, NUM_RANKS + 1)), strict=True)
            ],
            tree=[list(path) for path in tree.paths[1:]],
            left_out=left_out_lines(self.left_out),
            **measured.summary(tree),
        )
        return self.save(report, self.acceptance_profile(measured))

    def acceptance_profile(self, measured: Measurement) -> AcceptanceProfile:
        """The head's profile on some held-out texts; of static trees only if there are too few texts."""
        chain = self.options.report.chain
        answers = recorded(self.data.texts(self.data.held_out[:NUM_TEXTS]))
        if len(answers) < 2 or chain:
            return static_profile(measured.joint_ranks, top_k=NUM_RANKS, only_chain=chain)
        self.progress.stage(f"acceptance profile from {counted(len(answers), 'held-out text')}")
        head = copy_for(self.head, self.decoding_model)
        return measured_profile(self.decoding_model, head, answers, ReplaySettings(), progress=NoProgress())[0]

    def save(self, report: Report, profile: AcceptanceProfile) -> Report:
        made = self.folder.made_from(self.start_head)
        write_atomic(self.folder.path / "metrics.json", as_json({**asdict(report), **made}))
        card = model_card(report, made["options"], made["provenance"])
        # last: if the head is there, the run is complete
        save_head(self.head, self.folder.head, base=self.decoding_model, card=card, profile=profile)
        return report

    def tidy_up(self) -> None:
        self.folder.tidy_up()


class HeadRun(Run):
    """Trains heads on stored or live hidden states of a frozen model."""

    learner: Learner

    @property
    def has_texts(self) -> bool:
        return bool(self.options.chats.data or self.options.plain_text.text)

    def check_files(self) -> None:
        """Also of plain text; without text there must be hidden states."""
        super().check_files()
        check_readable(self.options.plain_text.text)
        for path in self.options.plain_text.text:
            next(plain_texts(path), None)
        folder = self.options.hidden_states.features
        if folder is not None and not self.has_texts and read_meta(folder) is None:
            raise DataError(f"--features {folder} has no hidden states: give --data FILE… or --text FILE… to make them")

    def load_target(self) -> TargetModel:
        """The model; with ``shard_model`` sharded over all processes."""
        options, is_sharded = self.options, self.options.hidden_states.shard_model
        if is_sharded and processes.count() == 1:
            raise InvalidSettings("shard_model is for several processes: start them with accelerate launch or torchrun")
        target = TargetModel.load(
            options.model,
            dtype=partial(reading_dtype, options),
            device="cpu" if is_sharded else None,
            four_bit=options.hardware.four_bit,
            chat_template=chat_template_text(options),
            check=partial(check_sizes, options),
        )
        if is_sharded:
            _ = target.weights_fingerprint, target.layers_fingerprint  # computed while the model is whole
            processes.shard(target)
        return target

    def read_data(self) -> TrainingData:
        options, features = self.options, self.options.hidden_states.features
        folder = features or options.out / "features"
        if not self.has_texts:
            return self.claim(plan_training(self._finished_features(folder), options, options.plain_text))
        self.progress.stage("reading data")
        texts = read_texts(self.target, options, self.left_out)
        data = self.claim(plan_training(LiveStore(self.target, texts), options, options.plain_text))
        self.progress.stage(f"hidden states of {counted(len(texts), 'text')}")
        layers = layers_read(options.heads, self.target)
        self.features, started = folder, time.monotonic()
        store = with_hidden_states(self.target, texts, options, self.progress, layers)
        self.reading_seconds = time.monotonic() - started
        return replace(data, store=store)

    def _finished_features(self, folder: Path) -> FeatureStore:
        target = self.target
        store = FeatureStore(folder, layers_read(self.options.heads, target))
        if (store.meta.model_id, store.meta.hidden_size) != (target.model_id, target.hidden_size):
            raise DataError(
                f"{folder} holds hidden states of {store.meta.model_id} (size {store.meta.hidden_size}), "
                f"not of {target.model_id} (size {target.hidden_size})"
            )
        return store

    def module(self) -> nn.Module:
        weight = self.options.hidden_states.feature_weight
        self.learner = head_learner(
            self.options.objective, self.head, in_float32(self.target.weights), feature_weight=weight
        )
        return self.learner

    def measured_learner(self) -> Learner:
        return self.learner

    def batches(self) -> PlannedBatches:
        return PlannedBatches(self.data.store, self.data.plan, skip_prompts=not self.head.needs_history)

    def acceptance_profile(self, measured: Measurement) -> AcceptanceProfile:
        """As of every run. A sharded model cannot be used in one process, so then only static trees are measured."""
        if self.options.hidden_states.shard_model:
            chain = self.options.report.chain
            return static_profile(measured.joint_ranks, top_k=NUM_RANKS, only_chain=chain)
        return super().acceptance_profile(measured)

    def tidy_up(self) -> None:
        super().tidy_up()
        settings = self.options.hidden_states
        if not settings.keep_features and settings.features is None:
            shutil.rmtree(self.options.out / "features", ignore_errors=True)
