"""A training batch for people: its texts in pieces, counts, and the page that shows them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from draftheads.data.batches import padded_length
from draftheads.data.texts import EncodedChat
from draftheads.models.chat_template import special_ids
from draftheads.reports.page import Page, Pieces, Table
from draftheads.utils.counts import counted
from draftheads.utils.provenance import as_json_values

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
        pieces = [[token_id] for token_id in ids] if is_special else _whole(tokenizer, before, ids)
        for piece in pieces:
            words = "" if is_special else _words(tokenizer, before, piece)
            # a token that decodes to nothing is shown by its name
            shown.append(Span(words or "".join(tokenizer.convert_ids_to_tokens(piece)), is_learned, is_special))
            before = piece
    return shown


def _whole(tokenizer: Any, before: Sequence[int], token_ids: Sequence[int]) -> Iterator[list[int]]:
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


@dataclass(frozen=True)
class PlannedBatch:
    """A batch of a training run, and all the data that the run reads."""

    index: int  # of the batch
    texts: Sequence[EncodedChat]  # all texts with at least one learned token
    batches: Sequence[Sequence[int]]  # of the run; each holds indices of texts
    num_left_out: int  # texts without a learned token
    num_too_short: int  # texts that were to be trained on, but without two learned tokens in a row
    num_held_out: int
    max_length: int  # tokens after which texts are cut

    @property
    def text_indices(self) -> Sequence[int]:
        return self.batches[self.index]

    @property
    def columns(self) -> tuple[str, str, str]:
        """Names of the columns of :meth:`rows`; the first column has none."""
        return "", f"batch {self.index}", "all the data"

    def rows(self) -> list[tuple[str, str, str]]:
        """The counts: what is counted, its value for the batch, and its value for all the data."""
        batch = [self.texts[i] for i in self.text_indices]

        def both(count: Callable[[Sequence[EncodedChat]], str]) -> tuple[str, str]:
            return count(batch), count(self.texts)

        def padding(length: Callable[[EncodedChat], int]) -> tuple[str, str]:
            lengths = [[length(self.texts[i]) for i in indices] for indices in self.batches]
            return f"{padding_share([lengths[self.index]]):.1%}", f"{padding_share(lengths):.1%}"

        num_training = len(self.texts) - self.num_too_short - self.num_held_out
        return [
            ("texts", *both(lambda texts: f"{len(texts):,}")),
            ("tokens", *both(lambda texts: f"{_count(texts)[1]:,}")),
            ("learned tokens", *both(lambda texts: "{0:,} ({2:.1%})".format(*_count(texts)))),
            ("tokens per text", *both(_lengths)),
            (f"texts cut off at {self.max_length:,} tokens", *both(lambda texts: f"{sum(t.is_cut for t in texts):,}")),
            ("padding of whole texts", *padding(lambda text: len(text.token_ids))),
            ("padding without prompts", *padding(num_read)),
            ("batches", "", f"{len(self.batches):,}"),
            ("texts trained on", "", f"{num_training:,}"),
            ("held-out texts", "", f"{self.num_held_out:,}"),
            ("left out: no learned token", "", f"{self.num_left_out:,}"),
            ("left out: no two learned tokens in a row", "", f"{self.num_too_short:,}"),
        ]

    def title(self, text_index: int) -> str:
        text = self.texts[text_index]
        cut = f", cut off at {self.max_length}" if text.is_cut else ""
        return f"text {text_index}: {counted(len(text.token_ids), 'token')}, {sum(text.loss_mask)} learned{cut}"


def batch_page(
    batch: PlannedBatch, tokenizer: Any, *, settings: Mapping[str, Any], provenance: Mapping[str, Any]
) -> Page:
    """The page of a batch; ``settings`` are the command's: ``model``, ``data`` (files) and others."""
    num_learned, num_tokens, share = _count([batch.texts[i] for i in batch.text_indices])
    texts = [(batch.title(i), _pieces(spans(tokenizer, batch.texts[i]))) for i in batch.text_indices]
    legend = [part for kind in KINDS for part in (*_pieces([kind]), ("   ", ""))]
    return Page(
        title=f"Training batch {batch.index} of {', '.join(str(path) for path in settings['data'])}",
        verdict=f"The heads learn {num_learned:,} of the {counted(num_tokens, 'token')} in this batch ({share:.1%}).",
        note=(
            f"As {settings['model']} reads it. The page shows {len(batch.text_indices)} of "
            f"{counted(len(batch.text_indices), 'text')} in this batch. Learned tokens must be the assistant's answers "
            "and the token that ends each; if not, the chat template is wrong."
        ),
        texts=[("Legend", legend), *texts],
        tables=[Table("Counts", batch.columns, batch.rows())],
        facts=[
            ("Model, data and settings", as_json_values(settings).items()),
            ("Command and machine", provenance.items()),
        ],
    )


def _pieces(shown: Iterable[Span]) -> Pieces:
    return [(span.visible, ("learned " * span.is_learned + "special" * span.is_special).rstrip()) for span in shown]


def padding_share(batches: Sequence[Sequence[int]]) -> float:
    """Share of padding tokens in batches, from the lengths of the texts in each.

    >>> padding_share([[3, 5], [6]])
    0.125
    """
    return 1 - sum(map(sum, batches)) / sum(len(lengths) * padded_length(max(lengths)) for lengths in batches)


def num_read(text: EncodedChat) -> int:
    """Number of tokens of a text that heads read: all from the position that predicts the first learned token.

    >>> num_read(EncodedChat((7, 8, 9, 10), (False, False, True, True)))
    3
    """
    return len(text.token_ids) - max(0, text.loss_mask.index(True) - 1)


def _count(texts: Sequence[EncodedChat]) -> tuple[int, int, float]:
    """Learned tokens, all tokens, and the share of the learned ones."""
    num_learned, num_tokens = sum(sum(text.loss_mask) for text in texts), sum(len(text.token_ids) for text in texts)
    return num_learned, num_tokens, num_learned / num_tokens


def _lengths(texts: Sequence[EncodedChat]) -> str:
    lengths = [len(text.token_ids) for text in texts]
    return f"{min(lengths):,} to {max(lengths):,}, mean {sum(lengths) / len(lengths):,.0f}"
