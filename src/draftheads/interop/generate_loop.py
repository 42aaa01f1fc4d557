"""The loop of ``generate`` with drafts: trees that are verified for all rows, and walked under transformers' own rules.

A tree's tokens are checked as ``generate`` would choose them: from the root on, the logits of a node go through the
logits processors with the node's own text, the next token is chosen from the result, and the walk goes on at the child
with that token. So each new token is one call of the processors and of the stopping criteria, in the order of the text.
With typical acceptance the processors see all nodes first, and the rule decides on the path and its tokens.

B rows, N nodes of a tree, T tokens of a prompt or of a text with its padding, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import InitVar, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from draftheads.decode.engine import Engine
from draftheads.errors import PromptTooLong
from draftheads.settings import SamplingSettings
from draftheads.speculation.accept import accept
from draftheads.speculation.draft import AcceptResult, Draft
from draftheads.speculation.sampling import RowSettings
from draftheads.utils.transfer import to_device

Children = dict[tuple[int, int], int]  # the node of a token below a node
_GROWTH = 256  # tokens by which texts get more room


@dataclass(kw_only=True)
class Texts:
    """The texts of the rows, padded on the left as ``generate`` got them, and how it chooses their tokens and ends."""

    prompts: InitVar[Tensor]  # (B, T) token ids
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    samples: bool  # draw the next token, or take the most likely one
    pad_id: int  # what follows an ended text
    typical: SamplingSettings | None = None  # typical acceptance with these thresholds, of texts that are sampled
    streamer: BaseStreamer | None = None
    keeps_scores: bool = False  # processed logits
    keeps_logits: bool = False
    together: bool = False  # whether all texts get their next tokens in the same call: no row is ahead of another

    def __post_init__(self, prompts: Tensor) -> None:
        self.together |= not self.ends_rows  # then how long ended texts become depends on the others
        self.lengths = [prompts.shape[1]] * len(prompts)  # padding on the left included
        self._ids = torch.cat([prompts, self._padding(prompts)], 1)  # (B, room)
        self._goes_on = [True] * len(prompts)
        self._first = self._streamed = prompts.shape[1]
        self._scores: list[Tensor] | None = [] if self.keeps_scores else None  # (B, V) for each new token
        self._logits: list[Tensor] | None = [] if self.keeps_logits else None

    @property
    def ends_rows(self) -> bool:
        """Whether padding follows an ended text. Without an end token ``generate`` goes on until all have ended."""
        return any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)

    @property
    def unfinished(self) -> list[int]:
        """The rows that get further tokens."""
        going = [row for row, goes_on in enumerate(self._goes_on) if goes_on]
        return going if self.ends_rows or not going else list(range(len(self._goes_on)))

    @property
    def token_ids(self) -> Tensor:
        """(B, T) prompts and answers, padded on the right."""
        return self._ids[:, : max(self.lengths)].clone()

    @property
    def scores(self) -> tuple[Tensor, ...] | None:
        """For each place of the answers (B, V), 0 after the end of a text; None unless they are kept."""
        return None if self._scores is None else tuple(self._scores)

    @property
    def logits(self) -> tuple[Tensor, ...] | None:
        """The same of the model's own logits."""
        return None if self._logits is None else tuple(self._logits)

    def at_nodes(self, rows: Sequence[int], draft: Draft, logits: Tensor) -> Tensor:
        """(b, N, V) what the processors make of the logits at all nodes of the trees behind these rows' texts."""
        depths, ancestors = draft.depths.expand_as(draft.token_ids), draft.ancestors.expand(len(rows), -1, -1)
        scores = logits.to(torch.float32, copy=True)
        for place, row in enumerate(rows):
            text = self._ids[row, : self.lengths[row]]
            for depth in range(int(depths[place].amax()) + 1):
                nodes = (depths[place] == depth).nonzero()[: None if depth else 1, 0]  # without those that fill up
                on_path = ancestors[place, nodes, 1:].nonzero()[:, 1].view(len(nodes), depth) + 1
                below = draft.token_ids[place, on_path].to(text.device)
                ids: Any = torch.cat([text.expand(len(nodes), -1), below], 1)
                processors = _of_rows(self.processors, torch.full_like(nodes, row))
                scores[place, nodes] = processors(ids, scores[place, nodes].to(text.device)).to(scores.device)
        return scores

    def extend(self, rows: Sequence[int], logits: Tensor, tokens: Sequence[int] | None = None) -> list[int]:
        """The next tokens of unfinished rows, from their logits (b, V). Rows of the same length share a call.

        ``tokens`` are the next ones where they are decided already.
        """
        chosen: dict[int, int] = {}
        lengths = [self.lengths[row] for row in rows]
        for length in dict.fromkeys(lengths):
            places = [place for place, other in enumerate(lengths) if other == length]
            members = [rows[place] for place in places]
            of_members = logits[to_device(places, logits.device)]  # a copy: processors may write into it
            decided = None if tokens is None else [tokens[place] for place in places]
            new_ids = self._extend(members, of_members.to(self._ids.device, torch.float32), decided)
            chosen |= zip(members, new_ids, strict=True)
        return [chosen[row] for row in rows]

    def stream(self) -> None:
        """Puts the tokens that all rows have by now, place by place."""
        if self.streamer is None:
            return
        going = [self.lengths[row] for row in self.unfinished]
        for place in range(self._streamed, min(going, default=max(self.lengths))):
            self.streamer.put(self._ids[:, place].cpu())
            self._streamed = place + 1

    def _extend(self, rows: Sequence[int], logits: Tensor, decided: list[int] | None) -> list[int]:
        """The same for rows of one length, whose logits may be changed; with ``together`` they are all that go on."""
        length, whole = self.lengths[rows[0]], self.together
        if length == self._ids.shape[1]:
            self._ids = torch.cat([self._ids, self._padding(self._ids)], 1)
        index = torch.tensor(rows, device=logits.device)
        if whole:
            everything = logits.new_zeros(len(self.lengths), logits.shape[1])
            logits, shown = everything.index_copy_(0, index, logits), torch.arange(len(everything), device=index.device)
            tokens = self._chosen(shown, length, logits, self.processors)[index]
        else:
            shown = index
            tokens = self._chosen(shown, length, logits, _of_rows(self.processors, index))
        tokens = tokens if decided is None else torch.tensor(decided, device=index.device)
        self._ids[index, length] = tokens
        # criteria of their own may look at the scores of all tokens, which only rows that go together have
        has_ended = self.criteria(self._ids[shown, : length + 1], self.scores if whole else None)
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
        for kept, values in ((self._scores, scores), (self._logits, logits)):
            if kept is not None:
                if length - self._first == len(kept):
                    kept.append(values.new_zeros(len(self.lengths), values.shape[1]))
                kept[length - self._first][rows] = values
        return scores.softmax(-1).multinomial(1)[:, 0] if self.samples and not self.typical else scores.argmax(-1)

    def _padding(self, like: Tensor) -> Tensor:
        return torch.full_like(like[:, :1], self.pad_id).expand(-1, _GROWTH)


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


