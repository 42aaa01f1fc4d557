"""What training reads, for people: a text in pieces with what is learned of each, and counts of many texts.

Knows encoded texts and how tokenizers decode; knows nothing of screens.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Self

from draftheads.chat_template import special_ids
from draftheads.data.chat import EncodedChat

_UNFINISHED = "\ufffd"  # what a tokenizer shows for bytes that are not a whole character yet


@dataclass(frozen=True)
class Span:
    """What a token says; several tokens where they share a character."""

    text: str
    is_learned: bool  # whether the loss mask covers it
    is_special: bool  # whether it is no text but a sign of the template's; then ``text`` is its name


def spans(tokenizer: Any, text: EncodedChat) -> list[Span]:
    """A text in as small pieces as can be shown.

    A character whose bytes are spread over tokens is one piece; only one that ``max_length`` cut through is shown
    as U+FFFD.
    """
    special = special_ids(tokenizer)
    found: list[Span] = []
    before: list[int] = []  # the tokens of the piece before
    tokens = zip(text.token_ids, text.loss_mask, strict=True)
    for (is_learned, is_special), run in groupby(tokens, lambda token: (token[1], token[0] in special)):
        ids = [token_id for token_id, _ in run]
        pieces = [[token_id] for token_id in ids] if is_special else _pieces(tokenizer, before, ids)
        for piece in pieces:
            words = "" if is_special else _words(tokenizer, before, piece)
            # a token without words of its own is not to go unseen
            found.append(Span(words or _names(tokenizer, piece), is_learned, is_special))
            before = piece
    return found


@dataclass(frozen=True)
class Counts:
    """How much there is of some texts."""

    num_texts: int
    num_tokens: int
    num_learned: int  # tokens that the loss masks cover
    num_cut: int  # texts that were longer
    shortest: int
    longest: int

    @classmethod
    def of(cls, texts: Sequence[EncodedChat]) -> Self:
        """Of at least one text."""
        lengths = [len(text.token_ids) for text in texts]
        return cls(
            num_texts=len(texts),
            num_tokens=sum(lengths),
            num_learned=sum(sum(text.loss_mask) for text in texts),
            num_cut=sum(text.is_cut for text in texts),
            shortest=min(lengths),
            longest=max(lengths),
        )


def padding_share(batches: Iterable[Sequence[int]]) -> float:
    """Which part of some batches is padding, by the lengths of the texts in each.

    >>> padding_share([[3, 5], [6]])
    0.125
    """
    batches = list(batches)
    size = sum(len(lengths) * max(lengths) for lengths in batches)
    return 1 - sum(map(sum, batches)) / size


def num_read(text: EncodedChat) -> int:
    """How many tokens heads are fed of a text: those from the position on that guesses the first learned one.

    >>> num_read(EncodedChat((7, 8, 9, 10), (False, False, True, True)))
    3
    """
    return len(text.token_ids) - max(0, text.loss_mask.index(True) - 1)


def _pieces(tokenizer: Any, before: Sequence[int], token_ids: Sequence[int]) -> Iterator[list[int]]:
    """The tokens in the smallest groups that say whole characters."""
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
    """What tokens say after others: some tokenizers need left neighbours for spaces."""
    start, whole = _decode(tokenizer, before), _decode(tokenizer, [*before, *token_ids])
    return whole[len(start) :] if whole.startswith(start) else _decode(tokenizer, token_ids)


def _decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text if token_ids else ""


def _names(tokenizer: Any, token_ids: Sequence[int]) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(list(token_ids)))
