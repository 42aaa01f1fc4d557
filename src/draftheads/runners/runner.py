"""A pass of the target, whatever computes it, and the keys and values of each text.

B rows, T tokens of a text, N nodes of a tree, P nodes of a path, D hidden size, n layers whose inputs a drafter reads.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftheads.models.model import TargetModel
from draftheads.speculation.draft import AcceptResult, Draft
from draftheads.utils.counts import rounded_up

BLOCK_SLOTS = 128  # memory of a text grows by so many tokens: little for short texts, few copies for long ones
PASS_TOKENS = 2048  # of several texts; larger passes are not faster
CHUNK_TOKENS = 512  # of one text in a pass; limits the memory of masks and activations

Entries = tuple[Tensor, ...]  # keys and values of a text, each (…, T, d)
States = Mapping[tuple[str, int, int], Tensor]  # of recurrent layers after a text: by kind, layer, number in the layer


@dataclass(eq=False)
class Row:
    """A text that the target reads and goes on with."""

    length: int = 0
    """Tokens with keys and values."""
    is_long: bool = False
    """Whether it has the long factors of LongRoPE."""
    memory: Any = None
    """Of its runner."""
    states: Any = None
    """Of recurrent layers, of its runner."""


class Runner(ABC):
    """Reads texts and verifies trees with one frozen model. Each text is a :class:`Row`.

    If a drafter reads the inputs of n ``layers``, hidden states are theirs side by side, n·D numbers, in place of h_t.

    Raises:
        InvalidSettings: the model has fewer layers.
    """

    def __init__(self, model: TargetModel, layers: Sequence[int] = ()) -> None:
        model.check_layers(layers)
        self.model = model
        self.layers = tuple(layers)

    @abstractmethod
    def open(self, most_tokens: int, known: Entries | None = None, states: States | None = None) -> Row:
        """A new text, of ``most_tokens`` at most. It begins with a copy of what another text had, if that is given.

        Args:
            most_tokens: of prompt and answer.
            known: :meth:`entries` of its first tokens.
            states: :meth:`states` after exactly these tokens, in a model with recurrent layers.
        """

    @abstractmethod
    def read(self, rows: Sequence[Row], token_ids: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
        """Reads the next T tokens of each row: for each h_t (T, D), and hidden states (T, D or n·D) for a drafter."""

    @abstractmethod
    def verify(self, rows: Sequence[Row], draft: Draft) -> tuple[Tensor, Tensor]:
        """One pass over all nodes of all rows: logits (B, N, V) and hidden states (B, N, D or n·D)."""

    def most_likely(self, rows: Sequence[Row], draft: Draft) -> tuple[Tensor, Tensor]:
        """The same with the most likely token after each node, (B, N) int64, where the model finds it alone."""
        raise NotImplementedError

    @abstractmethod
    def commit(self, rows: Sequence[Row], result: AcceptResult, num_accepted: Sequence[int]) -> None:
        """Keeps the keys and values of accepted nodes, and drops those of the others.

        Args:
            rows: of the last :meth:`verify`.
            result: paths (B, P) in its draft.
            num_accepted: the counts of the result, on the host.
        """

    @abstractmethod
    def drop(self, rows: Sequence[Row]) -> None:
        """These rows end; their memory is free."""

    @abstractmethod
    def entries(self, row: Row, num_tokens: int) -> Entries:
        """A copy of the keys and values of the first tokens of a row. A layer without them has (0, T, 0)."""

    def states(self, row: Row) -> States:
        """A copy of the states after all tokens of a row; empty without recurrent layers."""
        return {}

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory of all keys and values."""

    @torch.inference_mode()
    def prefill(
        self, prompts: Sequence[Sequence[int]], most_tokens: Sequence[int] = ()
    ) -> tuple[list[Row], Tensor, list[Tensor]]:
        """Reads whole prompts, of texts of ``most_tokens``; those of the prompt and one more where left out.

        Returns:
            A row for each, the logits after its last token (B, V), and hidden states (T, D or n·D) of each.
        """
        rows = [self.open(most) for most in most_tokens or [len(prompt) + 1 for prompt in prompts]]
        read = self.read(rows, prompts)
        return rows, self.model.logits(torch.stack([last[-1] for last, _ in read])), [hidden for _, hidden in read]

    def positions(self) -> int:
        """The last position that the model takes. Nodes behind it are never accepted."""
        return (self.model.max_positions or 1 << 30) - 1


def whole_blocks(num_slots: int) -> int:
    """The number of slots, rounded up to whole blocks."""
    return rounded_up(num_slots, BLOCK_SLOTS)
