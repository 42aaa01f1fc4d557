"""What drafts, and how much: made by the command line, the server and :func:`draftheads.load`, and passed whole."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from os import PathLike
from typing import Any

from draftheads.errors import InvalidSettings, require_bool
from draftheads.speculation.shapes import ROOT_ONLY, ByProfile, Shape, as_shape
from draftheads.speculation.tree import Tree
from draftheads.utils.counts import counted

UNTRAINED_HEADS = ("prompt-lookup", "lookahead")  # names of what drafts without a head
TreeChoice = Shape | ByProfile | Sequence[Sequence[int]] | str | PathLike[str] | int


@dataclass(frozen=True)
class Drafting:
    """What is drafted.

    The types are those of the command line. In Python ``head`` may also be a path, ``draft_model`` a loaded model, and
    ``tree`` a :data:`TreeChoice`.

    Raises:
        InvalidSettings: values that contradict each other or need another one.
        InvalidTree: ``tree`` is none of what is known, or a file that cannot be read.
    """

    head: str | None = None
    """The draft head: a name, a folder or a Hugging Face id. `draftheads info` lists the installed ones. prompt-lookup
    copies from the text so far; lookahead refines draft tokens of the model itself. Plain decoding when left out."""
    draft_model: str | None = None
    """A smaller model drafts in place of a head. With the same tokenizer: a folder or a Hugging Face id."""
    tree: str = "auto"
    """What is drafted. auto: as many nodes as pay, by the head's acceptance profile and the costs here; plain: nothing;
    24: growing trees of so many nodes; static:24: the head's best fixed tree; drawn:3: chains of sampled tokens, for
    --acceptance rejection or block; JSON such as '[[0],[1],[0,0]]' or a file of it: this tree; or an acceptance.json,
    as auto."""
    copy: bool = True
    """Also draft copies from the text so far. That is what followed an earlier occurrence of its last tokens."""
    corpus: str | None = None
    """Also draft copies from this text file: documents or code that answers quote, or earlier answers."""

    def __post_init__(self) -> None:
        require_bool(copy=self.copy)
        if self.head is not None and self.draft_model is not None:
            model = getattr(self.draft_model, "name_or_path", self.draft_model)
            raise InvalidSettings(f"head {self.head} and draft_model {model}: give one of them")
        if self.corpus is not None and self.head == "lookahead":
            raise InvalidSettings(f"corpus {self.corpus}: lookahead makes trees of its own; give another head, or none")
        shape = self.shape
        is_head = self.head is not None and self.head not in UNTRAINED_HEADS
        fills_shapes = self.draft_model is not None and not isinstance(shape, ByProfile)
        if is_head or fills_shapes or shape in (ROOT_ONLY, ByProfile()):
            return
        if isinstance(shape, ByProfile) and shape.profile != "auto":
            raise InvalidSettings(f"tree {shape.profile} is a head's profile: give a draft head by head=…")
        shown = f"a tree of {counted(shape.num_nodes, 'node')}" if isinstance(shape, Tree) else str(self.tree)
        what = f"{self.head} fills no tree" if self.head else "nothing is there to fill it"
        raise InvalidSettings(f"{shown}: {what}; give a draft head by head=…, or draft_model=…")

    @cached_property
    def shape(self) -> Shape | ByProfile:
        """What ``tree`` means. A file is read once: it may be a pipe."""
        return as_shape(self.tree)

    def keywords(self) -> dict[str, Any]:
        """The fields, as keywords of :func:`draftheads.load`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def is_plain(self) -> bool:
        """Whether nothing is drafted, whatever the head."""
        return self.shape == ROOT_ONLY
