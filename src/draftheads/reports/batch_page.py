"""The page of a training batch: its texts in pieces, and counts."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from draftheads.data.batches import padded_length
from draftheads.data.texts import EncodedChat
from draftheads.decode.text import TextStream
from draftheads.models.chat_template import special_ids
from draftheads.reports.page import Page, Pieces, Table
from draftheads.utils.counts import counted
from draftheads.utils.provenance import as_json_values

VISIBLE = str.maketrans(  # control characters, which a terminal would execute
    {
        **{chr(code): chr(0x2400 + code) for code in range(32)},
        "\x7f": "␡",
        **{chr(code): f"\\x{code:x}" for code in range(0x80, 0xA0)},
        "\n": "↵\n",
        "\t": "⇥   ",
    }
)
_LEGEND = [
    *[("learned", "learned"), ("  ", ""), ("special token", "special"), ("  ", "")],
    *[("learned special token", "learned special"), ("  only read  ↵ line break", "")],
]
Texts = Sequence[EncodedChat]


def pieces_of(tokenizer: Any, text: EncodedChat) -> Pieces:
    """A text in the smallest pieces that can be shown. Their classes are learned, special, or both.

    A character whose bytes are spread over several tokens is one piece. Only a character that ``max_length`` cut
    through is shown as U+FFFD.
    """
    special, stream = special_ids(tokenizer), TextStream(tokenizer, skip_special_tokens=False)
    shown: list[tuple[str, str]] = []
    tokens = zip(text.token_ids, text.loss_mask, strict=True)
    for (is_learned, is_special), run in groupby(tokens, lambda token: (token[1], token[0] in special)):
        waiting: list[int] = []  # tokens without a whole character
        found = []
        for token_id, _ in run:
            waiting.append(token_id)
            if (words := stream.push([token_id])) or is_special:
                found.append(_names(tokenizer, waiting) if is_special else words)
                waiting = []
        if waiting:  # a token that decodes to nothing is shown by its name
            found.append(stream.flush() or _names(tokenizer, waiting))
        classes = ("learned " * is_learned + "special" * is_special).rstrip()
        shown += [(words.translate(VISIBLE), classes) for words in found]
    return shown


def _names(tokenizer: Any, token_ids: Sequence[int]) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(token_ids))


def batch_page(
    tokenizer: Any,
    texts: Texts,
    batches: Sequence[Sequence[int]],
    numbers: Mapping[str, int],
    *,
    settings: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> Page:
    """The page of a batch.

    Args:
        tokenizer: that made the texts.
        texts: all texts with at least one learned token.
        batches: of the run; each holds indices of texts.
        numbers: of texts by what became of them.
        settings: the command's: ``model``, ``data`` (files), ``index`` (of the batch), ``max_length`` and others.
        provenance: as of :func:`draftheads.utils.provenance.provenance`.
    """
    index, cut = settings["index"], settings["max_length"]
    groups = [[texts[i] for i in indices] for indices in batches]
    shown, num_texts = groups[index], counted(len(groups[index]), "text")
    counts: dict[str, Callable[[Texts, Sequence[Texts]], str]] = {  # of some texts, and of batches
        "texts": lambda some, _: f"{len(some):,}",
        "tokens": lambda some, _: f"{_num_tokens(some):,}",
        "learned tokens": lambda some, _: f"{_num_learned(some):,} ({_num_learned(some) / _num_tokens(some):.1%})",
        "tokens per text": lambda some, _: _lengths([len(text.token_ids) for text in some]),
        f"texts cut off at {cut:,} tokens": lambda some, _: f"{sum(text.is_cut for text in some):,}",
        "padding of whole texts": lambda _, of: f"{padding_share(of, lambda text: len(text.token_ids)):.1%}",
        "padding without prompts": lambda _, of: f"{padding_share(of, num_read):.1%}",
    }
    rows = [(name, count(shown, [shown]), count(texts, groups)) for name, count in counts.items()]
    rows += [(name, "", f"{number:,}") for name, number in {"batches": len(batches), **numbers}.items()]
    return Page(
        title=f"Training batch {index} of {', '.join(str(path) for path in settings['data'])}",
        verdict=(
            f"The heads learn {_num_learned(shown):,} of the {counted(_num_tokens(shown), 'token')} in this batch "
            f"({_num_learned(shown) / _num_tokens(shown):.1%})."
        ),
        note=(
            f"As {settings['model']} reads it: {num_texts}. Learned tokens must be the assistant's answers and the "
            "token that ends each; if not, the chat template is wrong."
        ),
        texts=[
            ("Legend", _LEGEND),
            *((_title(i, texts[i], cut), pieces_of(tokenizer, texts[i])) for i in batches[index]),
        ],
        tables=[Table("Counts", ("", f"batch {index}", "all the data"), rows)],
        facts=[
            ("Model, data and settings", as_json_values(settings).items()),
            ("Command and machine", provenance.items()),
        ],
    )


def _title(number: int, text: EncodedChat, cut: int) -> str:
    end = f", cut off at {cut}" if text.is_cut else ""
    return f"text {number}: {counted(len(text.token_ids), 'token')}, {sum(text.loss_mask)} learned{end}"


def padding_share(batches: Sequence[Texts], length: Callable[[EncodedChat], int]) -> float:
    """Share of padding tokens in batches, whose texts have such lengths."""
    lengths = [list(map(length, batch)) for batch in batches]
    return 1 - sum(map(sum, lengths)) / sum(len(each) * padded_length(max(each)) for each in lengths)


def num_read(text: EncodedChat) -> int:
    """Number of tokens of a text that heads read: all from the position that predicts the first learned token.

    >>> num_read(EncodedChat((7, 8, 9, 10), (False, False, True, True)))
    3
    """
    return len(text.token_ids) - max(0, text.loss_mask.index(True) - 1)


def _num_tokens(texts: Texts) -> int:
    return sum(len(text.token_ids) for text in texts)


def _num_learned(texts: Texts) -> int:
    return sum(sum(text.loss_mask) for text in texts)


def _lengths(lengths: Sequence[int]) -> str:
    return f"{min(lengths):,} to {max(lengths):,}, mean {sum(lengths) / len(lengths):,.0f}"
