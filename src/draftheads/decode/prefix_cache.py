"""Texts that the target has read, kept so that prompts with the same beginning are read from there on."""

import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from draftheads.runners.runner import Entries

BLOCK_TOKENS = 8  # beginnings are found by whole blocks


@dataclass(frozen=True)
class ReadText:
    """T tokens that the target has read, and what it computed for them."""

    token_ids: list[int]
    entries: Entries  # keys and values
    hidden: Tensor  # (T, D) last hidden states, which drafters with a history read; of n layers (T, n·D)

    @property
    def num_bytes(self) -> int:
        """Memory that keys, values and hidden states hold, also of tokens that they do not show."""
        return sum(part.untyped_storage().nbytes() for part in (*self.entries, self.hidden))

    def first(self, num_tokens: int) -> "ReadText":
        """The beginning of the text; shares the memory."""
        entries = tuple(part[..., :num_tokens, :] for part in self.entries)
        return ReadText(self.token_ids[:num_tokens], entries, self.hidden[:num_tokens])


def block_digests(namespace: Hashable, token_ids: Sequence[int]) -> list[Hashable]:
    """One for each whole block, of all tokens up to its end: two texts that share one begin with the same tokens."""
    digests: list[Hashable] = []
    chain = hashlib.sha256()
    numbers = np.array(token_ids, dtype=np.int64)
    for end in range(BLOCK_TOKENS, len(numbers) + 1, BLOCK_TOKENS):
        chain.update(numbers[end - BLOCK_TOKENS : end].tobytes())
        digests.append((namespace, chain.digest()))
    return digests


class PrefixCache:
    """Read texts within a number of bytes; those used last are kept.

    Keys and values depend on the weights, so each text belongs to a namespace, such as the name of an adapter, and is
    found there only. Texts are named by their :func:`block_digests`.

    Args:
        max_bytes: memory of all texts.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.hits = 0
        self.tokens_reused = 0
        self._texts: OrderedDict[Hashable, tuple[ReadText, list[Hashable]]] = OrderedDict()  # by last digest; used last
        self._with_block: defaultdict[Hashable, set[Hashable]] = defaultdict(set)  # the names of texts that have it

    def __len__(self) -> int:
        return len(self._texts)

    def num_known(self, digests: Sequence[Hashable]) -> int:
        """How many tokens of a prompt begin a text that is kept."""
        return BLOCK_TOKENS * next(
            (n for n, digest in enumerate(digests) if digest not in self._with_block), len(digests)
        )

    def find(self, digests: Sequence[Hashable]) -> ReadText | None:
        """The longest beginning of a prompt that a text has; it shares the memory of the cache."""
        count = self.num_known(digests)
        if not count:
            return None
        name = next(iter(self._with_block[digests[count // BLOCK_TOKENS - 1]]))
        self._texts.move_to_end(name)
        self.hits += 1
        self.tokens_reused += count
        return self._texts[name][0].first(count)

    def add(self, digests: list[Hashable], text: ReadText) -> None:
        """Keeps a text in place of those that it extends, unless it is known or larger than the whole cache."""
        if not digests:
            return
        if names := self._with_block.get(digests[-1]):
            self._texts.move_to_end(next(iter(names)))
            return
        for name in [digest for digest in digests if digest in self._texts]:
            self._remove(name)
        if text.num_bytes <= self.max_bytes:
            self._shrink(self.max_bytes - text.num_bytes)
            self._texts[digests[-1]] = text, digests
            self.num_bytes += text.num_bytes
            for digest in digests:
                self._with_block[digest].add(digests[-1])

    def limit(self, max_bytes: int) -> None:
        """Sets the memory of all texts, and removes those used longest ago that do not fit any more."""
        self.max_bytes = max_bytes
        self._shrink(max_bytes)

    def _shrink(self, num_bytes: int) -> None:
        while self.num_bytes > num_bytes:
            self._remove(next(iter(self._texts)))

    def _remove(self, name: Hashable) -> None:
        text, digests = self._texts.pop(name)
        self.num_bytes -= text.num_bytes
        for digest in digests:
            self._with_block[digest].discard(name)
            if not self._with_block[digest]:
                del self._with_block[digest]
