"""Writes the pages of a folder: finds out what the folder holds, reads the record and writes the HTML beside it."""

import json
from pathlib import Path
from typing import Literal

from draftheads.errors import DataError
from draftheads.reports.bench_page import bench_page
from draftheads.reports.page import render
from draftheads.reports.training_page import training_page
from draftheads.reports.tune_page import tune_page
from draftheads.utils.files import write_atomic

PageKind = Literal["training", "tune", "bench"]

_KINDS = {  # by kind: in words, the file that a finished run leaves, its page, and what makes the page
    "training": ("training run", "metrics.json", "report.html", training_page),
    "tune": ("tune result", "tune.json", "tune.html", lambda record, _: tune_page(record)),
    "bench": ("comparison", "bench.json", "bench.html", lambda record, _: bench_page(record)),
}


def write_report(folder: Path, *kinds: PageKind, figures: bool = False) -> list[Path]:
    """Writes a page for each record in the folder: training run, tune result, comparison.

    Without ``kinds``, pages of all kinds are written. With ``figures``, each plot is also written to ``figures/``, as
    PNG and as SVG. Returns what was written: ``report.html`` of a training run, ``tune.html`` of a tune result,
    ``bench.html`` of a comparison, and the plots.
    """
    wanted = [_KINDS[kind] for kind in kinds or _KINDS]
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; give the output folder of train, tune or bench")
    if not any((folder / record).is_file() for _, record, *_ in wanted):
        names = " or ".join(f"{record} ({what})" for what, record, *_ in wanted)
        raise DataError(f"{folder}: not an output folder of train, tune or bench: it has no {names}")
    written: list[Path] = []
    for what, record, name, make in wanted:
        path = folder / record
        if not path.is_file():
            continue
        try:
            page = make(json.loads(path.read_text(encoding="utf-8")), folder)
            contents = {folder / name: render(page).encode()}
            for plot in page.plots if figures else ():
                contents |= {folder / "figures" / file: content for file, content in plot.files(page.where).items()}
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise DataError(f"this {what} cannot be read: {error!r}", path=path) from error
        for place, content in contents.items():
            write_atomic(place, content)
        written += contents
    return written
