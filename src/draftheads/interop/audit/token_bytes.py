"""The bytes that a tokenizer's tokens stand for; one token can be a part of a character."""

import re
from typing import Any

from draftheads.models.prompt_text import byte_of_letter

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """Of one tokenizer: byte-level as GPT-2's and Llama-3's, or with byte fallback as Llama-2's."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._is_byte_level = "ByteLevel" in str(getattr(backend, "decoder", ""))
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))

    def of(self, token_id: int) -> bytes:
        """Empty for tokens with a special meaning, which are not in texts."""
        if token_id in self._special:
            return b""
        convert = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        token = convert(token_id) if convert else None
        if not isinstance(token, str):
            return str(self._tokenizer.decode([token_id])).encode()
        if match := _BYTE.fullmatch(token):
            return bytes([int(match[1], 16)])
        letters = byte_of_letter()
        if self._is_byte_level and all(letter in letters for letter in token):
            return bytes(letters[letter] for letter in token)
        return token.replace("▁", " ").encode()
