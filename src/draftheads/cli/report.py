"""``draftheads report``: makes the page of a finished training run, a search for trees or a comparison once more."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from draftheads.errors import DataError
from draftheads.reports import bench_page
from draftheads.reports import train_page as training_page
from draftheads.reports import tune_page as search_page


@dataclass(frozen=True)
class ReportOptions:
    """Write the page of what is in a folder once more.

    report.html of a training run, tune.html of a search for trees, bench.html of a comparison.
    """

    folder: tyro.conf.Positional[Path]
    """The output folder."""


def run(options: ReportOptions) -> None:
    """Writes the pages and says where they are.

    Raises:
        DataError: there is nothing in the folder that a page could be made of, or it is damaged.
    """
    kinds = (
        ((options.folder / bench_page.RECORD).is_file(), bench_page.write_page),
        ((options.folder / search_page.RECORD).is_file(), search_page.write_page),
        (training_page.has_run(options.folder), training_page.write_page),
    )
    pages = [write(options.folder) for found, write in kinds if found]
    if not pages:
        raise DataError(
            f"{options.folder} holds nothing to make a page of: no metrics.json of a finished training run, no "
            f"{search_page.RECORD} of a search for trees, no {bench_page.RECORD} of a comparison"
        )
    for page in pages:
        print(page)
