"""Log-probabilities in OpenAI's two forms: of chats and of completions."""

from collections.abc import Sequence
from typing import Any

from draftheads.decode.request import TopLogprobs
from draftheads.serve.token_names import TokenNames

_LOWEST = -9999.0  # JSON has no infinity


def chat_logprobs(
    names: TokenNames, token_ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[TopLogprobs]
) -> dict[str, Any]:
    """Of the tokens of a chat's answer; ``tops`` are empty if none were asked for."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = names.bytes_of(token_id)
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
    """Of the tokens of a completion.

    Args:
        names: of tokens.
        token_ids: the tokens.
        logprobs: of them; None for the first token of a text.
        tops: the most likely tokens at each place; empty if none were asked for.
        offset: characters of the text before the first token.
    """
    tokens, offsets = [], []
    for token_id in token_ids:
        tokens.append(names.unique_text_of(token_id))
        offsets.append(offset)
        offset += len(names.text_of(token_id))
    # a token's own log-probability is in the object, too, as in OpenAI's API
    best = [
        None
        if logprob is None or not tops
        else {names.unique_text_of(one): max(value, _LOWEST) for one, value in (*(tops[i] or ()), (token_id, logprob))}
        for i, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True))
    ]
    return {
        "tokens": tokens,
        "token_logprobs": [None if logprob is None else max(logprob, _LOWEST) for logprob in logprobs],
        "top_logprobs": best if tops else None,
        "text_offset": offsets,
    }
