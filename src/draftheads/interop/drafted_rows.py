"""The loop of ``generate`` with drafts: trees that are verified for all rows, and walked under transformers' own rules.

A tree's tokens are checked as ``generate`` would choose them: from the root on, the logits of a node go through the
logits processors with the node's own text, the next token is chosen from the result, and the walk goes on at the child
with that token. So each new token is one call of the processors and of the stopping criteria, in the order of the text.

B rows, N nodes of a tree, T tokens of a prompt, V vocabulary.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from draftheads.decode.engine import Engine
from draftheads.errors import PromptTooLong
from draftheads.interop.generate_texts import Texts
from draftheads.speculation.draft import AcceptResult, Draft
from draftheads.utils.transfer import to_device


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
        is_held = texts.rules.together and len(prompts) > 1
        self._are_free = texts.rules.are_none and not is_held

    def run(self) -> None:
        """Decodes until all texts have ended."""
        with self._engine.model.computing():
            self._read()
            while self._rows:
                self._step()
        if self._engine.check is not None:
            self._engine.check.warn()

    def _read(self) -> None:
        """Reads the prompts; each text gets its first token."""
        most = self._most_tokens or max(self._texts.lengths)
        new = [most - length for length in self._texts.lengths]
        most_tokens = [len(prompt) + count for prompt, count in zip(self._prompts, new, strict=True)]
        rows, logits, hidden = self._batch.runner.prefill(self._prompts, most_tokens)
        self._rows = list(range(len(self._prompts)))
        roots = self._texts.extend(self._rows, logits)
        self._texts.stream()
        self._batch.begin(rows, self._prompts, hidden, roots)
        self._drop_ended()

    def _step(self) -> None:
        """At least one token for every text that has not ended."""
        longest, limit = max(row.length for row in self._batch.rows), self._engine.model.max_positions
        if limit is not None and longest >= limit:
            raise PromptTooLong(
                f"a text has {longest + 1:,} tokens and {self._engine.model.model_id} takes at most {limit:,}: "
                "give generate a lower max_new_tokens"
            )
        found = self._batch.verify()
        self.num_steps += 1
        draft, logits = found.draft, found.logits
        assert logits is not None
        paths, new_ids = self._walk(draft, logits)
        self._texts.stream()
        copied = [0] * len(paths) if draft.copied is None else _counts(draft.copied.tolist(), paths)
        counts, device = list(map(len, paths)), draft.token_ids.device
        path = to_device([[*nodes, *[0] * (draft.max_depth + 1 - len(nodes))] for nodes in paths], device)
        result = AcceptResult(path, to_device(counts, device), to_device([ids[-1] for ids in new_ids], device))
        self._batch.advance(found, result, new_ids, [] if found.asked is None else found.asked.tolist())
        self._batch.note(found, counts, copied, [self._are_free] * len(paths))
        self._drop_ended()

    def _walk(self, draft: Draft, logits: Tensor) -> tuple[list[list[int]], list[list[int]]]:
        """For each row the nodes that are accepted, root first, and the tokens that follow them.

        Runs the user's own code, so outside of inference mode.
        """
        children = _children(draft)
        paths: list[list[int]] = [[0] for _ in self._rows]
        new_ids: list[list[int]] = [[] for _ in self._rows]
        going, room = list(range(len(self._rows))), self._room
        while going:
            nodes = [paths[row][-1] for row in going]
            at = logits[to_device(going, logits.device), to_device(nodes, logits.device)]
            tokens = self._texts.extend([self._rows[row] for row in going], at)
            unfinished = set(self._texts.unfinished)
            further: dict[int, int] = {}
            is_held = False
            for row, token in zip(going, tokens, strict=True):
                new_ids[row].append(token)
                if self._rows[row] not in unfinished:
                    continue
                child = children[row].get((paths[row][-1], token))
                if child is not None and len(paths[row]) < room[row]:
                    further[row] = child
                elif self._texts.rules.together:
                    is_held = True
            if is_held:
                break
            for row, child in further.items():
                paths[row].append(child)
            going = list(further)
        return paths, new_ids

    @property
    def _room(self) -> list[float]:
        """How many nodes of each row's path have positions that the model takes."""
        limit = self._engine.model.max_positions or float("inf")
        return [limit - row.length for row in self._batch.rows]

    def _drop_ended(self) -> None:
        unfinished = set(self._texts.unfinished)
        kept = [place for place, row in enumerate(self._rows) if row in unfinished]
        if len(kept) < len(self._rows):
            self._rows = [self._rows[place] for place in kept]
            self._batch.keep(kept)


def _children(draft: Draft) -> list[dict[tuple[int, int], int]]:
    """For each row the node of a token below a node; of two, the first."""
    shape = draft.token_ids.shape
    parts = (draft.token_ids, draft.parents.expand(shape), draft.depths.expand(shape))
    packed = torch.stack(parts, 2).tolist()  # one transfer
    return [
        {(parent, token): node for node, (token, parent, depth) in reversed(list(enumerate(nodes))) if depth}
        for nodes in packed
    ]


def _counts(are_copied: Iterable[Sequence[bool]], paths: Iterable[Sequence[int]]) -> list[int]:
    """How many nodes of each path only a copy brought."""
    return [sum(copied[node] for node in nodes) for copied, nodes in zip(are_copied, paths, strict=True)]
