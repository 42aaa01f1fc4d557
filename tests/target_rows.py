"""The rows of a runner in a fixed order, for tests that read and step them together."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftheads.models.model import TargetModel
from draftheads.runners import runner_for
from draftheads.runners.runner import Entries, Row
from draftheads.speculation.draft import AcceptResult, Draft


class Target:
    def __init__(self, model: TargetModel, layers: Sequence[int] = ()) -> None:
        self.runner: Any = runner_for(model, layers)
        self.model = model
        self.rows: list[Row] = []

    @property
    def lengths(self) -> list[int]:
        return [row.length for row in self.rows]

    @property
    def num_bytes(self) -> int:
        return self.runner.num_bytes

    def prefill(self, prompts: Sequence[Sequence[int]], most_tokens: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Logits (b, V) and hidden states (b, T, D), right-padded."""
        rows, logits, hidden = self.runner.prefill(prompts, most_tokens)
        self.rows += rows
        return logits, pad_sequence(hidden, batch_first=True)

    def open(self, *most_tokens: int) -> None:
        self.rows += [self.runner.open(most) for most in most_tokens]

    def read(self, token_ids: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
        return self.runner.read(self.rows, token_ids)

    def verify(self, draft: Draft) -> tuple[Tensor, Tensor]:
        return self.runner.verify(self.rows, draft)

    def commit(self, result: AcceptResult, num_accepted: Sequence[int]) -> None:
        self.runner.commit(self.rows, result, num_accepted)

    def keep(self, rows: Sequence[int]) -> None:
        kept = [self.rows[row] for row in rows]
        self.runner.drop([row for row in self.rows if row not in kept])
        self.rows = kept

    def entries(self, row: int, num_tokens: int) -> Entries:
        return self.runner.entries(self.rows[row], num_tokens)
