"""Reads prompts on a cache of their own: a long one in chunks, short ones side by side, from a known beginning on.

The text of a request that was interrupted is read in the same way: its prompt, and its answer so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from draftheads.decode.request import Request
from draftheads.models.kv_cache import RowEntries
from draftheads.models.kv_target import Target
from draftheads.models.model import TargetModel


@dataclass(frozen=True)
class ReadText:
    """T tokens that the target has read, and what it computed for them."""

    token_ids: list[int]
    entries: RowEntries  # keys and values
    hidden: Tensor  # (T, D) last hidden states, which drafters with a history read; of n layers (T, n·D)

    @property
    def num_bytes(self) -> int:
        """Memory that keys, values and hidden states hold, also of slots that they do not show."""
        return self.entries.num_bytes + self.hidden.untyped_storage().nbytes()

    @property
    def visible_bytes(self) -> int:
        return sum(part.nbytes for layer in self.entries.layers for part in layer) + self.hidden.nbytes

    def first(self, num_tokens: int) -> "ReadText":
        """The beginning of the text; shares the memory."""
        return ReadText(self.token_ids[:num_tokens], self.entries.first(num_tokens), self.hidden[:num_tokens])

    def copied(self) -> "ReadText":
        """The same in memory of its own."""
        return ReadText(self.token_ids, self.entries.copied(), self.hidden.clone())


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt that was read whole."""

    request: Request
    text: ReadText
    logits: Tensor  # (V,) after its last token


class PromptReader:
    """Reads the prompts of some requests, side by side; a batch then adopts them.

    Args:
        model: the target.
        requests: whose prompts are read.
        known: for each the beginning of its prompt, if it was read before; it is copied. The last token of a prompt is
            read in any case, because its logits are needed.
        layers: whose inputs the drafter reads; ``known`` has the same.
    """

    def __init__(
        self,
        model: TargetModel,
        requests: Sequence[Request],
        known: Sequence[ReadText | None] = (),
        layers: Sequence[int] = (),
    ) -> None:
        self.requests = list(requests)
        self._texts = [request.ids_to_read for request in requests]
        self._target = Target(model, layers)
        self._target.cache.reserve(len(self.requests), max(map(len, self._texts)))
        self._hidden: list[list[Tensor]] = [[] for _ in self.requests]  # of each, parts (t, D or n·D)
        self._last: list[Tensor | None] = [None] * len(self.requests)  # h_t (D,) at the end of each prompt
        beginnings: list[ReadText | None] = []
        for place, request in enumerate(self.requests):
            text = known[place] if known else None
            if text is not None:
                text = text.first(len(self._texts[place]) - 1)
                assert text.token_ids == self._texts[place][: len(text.token_ids)], "the prompt begins with that text"
                self._hidden[place].append(text.hidden.clone())
                if not request.token_ids:
                    request.num_cached = len(text.token_ids)
            beginnings.append(text)
        entries = [None if text is None else text.entries for text in beginnings]
        self._target.adopt(entries, [request.most_tokens for request in self.requests])

    @property
    def num_left(self) -> int:
        """Prompt tokens that are not read yet."""
        return sum(map(len, self._unread(None)))

    @property
    def num_bytes(self) -> int:
        """Memory of keys, values and hidden states."""
        return self._target.cache.num_bytes + sum(part.nbytes for parts in self._hidden for part in parts)

    @torch.inference_mode()
    def read(self, most: int) -> int:
        """Reads the next tokens of each prompt, at most so many of a single one; returns how many it read.

        Several prompts are read whole, in one pass.
        """
        chunks = self._unread(most if len(self.requests) == 1 else None)
        ends = list(map(len, self._texts))
        for place, (last, hidden) in enumerate(self._target.read(chunks)):
            self._hidden[place].append(hidden)
            if self._target.lengths[place] == ends[place]:
                self._last[place] = last[-1]
        return sum(map(len, chunks))

    @cached_property
    @torch.inference_mode()
    def prompts(self) -> list[ReadPrompt]:
        """The prompts, once they are read; they share the memory of this reader."""
        assert not self.num_left, "the prompts are read whole"
        logits = self._target.model.logits(torch.stack([last for last in self._last if last is not None]))
        self._hidden = [[torch.cat(parts)] for parts in self._hidden]
        return [
            ReadPrompt(
                request,
                ReadText(self._texts[place], self._target.cache.entries(place, len(hidden)), hidden),
                logits[place],
            )
            for place, (request, [hidden]) in enumerate(zip(self.requests, self._hidden, strict=True))
        ]

    def _unread(self, most: int | None) -> list[list[int]]:
        """The next tokens of each prompt, at most so many."""
        return [text[length:][:most] for text, length in zip(self._texts, self._target.lengths, strict=True)]
