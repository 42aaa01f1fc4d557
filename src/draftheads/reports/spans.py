"""A training text in pieces for people: which characters are learned, and which tokens are special."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from draftheads.data.chat_tokens import EncodedChat
from draftheads.models.chat_template import special_ids

_UNFINISHED = "\ufffd"  # what a tokenizer gives for bytes that are not a whole character yet
_VISIBLE = str.maketrans(  # control characters, which a terminal would execute
    {
        **{chr(code): chr(0x2400 + code) for code in range(32)},
        "\x7f": "␡",
        **{chr(code): f"\\x{code:x}" for code in range(0x80, 0xA0)},
        "\n": "↵\n",
        "\t": "⇥   ",
    }
)


@dataclass(frozen=True)
class Span:
    """The text of a token; of several tokens where they share a character."""

    text: str
    is_learned: bool  # whether the loss mask covers it
    is_special: bool  # whether it is a special token; then ``text`` is its name

    @property
    def visible(self) -> str:
        """The text with control characters as symbols."""
        return self.text.translate(_VISIBLE)


KINDS = (  # one span of each kind, as a legend
    Span("learned", is_learned=True, is_special=False),
    Span("special token", is_learned=False, is_special=True),
    Span("learned special token", is_learned=True, is_special=True),
    Span("only read", is_learned=False, is_special=False),
    Span("↵ line break", is_learned=False, is_special=False),
)


def spans(tokenizer: Any, text: EncodedChat) -> list[Span]:
    """A text in the smallest pieces that can be shown.

    A character whose bytes are spread over several tokens is one piece. Only a character that ``max_length`` cut
    through is shown as U+FFFD.
    """
    special = special_ids(tokenizer)
    shown: list[Span] = []
    before: list[int] = []  # the tokens of the previous piece
    tokens = zip(text.token_ids, text.loss_mask, strict=True)
    for (is_learned, is_special), run in groupby(tokens, lambda token: (token[1], token[0] in special)):
        ids = [token_id for token_id, _ in run]
        pieces = [[token_id] for token_id in ids] if is_special else _pieces(tokenizer, before, ids)
        for piece in pieces:
            words = "" if is_special else _words(tokenizer, before, piece)
            # a token that decodes to nothing is shown by its name
            shown.append(Span(words or "".join(tokenizer.convert_ids_to_tokens(piece)), is_learned, is_special))
            before = piece
    return shown


def _pieces(tokenizer: Any, before: Sequence[int], token_ids: Sequence[int]) -> Iterator[list[int]]:
    """The tokens in the smallest groups that decode to whole characters."""
    piece: list[int] = []
    for token_id in token_ids:
        piece.append(token_id)
        words = _words(tokenizer, before, piece)
        if words and not words.endswith(_UNFINISHED):
            yield piece
            before, piece = piece, []
    if piece:
        yield piece


def _words(tokenizer: Any, before: Sequence[int], token_ids: Sequence[int]) -> str:
    """The text of tokens after other tokens: some tokenizers need these to decode spaces."""
    start, whole = _decode(tokenizer, before), _decode(tokenizer, [*before, *token_ids])
    return whole[len(start) :] if whole.startswith(start) else _decode(tokenizer, token_ids)


def _decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text if token_ids else ""
