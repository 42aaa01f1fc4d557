"""A smaller model with the same tokenizer drafts for the target (Leviathan et al. 2023; Chen et al. 2023).

It drafts on any tree that heads draft on, with a cache of its own. Each level of nodes is read together with all levels
above it: a pass over a few tokens takes no longer than one over a single token, and no cache is kept between levels.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftheads.errors import InvalidSettings
from draftheads.models.model import TargetModel
from draftheads.runners import bytes_of_states, bytes_per_slot, runner_for
from draftheads.runners.runner import Row
from draftheads.speculation.candidates import ancestors_of
from draftheads.speculation.draft import AcceptResult, Context, Draft
from draftheads.speculation.drafter import Drafter, DraftSession
from draftheads.speculation.growing import Predictor, fill
from draftheads.speculation.shapes import Shape, check_ranks
from draftheads.speculation.tree import Tree
from draftheads.utils.transfer import to_device


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

    Raises:
        InvalidSettings: another tokenizer.
    """

    needs_history = True
    reads_whole_text = True
    default_shape = Tree.chain(4)

    def __init__(self, model: TargetModel, target: TargetModel, *, max_depth: int = 6) -> None:
        ours, theirs = model.fingerprints.tokenizer, target.fingerprints.tokenizer
        if ours != theirs:
            what = _first_difference(model.tokenizer, target.tokenizer)
            raise InvalidSettings(
                f"{model.model_id} has another tokenizer than {target.model_id}: {what}; take a draft model of the "
                "same family"
            )
        self.model = model
        self.vocab_size = min(model.vocab_size, target.vocab_size)
        self.max_depth = max_depth

    @property
    def bytes_per_slot(self) -> int:
        """Memory of the keys and values of one token."""
        return bytes_per_slot(self.model)

    def bytes_of_rows(self, num_rows: int) -> int:
        """Memory of the states of recurrent layers."""
        return bytes_of_states(self.model, num_rows)

    @property
    def name(self) -> str:
        return self.model.model_id

    def start(self) -> "DraftModelSession":
        """A session with an empty cache."""
        return DraftModelSession(self)

    def check_shape(self, shape: Shape) -> None:
        """Can it fill the shape?"""
        check_ranks(shape, self.vocab_size)


def _first_difference(ours: Any, theirs: Any) -> str:
    """In words: the first token that two tokenizers do not share."""
    ids = [tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {} for tokenizer in (ours, theirs)]
    names = [{token_id: token for token, token_id in each.items()} for each in ids]
    for token_id in sorted({*names[0], *names[1]}):
        one, other = (repr(each[token_id]) if token_id in each else "missing" for each in names)
        if one != other:
            return f"token {token_id} is {one} there and {other} here"
    return "they have the same tokens and split texts in different ways"


class DraftModelSession(DraftSession, Predictor):
    """The small model's cache of one batch."""

    def __init__(self, drafter: DraftModel) -> None:
        self.drafter = drafter
        self._runner = runner_for(drafter.model)
        self._rows: list[Row] = []

    def propose(self, context: Context, shape: Shape) -> Draft:
        """Draft tokens for every row."""
        self.drafter.check_shape(shape)
        max_depth = shape.max_depth or self.drafter.max_depth
        return fill(self, shape, context, begin=partial(self.begin, context), max_depth=max_depth)

    def observe(self, context: Context) -> None:
        self._catch_up(context)

    def keep(self, rows: Tensor) -> None:
        kept = [self._rows[row] for row in rows.tolist()]
        self._runner.drop([row for row in self._rows if row not in kept])
        self._rows = kept

    def begin(self, context: Context, depth: int) -> _State:
        """The root, once the accepted tokens before it are read; both in one pass."""
        logits = self._catch_up(context)
        root = torch.zeros_like(context.root_ids[:, None])
        return _State(self._known(context.root_ids)[:, None], root, root[0], root, logits[:, None])

    def predict(self, state: _State, depth: int) -> Tensor:
        """(B, W, V)."""
        return state.logits[..., : self.drafter.vocab_size]

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
