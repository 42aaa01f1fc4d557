"""Plain text for training: files to blocks of tokens; the loss covers all of them.

Texts follow each other without padding. Each ends with the end-of-text token, and a block may contain the end of one
text and the start of the next.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from draftheads.data.chat_tokens import EncodedChat
from draftheads.data.json_lines import at_line, read_json_lines
from draftheads.errors import DataError
from draftheads.utils.messages import half_character, short


def read_texts(path: Path) -> Iterator[tuple[str, str]]:
    """Texts and their ``FILE:LINE``. A ``.txt`` file is one text; each line of ``.jsonl`` (``.gz``) has a "text"."""
    if path.suffix == ".txt":
        try:
            yield path.read_text(encoding="utf-8"), f"{path}:1"
        except UnicodeDecodeError as error:
            byte = f"0x{error.object[error.start]:02x}"
            raise DataError(f"not UTF-8 text: byte {byte}", path=path, line_number=1) from None
        except OSError as error:
            raise DataError(f"cannot be read: {error}", path=path, line_number=1) from None
        return
    for line_number, record in read_json_lines(path):
        text = record.get("text") if isinstance(record, dict) else None
        with at_line(path, line_number):
            if not isinstance(text, str):
                shown = short(repr(record))
                raise DataError(f'plain text is an object such as {{"text": "…"}}, not {shown}; chats go to --data')
            if problem := half_character(text):
                raise DataError(f"text {problem}")
            yield text, f"{path}:{line_number}"


def load_blocks(
    tokenizer: Any, paths: Sequence[Path], *, eos_ids: frozenset[int], length: int, max_tokens: int | None = None
) -> list[EncodedChat]:
    """All texts as blocks of ``length`` tokens, at most about ``max_tokens``; a block's source is its first text."""
    most = float("inf") if max_tokens is None else -(-max_tokens // length)  # blocks
    blocks: list[EncodedChat] = []
    rest: list[int] = []  # tokens that do not fill a block yet; ``source`` is the place of their first text
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


def _block(token_ids: list[int], source: str) -> EncodedChat:
    return EncodedChat(tuple(token_ids), (True,) * len(token_ids), source, is_plain=True)


def _tokens(tokenizer: Any, text: str, eos_ids: frozenset[int]) -> list[int]:
    ids = list(tokenizer(text)["input_ids"])
    if eos_ids and (not ids or ids[-1] not in eos_ids):
        ids.append(min(eos_ids))
    return ids
