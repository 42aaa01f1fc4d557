"""Reads a prompt in chunks on a cache of its own, from a text on that was read before."""

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
        """Memory of a copy."""
        return sum(part.nbytes for layer in self.entries.layers for part in layer) + self.hidden.nbytes

    def first(self, num_tokens: int) -> "ReadText":
        """The beginning of the text; shares the memory."""
        return ReadText(self.token_ids[:num_tokens], self.entries.first(num_tokens), self.hidden[:num_tokens])

    def copied(self) -> "ReadText":
        """The same in memory of its own."""
        return ReadText(self.token_ids, self.entries.copied(), self.hidden.clone())


class PromptReader:
    """Reads the prompt of one request; a batch then adopts it.

    Args:
        model: the target.
        request: whose prompt is read.
        known: the beginning of the prompt, read before; it is copied. The last token of the prompt is read in any
            case, because its logits are needed.
        layers: whose inputs the drafter reads; ``known`` has the same.
    """

    def __init__(
        self, model: TargetModel, request: Request, known: ReadText | None = None, layers: Sequence[int] = ()
    ) -> None:
        self.request = request
        self._target = Target(model, layers)
        self._target.cache.reserve(1, len(request.prompt_ids))
        self._hidden: list[Tensor] = []  # parts (t, D or n·D)
        self.logits: Tensor | None = None  # (V,) after the prompt, once it is read
        if known is None:
            self._target.lengths = [0]
        else:
            known = known.first(len(request.prompt_ids) - 1)
            assert known.token_ids == request.prompt_ids[: len(known.token_ids)], "the prompt begins with that text"
            self._target.adopt([known.entries])
            self._hidden.append(known.hidden.clone())
            request.num_cached = len(known.token_ids)

    @property
    def layers(self) -> tuple[int, ...]:
        """Whose inputs the drafter reads."""
        return self._target.layers

    @property
    def num_left(self) -> int:
        """Prompt tokens that are not read yet."""
        return len(self.request.prompt_ids) - self._target.lengths[0]

    @property
    def num_bytes(self) -> int:
        """Memory of keys, values and hidden states."""
        return self._target.cache.num_bytes + sum(part.nbytes for part in self._hidden)

    @torch.inference_mode()
    def read(self, most: int) -> int:
        """Reads the next tokens of the prompt, at most so many; returns how many it read."""
        done = self._target.lengths[0]
        tokens = self.request.prompt_ids[done : done + most]
        last, hidden = self._target.read(tokens)
        self._hidden.append(hidden)
        if not self.num_left:
            self.logits = self._target.model.logits(last[-1:])[0]
        return len(tokens)

    @cached_property
    def text(self) -> ReadText:
        """The prompt, once it is read; shares the memory of this reader."""
        assert not self.num_left, "the whole prompt is read"
        hidden = torch.cat(self._hidden)
        self._hidden = [hidden]
        return ReadText(self.request.prompt_ids, self._target.cache.entries(0, len(hidden)), hidden)
