"""Log-probabilities in OpenAI's two forms, of chats and of completions, and names of single tokens in them."""

from collections.abc import Sequence
from typing import Any

from draftheads.decode.request import TopLogprobs
from draftheads.models.prompt_text import TokenBytes

_LOWEST = -9999.0  # JSON has no infinity


class TokenNames(TokenBytes):
    """The bytes and texts of a tokenizer's tokens."""

    def text_of(self, token_id: int) -> str:
        """Its text; half characters are shown as �."""
        return self.of(token_id).decode(errors="replace")

    def unique_text_of(self, token_id: int) -> str:
        r"""Its text, or ``bytes:\xe2\x80`` for half a character, as the key of an object must be unique."""
        raw = self.of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(
    names: TokenNames, token_ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[TopLogprobs]
) -> dict[str, Any]:
    """Of the tokens of a chat's answer; ``tops`` are empty if none were asked for."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = names.of(token_id)
        return {"token": names.text_of(token_id), "logprob": max(logprob, _LOWEST), "bytes": list(raw)}

    content = [
        {**entry(token_id, logprob), "top_logprobs": [entry(*pair) for pair in (tops[i] if tops else ())]}
        for i, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True))
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    names: TokenNames,
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    tops: Sequence[TopLogprobs | None],
    *,
    offset: int = 0,
) -> dict[str, Any]:
    """Of the tokens of a completion, before which are ``offset`` characters of text.

    The first token of a text has no log-probability. ``tops`` are empty if none were asked for.
    """
    offsets = []
    for token_id in token_ids:
        offsets.append(offset)
        offset += len(names.text_of(token_id))
    # a token's own log-probability is in the object, too, as in OpenAI's API
    best = [
        None
        if logprob is None
        else {names.unique_text_of(top): max(value, _LOWEST) for top, value in (*(tops[i] or ()), (token_id, logprob))}
        for i, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True) if tops else ())
    ]
    return {
        "tokens": [names.unique_text_of(token_id) for token_id in token_ids],
        "token_logprobs": [None if logprob is None else max(logprob, _LOWEST) for logprob in logprobs],
        "top_logprobs": best if tops else None,
        "text_offset": offsets,
    }
