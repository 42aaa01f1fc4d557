"""Options of ``draftheads report``."""

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class ReportOptions:
    """Write the pages of a folder again: report.html of a training run, tune.html of `tune`, bench.html of `bench`."""

    folder: tyro.conf.Positional[Path]
    """The output folder."""
    figures: bool = False
    """Also write each plot to figures/ there. As PNG (200 dpi) and SVG, black on white."""
