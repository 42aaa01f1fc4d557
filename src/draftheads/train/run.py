"""Trains a draft head: for a frozen model, or together with it."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from draftheads.data.batches import PlannedBatches
from draftheads.data.features import FeatureStore, LiveStore, read_meta
from draftheads.data.files import check_readable
from draftheads.data.texts import read_texts as plain_texts
from draftheads.errors import DataError, InvalidSettings
from draftheads.models.model import TargetModel
from draftheads.models.model_names import model_name
from draftheads.train import processes
from draftheads.train.joint.run import JointRun
from draftheads.train.learner import Learner
from draftheads.train.new_head import check_sizes, in_float32, layers_read, reading_dtype
from draftheads.train.options import TrainOptions
from draftheads.train.recipes import defaults_from
from draftheads.train.report import Report
from draftheads.train.run_folder import chat_template_text
from draftheads.train.training import Run
from draftheads.train.training_data import TrainingData, plan_training, read_texts, with_hidden_states
from draftheads.utils.counts import counted
from draftheads.utils.progress import Progress, shown


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
    if given.get("features") is not None:
        given["features"] = _path(given["features"], "features")
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
    report: Report | None = (JointRun if options.joint else HeadRun)(options, progress).run()
    return report


class HeadRun(Run):
    """Trains heads on stored or live hidden states of a frozen model."""

    learner: Learner

    @property
    def has_texts(self) -> bool:
        return bool(self.options.data or self.options.text)

    def check_files(self) -> None:
        """Also of plain text; without text there must be hidden states."""
        super().check_files()
        check_readable(self.options.text)
        for path in self.options.text:
            next(plain_texts(path), None)
        folder = self.options.features
        if folder is not None and not self.has_texts and read_meta(folder) is None:
            raise DataError(f"--features {folder} has no hidden states: give --data FILE… or --text FILE… to make them")

    def load_target(self) -> TargetModel:
        options = self.options
        return TargetModel.load(
            options.model,
            dtype=partial(reading_dtype, options),
            four_bit=options.precision == "4bit",
            chat_template=chat_template_text(options),
            check=partial(check_sizes, options),
        )

    def read_data(self) -> TrainingData:
        options = self.options
        layers = layers_read(options, self.target)
        if not self.has_texts:
            return self.claim(plan_training(self._finished_features(layers), options))
        self.progress.stage("reading data")
        texts = read_texts(self.target, options, self.left_out)
        data = self.claim(plan_training(LiveStore(self.target, texts), options))
        self.progress.stage(f"hidden states of {counted(len(texts), 'text')}")
        self.features, started = options.features or options.out / "features", time.monotonic()
        store = with_hidden_states(self.target, texts, options, self.progress, layers)
        self.reading_seconds = time.monotonic() - started
        return replace(data, store=store)

    def _finished_features(self, layers: Sequence[int]) -> FeatureStore:
        folder, target = self.options.features, self.target
        assert folder is not None, "options without texts have features"
        store = FeatureStore(folder, layers)
        if (store.meta.model_id, store.meta.hidden_size) != (target.model_id, target.hidden_size):
            raise DataError(
                f"{folder} holds hidden states of {store.meta.model_id} (size {store.meta.hidden_size}), "
                f"not of {target.model_id} (size {target.hidden_size})"
            )
        return store

    def module(self) -> nn.Module:
        self.learner = self.learner_on(in_float32(self.target.weights))
        return self.learner

    def measured_learner(self) -> Learner:
        return self.learner

    def batches(self) -> PlannedBatches:
        return PlannedBatches(self.data.store, self.data.plan, skip_prompts=not self.head.needs_history)
