"""The order of a training run: texts to hidden states, hidden states to a head, the head measured and saved.

Heads are trained for a frozen model; ``joint.py`` trains them together with it. Nothing is printed.
"""

import copy
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from draftheads.checkpoints.checkpoint import copy_for, save_head
from draftheads.data.batches import PlannedBatches, PlannedTexts
from draftheads.data.features import LiveStore, read_meta, stored
from draftheads.data.files import check_readable
from draftheads.data.lines import LeftOut, left_out_lines
from draftheads.data.records import check_chats
from draftheads.data.texts import read_texts as plain_texts
from draftheads.errors import DataError, MissingDependency, UnsupportedModel, first_line
from draftheads.heads.base import DraftHead
from draftheads.models.chat_template import dated, reads_variable
from draftheads.models.fingerprint import Parts
from draftheads.models.model import TargetModel
from draftheads.models.pretrained import load_config, load_pretrained
from draftheads.search.settings import ReplaySettings
from draftheads.search.tune import NUM_TEXTS, measured_profile, recorded, static_profile
from draftheads.speculation.acceptance_profile import AcceptanceProfile
from draftheads.speculation.draft import TargetWeights
from draftheads.train import processes
from draftheads.train.learner import Learner
from draftheads.train.new_head import Start, check_sizes, fits_memory, in_float32, layers_read, new_head, reading_dtype
from draftheads.train.options import TrainOptions
from draftheads.train.report import BEST, NUM_RANKS, Measurement, Report, measure, model_card
from draftheads.train.run_folder import RunFolder, as_json, chat_template_text, find_checkpoint, step_of
from draftheads.train.trainer import Steps, TrainingInterrupted, fit, head_optimizer, read_checkpoint
from draftheads.train.training_data import (
    MOST_BATCH_TOKENS,
    TrainingData,
    checked_store,
    is_complete,
    is_extracted,
    plan_training,
    read_texts,
    staged_rate,
    with_hidden_states,
)
from draftheads.utils.counts import counted
from draftheads.utils.files import write_atomic
from draftheads.utils.progress import NoProgress, Progress

_MOST_OF_DEVICE = 0.9  # of its memory for a model; a larger one is spread
VALIDATION_TEXTS = 32  # held-out texts that are measured during training; at the end all of them are


class _LargerThanDeviceError(Exception):
    """The model has to be spread to read texts."""


