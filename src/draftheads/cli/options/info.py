"""Options of ``draftheads info``."""

from dataclasses import dataclass

import tyro

from draftheads.errors import InvalidSettings


@dataclass(frozen=True)
class InfoOptions:
    """Show a draft head, the bundled heads, or a tree."""

    head: tyro.conf.Positional[str | None] = None
    """A draft head: a name, a folder or a Hugging Face id. All installed heads when left out."""
    model: str = "smollm2-135m"
    """The base model of the installed head."""
    tree: str | None = None
    """Draw this tree instead. A JSON list of rank paths such as '[[0],[1],[0,0]]', or a file that has one."""

    def __post_init__(self) -> None:
        if self.head is not None and self.tree is not None:
            raise InvalidSettings(f"head is {self.head!r} and tree is {self.tree!r}: give one of them")
