"""Plain decoding: the drafter that drafts nothing. The oracle of every drafter, and the baseline of measurements."""

from typing import Self

from draftheads.speculation.draft import Context, Draft
from draftheads.speculation.drafter import Drafter, DraftSession
from draftheads.speculation.shapes import ROOT_ONLY, Shape

PLAIN = "plain decoding"


class NoDraft(Drafter, DraftSession):
    """A tree of one node: each step checks the root and gets one token. It keeps nothing, so it is its own session."""

    name = PLAIN

    def start(self) -> Self:
        """Itself."""
        return self

    def propose(self, context: Context, shape: Shape) -> Draft:
        """The root alone."""
        return Draft.on_tree(ROOT_ONLY, context.root_ids[:, None])
