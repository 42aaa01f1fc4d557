"""Chats on disk, and chats as token ids with a mask of what the model itself would have said.

Knows JSON lines and chat templates; knows nothing of hidden states or heads.

A record is one JSON object a line: ``{"messages": [{"role": …, "content": …}, …]}``. ``"finished": false`` says that
the last assistant turn was cut off, so the tokens that would close it are left out.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from draftheads.errors import DataError

Message = dict[str, str]


class ChatTokenizer(Protocol):
    """What is asked of a transformers tokenizer."""

    def apply_chat_template(self, conversation: Any, *, add_generation_prompt: bool, tokenize: bool) -> Any:
        """The chat as text."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> Any:
        """``["input_ids"]`` of a text."""


@dataclass(frozen=True)
class Chat:
    """One conversation and where it came from."""

    messages: tuple[Message, ...]
    finished: bool  # whether the last assistant turn ended by itself
    path: Path
    line: int  # counted from 1


@dataclass(frozen=True)
class EncodedChat:
    """A conversation as tokens; both sequences have the same length."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]  # True on what the assistant says, the token that ends its turn included


def read_chats(path: Path) -> Iterator[Chat]:
    """The chats of a ``.jsonl`` or ``.jsonl.gz`` file; empty lines are skipped.

    Raises:
        DataError: the file cannot be read, or a line is not a chat; names file and line.
    """
    line_number = 0
    try:
        with _open_text(path) as file:
            for line_number, line in enumerate(file, start=1):
                if line.strip():
                    yield _parse(line, path, line_number)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read after line {line_number}: {error}") from None


def encode_chat(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    finished: bool,
    max_length: int,
    *,
    eos_ids: frozenset[int],
) -> EncodedChat:
    """Tokens and loss mask of a chat, cut after ``max_length`` tokens.

    Prompts and answers are tokenised apart, as they are when the model writes: it reads a prompt and goes on with tokens of
    its own. The mask covers an answer and the first of ``eos_ids`` after it, not what the template puts behind.

    Raises:
        DataError: no assistant turn, or the template shows the assistant's words in another form than they were written.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise DataError("no message of role 'assistant', so there is nothing to learn from")
    spoken = list(messages[: turns[-1] + 1])
    whole = _render(tokenizer, spoken, add_generation_prompt=False)
    token_ids: list[int] = []
    loss_mask: list[bool] = []

    def add(text: str, *, loss: bool) -> None:
        ids = _tokenize(tokenizer, text)
        token_ids.extend(ids)
        loss_mask.extend([loss] * len(ids))

    done = 0  # characters of ``whole`` that are encoded
    for turn in turns:
        start, stop = _answer_span(tokenizer, spoken, turn, whole)
        add(whole[done:start], loss=False)
        add(whole[start:stop], loss=True)
        done = stop
        if len(token_ids) >= max_length:
            break
        after = len(_render(tokenizer, spoken[: turn + 1], add_generation_prompt=False))
        closing = _tokenize(tokenizer, whole[stop:after])
        if closing and closing[0] in eos_ids and (finished or turn != turns[-1]):
            token_ids.append(closing[0])
            loss_mask.append(True)
            token_ids.extend(closing[1:] if turn != turns[-1] else [])
            loss_mask.extend([False] * (len(token_ids) - len(loss_mask)))
            done = after
    return EncodedChat(tuple(token_ids[:max_length]), tuple(loss_mask[:max_length]))


def _answer_span(tokenizer: ChatTokenizer, messages: list[Message], turn: int, whole: str) -> tuple[int, int]:
    """Where the words of assistant turn ``turn`` stand in the rendered chat."""
    prompt = _render(tokenizer, messages[:turn], add_generation_prompt=True)
    upto = _render(tokenizer, messages[: turn + 1], add_generation_prompt=False)
    content = messages[turn]["content"].strip()
    if not (whole.startswith(upto) and upto.startswith(prompt)):
        raise DataError(
            f"the chat template rewrites message {turn} when the chat goes on, so what the model wrote cannot be found in "
            "the text; split the chat so that each record ends with the answer to learn from, or change the template"
        )
    answer = upto[len(prompt) :]
    place = answer.find(content)
    before, after = answer[: max(place, 0)], answer[max(place, 0) + len(content) :]
    if place < 0 or before.strip():
        raise DataError(
            f"the chat template does not show the assistant's message {turn} as it was written: "
            f"it shows {_short(answer)!r} for {_short(content)!r}"
        )
    # spaces inside the rendered answer are the model's own, as far as the message had them
    tail = messages[turn]["content"][len(messages[turn]["content"].rstrip()) :]
    kept = len(tail) if after.startswith(tail) else 0
    return len(prompt), len(prompt) + len(before) + len(content) + kept


def _render(tokenizer: ChatTokenizer, messages: list[Message], *, add_generation_prompt: bool) -> str:
    try:
        text = tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tokenize=False
        )
    except Exception as error:  # a template is a program of the model's author: it may raise anything
        raise DataError(f"the chat template refuses this chat: {error}") from error
    return str(text)


def _tokenize(tokenizer: ChatTokenizer, text: str) -> list[int]:
    if not text:
        return []
    return list(
        tokenizer(text, add_special_tokens=False)["input_ids"]
    )  # the template writes the special tokens itself


def _open_text(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _parse(line: str, path: Path, line_number: int) -> Chat:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {line_number}: not JSON: {error}") from None
    problem = _problem(record)
    if problem:
        raise DataError(f"{path}, line {line_number}: {problem}")
    messages = tuple({"role": m["role"], "content": m["content"]} for m in record["messages"])
    return Chat(messages, record.get("finished", True), path, line_number)


def _problem(record: object) -> str | None:
    """What keeps a JSON value from being a chat."""
    if not isinstance(record, dict) or not isinstance(record.get("messages"), list):
        return 'a chat is an object such as {"messages": [{"role": "user", "content": "…"}, …]}'
    for i, message in enumerate(record["messages"]):
        if not isinstance(message, dict):
            return f"message {i} is not an object with role and content"
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                return f"message {i}: {key} is {message.get(key)!r}; it must be a string"
    if not isinstance(record.get("finished", True), bool):
        return f"finished is {record['finished']!r}; it must be true or false"
    if not any(message["role"] == "assistant" for message in record["messages"]):
        return "no message of role 'assistant', so there is nothing to learn from"
    return None


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "…"
