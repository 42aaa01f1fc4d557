"""The protocol of drafters: what drafts, and what it keeps of a batch. All methods but two have defaults."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Self

from torch import Tensor

from draftheads.speculation.draft import Context, Draft
from draftheads.speculation.shapes import ROOT_ONLY, Shape


class DraftSession(ABC):
    """What a drafter keeps of one batch: the rows, their history and its caches."""

    @abstractmethod
    def propose(self, context: Context, shape: Shape) -> Draft:
        """Draft tokens for every row of the context, in the given shape.

        A drafter that does not fill shapes makes trees of its own, whatever the shape.
        """

    def observe(self, context: Context) -> None:  # noqa: B027 - many keep nothing
        """Takes note of a context without drafting: this step verifies the root alone."""

    def on_verify(self, draft: Draft, best: Callable[[], Tensor]) -> Tensor | None:
        """What the session needs on the host of the target's pass over its draft: (B, n) int64, or None.

        ``best()`` gives the target's most likely token after every node, (B, N).
        """
        return None

    def on_read(self, values: Sequence[Sequence[int]]) -> None:  # noqa: B027
        """Receives it, (B, n); the host reads it together with the step's tokens."""

    def keep(self, rows: Tensor) -> None:  # noqa: B027
        """Rows left or moved: row ``rows[i]`` is row i from now on. The tensor is on the host, (n,) int64."""


class Drafter(ABC):
    """Weights and settings of what drafts: a draft head, a small model, a lookup in the text so far.

    Drafting does not change a drafter, so batches and threads share it. Each batch has a session of its own.
    """

    needs_history: bool = False
    """Whether a context must carry all accepted tokens (stateful) or the last one only (stateless)."""
    reads_whole_text: bool = False
    """Whether layers read all accepted tokens, which takes time."""
    default_shape: Shape = ROOT_ONLY
    """What is drafted where no shape is given."""
    fills_shapes: bool = True
    """Off: it makes trees of its own, which have at most as many nodes as ``default_shape``."""
    max_depth: int = 1
    """Of trees whose shape gives no depth."""
    budget: int = 0
    """Nodes that its trees may have beyond a shape's own: copies."""
    hidden_layers: tuple[int, ...] = ()
    """The layers of the target whose inputs it reads in place of h_t; empty for one that reads h_t. Index 0 is the
    first layer, whose input are the embeddings; so index i is ``hidden_states[i]`` of transformers."""

    @property
    def bytes_per_slot(self) -> int:
        """Memory of what a session keeps of one token."""
        return 0

    def bytes_of_rows(self, num_rows: int) -> int:
        """Memory of what it keeps of so many rows beside that, whatever their length."""
        return 0

    @property
    def name(self) -> str:
        """For messages and tables."""
        return type(self).__name__

    @abstractmethod
    def start(self) -> DraftSession:
        """A session for a batch, which has no rows yet."""

    def check_shape(self, shape: Shape) -> None:  # noqa: B027 - many fill any shape
        """Can it fill the shape?

        Raises:
            InvalidTree: it cannot.
        """


class NoDraft(Drafter, DraftSession):
    """Plain decoding: the root alone. The reference of every drafter. It keeps nothing, so it is its own session."""

    name = "plain decoding"
    fills_shapes = False

    def start(self) -> Self:
        """Itself."""
        return self

    def propose(self, context: Context, shape: Shape) -> Draft:
        """A tree of one node: the step gets one token."""
        return Draft.on_tree(ROOT_ONLY, context.root_ids[:, None])
