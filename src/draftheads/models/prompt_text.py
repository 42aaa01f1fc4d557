"""Texts to token ids. A text that is surely too long is refused before it is tokenized, which can take seconds.

Knows ``transformers`` and ``tokenizers``; knows nothing of chats and their templates.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from tokenizers import models, pre_tokenizers

from draftheads.errors import PromptTooLong
from draftheads.models.model_names import shown_name

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_MARK = "▁"  # in place of a space in the tokens of SentencePiece
_ROUNDING = 1e-9


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
    """The token ids of a text; ``options`` are the tokenizer's.

    Raises:
        PromptTooLong: the text surely has more tokens than the model takes. Other long texts are not refused here.
    """
    limit = reader.max_positions
    if limit is not None and len(text) >= limit and (least := fewest_tokens(reader.tokenizer, text)) >= limit:
        name = shown_name(reader.model_id)
        raise PromptTooLong(f"the prompt has at least {least:,} tokens; {name} takes at most {limit - 1}")
    return list(reader.tokenizer(text, **options)["input_ids"])


def fewest_tokens(tokenizer: Any, text: str) -> int:
    """So many tokens a text has at least, found without tokenizing it; 0 if the tokenizer is of an unknown kind.

    A token with a byte b has at most L_b bytes, where L_b is the length of the longest such token of the vocabulary. So
    the sum of 1 / L_b over the bytes of a token is at most 1, and over those of a text at most its number of tokens.
    """
    if tokenizer not in _shares:
        _shares[tokenizer] = _shares_of(tokenizer)
    shares = _shares[tokenizer]
    if shares is None:
        return 0
    text = text.replace(" ", _SPACE_MARK) if shares.marks_spaces else text
    data = np.frombuffer(text.encode(), np.uint8)
    if shares.is_lossy:
        # composition joins letters with the marks behind them, which are not ASCII, and added tokens take spaces in
        first, second = data[:-1], data[1:]
        data = first[(first > ord(" ")) & (first < 127) & (second < 128)]
    total = np.bincount(data, minlength=256) @ shares.of_bytes
    return math.ceil(float(total) * (1 - _ROUNDING))


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


@dataclass(frozen=True, eq=False)
class _Shares:
    """What each byte of a text adds to the number of its tokens."""

    of_bytes: npt.NDArray[np.float64]  # (256,)
    marks_spaces: bool
    is_lossy: bool  # some text may become shorter before it is split into tokens


_shares: WeakKeyDictionary[Any, _Shares | None] = WeakKeyDictionary()  # by tokenizer


def _shares_of(tokenizer: Any) -> _Shares | None:
    """None if a text of any length may become one token."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not isinstance(backend.model, models.BPE):
        return None
    normalizers, splitters = list(_parts(backend.normalizer)), list(_parts(backend.pre_tokenizer))
    vocabulary = backend.get_vocab(with_added_tokens=True)
    letters = byte_of_letter()
    kinds = {part["type"] for part in splitters}
    if "ByteLevel" in kinds:  # a byte without a token vanishes
        known = {byte for letter, byte in letters.items() if letter in vocabulary}
        tokens = [bytes(letters[letter] for letter in token if letter in letters) for token in vocabulary]
    elif backend.model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        known = set(range(256))
        tokens = [*(bytes([byte]) for byte in known), *(token.encode() for token in vocabulary)]
    else:
        return None
    if not all(map(_keeps_text, (*normalizers, *splitters))) or {"ByteLevel", "Metaspace"} <= kinds:
        return None
    added = backend.get_added_tokens_decoder().values()
    return _Shares(
        _shares_by_byte([*tokens, *(token.content.encode() for token in added)], known),
        marks_spaces=any(map(_marks_spaces, (*normalizers, *splitters))),
        is_lossy=any(part["type"] == "NFC" for part in normalizers)
        or any(token.lstrip or token.rstrip for token in added),
    )


def _parts(component: Any) -> Iterator[Mapping[str, Any]]:
    """The settings of a normalizer or pre-tokenizer, which may be a sequence of others."""
    if component is not None:
        yield from _flat(json.loads(component.__getstate__()))


def _flat(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if part["type"] != "Sequence":
        yield part
        return
    for inner in part.get("normalizers") or part.get("pretokenizers") or ():
        yield from _flat(inner)


def _keeps_text(part: Mapping[str, Any]) -> bool:
    """Whether no text vanishes in a normalizer or pre-tokenizer; NFC shortens a text, but its ASCII letters stay."""
    if part["type"] in ("Split", "Punctuation"):
        return bool(part["behavior"] != "Removed")
    return part["type"] in ("ByteLevel", "Digits", "NFC", "Prepend") or _marks_spaces(part)


def _marks_spaces(part: Mapping[str, Any]) -> bool:
    if part["type"] == "Metaspace":
        return bool(part["replacement"] == _SPACE_MARK)
    return (part["type"], part.get("pattern"), part.get("content")) == ("Replace", {"String": " "}, _SPACE_MARK)


def _shares_by_byte(tokens: Iterable[bytes], known: set[int]) -> npt.NDArray[np.float64]:
    shares = np.zeros(256)
    left = set(known)
    for token in sorted(tokens, key=len, reverse=True):
        found = left.intersection(token)
        shares[list(found)] = 1 / max(1, len(token))
        left -= found
    return shares
