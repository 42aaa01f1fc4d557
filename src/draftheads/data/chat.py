"""Chats as token ids with a mask of what the model itself would have said.

Knows chat templates and tokenizers; knows nothing of files, hidden states or heads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from draftheads.data.records import NO_ANSWER
from draftheads.errors import DataError
from draftheads.messages import Message, short


class ChatTokenizer(Protocol):
    """What is asked of a transformers tokenizer."""

    def apply_chat_template(self, conversation: Any, *, add_generation_prompt: bool, tokenize: bool) -> Any:
        """The chat as text."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> Any:
        """``["input_ids"]`` of a text."""


class ChatReader(Protocol):
    """How a model reads chats: the model itself, or no more of it than that."""

    @property
    def tokenizer(self) -> Any:
        """A :class:`ChatTokenizer`."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Token ids that end a text."""


@dataclass(frozen=True)
class EncodedChat:
    """A conversation as tokens; ids and mask have the same length."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]  # True on what the assistant says, the token that ends its turn included
    source: str = ""  # where it is from, as FILE:LINE
    is_cut: bool = False  # whether there was more of it


def encode_chat(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    *,
    finished: bool,
    max_length: int,
    eos_ids: frozenset[int],
) -> EncodedChat:
    """Tokens and loss mask of a chat, cut after ``max_length`` tokens.

    Prompts and answers are tokenised apart, as they are when the model writes: it reads a prompt and goes on
    with tokens of its own. The mask covers an answer and the token of ``eos_ids`` right after it, not what
    the template puts behind. What follows the last answer is left out.

    Raises:
        DataError: no assistant turn, or the template hides or changes the assistant's words.
    """
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    for ids, is_said in _segments(tokenizer, messages, finished=finished, eos_ids=eos_ids):
        token_ids += ids
        loss_mask += [is_said] * len(ids)
        if len(token_ids) > max_length:
            break
    is_cut = len(token_ids) > max_length
    return EncodedChat(tuple(token_ids[:max_length]), tuple(loss_mask[:max_length]), is_cut=is_cut)


def special_ids(tokenizer: Any) -> set[int]:
    """Token ids of a transformers tokenizer that stand for no text, such as the end of a turn."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(token_id for token_id, token in added.items() if token.special)}


def _segments(
    tokenizer: ChatTokenizer, messages: Sequence[Message], *, finished: bool, eos_ids: frozenset[int]
) -> Iterator[tuple[list[int], bool]]:
    """Token ids piece by piece, and whether the assistant said them."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise DataError(NO_ANSWER)
    whole = _render(tokenizer, messages[: turns[-1] + 1])
    done = 0  # characters of ``whole`` that are tokens already
    for turn in turns:
        start, stop, end = _answer_span(tokenizer, messages, turn, whole)
        yield _tokenize(tokenizer, whole[done:start]), False
        yield _tokenize(tokenizer, whole[start:stop]), True
        done = stop
        closing = _tokenize(tokenizer, whole[stop:end])
        if closing and closing[0] in eos_ids and (finished or turn != turns[-1]):
            yield closing[:1], True
            yield closing[1:] if turn != turns[-1] else [], False
            done = end


def _answer_span(tokenizer: ChatTokenizer, messages: Sequence[Message], turn: int, whole: str) -> tuple[int, int, int]:
    """Where in the rendered chat the words of an assistant turn start and stop, and where the turn ends."""
    prompt = _render(tokenizer, messages[:turn], add_generation_prompt=True)
    upto = _render(tokenizer, messages[: turn + 1])
    if not whole.startswith(upto):
        raise DataError(
            f"the chat template rewrites the chat up to message {turn} when it goes on, so what the model wrote "
            "cannot be found in the text: split the chat so that each record ends with the answer to learn from"
        )
    if not upto.startswith(prompt):
        raise DataError(
            f"the chat template shows the answer of message {turn} after another prompt than it makes for one: "
            f"its prompt ends with {prompt[-40:]!r}"
        )
    content = messages[turn]["content"]
    words, answer = content.strip(), upto[len(prompt) :]
    place = answer.find(words)
    if place < 0 or answer[:place].strip():
        raise DataError(
            f"the chat template hides or changes the assistant's words of message {turn}: "
            f"it shows {short(answer)!r} for {short(content)!r}"
        )
    # spaces at the end of an answer are the model's own where the template keeps them
    trailing = content[len(content.rstrip()) :]
    stop = place + len(words)
    stop += len(trailing) if answer.startswith(trailing, stop) else 0
    return len(prompt), len(prompt) + stop, len(upto)


def _render(tokenizer: ChatTokenizer, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
    chat = [dict(message) for message in messages]
    try:
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=add_generation_prompt, tokenize=False)
    except Exception as error:  # a template is a program of the model's author: it may raise anything
        raise DataError(f"the chat template refuses this chat: {error}") from error
    return str(text)


def _tokenize(tokenizer: ChatTokenizer, text: str) -> list[int]:
    if not text:
        return []
    # the template writes the special tokens itself
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
