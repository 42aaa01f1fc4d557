"""Texts to token ids. A text that is surely too long is refused before it is tokenized, which can take seconds.

Knows ``transformers`` and ``tokenizers``; knows nothing of chats and their templates.
"""

import re
from contextlib import suppress
from functools import lru_cache
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from tokenizers import models, pre_tokenizers

from draftheads.errors import PromptTooLong
from draftheads.models.model_names import shown_name

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_MARK = "▁"  # in place of a space in the tokens of SentencePiece
_SPACES = f" Ġ{_SPACE_MARK}"  # in tokens
_NOT_COUNTED = re.compile("[^!-~]+")
_longest: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # bytes of the longest token, by tokenizer


class TextReader(Protocol):
    """What reads texts: a model."""

    @property
    def tokenizer(self) -> Any:
        """A ``transformers`` tokenizer."""

    @property
    def model_id(self) -> str:
        """Its name."""

    @property
    def max_positions(self) -> int | None:
        """The maximal number of tokens in a text; None if it is not known."""


def token_ids_of(reader: TextReader, text: str, **options: bool) -> list[int]:
    """The token ids of a text; ``options`` are the tokenizer's."""
    limit = reader.max_positions
    if limit is not None and len(text) >= limit and (least := fewest_tokens(reader.tokenizer, text)) >= limit:
        name = shown_name(reader.model_id)
        raise PromptTooLong(f"the prompt has at least {least:,} tokens; {name} takes at most {limit - 1}")
    return list(reader.tokenizer(text, **options)["input_ids"])


def fewest_tokens(tokenizer: Any, text: str) -> int:
    """So many tokens a text has at least: its printable ASCII letters by the longest token's bytes; 0 if it is unknown.

    Other letters do not count: normalizers compose them, and spaces may vanish.
    """
    if tokenizer not in _longest:
        _longest[tokenizer] = _longest_token(tokenizer)
    longest = _longest[tokenizer]
    return -(-len(_NOT_COUNTED.sub("", text)) // longest) if longest else 0


def _longest_token(tokenizer: Any) -> int:
    """Its bytes, without spaces around it; 0 if letters may vanish or an unknown word of any length is one token."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not isinstance(backend.model, models.BPE):
        return 0
    vocabulary = backend.get_vocab(with_added_tokens=True)
    fallback = backend.model.byte_fallback
    known = all(chr(byte) in vocabulary or (fallback and f"<0x{byte:02X}>" in vocabulary) for byte in range(33, 127))
    is_whole = not (backend.model.continuing_subword_prefix or backend.model.end_of_word_suffix)
    rules = f"{backend.normalizer}{backend.pre_tokenizer}".replace('Replace(pattern=String(" ")', "")
    if not (known and is_whole) or any(rule in rules for rule in ("Replace", "Precompiled", "Removed", "Delimiter")):
        return 0
    return max(len(token.strip(_SPACES).encode()) for token in vocabulary)


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
