"""``draftheads report``: makes the page of a finished training run, or of a search for trees, once more."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from draftheads.search import page as search_page
from draftheads.train import page as training_page


@dataclass(frozen=True)
class ReportOptions:
    """Write the page of what is in a folder: report.html of a training run, tune.html of a search for trees."""

    folder: tyro.conf.Positional[Path]
    """The output folder of either."""


def run(options: ReportOptions) -> None:
    """Writes the pages and says where they are."""
    searched = (options.folder / search_page.RECORD).is_file()
    if searched:
        print(search_page.write_page(options.folder))
    if not searched or training_page.has_run(options.folder):
        print(training_page.write_page(options.folder))
