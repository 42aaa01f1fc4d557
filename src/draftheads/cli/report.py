"""``draftheads report``: writes the pages of finished work again; and the same for commands that have just finished."""

from pathlib import Path

from rich.console import Console

from draftheads.cli.options import ReportOptions
from draftheads.errors import MissingDependency
from draftheads.reports.write import PageKind, write_report


def run(options: ReportOptions) -> None:
    """Writes the pages and plots, and prints their paths."""
    for path in write_report(options.folder, figures=options.figures):
        print(path)


def write_pages(console: Console, folder: Path, kind: PageKind) -> None:
    """Writes the page of work that has just finished; without matplotlib or jinja2, one line says so instead."""
    try:
        for page in write_report(folder, kind):
            console.print(f"wrote {page}", soft_wrap=True, markup=False)
    except MissingDependency as error:
        console.print(f"no page: {error}; then run: draftheads report {folder}", soft_wrap=True, markup=False)
