"""What a step did, read from the device: the tokens of each row, counts of drafts, and log-probabilities."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftheads.decode.request import Request, TopLogprobs
from draftheads.speculation.draft import AcceptResult, Draft
from draftheads.speculation.sampling import token_logprobs
from draftheads.utils.transfer import to_device


def tokens_of(
    draft: Draft, result: AcceptResult, asked: Tensor | None
) -> tuple[list[list[int]], list[int], list[int], list[list[int]], list[list[int]]]:
    """What a step did, for each row.

    Returns:
        The accepted draft tokens and then the next token (entries beyond their number are not used), their number,
        the number of copied ones, the number of draft tokens at each depth, and what the session asked for.
    """
    accepted = draft.token_ids.gather(1, result.path)[:, 1:]  # (B, P-1)
    ids = torch.cat([accepted, result.next_ids[:, None]], 1)  # (B, P)
    last = (result.num_accepted - 1)[:, None]
    ids = ids.scatter(1, last, result.next_ids[:, None])
    depths = torch.arange(1, draft.max_depth + 1, device=ids.device)
    by_depth = (draft.depths[:, :, None] == depths).sum(1).expand(len(ids), -1)  # (B, depths)
    parts = [result.num_accepted[:, None], result.num_copied(draft)[:, None], by_depth, ids]
    packed = torch.cat(parts if asked is None else [*parts, asked], 1).tolist()
    first = 2 + draft.max_depth
    end = first + ids.shape[1]
    return (
        [row[first:end] for row in packed],
        [row[0] for row in packed],
        [row[1] for row in packed],
        [_without_zeros(row[2:first]) for row in packed],
        [row[end:] for row in packed],
    )


def _without_zeros(counts: list[int]) -> list[int]:
    """The counts up to the last one above 0: a tree may be less deep than its shape allows."""
    while counts and not counts[-1]:
        counts.pop()
    return counts


def logprobs_of(
    requests: Sequence[Request], logits: Tensor | None, path: Tensor, new_ids: list[list[int]], counts: Sequence[int]
) -> list[dict[str, Any]]:
    """For each row the log-probabilities of its new tokens, as arguments of :meth:`Request.append`; empty unless asked.

    Args:
        requests: of the B rows.
        logits: (B, N, V) the target's, at each node; None where nobody asked.
        path: (B, P) the nodes at which the new tokens were chosen.
        new_ids: at most P tokens of each row.
        counts: how many of them are new.
    """
    arguments: list[dict[str, Any]] = [{} for _ in requests]
    asked = {row: k for row, request in enumerate(requests) if (k := request.settings.logprobs) is not None}
    if not asked or logits is None:
        return arguments
    rows = to_device(list(asked), logits.device)
    width = max(counts[row] for row in asked)
    tokens = to_device([new_ids[row][:width] for row in asked], logits.device)
    at = logits[rows[:, None], path[rows, :width]]  # (b, width, V)
    of_tokens, top, top_ids = token_logprobs(at, tokens, max(asked.values()))
    packed = torch.cat([of_tokens[..., None].double(), top.double(), top_ids.double()], -1).tolist()  # one transfer
    num_top = top.shape[-1]
    for (row, k), places in zip(asked.items(), packed, strict=True):
        pairs: list[TopLogprobs] = [
            tuple(zip(map(int, place[1 + num_top :]), place[1 : 1 + num_top], strict=True))[:k] for place in places
        ]
        arguments[row] = {"logprobs": [place[0] for place in places], "top_logprobs": pairs}
    return arguments
