"""A simulated machine for the pace: steps whose cost is known, guesses whose worth is known, no real time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch

from draftheads.decode.pace import Pace
from draftheads.draft import Context, Draft
from draftheads.growth import BestFirst, Shape
from draftheads.plan import Choice, Conditions, Cost, Kind, Tuned
from draftheads.search.grow import marginal_order
from draftheads.tree import Tree

# how often each head's guess of rank 0, 1, … is right
ACCURACY = [[0.55, 0.14, 0.07, 0.04], [0.5, 0.14, 0.07, 0.04], [0.45, 0.12, 0.06, 0.03], [0.4, 0.1, 0.05, 0.02]]
PATHS = marginal_order(ACCURACY, 40)
BATCH_SIZES = (1, 2, 4, 8, 16)
SIZES = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 40)
CONDITIONS = Conditions("a processor", "cpu", 2, "float32", "fast", "2.9", "5.10", "0.1.0", "0123456789abcdef")


def gains(accuracy: Sequence[Sequence[float]] = ACCURACY) -> list[float]:
    """Expected guesses kept of trees of 1, 2, … nodes."""
    worth = [0.0]
    for path in PATHS:
        worth.append(worth[-1] + float(np.prod([accuracy[depth][rank] for depth, rank in enumerate(path)])))
    return worth


def seconds(batch: int, nodes: int) -> float:
    """A machine that is bound by memory at first, and then by arithmetic; guessing costs a little, too."""
    return 0.028 + 0.0025 * batch * nodes + (0.003 + 0.0002 * batch if nodes > 1 else 0.0)


def tuned(
    cost: Callable[[int, int], float] = seconds,
    worth: Sequence[float] | None = None,
    *,
    kind: Kind = "static",
    paths: Sequence[Sequence[int]] = PATHS,
) -> Tuned:
    """What tuning finds on that machine."""
    expected = [1.0 + gain for gain in (gains() if worth is None else worth)]
    choices = []
    for batch in BATCH_SIZES:
        rates = {nodes: batch * expected[nodes - 1] / cost(batch, nodes) for nodes in (1, *SIZES)}
        best = max(rates, key=lambda nodes: rates[nodes])
        choices.append(Choice(batch, kind if best > 1 else "none", best, rates[best], rates[best] / rates[1]))
    return Tuned(
        command="draftheads tune model head",
        conditions=CONDITIONS,
        temperature=0.0,
        confidence=[1.0] * 4,
        paths=[list(path) for path in paths],
        static_tokens=expected,
        dynamic_tokens=expected if kind == "dynamic" else [],
        num_ranks=4,
        beam=4,
        costs=[
            Cost(batch, "none" if nodes == 1 else kind, nodes, 0.0, cost(batch, nodes), 0.0)
            for batch in BATCH_SIZES
            for nodes in (1, *SIZES)
        ],
        choices=choices,
    )


class Scripted:
    """A drafter whose tokens mean nothing; it keeps what it was asked for."""

    needs_history = False

    def __init__(self, sure: Callable[[int], Sequence[float]] = lambda row: [0.5]) -> None:
        self.shape: Shape = Tree.chain(0)
        self.sure = sure  # of a row: probabilities of a growing tree's paths, root left out, falling
        self.shapes: list[Shape | None] = []  # per step; None where it was told to follow
        self.kept: list[list[int]] = []

    def fresh(self) -> Self:
        return self

    def propose(self, context: Context) -> Draft:
        self.shapes.append(self.shape)
        batch = len(context.root_ids)
        if isinstance(self.shape, Tree):
            return Draft.on_tree(self.shape, torch.zeros(batch, self.shape.num_nodes, dtype=torch.long))
        assert isinstance(self.shape, BestFirst)
        nodes = self.shape.num_nodes
        rows = torch.tensor([[1.0, *self.sure(row)][:nodes] for row in range(batch)])
        draft = Draft.on_tree(Tree.chain(rows.shape[1] - 1), torch.zeros(rows.shape, dtype=torch.long))
        return Draft(**{**vars(draft), "path_log_probs": rows.log()})

    def follow(self, context: Context) -> None:
        self.shapes.append(None)

    def keep(self, rows: torch.Tensor) -> None:
        self.kept.append(rows.tolist())


def context(batch: int) -> Context:
    zeros = torch.zeros(batch, 1, dtype=torch.long)
    return Context(torch.zeros(batch, 1, 1), zeros, torch.ones(batch, dtype=torch.long), zeros[:, 0])


def step(pace: Pace, batch: int, kept: Callable[[int, int], int], cost: Callable[[int, int], float] = seconds) -> int:
    """One step; how many nodes it checked. ``kept`` says of a row and a number of nodes how many guesses hold."""
    nodes = pace.propose(context(batch)).num_nodes
    pace.note([kept(row, nodes) for row in range(batch)], cost(batch, nodes))
    return nodes


@dataclass
class Load:
    """Requests that come and go on a simulated machine.

    A guess is right as often as the accuracies say, times ``quality``; of one request that is fixed.
    """

    pace: Pace
    cost: Callable[[int, int], float] = seconds
    quality: Callable[[int], float] = lambda request: 1.0
    num_tokens: int = 80  # of an answer
    noise: float = 0.05
    seed: int = 0
    rows: list[list[float]] = field(default_factory=list)  # tokens to go and quality of each
    num_requests: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.sets = [set(map(tuple, PATHS[: nodes - 1])) for nodes in range(1, len(PATHS) + 2)]
        self.worth = gains()
        self.bounds = [np.cumsum(row) for row in ACCURACY]

    def phase(self, batch: int, tokens: int) -> float:
        """Tokens per second of a phase with that many rows at work."""
        done, spent = 0.0, 0.0
        del self.rows[batch:]
        self.pace.keep(torch.arange(min(batch, len(self.pace._rows))))
        while done < tokens:
            while len(self.rows) < batch:
                self.rows.append([self.num_tokens * (0.5 + self.random.random()), self.quality(self.num_requests)])
                self.num_requests += 1
            nodes = self.pace.propose(context(batch)).num_nodes
            kept = [self._kept(quality, nodes) for _, quality in self.rows]
            time = self.cost(batch, nodes) * float(np.exp(self.noise * self.random.standard_normal()))
            self.pace.note(kept, time)
            spent += self.cost(batch, nodes)  # what is expected, not what chance made of it: fewer steps tell as much
            done += sum(1 + quality * self.worth[nodes - 1] for _, quality in self.rows)
            for row, count in zip(self.rows, kept, strict=True):
                row[0] -= 1 + count
            going = [row for row, (left, _) in enumerate(self.rows) if left > 0]
            if len(going) < batch:
                self.rows = [self.rows[row] for row in going]
                self.pace.keep(torch.tensor(going, dtype=torch.long))
        return done / spent

    def _kept(self, quality: float, nodes: int) -> int:
        if nodes == 1 or self.random.random() >= quality:
            return 0
        ranks = [
            int(bound.searchsorted(value)) for bound, value in zip(self.bounds, self.random.random(4), strict=True)
        ]
        kept = 0
        while kept < 4 and tuple(ranks[: kept + 1]) in self.sets[nodes - 1]:
            kept += 1
        return kept


def best_fixed(batch: int, cost: Callable[[int, int], float], quality: float) -> tuple[float, float]:
    """Tokens per second of the best tree that is held fast, and of plain decoding."""
    worth = gains()
    rates = [batch * (1 + quality * worth[n - 1]) / cost(batch, n) for n in range(1, len(worth) + 1)]
    return max(rates), rates[0]
