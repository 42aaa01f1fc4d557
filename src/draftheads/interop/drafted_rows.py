"""The loop of ``generate`` with drafts: trees that are verified for all rows, and walked under transformers' own rules.

A tree's tokens are checked as ``generate`` would choose them: from the root on, the logits of a node go through the
logits processors with the node's own text, the next token is chosen from the result, and the walk goes on at the child
with that token. So each new token is one call of the processors and of the stopping criteria, in the order of the text.

B rows, N nodes of a tree, T tokens of a prompt, V vocabulary.
"""

import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftheads.decode.engine import Engine
from draftheads.errors import PromptTooLong
from draftheads.interop.generate_texts import Texts
from draftheads.speculation.draft import AcceptResult, Context, Draft
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
        self._context: Context | None = None

    def run(self) -> None:
        """Decodes until all texts have ended.

        Raises:
            PromptTooLong: a text has as many tokens as the model takes, and has not ended.
        """
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
        self._batch.rows, logits, states = self._batch.runner.prefill(self._prompts, most_tokens)
        hidden = pad_sequence(states, batch_first=True)
        self._rows = list(range(len(self._prompts)))
        roots = self._texts.extend(self._rows, logits)
        self._texts.stream()
        self._begin(hidden, roots)
        self._drop_ended()

    @torch.inference_mode()
    def _begin(self, hidden: Tensor, roots: list[int]) -> None:
        """What a drafter sees of the prompts, from their hidden states (B, T, D or n·D): all, or the last token."""
        prompts, device = list(self._prompts), hidden.device
        if not self._batch.drafter.needs_history:
            ends = to_device([len(ids) - 1 for ids in prompts], device)
            hidden = hidden[torch.arange(len(ends), device=device), ends][:, None]
            prompts = [ids[-1:] for ids in prompts]
        tokens = pad_sequence([torch.tensor(ids) for ids in prompts], batch_first=True)
        self._context = Context(
            hidden,
            to_device(tokens, device),
            to_device([len(ids) for ids in prompts], device),
            to_device(roots, device),
            known_ids=[[*ids, root] for ids, root in zip(prompts, roots, strict=True)],
        )

    def _step(self) -> None:
        """At least one token for every text that has not ended."""
        begin = time.perf_counter()
        draft, drafted, logits, hidden, asked = self._verify()
        paths, new_ids = self._walk(draft, logits)
        self._texts.stream()
        if asked is not None:
            self._batch.session.on_read(asked.tolist())
        copied = [0] * len(paths) if draft.copied is None else _counts(draft.copied.tolist(), paths)
        self._commit(draft, hidden, paths, new_ids)
        counts = list(map(len, paths))
        if self._batch.plan is not None:
            are_free = [self._are_free] * len(paths)
            milliseconds = 1e3 * (drafted - begin), 1e3 * (time.perf_counter() - drafted)
            self._batch.plan.note(draft, [count - 1 for count in counts], copied, are_free, milliseconds)
        self._drop_ended()

    @torch.inference_mode()
    def _verify(self) -> tuple[Draft, float, Tensor, Tensor, Tensor | None]:
        """A draft, when it was there, logits (B, N, V), hidden states, and what the session wants to read."""
        assert self._context is not None
        lengths, limit = [row.length for row in self._batch.rows], self._engine.model.max_positions
        if limit is not None and max(lengths) >= limit:
            raise PromptTooLong(
                f"a text has {max(lengths) + 1:,} tokens and {self._engine.model.model_id} takes at most {limit:,}: "
                "give generate a lower max_new_tokens"
            )
        draft = self._batch.drafted(self._context)
        drafted = time.perf_counter()
        logits, hidden = self._batch.runner.verify(self._batch.rows, draft)
        self.num_steps += 1
        return draft, drafted, logits, hidden, self._batch.session.on_verify(draft, logits)

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

    @torch.inference_mode()
    def _commit(self, draft: Draft, hidden: Tensor, paths: Sequence[list[int]], new_ids: Sequence[list[int]]) -> None:
        """The accepted nodes become text, and the drafter will see them with their hidden states."""
        assert self._context is not None
        device, counts = draft.token_ids.device, list(map(len, paths))
        path = to_device([[*nodes, *[0] * (draft.max_depth + 1 - len(nodes))] for nodes in paths], device)
        roots = to_device([ids[-1] for ids in new_ids], device)
        result = AcceptResult(path, to_device(counts, device), roots)
        self._batch.runner.commit(self._batch.rows, result, counts)
        batch = torch.arange(len(paths), device=device)[:, None]
        known = [[old[-1], *ids] for old, ids in zip(self._context.ids, new_ids, strict=True)]
        self._context = Context(
            hidden[batch, path], draft.token_ids.gather(1, path), result.num_accepted, roots, known_ids=known
        )

    @torch.inference_mode()
    def _drop_ended(self) -> None:
        unfinished = set(self._texts.unfinished)
        kept = [place for place, row in enumerate(self._rows) if row in unfinished]
        if len(kept) == len(self._rows):
            return
        assert self._context is not None
        self._rows = [self._rows[place] for place in kept]
        self._context = self._context.keep(kept)
        self._batch.runner.drop([row for place, row in enumerate(self._batch.rows) if place not in kept])
        self._batch.rows = [self._batch.rows[place] for place in kept]
        if self.num_steps:  # else the session has seen no row
            self._batch.session.keep(torch.tensor(kept, dtype=torch.long))
            if self._batch.plan is not None:
                self._batch.plan.keep(kept)


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
