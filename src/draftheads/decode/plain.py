"""Plain decoding: the drafter that drafts nothing. The oracle of every drafter, and the baseline of measurements."""

from typing import Self

import torch

from draftheads.speculation.draft import Context, Draft
from draftheads.speculation.shapes import ROOT_ONLY, Shape


class NoDraft:
    """A tree of one node: each step checks the root and gets one token. It keeps nothing, so it is its own session."""

    needs_history = False
    default_shape = None

    def start(self) -> Self:
        """Itself."""
        return self

    def propose(self, context: Context, shape: Shape) -> Draft:
        """The root alone."""
        return Draft.on_tree(ROOT_ONLY, context.root_ids[:, None])

    def follow(self, context: Context) -> None:
        """Nothing to note."""

    def keep(self, rows: torch.Tensor) -> None:
        """Nothing to keep."""
