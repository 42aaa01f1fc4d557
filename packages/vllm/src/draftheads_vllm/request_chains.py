"""Chains of draft tokens for requests that another engine schedules: they join, pause, start again and leave.

Knows draft heads by their sessions, and the other engine only by the names of its requests. R requests, T tokens of a
text, D hidden size, k draft tokens.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftheads.heads.base import DraftHead
from draftheads.speculation.draft import Context
from draftheads.speculation.tree import Tree
from draftheads.utils.transfer import to_device


@dataclass
class _ReadText:
    """What the target has read of a request."""

    length: int = 0  # tokens, from the beginning of the text
    # their hidden states, (t, D) each, in order; of a head without a history the last token's alone
    parts: list[Tensor] = field(default_factory=list)
    num_known: int = 0  # parts that the session has read; 0 if the request is not in it


class RequestChains:
    """Drafts one chain for each request, in one pass for all that are ready.

    A head with a history keeps the hidden states of a request's whole text, because a request that was paused leaves
    the session and reads them again when it goes on.

    Args:
        head: bound to the target's weights.
        num_draft_tokens: k, of each chain.

    Raises:
        InvalidTree: the head has fewer than k heads.
    """

    def __init__(self, head: DraftHead, num_draft_tokens: int) -> None:
        self.head = head
        self.shape = Tree.chain(num_draft_tokens)
        head.check_shape(self.shape)
        self._session = head.start()
        self._rows: list[str] = []  # the requests in the session, in its order
        self._texts: dict[str, _ReadText] = {}

    def read(self, request: str, start: int, states: Tensor) -> None:
        """Takes note of hidden states, (t, D) with t > 0, of a request's tokens from position ``start`` on.

        A start before the end of what was read means that the engine reads the text again, for instance after a
        preemption. A start beyond it leaves a gap: a head with a history then drafts nothing for this request until it
        is read again from its beginning.
        """
        text = self._texts.setdefault(request, _ReadText())
        if not self.head.needs_history:
            text.length, text.parts = start + len(states), [states[-1:].clone()]
            return
        if start < text.length:
            text.parts = [torch.cat(text.parts)[:start]] if start else []
            text.length = start
            self._leave({request})
        if start == text.length:
            text.parts.append(states.clone())  # it is part of the pass's states, which are far more
            text.length += len(states)

    def forget(self, going: Collection[str]) -> None:
        ended = self._texts.keys() - set(going)
        self._leave(ended)
        for request in ended:
            del self._texts[request]

    @torch.inference_mode()
    def propose(self, token_ids: Mapping[str, Sequence[int] | Any]) -> dict[str, list[int]]:
        """Draft tokens, k of each request, by request.

        Args:
            token_ids: the text of each request that is to be continued, (T,); the target has read all of it but the
                last token. Requests of which it has read less are left out of the result.
        """
        ready = [
            name for name, ids in token_ids.items() if name in self._texts and self._texts[name].length == len(ids) - 1
        ]
        if not ready:
            return {}
        self._leave(set(self._rows) - set(ready))
        self._rows += [name for name in ready if name not in self._rows]
        draft = self._session.propose(self._context(token_ids), self.shape)
        return dict(zip(self._rows, draft.token_ids[:, 1:].tolist(), strict=True))

    def _context(self, token_ids: Mapping[str, Sequence[int] | Any]) -> Context:
        """What is new to the session, of all its rows."""
        states, known = [], []
        for name in self._rows:
            text = self._texts[name]
            new = torch.cat(text.parts[text.num_known :])
            states.append(new)
            known.append([int(token) for token in token_ids[name][-len(new) - 1 :]])
            if self.head.needs_history:
                text.num_known = len(text.parts)
        device = states[0].device
        tokens = pad_sequence([torch.tensor(ids[:-1]) for ids in known], batch_first=True)
        return Context(
            pad_sequence(states, batch_first=True),
            to_device(tokens, device),
            to_device([len(ids) - 1 for ids in known], device),
            to_device([ids[-1] for ids in known], device),
            known_ids=known,
        )

    def _leave(self, requests: Collection[str]) -> None:
        """These leave the session, if they are in it."""
        kept = [row for row, name in enumerate(self._rows) if name not in requests]
        if len(kept) == len(self._rows):
            return
        for name in requests:
            if name in self._texts:
                self._texts[name].num_known = 0
        self._rows = [self._rows[row] for row in kept]
        self._session.keep(torch.tensor(kept, dtype=torch.long))
