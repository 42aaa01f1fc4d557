"""Chats as token ids with a mask of the assistant's tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from draftheads.data.records import NO_ANSWER
from draftheads.errors import DataError
from draftheads.models.chat_template import BUILT_IN, ChatReader, continuing_ids, render, template_of
from draftheads.utils.messages import Message, short


@dataclass(frozen=True)
class EncodedChat:
    """A conversation as tokens; ids and mask have the same length."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]  # True on what the assistant says, the token that ends its turn included
    source: str = ""  # FILE:LINE
    is_cut: bool = False  # whether there was more of it


def encode_chat(reader: ChatReader, messages: Sequence[Message], *, finished: bool, max_length: int) -> EncodedChat:
    """Tokens and loss mask of a chat, cut after ``max_length`` tokens.

    Prompts and answers are tokenized separately, as in generation: the model reads the tokens of a prompt and continues
    with tokens of its own. The mask covers an answer and the token of ``reader.eos_ids`` right after it, not what the
    template writes after this token. What follows the last answer is left out; where that answer was cut off
    (``finished`` is False), so is its end-of-turn token.

    Raises:
        DataError: no assistant turn, no chat template, or one that hides or changes the assistant's words.
    """
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    for ids, is_said in _segments(reader, messages, finished=finished):
        token_ids += ids
        loss_mask += [is_said] * len(ids)
        if len(token_ids) > max_length:
            break
    is_cut = len(token_ids) > max_length
    return EncodedChat(tuple(token_ids[:max_length]), tuple(loss_mask[:max_length]), is_cut=is_cut)


def encode_completion(
    reader: ChatReader, prompt: str, completion: str, *, finished: bool, max_length: int
) -> EncodedChat:
    """A text and its completion, without a chat template; the loss covers the completion and the end of the text."""
    prompt_ids = reader.tokenizer(prompt)["input_ids"] if prompt else []
    answer_ids = continuing_ids(reader.tokenizer, completion)
    if finished and reader.eos_ids:
        answer_ids.append(min(reader.eos_ids))
    return encode_answer(prompt_ids, answer_ids, max_length=max_length)


def encode_answer(prompt_ids: Sequence[int], answer_ids: Sequence[int], *, max_length: int) -> EncodedChat:
    """A prompt and an answer that are tokens already; the loss covers the answer."""
    token_ids = (*prompt_ids, *answer_ids)
    loss_mask = (False,) * len(prompt_ids) + (True,) * len(answer_ids)
    return EncodedChat(token_ids[:max_length], loss_mask[:max_length], is_cut=len(token_ids) > max_length)


def check_known(texts: Sequence[EncodedChat], vocab_size: int) -> None:
    """Raises :class:`DataError` if a text has a token of the tokenizer that the model does not have."""
    for text in texts:
        if (token := max(text.token_ids, default=0)) >= vocab_size:
            raise DataError(
                f"{text.source}: token {token} is one of the tokenizer, and the model has the tokens 0 … "
                f"{vocab_size - 1}: leave this text out"
            )


def _segments(reader: ChatReader, messages: Sequence[Message], *, finished: bool) -> Iterator[tuple[list[int], bool]]:
    """Token ids piece by piece, and whether the assistant said them."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise DataError(NO_ANSWER)
    whole = _rendered(reader, messages[: turns[-1] + 1])
    done = end = 0  # characters of ``whole`` that are tokens already; where the turn before ends
    for turn in turns:
        start, stop, end = _answer_span(reader, messages, turn, whole)
        yield from _prompt_segments(reader, whole[done:start], is_first=not done)
        yield continuing_ids(reader.tokenizer, whole[start:stop]), True
        done = stop
    closing = continuing_ids(reader.tokenizer, whole[done:end])
    if finished and closing and closing[0] in reader.eos_ids:
        yield closing[:1], True


def _prompt_segments(reader: ChatReader, text: str, *, is_first: bool) -> Iterator[tuple[list[int], bool]]:
    """The text before an answer. After another answer it begins with the end of that turn, which the assistant says."""
    if is_first:  # a text of its own, as in generation; the template writes special tokens itself
        yield list(reader.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else [], False
        return
    ids = continuing_ids(reader.tokenizer, text)
    num_said = int(bool(ids) and ids[0] in reader.eos_ids)
    yield ids[:num_said], True
    yield ids[num_said:], False


def _answer_span(reader: ChatReader, messages: Sequence[Message], turn: int, whole: str) -> tuple[int, int, int]:
    """Where in the rendered chat the words of an assistant turn start and stop, and where the turn ends."""
    prompt = _rendered(reader, messages[:turn], add_generation_prompt=True)
    upto = _rendered(reader, messages[: turn + 1])
    if not whole.startswith(upto):
        raise DataError(
            f"the chat template changes the chat up to message {turn} when the chat continues, so the model's words "
            "cannot be found in the text: split the chat so that each record ends with the answer to learn from"
        )
    if not upto.startswith(prompt):
        raise DataError(
            f"the chat template writes the answer of message {turn} after another text than its generation prompt, "
            f"which ends with {prompt[-40:]!r}: use another --chat-template"
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


def _rendered(reader: ChatReader, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
    if template_of(reader) is None:
        raise DataError(f"the model has no chat template: give one by --chat-template, a file or {', '.join(BUILT_IN)}")
    try:
        return render(reader, messages, add_generation_prompt=add_generation_prompt)
    except Exception as error:  # a template is a program of the model's author: it may raise anything
        raise DataError(f"the chat template refuses this chat: {error}") from error
