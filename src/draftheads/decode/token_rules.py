"""The grammars, logit biases, shortest lengths and processors of a batch; of forbidden tokens logits are -infinity.

B rows, W or N places in each, V vocabulary, V' draft vocabulary.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftheads.decode.request import Request
from draftheads.speculation.accept import Processed
from draftheads.speculation.draft import FORBIDDEN, Draft, Places, with_nodes
from draftheads.utils.transfer import to_device

_LOWEST = -1e30


class BatchRules:
    """The rules of B rows; see :class:`draftheads.speculation.draft.TokenRules`.

    Args:
        requests: of the rows.
        vocab_size: V.
        device: of the logits.
    """

    def __init__(self, requests: Sequence[Request], *, vocab_size: int, device: torch.device) -> None:
        self._requests = requests
        states = enumerate(request.grammar_state for request in requests)
        self._states = {row: state for row, state in states if state is not None}
        self._num_words = -(-vocab_size // 32)
        self._bias: Tensor | None = None  # (B, V) float32
        if any(request.bias for request in requests):
            bias = torch.zeros(len(requests), vocab_size)
            for row, request in enumerate(requests):
                bias[row, list(request.bias)] = torch.tensor(list(request.bias.values()))
            self._bias = to_device(bias, device)
        self._ends: Tensor | None = None  # (B, V) bool: tokens that end an answer
        if any(request.min_new_tokens for request in requests):
            ends = torch.zeros(len(requests), vocab_size, dtype=torch.bool)
            for row, request in enumerate(requests):
                ends[row, [token for token in request.stop_ids if token < vocab_size]] = True
            self._ends = to_device(ends, device)

    @property
    def concern_drafts(self) -> bool:
        """Whether drafters apply them, too: grammars, and biases of requests. The others concern few drafts."""
        return bool(self._states) or any(request.settings.logit_bias for request in self._requests)

    def below(self, places: Places, parents: Tensor, token_ids: Tensor) -> Places:
        """The places (B, W') of children, from the indices (B, W') of their parents' places and their tokens."""
        below: Places = [[0] * token_ids.shape[1] for _ in self._requests]
        if not self._states:
            return below
        packed = torch.stack([parents, token_ids], 2).tolist()
        for row, state in self._states.items():
            below[row] = [state.place_below(places[row][parent], token) for parent, token in packed[row]]
        return below

    def num_allowed(self, row: int, token_ids: Sequence[int]) -> int:
        """How many tokens of a chain below the root are allowed."""
        return self._states[row].num_allowed(token_ids) if row in self._states else len(token_ids)

    def drafted(self, logits: Tensor, places: Places, target_ids: Tensor | None = None) -> Tensor:
        """Logits of a drafter at places, (B, W or 1, V') -> (B, W, V'). Nothing follows the end of a grammar.

        Args:
            logits: of the children.
            places: (B, W).
            target_ids: (V',) the tokens of a draft vocabulary; None if they are the first tokens of the vocabulary.
        """
        return self._applied(logits, places, target_ids, beyond=0)

    def verified(self, logits: Tensor, places: Places, depths: Tensor) -> Tensor:
        """The target's logits at places, (B, N, V) -> (B, N, V); unchanged where an answer cannot get to.

        ``depths`` (1 or B, N) are those of the nodes. At depth d, d tokens were added to the answers as they are now.
        """
        logits = self._applied(logits, places, None, beyond=-1)
        missing = [request.min_new_tokens - len(request.token_ids) for request in self._requests]
        if self._ends is None or max(missing) <= 0:
            return logits
        is_early = depths < to_device(missing, logits.device)[:, None]  # (B, N)
        return logits.masked_fill(is_early[..., None] & self._ends[:, None], -torch.inf)

    def processed(self, draft: Draft) -> Processed | None:
        """What the rows' logits processors make of logits at nodes; None without any."""
        rows = [row for row, request in enumerate(self._requests) if request.processors]
        if not rows:
            return None
        tokens, parents = (part.expand_as(draft.token_ids).tolist() for part in (draft.token_ids, draft.parents))
        known: dict[tuple[int, int], Tensor] = {}  # rows that have ended their walk ask again

        def process(logits: Tensor, nodes: Tensor) -> Tensor:
            scores, at = logits.to(torch.float32, copy=True), nodes.tolist()
            for row in rows:
                if (row, at[row]) not in known:
                    path, node = list[int](), at[row]
                    while node:
                        path.append(tokens[row][node])
                        node = parents[row][node]
                    known[row, at[row]] = self._processed(self._requests[row], path[::-1], scores[row])
                scores[row] = known[row, at[row]]
            return scores

        return process

    def _processed(self, request: Request, path: list[int], scores: Tensor) -> Tensor:
        """The scores (V,) of the next token after the text and a path of drafts."""
        assert request.processors
        text: Any = torch.tensor([[*request.prompt_ids, *request.token_ids, *path]], device=scores.device)
        processed: Tensor = request.processors(text, scores[None].clone())[0]
        if request.grammar_state is None:
            return processed
        # something that the grammar allows is left, also where processors forbid all of it
        return processed.clamp_min(_LOWEST).masked_fill(scores == -torch.inf, -torch.inf)

    def pruned(self, draft: Draft) -> tuple[Draft, Places]:
        """The draft without forbidden tokens and what is below them, and the places of its nodes."""
        places: Places = [[0] * draft.num_nodes for _ in self._requests]
        if not self._states:
            return draft, places
        parts = (draft.parents, draft.depths, draft.token_ids)
        packed = torch.stack([part.expand_as(draft.token_ids) for part in parts], 2).tolist()
        kept = [list(range(draft.num_nodes)) for _ in self._requests]
        for row, state in self._states.items():
            for node, (parent, depth, token) in enumerate(packed[row][1:], 1):
                places[row][node] = state.place_below(places[row][parent], token) if depth else FORBIDDEN
            kept[row] = [node for node, place in enumerate(places[row]) if place != FORBIDDEN]
        if draft.reads_all_nodes or all(len(nodes) == draft.num_nodes for nodes in kept):
            return draft, places
        width = max(map(len, kept))
        deepest = max(packed[row][node][1] for row, nodes in enumerate(kept) for node in nodes)
        places = [
            [*(places[row][node] for node in nodes), *[FORBIDDEN] * (width - len(nodes))]
            for row, nodes in enumerate(kept)
        ]
        return with_nodes(draft, kept, max_depth=deepest), places

    def _applied(self, logits: Tensor, places: Places, target_ids: Tensor | None, *, beyond: int) -> Tensor:
        if self._bias is not None:
            bias = self._bias[:, : logits.shape[-1]] if target_ids is None else self._bias[:, target_ids]
            logits = logits + bias[:, None]  # in fp32, as in transformers
        if not self._states:
            return logits.expand(-1, len(places[0]), -1)
        words = np.full((len(self._states), len(places[0]), self._num_words), beyond, np.int32)
        for i, (row, state) in enumerate(self._states.items()):
            for j, place in enumerate(places[row]):
                if place >= 0:
                    words[i, j] = state.masks[place]
        # the lowest bit of a word first
        allowed = _eights(logits.device)[to_device(words, logits.device).view(torch.uint8).long()].view(torch.bool)
        allowed = allowed[..., : logits.shape[-1]] if target_ids is None else allowed[..., target_ids]
        if len(self._states) == len(places):
            return torch.where(allowed, logits, -torch.inf)
        at = to_device(list(self._states), logits.device)
        logits = logits.repeat(1, len(places[0]) // logits.shape[1], 1)
        logits[at] = torch.where(allowed, logits[at], -torch.inf)
        return logits


def has_rules(request: Request) -> bool:
    """Whether more than penalties and sampling decides on the request's tokens."""
    return bool(request.grammar_state or request.bias or request.min_new_tokens or request.processors)


@lru_cache(maxsize=8)
def _eights(device: torch.device) -> Tensor:
    """(256,) int64: the eight bits of each byte as eight booleans."""
    numbers = np.arange(256, dtype=np.uint8)[:, None]
    with torch.inference_mode(mode=False):
        return to_device(np.unpackbits(numbers, axis=1, bitorder="little").view(np.int64)[:, 0], device)
