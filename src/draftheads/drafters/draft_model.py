"""A smaller model drafts for the target (Leviathan et al. 2023; Chen et al. 2023), also one of another tokenizer.

It drafts on any tree that heads draft on, with a cache of its own. Each level of nodes is read together with all levels
above it: a pass over a few tokens takes no longer than one over a single token, and no cache is kept between levels.
"""

import logging
import warnings
from functools import partial
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from draftheads.drafters.vocabulary import SharedPredictor, TranslatedText, Vocabularies
from draftheads.errors import InvalidSettings, SpeedWarning
from draftheads.models.model import TargetModel
from draftheads.runners import bytes_of_states, bytes_per_slot, runner_for
from draftheads.runners.runner import Row
from draftheads.speculation.candidates import ancestors_of
from draftheads.speculation.draft import AcceptResult, Context, Draft
from draftheads.speculation.drafter import Drafter, DraftSession
from draftheads.speculation.growing import Predictor, fill
from draftheads.speculation.shapes import Shape, check_ranks
from draftheads.speculation.tree import Tree
from draftheads.utils.counts import counted
from draftheads.utils.transfer import to_device

_FEW = 0.02  # of the target's tokens; with 5 % trees have nine tenths of the tokens per step, as these are frequent

logger = logging.getLogger("draftheads")


class _State(NamedTuple):
    """The tree as far as it is read, and W nodes of it whose children are next."""

    token_ids: Tensor  # (B, n)
    parents: Tensor  # (B, n)
    depths: Tensor  # (n,)
    at: Tensor  # (B, W) the nodes at hand
    logits: Tensor  # (B, W, V) there


