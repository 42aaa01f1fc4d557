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


def write_report(folder: Path, *kinds: PageKind, figures: bool = False) -> list[Path]:
    """Writes a page for each record in the folder: training run, tune result, comparison.

    Without ``kinds``, pages of all kinds are written. With ``figures``, each plot is also written to ``figures/``, as
    PNG and as SVG. Returns what was written: ``report.html`` of a training run, ``tune.html`` of a tune result,
    ``bench.html`` of a comparison, and the plots.
    """
    wanted = [_KINDS[kind] for kind in kinds or _KINDS]
    there = [files for files in wanted if (folder / files.record).is_file()]
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; give the output folder of train, tune or bench")
    if not there:
        names = " or ".join(f"{files.record} ({files.what})" for files in wanted)
        raise DataError(f"{folder}: not an output folder of train, tune or bench: it has no {names}")
    return [path for files in there for path in _write(folder, files, figures=figures)]


def _write(folder: Path, files: _Files, *, figures: bool) -> list[Path]:
    path = folder / files.record
    try:
        page = files.make(json.loads(path.read_text(encoding="utf-8")), folder)
        contents = {folder / files.page: render(page).encode()}
        for figure in page.figures if figures else ():
            contents |= {folder / "figures" / name: content for name, content in figure.files(page.where).items()}
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise DataError(f"this {files.what} cannot be read: {error!r}", path=path) from error
    for place, content in contents.items():
        write_atomic(place, content)
    return list(contents)
