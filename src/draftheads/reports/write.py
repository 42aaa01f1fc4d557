"""Writes the pages of a folder: finds out what the folder holds, reads the record and writes the HTML beside it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from draftheads.errors import DataError
from draftheads.reports.bench_page import bench_page
from draftheads.reports.page import Page, render
from draftheads.reports.training_page import training_page
from draftheads.reports.tune_page import tune_page
from draftheads.utils.files import write_atomic

PageKind = Literal["training", "tune", "bench"]


class _Files(NamedTuple):
    """One kind of page."""

    what: str
    record: str  # name of the file that a finished run leaves
    page: str
    make: Callable[[Any, Path], Page]


_KINDS: dict[PageKind, _Files] = {
    "training": _Files("training run", "metrics.json", "report.html", training_page),
    "tune": _Files("tune result", "tune.json", "tune.html", lambda record, _: tune_page(record)),
    "bench": _Files("comparison", "bench.json", "bench.html", lambda record, _: bench_page(record)),
}


def write_report(folder: Path, *kinds: PageKind) -> list[Path]:
    """Writes a page for each record in the folder: training run, tune result, comparison.

    Without ``kinds``, pages of all kinds are written. Returns the pages: ``report.html`` of a training run,
    ``tune.html`` of a tune result, ``bench.html`` of a comparison.

    Raises:
        DataError: the folder holds no record of these kinds, or a record is damaged.
        MissingDependency: matplotlib or jinja2 is not installed.
    """
    wanted = [_KINDS[kind] for kind in kinds or _KINDS]
    there = [files for files in wanted if (folder / files.record).is_file()]
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; give the output folder of train, tune or bench")
    if not there:
        names = " or ".join(f"{files.record} ({files.what})" for files in wanted)
        raise DataError(f"{folder}: not an output folder of train, tune or bench: it has no {names}")
    return [_write(folder, files) for files in there]


def _write(folder: Path, files: _Files) -> Path:
    path = folder / files.record
    try:
        html = render(files.make(json.loads(path.read_text(encoding="utf-8")), folder))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise DataError(f"this {files.what} cannot be read: {error!r}", path=path) from error
    write_atomic(folder / files.page, html.encode())
    return folder / files.page