class Run:
    """The steps of a training run in their order: heads are trained on hidden states of a frozen model."""

    options: TrainOptions
    head_folder = ""  # of the head within the output folder

    target: TargetModel  # the model before training
    start_head: Start | None  # of --start-from
    data: TrainingData
    head: DraftHead
    learner: Learner
    trained: nn.Module  # the learner, of joint training with the model
    features: Path | None = None  # where hidden states are stored, as soon as there may be some
    reading_seconds = 0.0  # for them

    def __init__(self, options: TrainOptions, progress: Progress) -> None:
        self.options = options
        self.progress = progress
        self.folder = RunFolder(options, self.head_folder)
        self.left_out: LeftOut = {}
        self.scripts: dict[str, int] = {}  # letters in a sample of the texts

    def run(self) -> Any:
        """The whole run; returns the report, in the first process at least."""
        self.check_packages()
        with self.folder.lock():
            metrics = processes.every(self.folder.complete_metrics())[0]
            if metrics is not None:
                self.progress.stage(f"{self.options.out} is complete already: nothing is left to do")
                if processes.is_first():
                    self.tidy_up()
                return Report.of(metrics)
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
        self.target = target
        try:
            self.start_head = self.read_start()
            with dated(self.folder.date):
                self.data = self.read_data()
            self.head = new_head(self.options, target, self.data.store, self.data.training, start=self.start_head)
            facts, report = self.train(), None
            if processes.is_first():
                report = self.measure_and_save(facts)
            if processes.writes(self.options.out):
                self.tidy_up()
            processes.wait()
        except KeyboardInterrupt:
            raise TrainingInterrupted(f"stopped; {self.folder.kept(self.features)}") from None
        return report

    def check_packages(self) -> None:
        if self.options.optimizer == "adamw-8bit" and find_spec("bitsandbytes") is None:
            raise MissingDependency("--optimizer adamw-8bit needs bitsandbytes", extra="quantised")

    def check_files(self) -> None:
        """Reads the start of all text files, before the model is loaded.

        Raises:
            DataError: a file cannot be read, is empty, or is of another kind.
        """
        check_readable(self.options.data)
        for path in self.options.data:
            check_chats(path)
        check_readable(self.options.text)
        for path in self.options.text:
            next(plain_texts(path, says=False), None)
        folder = self.options.features
        if folder is not None and not self.has_texts and read_meta(folder) is None:
            raise DataError(f"--features {folder} has no hidden states: give --data FILE… or --text FILE… to make them")

    @property
    def has_texts(self) -> bool:
        return bool(self.options.data or self.options.text)

    def load_target(self) -> TargetModel:
        """The model, without its layers if hidden states are stored already."""
        load = partial(
            TargetModel.load,
            self.options.model,
            dtype=self.dtype,
            four_bit=self.options.precision == "4bit",
            chat_template=chat_template_text(self.options),
            check=self.check_model,
        )
        if self.has_states():
            try:
                return load(parts=Parts())
            except UnsupportedModel as error:
                self.progress.stage(f"loading all of {self.options.model}: {first_line(error)}")
        try:
            return load()
        except _LargerThanDeviceError:
            return load(parts=Parts(), check=None)

    def has_states(self) -> bool:
        """Whether no text is read with the model, as far as the files tell.

        What vLLM computed is compared with the model's own states where these can be computed.
        """
        folder = self.options.features or self.options.out / "features"
        if not is_extracted(folder):
            return is_complete(folder)
        config = load_config(self.options.model)
        return not fits_memory(config, self.dtype(config))

    def check_model(self, config: Any) -> None:
        """Checks the sizes of a model of this configuration, before its weights are read."""
        check_sizes(self.options, config)
        is_tuned = self.options.joint or self.options.precision == "4bit"
        if is_tuned or self.has_states() or fits_memory(config, self.dtype(config), part=_MOST_OF_DEVICE, unknown=True):
            return
        if processes.count() > 1:
            fix = "read its texts by one process, with --features FOLDER; several can then train on that folder"
            raise UnsupportedModel(f"{self.options.model} is larger than the memory of a device: {fix}")
        raise _LargerThanDeviceError

    def dtype(self, config: Any) -> torch.dtype:
        """The type in which a model of this configuration is loaded."""
        return reading_dtype(self.options, config)

    def read_start(self) -> Start | None:
        """The head of ``--start-from``, checked before hours of work."""
        if self.options.start_from is None:
            return None
        start = Start.read(self.options.start_from, self.target)
        part = start.part_of_new(self.options, self.target)
        if self.folder.checkpoint() is None:
            told = f"starting from {start.name}, which gives {part:.0%} of the head's parameters"
            if not start.has_vocab(self.options.draft_vocab_size):
                number, vocab_size = start.saved.config.num_draft_tokens, self.target.vocab_size
                size = min(self.options.draft_vocab_size or vocab_size, vocab_size)
                told += f"; it predicts {number:,} tokens, and the new head {size:,}"
            self.progress.stage(told)
        return start

    def read_data(self) -> TrainingData:
        """Texts and batches; :meth:`claim` is called for them before hours of work."""
        options, target = self.options, self.target
        layers = layers_read(options, target)
        if not self.has_texts:
            return self.claim(plan_training(checked_store(target, options.features, layers), options))
        self.progress.stage("reading data")
        texts = read_texts(target, options, self.left_out, self.progress)
        self.scripts = texts.facts.get("scripts", {})
        data = self.claim(plan_training(LiveStore(target, texts), options))
        self.features, started = options.features or options.out / "features", time.monotonic()
        own = len(texts) if is_extracted(self.features) else stored(self.features)[0]
        total, kept = (processes.of_all(options.out, number) for number in (len(texts), own))
        there = f", {'all' if kept == total else f'{kept:,} of them'} stored already" if kept else ""
        self.progress.stage(f"hidden states of {counted(total, 'text')}{there}")
        with self.reader() as reader:
            store = with_hidden_states(reader, texts, options, self.progress, layers)
        self.reading_seconds = time.monotonic() - started
        return replace(data, store=store)

    @contextmanager
    def reader(self) -> Iterator[TargetModel]:
        """The model that reads texts: the target, or if it has no layers the whole one, spread until they are read."""
        if self.target.has_layers or self.has_states():
            yield self.target
            return
        with TemporaryDirectory(dir=self.options.out) as folder:
            how: Any = {"tokenizer": self.target.tokenizer, "dtype": self.target.dtype, "spread_to": Path(folder)}
            model: Any = load_pretrained(self.options.model, **how)[0]
            places = Counter(map(str, getattr(model, "hf_device_map", {"": model.device}).values()))  # none if it fits
            parts = (f"{counted(number, 'part')} on {place}" for place, number in places.items())
            self.progress.stage(f"this device does not hold the model, which is spread: {', '.join(parts)}")
            yield replace(self.target, model=model, only_reads=True)

    def claim(self, data: TrainingData) -> TrainingData:
        if self.has_texts and reads_variable(self.target, "strftime_now"):
            self.progress.stage(f"the chat template writes the date: that of the run, {self.folder.date[:10]}")
        self.folder.claim(data, model=self.target.model_id, start=self.start_head)
        return data

    def learner_on(self, weights: TargetWeights) -> Learner:
        """The head with the objective of the run, for a model with these weights."""
        loss, decay, noise = self.options.loss, self.options.depth_decay, self.options.noise_alpha
        return Learner(self.head, weights, loss=loss, depth_decay=decay, noise_alpha=noise)

    def train(self) -> dict[str, Any]:
        number = processes.count()
        by = f" by {counted(number, 'process')}" if number > 1 else ""
        own, names = self.data.training, ("num_training_texts", "num_training_tokens", "num_answer_tokens")
        counts = [processes.of_all(self.options.out, count) for count in (len(own), *self.data.sizes(own))]
        self.progress.stage(f"training {self.head.config.method} on {counted(counts[0], 'text')}{by}")
        started = time.monotonic()
        self.trained = self.module()
        parts = self.trained, self.optimizer(), self.steps(), self.batches(), self.folder
        first_step = fit(*parts, data=self.data, progress=self.progress, validate=self.validate)
        seconds = time.monotonic() - started
        num_tokens = processes.of_all(self.options.out, sum(self.data.tokens_per_step[first_step:]))
        return {
            **dict(zip(names, counts, strict=True)),
            "reading_seconds": round(self.reading_seconds, 1),
            "training_seconds": round(seconds, 1),
            "tokens_per_second": round(num_tokens / seconds, 1),
        }

    def module(self) -> nn.Module:
        self.learner = self.learner_on(in_float32(self.target.weights))
        return self.learner

    def optimizer(self) -> Optimizer:
        return head_optimizer(self.options, self.head)

    def steps(self) -> Steps:
        warmup, final = self.options.warmup, self.options.final_learning_rate
        return Steps([partial(staged_rate, stages=self.data.stages, warmup=warmup, final=final)])

    def batches(self) -> PlannedTexts:
        return PlannedBatches(self.data.store, self.data.plan, skip_prompts=not self.head.needs_history)

    def validate(self) -> dict[str, Any]:
        return self.measure(self.data.held_out[:VALIDATION_TEXTS]).summary()

    def measure(self, documents: Sequence[int]) -> Measurement:
        size = min(self.options.batch_tokens, MOST_BATCH_TOKENS)
        return measure(self.measured_learner(), self.data.store, documents, batch_tokens=size)

    def measured_learner(self) -> Learner:
        """The head as it is now, with the objective for the model that it decodes with."""
        return self.learner

    @property
    def decoding_model(self) -> TargetModel:  # that the head is for
        return self.target

    def base_in(self, folder: Path) -> TargetModel:
        """The same, by the name that the head in this output folder records."""
        return self.decoding_model

    def measure_and_save(self, facts: dict[str, Any]) -> Report:
        """The head of the last step, and before it the one with the lowest held-out loss if it is another one."""
        path, num_steps = self.folder.path, self.data.num_steps
        best = find_checkpoint(path, BEST)
        if best is None or (step := step_of(best)) == num_steps:
            if (path / BEST / "metrics.json").exists():
                shutil.rmtree(path / BEST)  # of a run before
            return self.measure_and_save_in(path, {"num_steps": num_steps, **facts})
        self.progress.stage(f"the head of step {step} had the lowest held-out loss: it is saved in {path / BEST}")
        last = copy.deepcopy(self.trained.state_dict())
        read_checkpoint(best, self.trained)
        found = self.measure_and_save_in(path / BEST, {"num_steps": step, **facts})
        self.trained.load_state_dict(last)
        best_one = {"best_step": step, "best_loss": fmean(found.losses)}
        return self.measure_and_save_in(path, {"num_steps": num_steps, **best_one, **facts})

    def measure_and_save_in(self, folder: Path, facts: dict[str, Any]) -> Report:
        self.progress.stage(f"measuring on {counted(len(self.data.held_out), 'held-out text')}")
        measured = self.measure(self.data.held_out)
        by_rank = zip(*map(measured.accuracy, range(1, NUM_RANKS + 1)), strict=True)
        report = Report(
            method=self.head.config.method,
            model_id=self.decoding_model.model_id,
            num_held_out_texts=len(self.data.held_out),
            num_held_out_tokens=self.data.sizes(self.data.held_out)[1],
            **facts,
            accuracy_by_rank=list(map(list, by_rank)),
            tree=[list(path) for path in measured.tree().paths[1:]],
            left_out=left_out_lines(self.left_out),
            scripts=self.scripts,
            **measured.summary(),
        )
        return self.save(report, self.acceptance_profile(measured), folder)

    def acceptance_profile(self, measured: Measurement) -> AcceptanceProfile:
        """The head's profile on some held-out texts; of static trees only if there are too few texts."""
        documents, store = self.data.held_out[:NUM_TEXTS], self.data.store
        # states that the model would compute again are read; those of a model that is tuned have changed
        read = None if type(store) is LiveStore else [partial(store.__getitem__, index) for index in documents]
        answers = recorded(self.data.texts(documents), read)
        if len(answers) < 2:
            return static_profile(measured.joint_ranks, top_k=NUM_RANKS)
        self.progress.stage(f"acceptance profile from {counted(len(answers), 'held-out text')}")
        head = copy_for(self.head, self.decoding_model)
        return measured_profile(self.decoding_model, head, answers, ReplaySettings(), progress=NoProgress())[0]

    def save(self, report: Report, profile: AcceptanceProfile, folder: Path) -> Report:
        made = self.folder.made_from(self.start_head)
        write_atomic(folder / "metrics.json", as_json({**asdict(report), **made}))
        card = model_card(report, made["options"], made["provenance"])
        # last: if the head is there, the run is complete
        save_head(self.head, folder / self.head_folder, base=self.base_in(folder), card=card, profile=profile)
        return report

    def tidy_up(self) -> None:
        self.folder.tidy_up()
        if self.options.features is None:
            shutil.rmtree(self.options.out / "features", ignore_errors=True)
