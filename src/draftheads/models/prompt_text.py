"""Texts to token ids. A text that is far too long is refused by its beginning: all of it could take seconds.

Knows ``transformers`` and ``tokenizers``; knows nothing of chats.
"""

import re
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from tokenizers import pre_tokenizers

from draftheads.errors import PromptTooLong
from draftheads.models.chat_template import ChatReader
from draftheads.models.model_names import shown_name

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_MARK = "▁"  # in place of a space in the tokens of SentencePiece
_LETTERS = 16  # for each token that a model takes: a text that is longer is refused if its beginning has too many


def token_ids_of(reader: ChatReader, text: str, **options: bool) -> list[int]:
    """The token ids of a text; ``options`` are the tokenizer's."""
    limit, read = reader.max_positions, partial(reader.tokenizer, **options)
    if limit is not None and len(text) > _LETTERS * limit:
        beginning = text[: _LETTERS * limit].rstrip()  # a special token behind it may take the spaces before it
        if len(read(beginning)["input_ids"]) > 2 * limit:
            name = shown_name(reader.model_id)
            raise PromptTooLong(f"the prompt has more than {limit:,} tokens; {name} takes at most {limit - 1}")
    return list(read(text)["input_ids"])


@lru_cache(1)
def byte_of_letter() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes are their own letters, the others follow from U+0100 on."""
    printable = {letter: ord(letter) for letter in pre_tokenizers.ByteLevel.alphabet() if ord(letter) < 256}
    others = sorted(set(range(256)) - set(printable.values()))
    return printable | {chr(256 + number): byte for number, byte in enumerate(others)}


class TokenBytes:
    """The bytes that the tokens of a tokenizer stand for; a token can be a part of a character.

    Attributes:
        are_known: whether the tokenizer is byte-level, as GPT-2's, or has byte fallback, as Llama-2's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        decoder = str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", ""))
        self._is_byte_level = "ByteLevel" in decoder
        self.are_known = self._is_byte_level or "ByteFallback" in decoder

    def of(self, token_id: int) -> bytes:
        """Of one token; special ones have the bytes of their names."""
        convert = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        token = convert(token_id) if convert else None
        if not isinstance(token, str):
            return str(self._tokenizer.decode([token_id])).encode()
        if self._is_byte_level:
            with suppress(KeyError):  # added tokens have any letters
                return bytes(map(byte_of_letter().__getitem__, token))
        if match := _BYTE.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace(_SPACE_MARK, " ").encode()
