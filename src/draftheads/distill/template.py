"""Where a user's turn begins and how it ends in a chat template. Knows templates and tokenizers; knows no models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftheads.errors import UnsupportedModel
from draftheads.models.chat_template import ChatReader, continuing_ids, render, special_ids

_WORDS = "seventeen purple elephants"  # stands for the user's words; templates strip white space around them


@dataclass(frozen=True)
class TurnEnd:
    """What ends a user's turn; one of the two fields is empty."""

    token_ids: tuple[int, ...]
    texts: tuple[str, ...]


def user_turn_opening(reader: ChatReader, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a chat up to where the user's next words begin.

    Raises:
        UnsupportedModel: the template refuses such a chat, or changes or hides the user's words.
    """
    before, _ = _around_words(reader, messages)
    # a space before the user's words belongs to their first token
    return list(reader.tokenizer(before.rstrip(" "), add_special_tokens=False)["input_ids"])


def user_turn_end(reader: ChatReader) -> TurnEnd:
    """The special token right after a user's words, or else the text there.

    Raises:
        UnsupportedModel: the template writes neither.
    """
    _, after = _around_words(reader, ())
    first_line = next(iter(after.strip().splitlines()), "").strip()
    if not first_line:
        raise UnsupportedModel("the chat template writes nothing after a user's words, so their end cannot be found")
    token = continuing_ids(reader.tokenizer, after.strip())[0]
    return TurnEnd((token,), ()) if token in special_ids(reader.tokenizer) else TurnEnd((), (first_line,))


def _around_words(reader: ChatReader, messages: Sequence[Mapping[str, str]]) -> tuple[str, str]:
    chat = [*map(dict, messages), {"role": "user", "content": _WORDS}]
    try:
        text = render(reader, chat, add_generation_prompt=True)
    except Exception as error:  # a template is a program of the model's author: it may raise anything
        raise UnsupportedModel(f"the chat template refuses a chat of self-talk: {error}") from error
    before, found, after = text.rpartition(_WORDS)
    if not found:
        raise UnsupportedModel("the chat template does not show the user's words, so the model cannot write them")
    return before, after
