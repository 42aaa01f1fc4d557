"""Options of ``draftheads cache``."""

from dataclasses import dataclass
from typing import Literal

import tyro


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
