"""Texts that the target has read, kept so that prompts with the same beginning are read from there on."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from draftheads.decode.prompt_reader import ReadText

Key = tuple[Hashable, tuple[int, ...]]  # a namespace, and the tokens of a text
FEWEST_TOKENS = 8  # a shorter common beginning is not worth a copy: most prompts begin with the same special tokens


class PrefixCache:
    """Read texts within a number of bytes; those used last are kept.

    Keys and values depend on the weights, so each text belongs to a namespace, such as the name of an adapter, and is
    found there only.

    Args:
        max_bytes: memory of all texts.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.hits = 0
        self.tokens_reused = 0
        self._texts: OrderedDict[Key, ReadText] = OrderedDict()  # used last comes last

    def __len__(self) -> int:
        return len(self._texts)

    def find(self, namespace: Hashable, token_ids: Sequence[int]) -> ReadText | None:
        """The longest shared beginning of a prompt and a text; without the prompt's last token, which is read anew.

        None if it has fewer than ``FEWEST_TOKENS``. The result shares the memory of the cache: copy it before the next
        call.
        """
        best, count = self._best(namespace, token_ids)
        if best is None:
            return None
        self._texts.move_to_end(best)
        self.hits += 1
        self.tokens_reused += count
        return self._texts[best].first(count)

    def num_known(self, namespace: Hashable, token_ids: Sequence[int]) -> int:
        """How many tokens :meth:`find` would return."""
        return self._best(namespace, token_ids)[1]

    def _best(self, namespace: Hashable, token_ids: Sequence[int]) -> tuple[Key | None, int]:
        """The text that shares the longest beginning with a prompt, and its length."""
        wanted = token_ids[:-1]
        shared = {key: num_shared(key[1], wanted) for key in self._texts if key[0] == namespace}
        best = max(shared, key=shared.__getitem__, default=None)
        return (None, 0) if best is None or shared[best] < FEWEST_TOKENS else (best, shared[best])

    def add(self, namespace: Hashable, text: ReadText, *, copy: bool = True) -> None:
        """Keeps a text in place of those that it extends.

        A text that is the beginning of a kept one, or larger than the whole cache, is not kept.

        Without ``copy`` the memory of the text is the cache's from now on.
        """
        ids = tuple(text.token_ids)
        for key in [key for key in self._texts if key[0] == namespace]:
            shared = num_shared(key[1], ids)
            if shared == len(ids):
                self._texts.move_to_end(key)
                return
            if shared == len(key[1]):
                self._remove(key)
        size = text.visible_bytes if copy else text.num_bytes
        if size <= self.max_bytes:
            self._shrink(self.max_bytes - size)
            self._texts[namespace, ids] = text.copied() if copy else text
            self.num_bytes += size

    def limit(self, max_bytes: int) -> None:
        """Sets the memory of all texts, and removes those used longest ago that do not fit any more."""
        self.max_bytes = max_bytes
        self._shrink(max_bytes)

    def _shrink(self, num_bytes: int) -> None:
        while self.num_bytes > num_bytes:
            self._remove(next(iter(self._texts)))

    def _remove(self, key: Key) -> None:
        self.num_bytes -= self._texts.pop(key).num_bytes


def num_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens that both begin with.

    >>> num_shared([1, 2, 3], [1, 2, 4, 5]), num_shared([1], [1, 2])
    (2, 1)
    """
    places = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in places if a != b), min(len(first), len(second)))
