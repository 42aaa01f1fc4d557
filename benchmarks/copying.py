"""What copying from the text so far costs a step: looking up, choosing nodes, merging.

The last line is one JSON object. Run it with ``OMP_NUM_THREADS=1 python benchmarks/copying.py``.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import tyro
from harness import median_ms

from draftheads.drafters.mixed import NUM_TOKENS, copy_tree
from draftheads.drafters.sources import DEFAULT_COPY_PROBS, MAX_NGRAM, TextIndex, TextSoFar, votes_of
from draftheads.speculation.candidates import Candidates, merged, selected
from draftheads.speculation.shapes import BestFirst


@dataclass(frozen=True)
class Options:
    """What is measured."""

    num_nodes: int = 10
    """Nodes that are chosen."""
    text_length: int = 8_000
    """Tokens of the text."""
    rounds: int = 500
    """Calls of each part; their median counts."""


def candidates(rows: int) -> Candidates:
    """A root, eight tokens below it, and eight below each of six of these."""
    parents = torch.tensor([[0] * 9 + [1 + i // 8 for i in range(48)]]).expand(rows, -1)
    log_probs = -torch.rand(rows, 57)
    log_probs[:, 0] = 0.0
    paths = torch.cat([log_probs[:, :9], log_probs[:, 9:] + log_probs.gather(1, parents[:, 9:])], 1)
    return Candidates(torch.randint(0, 9, (rows, 57)), parents, paths)


def costs(rows: int, options: Options) -> Iterator[tuple[str, float]]:
    """Names and milliseconds for a number of rows."""
    texts = [TextIndex(max_ngram=MAX_NGRAM) for _ in range(rows)]
    words = random.Random(0)  # noqa: S311 - no secret
    ids = [words.randrange(300) for _ in range(options.text_length)]
    for text in texts:
        text.read(ids)
    votes = votes_of(DEFAULT_COPY_PROBS)

    def look_up() -> None:
        for text in texts:
            text.read([5, 9, 7])
            copy_tree(TextSoFar().copies(text, NUM_TOKENS, len(votes)), votes, NUM_TOKENS)

    yield "look up", median_ms(look_up, options.rounds)
    found = candidates(rows)
    choose = partial(selected, found, BestFirst(options.num_nodes), 2)
    yield "choose nodes", median_ms(choose, options.rounds)
    draft, _ = choose()
    chain = Candidates(
        torch.randint(0, 9, (rows, 1 + NUM_TOKENS)),
        torch.tensor([[0, *range(NUM_TOKENS)]]).expand(rows, -1),
        -0.3 * torch.arange(1.0 + NUM_TOKENS).expand(rows, -1),
    )
    yield "merge", median_ms(lambda: merged(draft, chain, BestFirst(options.num_nodes)), options.rounds)


@torch.inference_mode()
def main(options: Options) -> None:
    """All costs for one row and for eight."""
    found = {rows: dict(costs(rows, options)) for rows in (1, 8)}
    for rows, parts in found.items():
        print(f"{rows} rows: " + ", ".join(f"{name} {value:.3f} ms" for name, value in parts.items()))
    print(json.dumps({**vars(options), "milliseconds": found}))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
