"""``draftheads cache``: shows the parts of the cache, or deletes them."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftheads.errors import InvalidSettings
from draftheads.utils.cache import PARTS, CachePart, Contents, cache_folder, clear, contents_of
from draftheads.utils.counts import byte_size, counted


@dataclass(frozen=True)
class CacheOptions:
    """Show what is in the cache, or clear it.

    The cache has what draftheads measured and converted. Models from the Hugging Face Hub are in another cache.
    """

    action: tyro.conf.Positional[Literal["show", "clear"]] = "show"
    """What to do. show lists the parts and their sizes; clear deletes them."""
    part: tyro.conf.Positional[str | None] = None
    """Only this part: a name that show lists."""
    yes: bool = False
    """With clear: do not ask. Needed where there is no terminal."""


def run(options: CacheOptions) -> None:
    console, cache = Console(highlight=False), cache_folder()
    parts = [part for part in PARTS if options.part in (None, part.name)]
    if not parts:
        names = ", ".join(part.name for part in PARTS)
        raise InvalidSettings(f"the cache has no part {options.part!r}; its parts are {names}")
    sizes = {part: contents for part in parts if (contents := contents_of(part, cache)).num_files}
    if options.action == "clear":
        _clear(console, cache, sizes, yes=options.yes)
        return
    console.print(Text(f"{cache}: {_total(sizes) if sizes else 'empty'}"), soft_wrap=True)
    if sizes:
        console.print(_table(sizes))
        console.print("\n`draftheads cache clear` deletes all parts, `draftheads cache clear PART` one.", markup=False)
    console.print("Models from the Hugging Face Hub are in another cache: `hf cache ls`.", markup=False)


def _table(sizes: dict[CachePart, Contents]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("\npart", no_wrap=True)
    table.add_column("\nfiles", justify="right")
    table.add_column("\nsize", justify="right", no_wrap=True)
    table.add_column("\nwhat it is, and what clearing it means")
    for part, contents in sizes.items():
        text = Text.assemble(part.what, "\n", (part.loss, "dim"))
        table.add_row(part.name, f"{contents.num_files:,}", byte_size(contents.num_bytes), text)
    return table


def _clear(console: Console, cache: Path, sizes: dict[CachePart, Contents], *, yes: bool) -> None:
    if not sizes:
        console.print(Text(f"{cache}: nothing to delete"), soft_wrap=True)
        return
    if not yes:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            reason = "nothing was deleted, because there is no terminal to ask on"
            raise InvalidSettings(f"{cache}: {reason}; add --yes to delete {_total(sizes)}")
        console.print(Text(f"{cache}"), soft_wrap=True)
        console.print(_table(sizes))
        if not _agreed(console, f"\nDelete {counted(len(sizes), 'part')}, {_total(sizes)}? [y/N] "):
            console.print("nothing was deleted")
            return
    cleared = {part: clear(part, cache) for part in sizes}
    console.print(f"deleted {_total({part: deleted for part, (deleted, _) in cleared.items()})}")
    for path in (path for _, in_use in cleared.values() for path in in_use):
        console.print(Text(f"kept {path.relative_to(cache)}: another process is using it"), soft_wrap=True)


def _agreed(console: Console, question: str) -> bool:
    try:
        return console.input(Text(question)).strip().lower() in ("y", "yes")
    except EOFError:
        console.print()
        return False


def _total(sizes: dict[CachePart, Contents]) -> str:
    num_files, num_bytes = map(sum, zip(*sizes.values(), strict=True))
    return f"{byte_size(num_bytes)} in {counted(num_files, 'file')}"
