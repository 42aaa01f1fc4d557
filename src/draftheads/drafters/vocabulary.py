"""Two vocabularies: tokens that stand for the same bytes, and the target's text in the tokens of a draft model.

Drafts hold tokens of both vocabularies (TLI), or the text of a drafted chain in the target's tokens (SLEM), as in Timor
et al. 2025, arXiv 2502.05202. The target verifies them as any other draft.
"""

import re
from collections.abc import Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor

from draftheads.cpu.optimise import TYPICAL_TEXT
from draftheads.errors import InvalidSettings
from draftheads.models.chat_template import TokenBytes, continuing_ids, ids_around, ids_of, special_ids
from draftheads.models.model import TargetModel
from draftheads.speculation.draft import Draft
from draftheads.speculation.growing import Predictor
from draftheads.speculation.tree import Tree

_BROKEN = re.compile("([\udc80-\udcff]+)")  # bytes of no whole character, as Python decodes them
# The end of a text is spelt anew at each step. It begins before a word, where the tokens of most vocabularies do.
_LEAST, _MOST = 32, 128  # bytes of it
_PLACES = re.compile(rb"(?<=\S)(?= \S)"), re.compile(rb"(?=[^\x80-\xbf])")  # before a word; before a character


class _Side:
    """The tokens of one model."""

    def __init__(self, model: TargetModel) -> None:
        self.tokenizer: Any = model.tokenizer
        self.special = special_ids(self.tokenizer)
        names = self.tokenizer.get_vocab() if hasattr(self.tokenizer, "get_vocab") else {}
        spelling, size = TokenBytes(self.tokenizer), model.vocab_size
        self.bytes = {i: spelling.of(i) for i in sorted(names.values()) or range(size) if i < size}
        # by the bytes, and whether the token is special; <0x41> has the bytes of A only where there is no A
        self.ids: dict[tuple[bytes, bool], int] = {}
        fallback = {i for name, i in names.items() if name.startswith("<0x")}
        for i in sorted(self.bytes, key=lambda i: (i in fallback, i)):
            self.ids.setdefault((self.bytes[i], i in self.special), i)
        self.bos, self.eos = (getattr(self.tokenizer, f"{role}_token_id", None) for role in ("bos", "eos"))
        probe = ids_of(self.tokenizer, TYPICAL_TEXT)
        self.num_typical = len(probe)
        shown = str(self.tokenizer.decode(probe, clean_up_tokenization_spaces=False))
        spelt = b"".join(self.bytes.get(i, b"") for i in probe).decode(errors="replace")
        if shown.split() != spelt.split():
            raise InvalidSettings(
                f"tokens of {model.model_id} are neither byte-level nor of SentencePiece's kind, so their bytes are "
                "not known; a draft model and its target must then have the same tokenizer"
            )

    def encode(self, data: bytes | bytearray) -> list[int]:
        """The tokens of bytes that follow others. Bytes of half characters are left out where no token is a byte."""
        ids: list[int] = []
        for number, part in enumerate(_BROKEN.split(data.decode(errors="surrogateescape"))):
            if number % 2:
                raw = part.encode(errors="surrogateescape")
                ids += [self.ids[key] for byte in raw if (key := (bytes([byte]), False)) in self.ids]
            else:
                ids += continuing_ids(self.tokenizer, part)
        return ids


