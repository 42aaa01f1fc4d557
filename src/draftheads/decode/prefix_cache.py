"""Texts that the target has read, kept so that prompts with the same beginning are read from there on.

Keys and values are those of each token, so a prompt goes on from any block of a text. States of recurrent layers are
those of a whole text: a prompt goes on from its end only, and such a text is kept beside longer ones. States are large.
In bf16, those of a text of Qwen3.5-0.8B take 19.5 MB, as much as the keys and values of 1,590 tokens, and those of
Mamba-2-130M 19.1 MB. So few places have them: ``EngineCore`` chooses them.
"""

import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from draftheads.runners.runner import Entries, States

BLOCK_TOKENS = 8  # beginnings are found by whole blocks


@dataclass(frozen=True)
class ReadText:
    """T tokens that the target has read, and what it computed for them."""

    token_ids: list[int]
    entries: Entries  # keys and values
    hidden: Tensor  # (T, D) last hidden states, which drafters with a history read; of n layers (T, n·D)
    states: States = field(default_factory=dict)  # of recurrent layers, after the last token

    @property
    def num_bytes(self) -> int:
        """Memory that keys, values, states and hidden states hold, also of tokens that they do not show."""
        parts = (*self.entries, *self.states.values(), self.hidden)
        return sum(part.untyped_storage().nbytes() for part in parts)

    def first(self, num_tokens: int) -> "ReadText":
        """The beginning of the text; shares the memory."""
        if self.states:
            assert num_tokens == len(self.token_ids), "states are those of the whole text"
            return self
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
    found there only. Texts are named by their :func:`block_digests`, and those with states by their last tokens, too.

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
        self._ends: defaultdict[Hashable, set[Hashable]] = defaultdict(set)  # of those with states, by their last block

    def __len__(self) -> int:
        return len(self._texts)

    def num_shared(self, digests: Sequence[Hashable]) -> int:
        """How many tokens of a prompt begin a text that is kept, though the prompt may not go on from there."""
        return BLOCK_TOKENS * next(
            (n for n, digest in enumerate(digests) if digest not in self._with_block), len(digests)
        )

    def num_known(self, digests: Sequence[Hashable], token_ids: Sequence[int] = ()) -> int:
        """How many tokens of a prompt need not be read; its tokens are for texts with states."""
        return self._longest(digests, token_ids)[0]

    def _longest(self, digests: Sequence[Hashable], token_ids: Sequence[int]) -> tuple[int, Hashable]:
        """The number of these tokens, and the name of a text that has them."""
        for blocks in range(self.num_shared(digests) // BLOCK_TOKENS, 0, -1):
            digest = digests[blocks - 1]
            name = next(iter(self._with_block[digest]))
            if not self._texts[name][0].states:
                return blocks * BLOCK_TOKENS, name
            ending = [(self._texts[each][0].token_ids, each) for each in self._ends.get(digest, ())]
            if fitting := [(len(ids), each) for ids, each in ending if ids == list(token_ids[: len(ids)])]:
                return max(fitting, key=lambda pair: pair[0])
        return 0, None

    def find(self, digests: Sequence[Hashable], token_ids: Sequence[int] = ()) -> ReadText | None:
        """The longest beginning of a prompt from which it can go on; it shares the memory of the cache."""
        count, name = self._longest(digests, token_ids)
        if not count:
            return None
        self._texts.move_to_end(name)
        self.hits += 1
        self.tokens_reused += count
        return self._texts[name][0].first(count)

    def add(self, digests: list[Hashable], text: ReadText) -> None:
        """Keeps a text, unless it is known or larger than the cache. Without states it replaces those it extends."""
        if not digests:
            return
        own, names = digests[-1], self._with_block.get(digests[-1], set())
        if text.states:
            own = own, *text.token_ids[len(digests) * BLOCK_TOKENS :]
            names = names & {own}
        if names:
            self._texts.move_to_end(next(iter(names)))
            return
        for name in [digest for digest in digests if digest in self._texts]:
            self._remove(name)
        if text.num_bytes <= self.max_bytes:
            self._shrink(self.max_bytes - text.num_bytes)
            self._texts[own] = text, digests
            self.num_bytes += text.num_bytes
            for digest in digests:
                self._with_block[digest].add(own)
            if text.states:
                self._ends[digests[-1]].add(own)

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
        for of, digest in [*((self._with_block, digest) for digest in digests), (self._ends, digests[-1])]:
            of[digest].discard(name)
            if not of[digest]:
                del of[digest]
