"""``draftheads report``: makes the page of a finished training run once more."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from draftheads.train.page import write_page


@dataclass(frozen=True)
class ReportOptions:
    """Write report.html: losses, accuracies and settings of a finished training run, from the files in its folder."""

    folder: tyro.conf.Positional[Path]
    """The run's output folder."""


def run(options: ReportOptions) -> None:
    """Writes the page and says where it is."""
    print(write_page(options.folder))
