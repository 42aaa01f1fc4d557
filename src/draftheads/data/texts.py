"""The texts of a training run as tokens: chats, and plain text in blocks.

The blocks of plain text follow each other without padding, and the loss covers all of them. Each text ends with the
end-of-text token, and a block may contain the end of one text and the start of the next.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

from draftheads.data.chat_tokens import EncodedChat, encode_answer, encode_chat, encode_completion
from draftheads.data.files import at_line, read_values
from draftheads.data.records import Record, read_chats
from draftheads.errors import DataError, UnlearnableChat
from draftheads.models.chat_template import ChatReader
from draftheads.models.fingerprint import tokenizer_fingerprint
from draftheads.utils.counts import counted
from draftheads.utils.messages import half_character, short

LeftOut = dict[str, list[str]]  # FILE:LINE of chats that nothing can be learned from, by the reason


def load_texts(
    model: ChatReader,
    paths: Sequence[Path],
    *,
    max_length: int,
    max_tokens: int | None = None,
    left_out: LeftOut | None = None,
) -> list[EncodedChat]:
    """The chats of all files as tokens, at most about ``max_tokens`` in all.

    Texts are cut after ``max_length`` tokens, or fewer if the model takes fewer. Chats that nothing can be learned from
    are left out, and added to ``left_out``.
    """
    texts: list[EncodedChat] = []
    num_tokens = 0
    left_out = {} if left_out is None else left_out
    max_length = limited(max_length, model)
    own_fingerprint = cache(lambda: tokenizer_fingerprint(model.tokenizer))
    for chat in read_chats(*paths):
        reason = f"no answer within the first {counted(max_length, 'token')}"
        found: list[EncodedChat] = []
        with at_line(chat.path, chat.line_number):
            try:
                last = _encoded(model, chat, max_length, own_fingerprint)
                found = [replace(text, source=chat.source, earlier=()) for text in (*last.earlier, last)]
            except UnlearnableChat as error:
                reason = str(error)
        found = [text for text in found if any(text.loss_mask)]
        texts += found
        num_tokens += sum(len(text.token_ids) for text in found)
        if not found:
            left_out.setdefault(reason, []).append(chat.source)
        if max_tokens is not None and num_tokens >= max_tokens:
            break
    if not texts:
        what = "no chat to learn from" if left_out else "no chat"
        raise DataError(": ".join([f"{what} in {', '.join(map(str, paths))}", *left_out_lines(left_out)]))
    return texts


def left_out_lines(left_out: LeftOut) -> list[str]:
    """What to tell of chats that were left out.

    >>> left_out_lines({"no answer": ["a.jsonl:3", "a.jsonl:7"]})
    ['2 chats were left out: no answer (the first is a.jsonl:3)']
    """
    return [
        f"{counted(len(places), 'chat')} {'was' if len(places) == 1 else 'were'} left out: {reason} "
        f"(the first is {places[0]})"
        for reason, places in sorted(left_out.items(), key=lambda item: -len(item[1]))
    ]


def limited(length: int, model: ChatReader) -> int:
    """The length, or that of the model's longest text."""
    return min(length, model.max_positions or length)


def _encoded(model: ChatReader, chat: Record, max_length: int, own_fingerprint: Callable[[], str]) -> EncodedChat:
    """The text of a chat, or of tokens that a server recorded."""
    if chat.tokens is not None:
        if (own := own_fingerprint()) != (other := chat.tokens.tokenizer):
            fix = "give the model that was served"
            raise DataError(f"recorded with a tokenizer of fingerprint {other}; that of this model is {own}: {fix}")
        return encode_answer(chat.tokens.prompt_ids, chat.tokens.answer_ids, max_length=max_length)
    if chat.problem:
        raise UnlearnableChat(chat.problem)
    if not chat.is_completion:
        return encode_chat(
            model,
            chat.messages,
            finished=chat.finished,
            max_length=max_length,
            tools=chat.tools,
            is_generated=chat.is_generated,
        )
    prompt, completion = (message["content"] for message in chat.messages)
    return encode_completion(model, prompt, completion, finished=chat.finished, max_length=max_length)


def check_known(texts: Sequence[EncodedChat], vocab_size: int) -> None:
    """Raises :class:`DataError` if a text has a token of the tokenizer that the model does not have."""
    for text in texts:
        if (token := max(text.token_ids, default=0)) >= vocab_size:
            raise DataError(
                f"{text.source}: token {token} is one of the tokenizer, and the model has the tokens 0 … "
                f"{vocab_size - 1}: leave this text out"
            )


def read_texts(path: Path) -> Iterator[tuple[str, str]]:
    """The plain texts of a file or a folder, and their ``FILE:LINE``: .txt files, and "text" of lines and rows."""
    for file, line_number, record in read_values(path):
        text = record.get("text") if isinstance(record, dict) else None
        with at_line(file, line_number):
            if not isinstance(text, str):
                shown = short(repr(record))
                raise DataError(f'plain text is an object such as {{"text": "…"}}, not {shown}; chats go to --data')
            if problem := half_character(text):
                raise DataError(f"text {problem}")
            yield text, f"{file}:{line_number}"


def load_blocks(
    tokenizer: Any, paths: Sequence[Path], *, eos_ids: frozenset[int], length: int, max_tokens: int | None = None
) -> list[EncodedChat]:
    """All texts as blocks of ``length`` tokens, at most about ``max_tokens``; a block's source is its first text."""
    most = None if max_tokens is None else -(-max_tokens // length)
    blocks = list(islice(_blocks(tokenizer, paths, eos_ids, length), most))
    if not blocks:
        raise DataError(f"no text in {', '.join(map(str, paths))}")
    return blocks


def _blocks(tokenizer: Any, paths: Sequence[Path], eos_ids: frozenset[int], length: int) -> Iterator[EncodedChat]:
    ids: list[int] = []  # tokens that do not fill a block yet; ``source`` is the place of their first text
    source = ""
    for text, place in chain.from_iterable(map(read_texts, paths)):
        source = source if ids else place
        own = list(tokenizer(text)["input_ids"])
        if eos_ids and (not own or own[-1] not in eos_ids):
            own.append(min(eos_ids))
        ids += own
        whole = len(ids) // length * length
        for start in range(0, whole, length):
            yield _block(ids[start : start + length], source)
            source = place
        ids = ids[whole:]
    if len(ids) > 1:
        yield _block(ids, source)


def _block(ids: list[int], source: str) -> EncodedChat:
    return EncodedChat(tuple(ids), (True,) * len(ids), source, is_plain=True)