class DraftModel(Drafter):
    """A small causal language model that drafts.

    Args:
        model: the small one.
        target: the model that it drafts for.
        max_depth: of trees whose shape gives no depth.

    If it has another tokenizer, trees are of the tokens that both vocabularies have, and the text of chains is spelt in
    the target's tokens: see :mod:`draftheads.drafters.vocabulary`.

    Raises:
        InvalidSettings: another tokenizer, and no token is shared, the bytes of tokens are not known, or layers have
            states.

    Warns:
        SpeedWarning: less than 2 % of the target's tokens are shared.
    """

    needs_history = True
    reads_whole_text = True
    default_shape = Tree.chain(4)

    def __init__(self, model: TargetModel, target: TargetModel, *, max_depth: int = 6) -> None:
        self.model = model
        self.max_depth = max_depth
        self.vocab_size = min(model.vocab_size, target.vocab_size)  # tokens that it can draft
        self.vocabularies: Vocabularies | None = None
        if model.fingerprints.tokenizer != target.fingerprints.tokenizer:
            differs = f"{model.model_id} has another tokenizer than {target.model_id}"
            if model.is_recurrent:
                raise InvalidSettings(
                    f"{differs}, and layers with states, which cannot go back to where its tokens change; take a draft "
                    "model of the same family, or one without recurrent layers"
                )
            self.vocabularies = Vocabularies(model, target)
            self.vocab_size = self.vocabularies.shared.shape[1]
            share, count = self.vocabularies.coverage, counted(len(self.vocabularies.target.bytes), "token")
            words = f"{differs}: it can draft {self.vocab_size:,} of the target's {count} ({share:.1%})"
            if share < _FEW:
                little = f"{words}: trees will draft little, chains (the default) more"
                warnings.warn(little, SpeedWarning, stacklevel=2)
            else:
                logger.info(words)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of the keys and values of one token of the target, in typical text."""
        ratio = 1.0 if self.vocabularies is None else max(1.0, self.vocabularies.ratio)
        return ceil(bytes_per_slot(self.model) * ratio)

    def bytes_of_rows(self, num_rows: int) -> int:
        """Bytes of the states of recurrent layers."""
        return bytes_of_states(self.model, num_rows)

    @property
    def name(self) -> str:
        return self.model.model_id

    def start(self) -> "DraftModelSession":
        """A session with an empty cache."""
        return DraftModelSession(self)

    def check_shape(self, shape: Shape) -> None:
        """Raises :class:`InvalidTree` if the shape has a rank beyond the tokens that it can draft."""
        check_ranks(shape, self.vocab_size)


class DraftModelSession(DraftSession, Predictor):
    """The small model's cache of one batch."""

    def __init__(self, drafter: DraftModel) -> None:
        self.drafter = drafter
        self._runner = runner_for(drafter.model)
        self._rows: list[Row] = []
        self._texts: list[TranslatedText] = []  # of the rows, if the draft model has another tokenizer

    def propose(self, context: Context, shape: Shape) -> Draft:
        """Draft tokens for every row."""
        self.drafter.check_shape(shape)
        max_depth = shape.max_depth or self.drafter.max_depth
        both = self.drafter.vocabularies
        begin = partial(self.begin, self._translated(context))
        if both is None:
            return fill(self, shape, context, begin=begin, max_depth=max_depth)
        is_chain = isinstance(shape, Tree) and shape.num_nodes == shape.max_depth + 1 > 1
        if is_chain and not both.are_equal and context.rules is None:
            chain = fill(self, Tree.chain(both.chain_length(max_depth)), context, begin=begin, max_depth=max_depth)
            return both.respelt(chain, context.root_ids, shape.num_nodes)
        return fill(SharedPredictor(self, both), shape, context, begin=begin, max_depth=max_depth)

    def observe(self, context: Context) -> None:
        self._catch_up(self._translated(context))

    def keep(self, rows: Tensor) -> None:
        kept = [self._rows[row] for row in rows.tolist()]
        self._runner.drop([row for row in self._rows if row not in kept])
        self._rows = kept
        self._texts = [self._texts[row] for row in rows.tolist()] if self._texts else []

    def begin(self, context: Context, depth: int) -> _State:
        """The root, once the accepted tokens before it are read; both in one pass."""
        logits = self._catch_up(context)
        root = torch.zeros_like(context.root_ids[:, None])
        return _State(self._known(context.root_ids)[:, None], root, root[0], root, logits[:, None])

    def predict(self, state: _State, depth: int) -> Tensor:
        """(B, W, V)."""
        return state.logits if self.drafter.vocabularies else state.logits[..., : self.drafter.vocab_size]

    def descend(self, state: _State, depth: int, parents: Tensor, token_ids: Tensor) -> _State:
        """Reads the tree with the chosen children."""
        batch, width = token_ids.shape
        old = state.token_ids.shape[1]
        rows = torch.arange(batch, device=token_ids.device)[:, None]
        above = state.at[rows, parents]  # (B, W') in the tree
        new = torch.arange(old, old + width, device=token_ids.device)
        parents = torch.cat([state.parents, above], 1)
        tree = Draft(
            token_ids=torch.cat([state.token_ids, self._known(token_ids)], 1),
            parents=parents,
            depths=torch.cat([state.depths, torch.full_like(new, depth + 1)])[None],
            ancestors=ancestors_of(parents, depth + 1),
            max_depth=depth + 1,
        )
        logits, _ = self._runner.verify(self._rows, tree)
        return _State(tree.token_ids, parents, tree.depths[0], new.expand(batch, -1), logits[:, old:])

    def _known(self, token_ids: Tensor) -> Tensor:
        """Tokens as the small model can read them: of those that it does not have, the last one that it has."""
        return token_ids.clamp_max(self.drafter.model.vocab_size - 1)

    def _translated(self, context: Context) -> Context:
        """The same in the draft model's tokens. What changed of those that were read is not kept."""
        if (both := self.drafter.vocabularies) is None:
            return context
        known = len(self._rows)
        self._texts += [TranslatedText(both) for _ in range(context.num_new_rows(known))]
        ids = []
        for number, (text, new) in enumerate(zip(self._texts, context.ids, strict=True)):
            same, start = text.add(new[1 if number < known else 0 :]), 0  # the first one of known rows was their root
            if number < known:
                row = self._rows[number]
                start = row.length = min(row.length, same, len(text.ids) - 1)
            ids.append(text.ids[start:])
        device, width = context.root_ids.device, max(map(len, ids)) - 1
        padded = [[*each[:-1], *[0] * (width + 1 - len(each))] for each in ids]
        counts, roots = ([len(each) - 1 for each in ids], [each[-1] for each in ids])
        tokens = to_device(padded, device, torch.long).view(len(ids), width)
        return Context(context.hidden, tokens, to_device(counts, device), to_device(roots, device), known_ids=ids)

    def _catch_up(self, context: Context) -> Tensor:
        """Reads what was accepted, prompts of new rows included, and the roots, of which nothing is kept: (B, V)."""
        known = len(self._rows)
        batch = known + context.num_new_rows(known)
        counts = [*context.counts[:known], *[0] * (batch - known)]
        if batch > known:
            last = self.drafter.model.vocab_size - 1
            new = [[min(token, last) for token in ids[:-1]] for ids in context.ids[known:]]
            self._rows += self._runner.prefill(new)[0]
        width = max(counts) + 1
        device = context.root_ids.device
        num_read = to_device(counts, device) if batch > known else context.num_accepted
        steps = torch.arange(width, device=device)
        before = context.token_ids[:, :width] if known else context.root_ids[:, None]
        if before.shape[1] < width:
            before = torch.cat([before, context.root_ids[:, None]], 1)
        chain = torch.where(steps < num_read[:, None], before, context.root_ids[:, None])  # (B, width)
        logits, _ = self._runner.verify(self._rows, Draft.on_tree(Tree.chain(width - 1), self._known(chain)))
        read = AcceptResult(steps.expand(batch, -1), num_read, context.root_ids)
        self._runner.commit(self._rows, read, counts)
        return logits[torch.arange(batch, device=device), num_read]
