"""Plain text to learn from: files to blocks of tokens, every one of which is learned.

Knows text files and tokenizers; knows nothing of chats. Texts follow each other without padding: the end token closes
one, and a block may hold the end of one text and the start of the next.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from draftheads.data.chat import EncodedChat
from draftheads.data.records import read_json_lines
from draftheads.errors import DataError
from draftheads.messages import half_character, short


def read_texts(path: Path) -> Iterator[tuple[str, str]]:
    """Texts with where they are from: a ``.txt`` file is one; a line of ``.jsonl`` or ``.jsonl.gz`` has a "text".

    Raises:
        DataError: a file that cannot be read, or a line without a text; names file and line.
    """
    if path.suffix == ".txt":
        try:
            yield path.read_text(encoding="utf-8"), f"{path}:1"
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot be read: {error}", path=path, line_number=1) from None
        return
    for line_number, record in read_json_lines(path):
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise DataError(
                f'plain text is an object such as {{"text": "…"}}, not {short(repr(record))}; chats go to --data',
                path=path,
                line_number=line_number,
            )
        if problem := half_character(text):
            raise DataError(f"text {problem}", path=path, line_number=line_number)
        yield text, f"{path}:{line_number}"


def load_blocks(
    tokenizer: Any, paths: Sequence[Path], *, eos_ids: frozenset[int], length: int, max_tokens: int | None = None
) -> list[EncodedChat]:
    """All texts as blocks of ``length`` tokens, until ``max_tokens`` tokens are there; a block names its first text.

    Raises:
        DataError: a bad line, or no text at all.
    """
    most = float("inf") if max_tokens is None else -(-max_tokens // length)  # blocks
    blocks: list[EncodedChat] = []
    rest: list[int] = []  # of texts that have not filled a block, the first of which is from ``source``
    source = ""
    for text, place in chain.from_iterable(map(read_texts, paths)):
        if len(blocks) >= most:
            break
        source = source if rest else place
        rest += _tokens(tokenizer, text, eos_ids)
        whole = len(rest) // length * length
        for start in range(0, whole, length):
            blocks.append(_block(rest[start : start + length], source))
            source = place
            if len(blocks) >= most:
                break
        rest = rest[whole:]
    if len(rest) > 1 and len(blocks) < most:
        blocks.append(_block(rest, source))
    if not blocks:
        raise DataError(f"no text in {', '.join(map(str, paths))}")
    return blocks


def is_plain(loss_mask: Sequence[bool] | Any) -> bool:
    """Whether a text is plain: it is learned from its first token on, where a chat starts with somebody else's words.

    >>> is_plain([True, True]), is_plain([False, True])
    (True, False)
    """
    return bool(loss_mask[0])


def _block(token_ids: list[int], source: str) -> EncodedChat:
    return EncodedChat(tuple(token_ids), (True,) * len(token_ids), source)


def _tokens(tokenizer: Any, text: str, eos_ids: frozenset[int]) -> list[int]:
    ids = list(tokenizer(text)["input_ids"])
    if eos_ids and (not ids or ids[-1] not in eos_ids):
        ids.append(min(eos_ids))
    return ids
