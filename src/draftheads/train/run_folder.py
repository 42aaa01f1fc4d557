"""The output folder of a training run: its files, its lock, and the checks before a run resumes.

It holds the result with ``metrics.json`` and ``log.jsonl``: the head of the last step, and in ``best/`` the one of the
step with the lowest held-out loss if it is another step. Until the run is complete there are also ``run.json`` (what
the run depends on), ``texts/`` (as tokens), ``checkpoints/`` and ``features/``.
"""

import contextlib
import json
import shutil
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from draftheads.checkpoints.checkpoint import read_head
from draftheads.checkpoints.registry import find_head
from draftheads.data.features import read_meta, stored
from draftheads.errors import (
    DataError,
    DraftHeadsError,
    InvalidSettings,
    ModelNotFound,
    StorageError,
    UnsupportedModel,
)
from draftheads.loading import resolve, template_of
from draftheads.models.chat_template import read_template
from draftheads.models.file_checks import keys_in
from draftheads.models.model_names import kind_of_folder
from draftheads.train import processes
from draftheads.train.new_head import Start
from draftheads.train.options import TrainOptions
from draftheads.train.training_data import TEXTS_FOLDER, TrainingData
from draftheads.utils.counts import counted
from draftheads.utils.files import current, locked, remove_leftovers, write_atomic
from draftheads.utils.provenance import as_json_values, changes, provenance, require_same

# settings that do not change the result: a complete run is the same with other values
_WITHOUT_EFFECT = frozenset({"out", "resume", "save_steps"})
# settings that may change when a run resumes; the text is compared by its fingerprint, variables are in the template
_MAY_CHANGE_ON_RESUME = _WITHOUT_EFFECT | {"data", "text", "features", "template_variables"}


def chat_template_text(options: TrainOptions) -> str | None:
    """Text of the chat template of a run: the given one, else the one that its first head was trained with."""
    try:
        start = options.start_from
        first = None if start is None else resolve(start, options.model, ignore_profile=True)
        return template_of(options.chat_template, first)
    except ModelNotFound:  # a complete run does not need its first head any more
        return read_template(options.chat_template)


