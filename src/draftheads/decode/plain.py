"""Plain decoding: the drafter that guesses nothing. The oracle of every drafter, and the honest baseline."""

from typing import Self

import torch

from draftheads.draft import Context, Draft
from draftheads.tree import Tree

_ROOT_ONLY = Tree.chain(0)


class NoDraft:
    """A tree of one node: each step checks the root and gets one token."""

    needs_history = False

    def fresh(self) -> Self:
        """Itself."""
        return self

    def propose(self, context: Context) -> Draft:
        """The root alone."""
        return Draft.on_tree(_ROOT_ONLY, context.root_ids[:, None])

    def follow(self, context: Context) -> None:
        """Nothing to note."""

    def keep(self, rows: torch.Tensor) -> None:
        """Nothing to keep."""
