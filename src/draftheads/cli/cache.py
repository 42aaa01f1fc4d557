"""``draftheads cache``: shows the parts of the cache, or deletes them."""

from dataclasses import dataclass
from typing import Literal

import tyro

from draftheads.errors import InvalidSettings
from draftheads.utils.cache import PARTS, cache_folder, clear, contents_of
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


def run(options: CacheOptions) -> None:
    cache, parts = cache_folder(), [part for part in PARTS if options.part in (None, part.name)]
    if not parts:
        names = ", ".join(part.name for part in PARTS)
        raise InvalidSettings(f"the cache has no part {options.part!r}; its parts are {names}")
    print(cache)
    for part in parts:
        contents, in_use = clear(part, cache) if options.action == "clear" else (contents_of(part, cache), [])
        if contents.num_files:
            size = f"{byte_size(contents.num_bytes)} in {counted(contents.num_files, 'file')}"
            what = "deleted" if options.action == "clear" else f"{part.what}; {part.loss}"
            print(f"{part.name:<14} {size:<22} {what}")
        for path in in_use:
            print(f"kept {path.relative_to(cache)}: another process is using it")
    if options.action == "show":
        print("`draftheads cache clear [PART]` deletes them. `hf cache ls` lists models from the Hugging Face Hub.")
