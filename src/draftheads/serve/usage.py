"""The counts of a response: tokens as OpenAI has them, and what drafting did."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from draftheads.decode.request import Request
from draftheads.decode.text import TextStream


def usage_of(requests: Sequence[Request], *, n: int = 1, prompt_tokens: int | None = None) -> dict[str, Any]:
    """Counts of all answers of a response.

    Args:
        requests: finished, or as far as they are; n in a row have the same prompt.
        n: answers to each prompt.
        prompt_tokens: of prompts that were only scored.
    """
    prompts = requests[::n]
    read = sum(len(request.prompt_ids) for request in prompts) if prompt_tokens is None else prompt_tokens
    answered = sum(len(request.token_ids) for request in requests)
    cached = sum(request.num_cached for request in prompts)
    steps = sum(request.num_steps for request in requests)
    # the first token of an answer comes from the prompt's pass
    of_steps = sum(max(0, len(request.token_ids) - 1) for request in requests)
    return {
        "prompt_tokens": read,
        "completion_tokens": answered,
        "total_tokens": read + answered,
        "prompt_tokens_details": {"cached_tokens": cached},
        "draft": {
            "steps": steps,
            "tokens_per_step": round(of_steps / steps, 4) if steps else 1.0,
            "drafted_by_depth": _sums([request.drafted_by_depth for request in requests]),
            "accepted_by_depth": _sums([request.accepted_by_depth for request in requests]),
        },
    }


def _sums(lists: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*lists, fillvalue=0)]


class DraftPieces:
    """Which parts of an answer's text were drafted, event by event.

    Text of a token can come with a later event: a half character, or what may become a stop string.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._stream = TextStream(tokenizer)
        self._waiting: list[tuple[str, bool]] = []

    def push(self, token_ids: Sequence[int], num_drafted: int, text: str) -> list[list[Any]]:
        """The event's new text in pieces ``[text, is_drafted]``, which together are the text."""
        for place, token in enumerate(token_ids):
            self._waiting.append((self._stream.push([token]), place < num_drafted))
        pieces: list[list[Any]] = []
        while text and self._waiting:
            piece, drafted = self._waiting.pop(0)
            part = piece[: len(text)]
            if len(piece) > len(text):
                self._waiting.insert(0, (piece[len(text) :], drafted))
            if part:
                pieces.append([text[: len(part)], drafted])
            text = text[len(part) :]
        if text:  # half a character at the end of an answer
            pieces.append([text, False])
        return pieces
