"""Writes the page of finished work: reads the record that it left in its folder, and writes the HTML beside it."""

import json
from pathlib import Path
from typing import Literal

from draftheads.reports.bench_page import bench_page
from draftheads.reports.page import render
from draftheads.reports.training_page import training_page
from draftheads.reports.tune_page import tune_page
from draftheads.utils.files import write_atomic

_PAGES = {  # the record of finished work, its page, and what makes the page
    "training": ("metrics.json", "report.html", training_page),
    "tune": ("tune.json", "tune.html", lambda record, _: tune_page(record)),
    "bench": ("bench.json", "bench.html", lambda record, _: bench_page(record)),
}


def write_page(folder: Path, kind: Literal["training", "tune", "bench"]) -> Path:
    """Writes the page of a training run, a tune result or a comparison, and returns its path.

    Raises:
        MissingDependency: the extra ``report`` is not installed.
    """
    record, name, make = _PAGES[kind]
    page = make(json.loads((folder / record).read_text(encoding="utf-8")), folder)
    write_atomic(folder / name, render(page).encode())
    return folder / name
