"""Single tokens as text and bytes, for log-probabilities. Knows tokenizers; knows nothing of models."""

import re
from functools import lru_cache
from typing import Any

from tokenizers import pre_tokenizers

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenNames:
    """Names of a tokenizer's tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._byte_level = "ByteLevel" in str(getattr(backend, "decoder", ""))

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token stands for; a token can be a part of a character."""
        convert = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        token = convert(token_id) if convert else None
        if not isinstance(token, str):
            return str(self._tokenizer.decode([token_id])).encode()
        if match := _BYTE.fullmatch(token):
            return bytes([int(match[1], 16)])
        if self._byte_level and all(letter in _byte_of_letter() for letter in token):
            return bytes(_byte_of_letter()[letter] for letter in token)
        return token.replace("▁", " ").encode()

    def text_of(self, token_id: int) -> str:
        """Its text; half characters are shown as �."""
        return self.bytes_of(token_id).decode(errors="replace")

    def unique_text_of(self, token_id: int) -> str:
        r"""Its text, or ``bytes:\xe2\x80`` for half a character, as the key of an object must be unique."""
        raw = self.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


@lru_cache(1)
def _byte_of_letter() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes are their own letters, the others follow from U+0100 on."""
    letters = set(pre_tokenizers.ByteLevel.alphabet())
    own = {letter: ord(letter) for letter in letters if ord(letter) < 256}
    others = sorted(set(range(256)) - set(own.values()))
    return own | {chr(256 + number): byte for number, byte in enumerate(others)}