class Vocabularies:
    """The tokens of a draft model and of its target, and which of them are the same.

    Two tokens are the same if they stand for the same bytes and both or neither are special; and so are the tokens that
    begin and end texts, whatever their names. V' tokens are shared.

    Attributes:
        shared: (2, V') int64, ids of the draft model and of the target, ascending ids of the target.
        draft_of: (V,) int64, the draft model's id of each token of the target that is shared, else 0.
        coverage: the share of the target's tokens that is shared.
        are_equal: whether they differ in ids and special tokens only.
        ratio: tokens of the draft model for one of the target, in typical text.

    Raises:
        InvalidSettings: no token is shared, or the bytes of tokens are not known.
    """

    def __init__(self, draft: TargetModel, target: TargetModel) -> None:
        self.draft, self.target = ours, theirs = _Side(draft), _Side(target)
        pairs = {theirs.ids[key]: own for key, own in ours.ids.items() if key in theirs.ids}
        self.are_equal = not any(not is_special for _, is_special in ours.ids.keys() ^ theirs.ids.keys())
        if not any(i not in theirs.special for i in pairs):
            raise InvalidSettings(
                f"no token of the draft model {draft.model_id} has the text of a token of {target.model_id}; take a "
                "draft model of the same family"
            )
        # the end first: where one token of the draft model begins and ends texts, it is drafted as the target's end
        for own, other in ((ours.eos, theirs.eos), (ours.bos, theirs.bos)):
            if own is not None and other is not None and own not in pairs.values():
                pairs.setdefault(other, own)
        self.start = ids_around(ours.tokenizer)[0]  # of each text of the draft model
        self.filler = next((i for i in (ours.bos, ours.eos) if i is not None), 0)
        # what a token of the target is in the draft model's texts, if not the tokens of its text
        self.direct = {i: own for i, own in pairs.items() if self.are_equal or i in theirs.special}
        self.target_of = {own: i for i, own in pairs.items()}
        self.shared = torch.tensor(sorted(pairs.items())).T.flip(0).to(draft.device)
        self.draft_of = torch.zeros(target.vocab_size, dtype=torch.long, device=draft.device)
        self.draft_of[self.shared[1]] = self.shared[0]
        self.coverage = len(pairs) / len(theirs.bytes)
        self.ratio = ours.num_typical / theirs.num_typical

    def respelt(self, draft: Draft, root_ids: Tensor, num_nodes: int) -> Draft:
        """A chain of the draft model's tokens as a chain of the target's that has the same text (SLEM).

        Args:
            draft: B chains of the draft model's tokens; their roots are not read.
            root_ids: (B,) the target's tokens at the roots.
            num_nodes: of each row, the root included. Longer texts are cut; nodes of shorter ones fill up the row.
        """
        rows = [self._respelt(ids[1:])[: num_nodes - 1] for ids in draft.token_ids.tolist()]
        chains = [
            [root, *ids, *[0] * (num_nodes - 1 - len(ids))] for root, ids in zip(root_ids.tolist(), rows, strict=True)
        ]
        sizes = torch.tensor([[len(ids)] for ids in rows])
        filling = (torch.arange(num_nodes) > sizes).to(root_ids.device)
        return Draft.on_tree(Tree.chain(num_nodes - 1), torch.tensor(chains).to(root_ids.device)).filled_up(filling)

    def chain_length(self, num_tokens: int) -> int:
        """About how many tokens of the draft model have the text of so many tokens of the target, rounded up."""
        return ceil(num_tokens * self.ratio)

    def _respelt(self, ids: Sequence[int]) -> list[int]:
        """The target's tokens of the text of the draft model's; they end before a special token that is not shared."""
        found, text = [], b""
        for i in ids:
            if i not in self.draft.special and i in self.draft.bytes:
                text += self.draft.bytes[i]
                continue
            found += self.target.encode(text)
            text = b""
            if i not in self.target_of:
                break
            found.append(self.target_of[i])
        return found + self.target.encode(text)


class TranslatedText:
    """The text of one row in the draft model's tokens.

    Attributes:
        ids: the tokens so far, the last ones of which may change.
    """

    def __init__(self, vocabularies: Vocabularies) -> None:
        self._of = vocabularies
        self.ids = [*vocabularies.start]
        self._certain = len(self.ids)  # tokens before the end of the text that is spelt anew
        self._end = bytearray()
        self._is_new = True

    def add(self, token_ids: Sequence[int]) -> int:
        """Adds tokens of the target, at first two tokens or more. Returns how many tokens before did not change."""
        start, before = self._certain, self.ids[self._certain :]
        if self._is_new and self._of.start and token_ids[:1] == [self._of.target.bos]:
            token_ids = token_ids[1:]
        for token in token_ids:
            if (own := self._of.direct.get(token)) is not None:
                self._settle(len(self._end))
                self.ids.append(own)
                self._certain += 1
            elif token != self._of.target.bos:
                self._end += self._of.target.bytes.get(token, b"")
        if len(self._end) > _MOST:
            self._settle(self._place())
        self.ids[self._certain :] = self._of.draft.encode(self._end)
        if self._is_new and (missing := 2 - len(self.ids)) > 0:
            self.ids[:0] = [self._of.filler] * missing
            self._certain += missing
        self._is_new = False
        after = self.ids[start:]
        pairs = enumerate(zip(before, after, strict=False))
        return start + next((n for n, (old, new) in pairs if old != new), min(len(before), len(after)))

    def _settle(self, place: int) -> None:
        """The tokens of so many bytes of the end do not change any more."""
        if self._end:
            self.ids[self._certain :] = self._of.draft.encode(self._end[:place])
            self._certain, self._end = len(self.ids), self._end[place:]

    def _place(self) -> int:
        last = len(self._end) - _LEAST
        for places in _PLACES:
            if found := [each.start() for each in places.finditer(self._end, 0, last)]:
                return found[-1]
        return last


class SharedPredictor(Predictor):
    """A predictor of the draft model's tokens, for the V' tokens of the target that are shared (TLI)."""

    def __init__(self, predictor: Predictor, vocabularies: Vocabularies) -> None:
        self.predictor, self.vocabularies = predictor, vocabularies

    def predict(self, state: Any, depth: int) -> Tensor:
        """Logits of the shared tokens, (B, W, V')."""
        return self.predictor.predict(state, depth)[..., self.vocabularies.shared[0]]

    def descend(self, state: Any, depth: int, parents: Tensor, token_ids: Tensor) -> Any:
        return self.predictor.descend(state, depth, parents, self.vocabularies.draft_of[token_ids])

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return self.vocabularies.shared[1][draft_ids]
