"""``draftheads reproduce``: a table or figure of a paper, for a model and its heads."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from draftheads.cli.show import ProgressDisplay, print_table, quiet_transformers
from draftheads.errors import InvalidSettings
from draftheads.utils.counts import counted
from draftheads.utils.files import check_writable, write_atomic
from draftheads_papers.measures import measures_of
from draftheads_papers.options import ReproduceOptions, table_names
from draftheads_papers.paper_tables import read_table
from draftheads_papers.reproduce import Reproduction, reproduce, trained_for
from draftheads_papers.studies import Variant


def run(options: ReproduceOptions) -> None:
    """Lists the tables, or rebuilds some and prints them."""
    console = Console(highlight=False)
    if not options.tables:
        show_tables(console)
        return
    tables = [read_table(name) for name in options.tables]
    measures = [measures_of(options.quality or table.quality, table.judge) for table in tables]  # raises early
    quiet_transformers()
    out = check_writable(options.out / f"{tables[0].name}.json").parent
    trained: list[list[Variant]] = [[] for _ in tables]
    if not options.heads:
        budget = {"data": options.data, **_settings(options.train)}
        with ProgressDisplay(console) as progress:
            trained = trained_for(tables, options.model, out, budget, quick=options.quick, progress=progress)
    for table, variants, quality in zip(tables, trained, measures, strict=True):
        with ProgressDisplay(console) as progress:
            found = reproduce(
                table,
                options.model,
                options.heads,
                variants,
                progress=progress,
                quick=options.quick,
                prompts=options.prompts,
                limit=options.limit,
                quality=quality,
            )
        _write_and_show(found, out / table.name, console)


def _write_and_show(found: Reproduction, path: Path, console: Console) -> None:
    text, record = (path.with_name(f"{path.name}.{kind}") for kind in ("md", "json"))
    write_atomic(text, "".join(line + "\n" for line in found.lines).encode())
    write_atomic(record, json.dumps(found.record, indent=1, default=str).encode())
    for block in found.blocks:
        if isinstance(block, str):
            console.print(Markdown(block))
        else:
            print_table(console, *block)
        console.print()
    console.print(f"wrote {text} and {record}", soft_wrap=True)


def show_tables(console: Console) -> None:
    """All tables with what they need."""
    shown = Table("table", "what", "in the paper", box=None, padding=(0, 2, 0, 0))
    for name in table_names():
        table = read_table(name)
        trains = f"; trains {counted(len(table.variants), 'head')}" if table.variants else ""
        shown.add_row(name, table.title, f"{table.needs}{trains}")
    console.print(shown)
    console.print("\ndraftheads reproduce TABLE --quick: a short run on the embedded model")


def _settings(given: tuple[str, ...]) -> dict[str, Any]:
    """NAME=VALUE as settings; values are JSON, or texts."""
    settings: dict[str, Any] = {}
    for each in given:
        name, equals, text = each.partition("=")
        if not equals:
            raise InvalidSettings(f"--train is {each!r}; give NAME=VALUE, such as batch_tokens=4096")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        settings[name.replace("-", "_")] = value
    if "text" in settings:
        settings["text"] = (Path(settings["text"]),)
    return settings
