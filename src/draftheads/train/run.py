"""Trains a draft head: for a frozen model, or together with it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftheads.errors import InvalidSettings
from draftheads.models.model_names import model_name
from draftheads.train import processes
from draftheads.train.full import FullRun
from draftheads.train.joint import JointRun
from draftheads.train.options import TrainOptions
from draftheads.train.recipes import defaults_from
from draftheads.train.report import Report
from draftheads.train.training import Run
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
    kind = {None: Run, "full": FullRun}.get(options.joint, JointRun)
    report: Report | None = kind(options, progress).run()
    return report
