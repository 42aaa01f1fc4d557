"""The texts of a call of ``generate``, under transformers' own logits processors, stopping criteria and streamer.

B rows, T tokens of a text with its padding, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from draftheads.utils.transfer import to_device

_GROWTH = 256  # tokens by which texts get more room


@dataclass(frozen=True, kw_only=True)
class GenerateRules:
    """How ``generate`` chooses tokens and ends texts."""

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    samples: bool  # draw the next token, or take the most likely one
    pad_id: int  # what follows an ended text
    streamer: BaseStreamer | None = None
    keeps_scores: bool = False  # processed logits
    keeps_logits: bool = False
    together: bool = False  # whether all texts get their next tokens in the same call: no row is ahead of another

    def __post_init__(self) -> None:
        if not self.ends_rows:  # how long ended texts become depends on the others
            object.__setattr__(self, "together", True)

    @property
    def ends_rows(self) -> bool:
        """Whether padding follows an ended text. Without an end token ``generate`` goes on until all have ended."""
        return any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)

    @property
    def are_none(self) -> bool:
        """Whether the model alone decides on the tokens."""
        return not self.samples and not self.processors


class Texts:
    """The texts of the rows, padded on the left as ``generate`` got them, and what their rules say.

    Args:
        prompts: (B, T) token ids.
        rules: of the texts.
    """

    def __init__(self, prompts: Tensor, rules: GenerateRules) -> None:
        self.rules = rules
        self.lengths = [prompts.shape[1]] * len(prompts)  # padding on the left included
        self._ids = torch.cat([prompts, self._padding(prompts)], 1)  # (B, room)
        self._goes_on = [True] * len(prompts)
        self._first = self._streamed = prompts.shape[1]
        self._scores: list[Tensor] = []  # (B, V) for each new token
        self._logits: list[Tensor] = []

    @property
    def unfinished(self) -> list[int]:
        """The rows that get further tokens."""
        going = [row for row, goes_on in enumerate(self._goes_on) if goes_on]
        return going if self.rules.ends_rows or not going else list(range(len(self._goes_on)))

    @property
    def token_ids(self) -> Tensor:
        """(B, T) prompts and answers, padded on the right."""
        return self._ids[:, : max(self.lengths)].clone()

    @property
    def scores(self) -> tuple[Tensor, ...] | None:
        """For each place of the answers (B, V), 0 after the end of a text; None unless they are kept."""
        return tuple(self._scores) if self.rules.keeps_scores else None

    @property
    def logits(self) -> tuple[Tensor, ...] | None:
        """The same of the model's own logits."""
        return tuple(self._logits) if self.rules.keeps_logits else None

    def extend(self, rows: Sequence[int], logits: Tensor) -> list[int]:
        """The next tokens of unfinished rows, from their logits (b, V). Rows of the same length share a call."""
        chosen = [0] * len(rows)
        for places in _equal([self.lengths[row] for row in rows]):
            members = [rows[place] for place in places]
            of_members = logits[to_device(places, logits.device)]  # a copy: processors may write into it
            tokens = self._extend(members, of_members.to(self._ids.device, torch.float32))
            for place, token in zip(places, tokens, strict=True):
                chosen[place] = token
        return chosen

    def stream(self) -> None:
        """Puts the tokens that all rows have by now, place by place."""
        if self.rules.streamer is None:
            return
        going = [self.lengths[row] for row in self.unfinished]
        for place in range(self._streamed, min(going, default=max(self.lengths))):
            self.rules.streamer.put(self._ids[:, place].cpu())
            self._streamed = place + 1

    def _extend(self, rows: Sequence[int], logits: Tensor) -> list[int]:
        """The same for rows of one length, whose logits may be changed; with ``together`` they are all that go on."""
        length, whole = self.lengths[rows[0]], self.rules.together
        self._make_room(length + 1)
        index = torch.tensor(rows, device=logits.device)
        if whole:
            everything = logits.new_zeros(len(self.lengths), logits.shape[1])
            logits, shown = everything.index_copy_(0, index, logits), torch.arange(len(everything), device=index.device)
            tokens = self._chosen(shown, length, logits, self.rules.processors)[index]
        else:
            shown = index
            tokens = self._chosen(shown, length, logits, _of_rows(self.rules.processors, index))
        self._ids[index, length] = tokens
        # criteria of their own may look at the scores of all tokens, which only rows that go together have
        has_ended = self.rules.criteria(self._ids[shown, : length + 1], self.scores if whole else None)
        ended = has_ended.expand(len(shown)).tolist()
        for place, row in enumerate(rows):
            self.lengths[row] = length + 1
            self._goes_on[row] &= not ended[row if whole else place]
        new_ids: list[int] = tokens.tolist()
        return new_ids

    def _chosen(self, rows: Tensor, length: int, logits: Tensor, processors: LogitsProcessorList) -> Tensor:
        """(b,) the next tokens of rows (b,) with texts of this length, from their logits (b, V)."""
        ids: Any = self._ids[rows, :length]  # transformers' type is a LongTensor
        scores = processors(ids, logits)
        if self.rules.keeps_scores:
            self._note(self._scores, length, rows, scores)
        if self.rules.keeps_logits:
            self._note(self._logits, length, rows, logits)
        return scores.softmax(-1).multinomial(1)[:, 0] if self.rules.samples else scores.argmax(-1)

    def _note(self, kept: list[Tensor], length: int, rows: Tensor, values: Tensor) -> None:
        place = length - self._first
        if place == len(kept):
            kept.append(values.new_zeros(len(self.lengths), values.shape[1]))
        kept[place][rows] = values

    def _make_room(self, length: int) -> None:
        if length > self._ids.shape[1]:
            self._ids = torch.cat([self._ids, self._padding(self._ids)], 1)

    def _padding(self, like: Tensor) -> Tensor:
        return torch.full_like(like[:, :1], self.rules.pad_id).expand(-1, _GROWTH)


def _of_rows(processors: LogitsProcessorList, rows: Tensor) -> LogitsProcessorList:
    """The processors for some of the rows: transformers' repetition penalty knows each row's padding."""
    found = LogitsProcessorList()
    for processor in processors:
        lengths = getattr(processor, "prompt_ignore_length", None)
        if isinstance(lengths, Tensor):
            processor = copy(processor)  # noqa: PLW2901
            processor.prompt_ignore_length = lengths.to(rows.device)[rows]
        found.append(processor)
    return found


def _equal(values: Sequence[int]) -> Iterator[list[int]]:
    """The places of equal values, together.

    >>> list(_equal([7, 5, 7]))
    [[0, 2], [1]]
    """
    for value in dict.fromkeys(values):
        yield [place for place, other in enumerate(values) if other == value]
