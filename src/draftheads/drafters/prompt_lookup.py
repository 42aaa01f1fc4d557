"""Guesses copied from the text so far: what followed the last words the last time (prompt lookup decoding)."""

from typing import Self

import torch
from torch import Tensor

from draftheads.draft import Context, Draft
from draftheads.errors import InvalidSettings
from draftheads.tree import Tree


class PromptLookup:
    """Finds the latest place where the text had its last tokens before, the longest match first, and copies on.

    Where a copy runs into the end of the text, as in a text that repeats itself, it goes on with what it has copied.

    Args:
        num_tokens: how many are guessed at most.
        max_ngram: how many last tokens are looked for at most.
        min_ngram: at least.

    Raises:
        InvalidSettings: a number below 1, or ``min_ngram`` above ``max_ngram``.
    """

    needs_history = True

    def __init__(self, *, num_tokens: int = 8, max_ngram: int = 3, min_ngram: int = 1) -> None:
        for name, value in (("num_tokens", num_tokens), ("max_ngram", max_ngram), ("min_ngram", min_ngram)):
            if value < 1:
                raise InvalidSettings(f"{name} is {value}; it must be at least 1")
        if min_ngram > max_ngram:
            raise InvalidSettings(f"min_ngram is {min_ngram} and max_ngram {max_ngram}: it must not be larger")
        self.num_tokens, self.max_ngram, self.min_ngram = num_tokens, max_ngram, min_ngram
        self._rows: list[_Text] = []

    @property
    def most_nodes(self) -> int:
        """Of a draft, root included."""
        return 1 + self.num_tokens

    def fresh(self) -> Self:
        """The same settings, no texts."""
        return type(self)(num_tokens=self.num_tokens, max_ngram=self.max_ngram, min_ngram=self.min_ngram)

    def propose(self, context: Context) -> Draft:
        """A chain for each row that has something to copy."""
        self._read(context)
        roots = context.root_ids.tolist()
        copies = [text.copy(root, self.num_tokens) for text, root in zip(self._rows, roots, strict=True)]
        length = max(map(len, copies))
        chains = [[root, *(copy or [root] * length)] for root, copy in zip(roots, copies, strict=True)]
        draft = Draft.on_tree(Tree.chain(length), torch.tensor(chains, device=context.root_ids.device))
        if all(copies) or not length:
            return draft
        empty = torch.tensor([not copy for copy in copies], device=context.root_ids.device)[:, None]
        return draft.filled_up(empty & (draft.depths > 0))

    def follow(self, context: Context) -> None:
        """Reads the accepted tokens."""
        self._read(context)

    def keep(self, rows: Tensor) -> None:
        """Texts move with their rows."""
        self._rows = [self._rows[row] for row in rows.tolist()]

    def _read(self, context: Context) -> None:
        counts, tokens = context.num_accepted.tolist(), context.token_ids.tolist()
        new = context.num_new_rows(len(self._rows))
        self._rows += [_Text(self.min_ngram, self.max_ngram) for _ in range(new)]
        for text, count, ids in zip(self._rows, counts, tokens, strict=True):
            text.read(ids[:count])


class _Text:
    """A row's tokens, and where each n-gram was last followed by something."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.sizes = range(longest, shortest - 1, -1)
        self.ids: list[int] = []
        self.places: dict[tuple[int, ...], int] = {}  # n-gram -> where what follows it stands

    def read(self, ids: list[int]) -> None:
        """More tokens."""
        for token in ids:
            end = len(self.ids)
            for size in self.sizes:
                if size <= end:
                    self.places[tuple(self.ids[end - size :])] = end
            self.ids.append(token)

    def copy(self, root: int, count: int) -> list[int]:
        """What followed the text's end, root included, where it stood before; nothing if it never did."""
        known = [*self.ids[-self.sizes.start :], root]
        for size in self.sizes:
            if size > len(known):
                continue
            end = self._place(known[-size:])
            if end is not None:
                text = [*self.ids, root]
                period = text[end:]
                return [period[i % len(period)] for i in range(count)]
        return []

    def _place(self, ngram: list[int]) -> int | None:
        """The root itself follows the text's last n-gram."""
        if self.ids[-len(ngram) :] == ngram and len(self.ids) >= len(ngram):
            return len(self.ids)
        return self.places.get(tuple(ngram))
