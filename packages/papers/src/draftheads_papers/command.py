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
from draftheads_papers.options import ReproduceOptions, table_names
from draftheads_papers.paper_tables import read_table
from draftheads_papers.reproduce import reproduce


def run(options: ReproduceOptions) -> None:
    """Lists the tables, or rebuilds one and prints it."""
    console = Console(highlight=False)
    if options.table is None:
        show_tables(console)
        return
    table = read_table(options.table)
    quiet_transformers()
    out = check_writable((options.out or Path(table.name)) / "table.json").parent
    with ProgressDisplay(console) as progress:
        found = reproduce(
            table,
            options.model,
            options.heads,
            out=out,
            progress=progress,
            data=options.data,
            train=_settings(options.train),
            quick=options.quick,
            prompts=options.prompts,
            limit=options.limit,
            quality=options.quality,
        )
    write_atomic(out / "table.md", "".join(line + "\n" for line in found.lines).encode())
    write_atomic(out / "table.json", json.dumps(found.record, indent=1, default=str).encode())
    for block in found.blocks:
        if isinstance(block, str):
            console.print(Markdown(block))
        else:
            print_table(console, *block)
        console.print()
    console.print(f"wrote {out / 'table.md'} and {out / 'table.json'}", soft_wrap=True)


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
