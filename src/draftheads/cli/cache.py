"""``draftheads cache``: shows the parts of the cache, or deletes them."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftheads.cli.options.cache import CacheOptions
from draftheads.errors import InvalidSettings
from draftheads.utils.cache import (
    PARTS,
    CachePart,
    Contents,
    cache_folder,
    clear,
    clearable_folder,
    contents_of,
    other_entries,
)
from draftheads.utils.counts import byte_size, counted

Found = list[tuple[CachePart, Contents]]


def run(options: CacheOptions) -> None:
    """Shows or clears.

    Raises:
        InvalidSettings: no such part, a cache folder that may not be cleared, or nobody to ask and no ``--yes``.
        StorageError: a file cannot be deleted.
    """
    console = Console(highlight=False)
    parts = _parts(options.part)
    cache = clearable_folder() if options.action == "clear" else cache_folder()
    found = [(part, contents) for part in parts if (contents := contents_of(part, cache)).num_files]
    if options.action == "clear":
        _clear(console, cache, found, yes=options.yes)
    else:
        _show(console, cache, found, [] if options.part else other_entries(cache))


def _parts(name: str | None) -> Sequence[CachePart]:
    if name is None:
        return PARTS
    if found := [part for part in PARTS if part.name == name]:
        return found
    raise InvalidSettings(f"the cache has no part {name!r}; its parts are {', '.join(part.name for part in PARTS)}")


def _show(console: Console, cache: Path, found: Found, others: Sequence[Path]) -> None:
    console.print(Text(f"{cache}: {_in_words(found) if found else 'empty'}"), soft_wrap=True)
    if found:
        console.print(_table(found))
    if others:
        names = ", ".join(map(str, others[:5])) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
        console.print(Text(f"\nNot from draftheads, and never deleted: {names}"))
    if found:
        console.print("\n`draftheads cache clear` deletes all parts, `draftheads cache clear PART` one.", markup=False)
    console.print("Models from the Hugging Face Hub are in another cache: `hf cache ls`.", markup=False)


def _table(found: Found) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("\npart", no_wrap=True)
    table.add_column("\nfiles", justify="right")
    table.add_column("\nsize", justify="right", no_wrap=True)
    table.add_column("\nwhat it is, and what clearing it means")
    for part, contents in found:
        text = Text.assemble(part.what, "\n", (part.loss, "dim"))
        table.add_row(part.name, f"{contents.num_files:,}", byte_size(contents.num_bytes), text)
    return table


def _clear(console: Console, cache: Path, found: Found, *, yes: bool) -> None:
    if not found:
        console.print(Text(f"{cache}: nothing to delete"), soft_wrap=True)
        return
    if not yes:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise InvalidSettings(
                f"{cache}: nothing was deleted, because there is no terminal to ask on; add --yes to delete "
                f"{_in_words(found)}"
            )
        console.print(Text(f"{cache}"), soft_wrap=True)
        console.print(_table(found))
        if not _agreed(console, f"\nDelete {counted(len(found), 'part')}, {_in_words(found)}? [y/N] "):
            console.print("nothing was deleted")
            return
    total, in_use = Contents(), list[Path]()
    for part, _ in found:
        deleted, kept = clear(part, cache)
        total.num_files += deleted.num_files
        total.num_bytes += deleted.num_bytes
        in_use += kept
    console.print(f"deleted {_size(total)}")
    for path in in_use:
        console.print(Text(f"kept {path.relative_to(cache)}: another process is using it"), soft_wrap=True)


def _agreed(console: Console, question: str) -> bool:
    try:
        return console.input(Text(question)).strip().lower() in ("y", "yes")
    except EOFError:
        console.print()
        return False


def _in_words(found: Found) -> str:
    return _size(
        Contents(sum(contents.num_files for _, contents in found), sum(contents.num_bytes for _, contents in found))
    )


def _size(contents: Contents) -> str:
    return f"{byte_size(contents.num_bytes)} in {counted(contents.num_files, 'file')}"
