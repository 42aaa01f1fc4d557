"""``draftheads report``: makes the page of a finished training run, a search for trees or a comparison once more."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from draftheads.bench import page as bench_page
from draftheads.search import page as search_page
from draftheads.train import page as training_page


@dataclass(frozen=True)
class ReportOptions:
    """Write the page of what is in a folder once more.

    report.html of a training run, tune.html of a search for trees, bench.html of a comparison.
    """

    folder: tyro.conf.Positional[Path]
    """The output folder."""


def run(options: ReportOptions) -> None:
    """Writes the pages and says where they are."""
    compared = (options.folder / bench_page.RECORD).is_file()
    if compared:
        print(bench_page.write_page(options.folder))
    searched = (options.folder / search_page.RECORD).is_file()
    if searched:
        print(search_page.write_page(options.folder))
    if not (searched or compared) or training_page.has_run(options.folder):
        print(training_page.write_page(options.folder))