class DraftedRows:
    """Decodes the texts of a call: reads the prompts, and drafts and verifies until all texts have ended.

    Args:
        engine: the model and what drafts.
        texts: with the prompts.
        prompts: the token ids of each row's prompt, without padding.
        most_tokens: the greatest length of a text with its padding; None if it is not known.

    Attributes:
        num_steps: passes of the model after the prompts were read.
    """

    def __init__(
        self, engine: Engine, texts: Texts, prompts: Sequence[list[int]], *, most_tokens: int | None = None
    ) -> None:
        self.num_steps = 0
        self._engine, self._texts, self._prompts, self._most_tokens = engine, texts, prompts, most_tokens
        self._batch = engine.batch()
        self._rows: list[int] = []  # the texts that are still decoded, in the order of the model's rows
        # free rows take the most likely token whatever it is, and as many of them as are accepted
        is_held = texts.together and len(prompts) > 1
        self._are_free = not (texts.samples or texts.processors or is_held)

    def run(self) -> None:
        """Reads the prompts, gives each text its first token, and decodes until all texts have ended."""
        with self._engine.model.computing():
            length = self._texts.lengths[0]  # with padding, which all rows have at first
            most_tokens = [len(prompt) + (self._most_tokens or length) - length for prompt in self._prompts]
            rows, logits, hidden = self._batch.runner.prefill(self._prompts, most_tokens)
            self._rows = list(range(len(self._prompts)))
            roots = self._texts.extend(self._rows, logits)
            self._texts.stream()
            self._batch.begin(rows, self._prompts, hidden, roots)
            self._drop_ended()
            while self._rows:
                self._step()
        if self._engine.check is not None:
            self._engine.check.warn()

    def _step(self) -> None:
        """At least one token for every text that has not ended."""
        longest, limit = max(row.length for row in self._batch.rows), self._engine.model.max_positions
        if limit is not None and longest >= limit:
            raise PromptTooLong(
                f"a text has {longest + 1:,} tokens and {self._engine.model.model_id} takes at most {limit:,}: "
                "give generate a lower max_new_tokens"
            )
        typical, model = self._texts.typical, self._engine.model
        own = [typical] * len(self._rows) if typical else []
        settings = RowSettings.of(own, vocab_size=model.vocab_size, device=model.device) if own else None
        found = self._batch.verify(settings=settings)
        self.num_steps += 1
        draft, logits = found.draft, found.logits
        assert logits is not None
        paths, new_ids = self._walk(logits, *self._choices(draft, logits, settings))
        self._texts.stream()
        are_copied = torch.zeros_like(draft.token_ids) if draft.copied is None else draft.copied
        copied = [sum(row[node] for node in nodes) for row, nodes in zip(are_copied.tolist(), paths, strict=True)]
        counts, device = list(map(len, paths)), draft.token_ids.device
        path = to_device([[*nodes, *[0] * (draft.max_depth + 1 - len(nodes))] for nodes in paths], device)
        result = AcceptResult(path, to_device(counts, device), to_device([ids[-1] for ids in new_ids], device))
        self._batch.advance(found, result, new_ids, [] if found.asked is None else found.asked.tolist())
        self._batch.note(found, counts, copied, [self._are_free] * len(paths))
        self._drop_ended()

    def _choices(
        self, draft: Draft, logits: Tensor, settings: RowSettings | None
    ) -> tuple[list[Children], list[dict[int, int]] | None]:
        """Where the walk may go in each row; with typical acceptance also the token that it takes at each node."""
        if settings is None:
            return _children(draft), None
        scores = self._texts.at_nodes(self._rows, draft, logits)
        found = accept(draft, scores, settings, scores.new_zeros(len(scores), draft.max_depth + 1))
        children: list[Children] = []
        decided: list[dict[int, int]] = []
        parts = (found.path, found.num_accepted, found.next_ids, draft.token_ids)
        for nodes, count, last, ids in zip(*(part.tolist() for part in parts), strict=True):
            tokens = [*(ids[node] for node in nodes[1:count]), last]
            decided.append(dict(zip(nodes, tokens, strict=False)))
            children.append(dict(zip(zip(nodes, tokens, strict=False), nodes[1:count], strict=False)))
        return children, decided

    def _walk(
        self, logits: Tensor, children: Sequence[Children], decided: Sequence[Mapping[int, int]] | None
    ) -> tuple[list[list[int]], list[list[int]]]:
        """For each row the nodes that are accepted, root first, and the tokens that follow them.

        Runs the user's own code, so outside of inference mode.
        """
        paths: list[list[int]] = [[0] for _ in self._rows]
        new_ids: list[list[int]] = [[] for _ in self._rows]
        going, limit = list(range(len(self._rows))), self._engine.model.max_positions or float("inf")
        room = [limit - row.length for row in self._batch.rows]  # nodes of each row's path that have positions
        while going:
            nodes = [paths[row][-1] for row in going]
            at = logits[to_device(going, logits.device), to_device(nodes, logits.device)]
            tokens = None if decided is None else [decided[row][paths[row][-1]] for row in going]
            tokens = self._texts.extend([self._rows[row] for row in going], at, tokens)
            unfinished = set(self._texts.unfinished)
            for row, token in zip(going, tokens, strict=True):
                new_ids[row].append(token)
            going = [row for row in going if self._rows[row] in unfinished]
            below = {row: children[row].get((paths[row][-1], new_ids[row][-1])) for row in going}
            further = {row: child for row, child in below.items() if child and len(paths[row]) < room[row]}
            if self._texts.together and len(further) < len(going):  # no row goes ahead of another
                break
            for row, child in further.items():
                paths[row].append(child)
            going = list(further)
        return paths, new_ids

    def _drop_ended(self) -> None:
        unfinished = set(self._texts.unfinished)
        kept = [place for place, row in enumerate(self._rows) if row in unfinished]
        if len(kept) < len(self._rows):
            self._rows = [self._rows[place] for place in kept]
            self._batch.keep(kept)


def _children(draft: Draft) -> list[Children]:
    """For each row the node of a token below a node; of two, the first."""
    shape = draft.token_ids.shape
    parts = (draft.token_ids, draft.parents.expand(shape), draft.depths.expand(shape))
    packed = torch.stack(parts, 2).tolist()  # one transfer
    return [
        {(parent, token): node for node, (token, parent, depth) in reversed(list(enumerate(nodes))) if depth}
        for nodes in packed
    ]