class RunFolder:
    """``--out`` of a run with these options; the head is in its subfolder ``head_name``, in the folder by default."""

    def __init__(self, options: TrainOptions, head_name: str = "") -> None:
        self.options, self.path = options, options.out
        self.head, self.checkpoints = self.path / head_name, self.path / "checkpoints"

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """A ``with`` block in which no other run writes there. Of several processes, one has the lock."""
        if self.path.exists() and not self.path.is_dir():
            raise InvalidSettings(f"--out is {self.path}, which is a file: name a folder")
        kind = kind_of_folder(self.head) if self.head.is_dir() else None
        if kind not in (None, "draft head"):
            raise InvalidSettings(f"--out is {self.path}, which holds a {kind}: name another --out")
        return locked(self.path, "name another --out") if processes.writes(self.path) else contextlib.nullcontext()

    def checkpoint(self) -> Path | None:
        """The newest checkpoint, to resume from; None without ``--resume`` or without a checkpoint."""
        return find_checkpoint(self.path) if self.options.resume else None

    @cached_property
    def date(self) -> str:
        """The date that chat templates write in this run: of its beginning, or of the stored hidden states, else now.

        The same in all processes, which must all ask for it.
        """
        path, options = self.path / "run.json", self.options
        begun = _recorded(path) if path.exists() else {}
        stored = read_meta(options.features or self.path / "features")
        known = begun.get("date") or (stored and stored.date)
        return str(processes.every(known or datetime.fromtimestamp(int(time.time()), UTC).astimezone().isoformat())[0])

    def tidy_checkpoints(self) -> None:
        """Removes what kills left half-written; where nothing is resumed, also the best of an earlier run."""
        if self.checkpoint() is None:
            shutil.rmtree(self.checkpoints, ignore_errors=True)
        remove_leftovers(self.checkpoints / "*")

    def kept(self, features: Path | None) -> str:
        """What a run that was stopped left here and in a store of hidden states, and how to go on."""
        if current(self.head, "config.json").exists():
            return f"the trained head is in {self.head}"
        if newest := find_checkpoint(self.path):
            return f"{newest} is kept: the same command with --resume continues from there"
        num_texts, num_tokens = (0, 0) if features is None else stored(features)
        if not num_texts:
            return "nothing was kept: the same command begins again"
        what = f"hidden states of {counted(num_texts, 'text')} ({counted(num_tokens, 'token')})"
        return f"{what} are kept in {features}: the same command continues from there"

    def complete_metrics(self) -> dict[str, Any] | None:
        """The content of ``metrics.json`` if ``--resume`` asks for this very run, and it is complete; else None."""
        resume, path = self.options.resume, self.path / "metrics.json"
        differences: list[str] = []
        if current(self.head, "config.json").exists():
            if resume and path.exists():
                metrics = _recorded(path, "options", "start_digest")
                if not (differences := self._changes(metrics)):
                    return metrics
            how = f" ({', '.join(differences)})" if differences else ""
            raise InvalidSettings(f"{self.path} holds a trained head{how}: name another --out, or delete it")
        if not resume and find_checkpoint(self.path):
            raise InvalidSettings(f"{self.path} holds a run that is not complete: add --resume, or delete it")
        return None

    def claim(self, data: TrainingData, *, model: str, start: Start | None) -> None:
        """Writes what the run depends on. If it resumes from a checkpoint, the same must be there."""
        date, path, settings = self.date, self.path / "run.json", self._settings()
        facts = {"model": model, "num_steps": data.num_steps, "data": data.store.fingerprint}
        facts |= {"processes": processes.count(), "start_digest": start and start.saved.digest}
        now = as_json_values({name: settings[name] for name in settings.keys() - _MAY_CHANGE_ON_RESUME} | facts)
        names, fix = sorted(now.keys() - {"data", "model", "start_from"}), "Give all hosts the same settings"
        for other in processes.every(now):  # hosts are started one by one
            require_same(other, now, names=names, problem="the hosts train with different settings", fix=fix)
        if not processes.writes(self.path):
            return
        if self.checkpoint() and path.exists():
            before = _recorded(path, "data", "num_steps")
            _check_names(path, before, {**now, "date": date})
            problem = "--resume continues the same run, but settings have changed"
            fix = "Give the settings as they were, or name another --out"
            require_same(before, now, names=sorted(now.keys() - {"data", "num_steps"}), problem=problem, fix=fix)
            if before["data"] != now["data"]:
                raise DataError(
                    "--resume continues the same run, but the texts or the model have changed since (fingerprint "
                    f"{before['data']}, now {now['data']}; {counted(before['num_steps'], 'step')}, now "
                    f"{now['num_steps']}): give the data as it was, or start again with another --out"
                )
            require_same(before, now, names=["num_steps"], problem=problem, fix=fix)
        write_atomic(path, as_json({**now, "date": date}))

    def made_from(self, start: Start | None) -> dict[str, Any]:
        """How the result was made, JSON values for ``metrics.json``."""
        settings, usual = self._settings(), self.options.defaults()
        return {
            "options": settings,
            "changed_options": [name for name, value in settings.items() if value != usual.get(name)],
            "start_digest": start and start.saved.digest,
            "provenance": provenance(),
        }

    def tidy_up(self) -> None:
        """Removes what a complete run does not need any more, and files that kills left half-written."""
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        shutil.rmtree(self.path / TEXTS_FOLDER, ignore_errors=True)
        (self.path / "run.json").unlink(missing_ok=True)
        remove_leftovers(self.path / "*")

    def _settings(self) -> dict[str, Any]:
        """All options as JSON values; the text of the chat template instead of its name."""
        return as_json_values({**vars(self.options), "chat_template": chat_template_text(self.options)})

    def _changes(self, metrics: dict[str, Any]) -> list[str]:
        """Differences from a complete run that would give another result."""
        before, now = metrics["options"], self._settings()
        _check_names(self.path / "metrics.json", before, now)
        names = now.keys() - _WITHOUT_EFFECT
        if now["data"] or now.get("text"):
            names -= {"features"}  # they are hidden states of that text, in any folder
        differences = changes(before, now, names=sorted(names))
        if (start := now["start_from"]) is not None and before["start_from"] == start:
            with contextlib.suppress(DraftHeadsError):  # it may be gone
                was, now_is = metrics["start_digest"], read_head(find_head(start, self.options.model)).digest
                if was != now_is:
                    differences.append(f"the weights of {start} were {was} and are {now_is}")
        return differences


def _recorded(path: Path, *names: str) -> dict[str, Any]:
    """What a run wrote in a file, with these names at least."""
    try:
        found = keys_in(path)
    except UnsupportedModel as error:
        raise StorageError(f"{error}: delete {path.parent}, or name another --out") from None
    if missing := sorted({*names} - found.keys()):
        raise StorageError(f"{path} has no {missing[0]}: delete {path.parent}, or name another --out")
    return found


def _check_names(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuses to go on with a run of a version that had other settings."""
    if gone := sorted(before.keys() - now.keys()):
        fix = "Finish the run with the version that began it, or name another --out"
        raise InvalidSettings(f"{path} has settings that this version does not have: {', '.join(gone)}. {fix}")


def find_checkpoint(out: Path, kind: str = "checkpoint") -> Path | None:
    """The newest checkpoint below an output folder; of kind ``best`` the one with the lowest held-out loss."""
    return max((out / "checkpoints").glob(f"{kind}-*.pt"), key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.rpartition("-")[2])


def as_json(value: dict[str, Any]) -> bytes:
    """The bytes of a JSON file, indented for readers."""
    return (json.dumps(value, indent=2) + "\n").encode()
