"""The output folder of a run: whether it is free, what a resumed run must find in it, and what is tidied up at the end.

It holds the head (see ``checkpoint``) with ``metrics.json`` and ``log.jsonl``, and while the run is not complete
``run.json`` (what it depends on), ``checkpoints/`` and ``features/``.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from draftheads.chat_template import read_template
from draftheads.errors import DataError, InvalidSettings
from draftheads.files import locked, remove_leftovers, write_atomic
from draftheads.progress import Progress
from draftheads.provenance import provenance
from draftheads.train import processes
from draftheads.train.material import Material
from draftheads.train.options import TrainOptions
from draftheads.train.start import Start, digest_of
from draftheads.train.trainer import find_checkpoint, require_packages

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


def check_place(options: TrainOptions) -> None:
    """Keeps a run from failing late."""
    require_packages(options)
    if options.out.exists() and not options.out.is_dir():
        raise InvalidSettings(f"--out is {options.out}, which is a file: name a folder")


@contextlib.contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """No other run writes into the folder meanwhile; of several processes of one run the first sees to it.

    Raises:
        StorageError: another one does.
    """
    with locked(out, "name another --out") if processes.is_first() else contextlib.nullcontext():
        yield


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


def say_where_it_starts(options: TrainOptions, reporter: Progress) -> None:
    """With ``--resume``, which may be there from the first start on: so a mistyped --out is seen."""
    if options.resume:
        checkpoint = find_checkpoint(options.out)
        if checkpoint is None:
            reporter.stage(f"no checkpoint in {options.out}: training starts from the beginning")
        else:
            reporter.stage(f"going on from {checkpoint}")


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


def tidy_up(options: TrainOptions, *names: str) -> None:
    """Removes what a complete run needs no more, and what kills left of writing its files, those of ``names`` too."""
    shutil.rmtree(options.out / "checkpoints", ignore_errors=True)
    (options.out / "run.json").unlink(missing_ok=True)
    for name in ("run.json", "metrics.json", "log.jsonl", "validation.jsonl", "report.html", ".incoming", *names):
        remove_leftovers(options.out / name)


def plain(options: TrainOptions) -> dict[str, Any]:
    """The options as JSON gives them back: paths as text, tuples as lists, the chat template as its text."""
    settings = {**asdict(options), "chat_template": read_template(options.chat_template)}
    result: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return result


def as_json(value: dict[str, Any]) -> bytes:
    """The bytes of a JSON file for people, too."""
    return (json.dumps(value, indent=2) + "\n").encode()
