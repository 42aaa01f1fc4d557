"""Lookahead decoding: Jacobi iteration at future positions gives n-grams to draft from.

(Fu et al. 2024.) A window of W columns holds N-1 levels of tokens. Level 0 predicts the text that comes, one token per
column. The levels above are the model's outputs in the last steps (Jacobi iteration). Every step reads the window
together with the draft: below column i, which sees the columns before it, are its N-2 levels. The model's outputs at
their ends are the newest level. Each column is then an n-gram from the model's own outputs and goes to a pool. N-grams
of the pool that begin with the root are the draft. The window is a tree, too, so both are one tree, common beginnings
merged.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Self

from torch import Tensor

from draftheads.errors import require_at_least
from draftheads.speculation.candidates import ancestors_of
from draftheads.speculation.draft import Context, Draft
from draftheads.speculation.drafter import Drafter, DraftSession
from draftheads.speculation.shapes import BestFirst, Shape
from draftheads.utils.transfer import to_device


class _Trie:
    """A tree of tokens; node 0 is the root. Equal tokens below a node are one node."""

    def __init__(self, root: int) -> None:
        self.nodes = [(root, 0, 0)]  # token, parent and depth of each
        self._children: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int) -> int:
        """The node of a token below another one."""
        node = self._children.setdefault((parent, token), len(self.nodes))
        if node == len(self.nodes):
            self.nodes.append((token, parent, self.nodes[parent][2] + 1))
        return node


class _Row:
    """The window and the pool of one text."""

    def __init__(self, drafter: "Lookahead", text: Sequence[int]) -> None:
        self.window, self.ngram, self.guesses = drafter.window, drafter.ngram, drafter.guesses
        self.levels: list[list[int]] = []  # up to N-1, each W tokens
        self.pool: dict[int, deque[tuple[int, ...]]] = {}  # the last n-grams by their first tokens
        self.seed = text[-self.window :]  # the first window is filled with these tokens
        self.ends: list[int] = []  # of this step: node at the end of each column
        self.root = 0

    def tree(self, root: int) -> _Trie:
        """N-grams from the pool, the newest first, then the window."""
        trie = _Trie(root)
        self.root = root
        for guess in reversed(self.pool.get(root, ())):
            node = 0
            for token in guess:
                node = trie.add(node, token)
        if not self.levels:
            fill = self.seed or [root]
            self.levels = [[fill[i % len(fill)] for i in range(self.window)]]
        node, self.ends = 0, []
        for column in range(self.window):
            # column 0 is the root itself
            node = trie.add(node, self.levels[0][column]) if column else 0
            end = node
            for level in self.levels[1:]:
                end = trie.add(end, level[column])
            self.ends.append(end)
        return trie

    def learn(self, outputs: Sequence[int]) -> None:
        """From the model's most likely token after each node: the newest level, and n-grams for the pool."""
        newest = [outputs[end] for end in self.ends]
        if len(self.levels) == self.ngram - 1:
            for column in range(self.window):
                first = self.levels[0][column] if column else self.root
                self._remember(first, (*(level[column] for level in self.levels[1:]), newest[column]))
            self.levels = self.levels[1:]
        self.levels.append(newest)

    def _remember(self, first: int, rest: tuple[int, ...]) -> None:
        ngrams = self.pool.setdefault(first, deque(maxlen=self.guesses))
        if rest in ngrams:
            ngrams.remove(rest)
        ngrams.append(rest)


class Lookahead(Drafter):
    """Drafts with the target model alone: W, N and G of the paper.

    Args:
        window: W, columns.
        ngram: N, tokens of an n-gram, its first included; a draft is at most N-1 deep.
        guesses: G, n-grams that are tried at a step.

    Raises:
        InvalidSettings: a number that is too small.
    """

    needs_history = True
    fills_shapes = False

    def __init__(self, *, window: int = 5, ngram: int = 4, guesses: int = 5) -> None:
        require_at_least(1, window=window, guesses=guesses)
        require_at_least(2, ngram=ngram)
        self.window, self.ngram, self.guesses = window, ngram, guesses
        # the first level and N-2 more of W columns, and G n-grams of N-1
        self.default_shape = BestFirst((window + guesses) * (ngram - 1))

    @classmethod
    def within(cls, num_nodes: int, *, ngram: int = 4) -> Self:
        """As many columns as n-grams, so many that a step reads no more than ``num_nodes`` tokens.

        >>> Lookahead.within(24).default_shape.num_nodes, Lookahead.within(7).default_shape.num_nodes
        (24, 6)
        """
        columns = max(1, num_nodes // (2 * (ngram - 1)))
        return cls(window=columns, ngram=ngram, guesses=columns)

    def start(self) -> "LookaheadSession":
        return LookaheadSession(self)


class LookaheadSession(DraftSession):
    """The windows and pools of one batch."""

    def __init__(self, drafter: Lookahead) -> None:
        self.drafter = drafter
        self._rows: list[_Row] = []

    def propose(self, context: Context, shape: Shape) -> Draft:
        """Each row's own tree; one that is smaller than others is filled up."""
        self.observe(context)
        trees = [row.tree(ids[-1]).nodes for row, ids in zip(self._rows, context.ids, strict=True)]
        width, deepest = max(map(len, trees)), max(depth for tree in trees for _, _, depth in tree)
        packed = [[*tree, *tree[:1] * (width - len(tree))] for tree in trees]
        token_ids, parents, depths = to_device(packed, context.root_ids.device).permute(2, 0, 1).contiguous()
        return Draft(token_ids, parents, depths, ancestors_of(parents, deepest), deepest, reads_all_nodes=True)

    def on_verify(self, draft: Draft, best: Callable[[], Tensor]) -> Tensor:
        """(B, N) the target's most likely token after every node."""
        return best()

    def on_read(self, values: Sequence[Sequence[int]]) -> None:
        for row, outputs in zip(self._rows, values, strict=True):
            row.learn(outputs)

    def observe(self, context: Context) -> None:
        """Notes new rows; a step without a draft changes nothing else."""
        known = len(self._rows)
        for place in range(known, known + context.num_new_rows(known)):
            self._rows.append(_Row(self.drafter, context.ids[place][:-1]))

    def keep(self, rows: Tensor) -> None:
        """Windows and pools move with their rows."""
        self._rows = [self._rows[row] for row in rows.tolist()]
