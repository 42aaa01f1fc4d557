"""Times the parts of a decoding step for cost profiles. It is not used while requests are decoded."""

import time
from collections.abc import Callable
from functools import partial
from itertools import chain, product

import torch
from torch import Tensor

from draftheads.heads.base import DraftHead, HeadSession
from draftheads.models.model import TargetModel
from draftheads.runners import bytes_per_slot, runner_for
from draftheads.runners.runner import Row, Runner
from draftheads.settings import SamplingSettings
from draftheads.speculation.accept import accept
from draftheads.speculation.draft import Context, Draft
from draftheads.speculation.sampling import RowSettings, most_likely
from draftheads.speculation.shapes import BestFirst, Shape
from draftheads.speculation.tree import Tree

TEXT_TOKENS = 256  # tokens of each row, about as many as a short answer and its prompt have
LONG_TEXT_TOKENS = 1024  # the same where the cost of a longer text is measured
_DEPTH = 5  # of static trees, and of trees of heads without a limit; further levels cost as much as these
STEP_TOKENS = 3  # that a step adds to a row; of several rows the one with the most counts


def wait_for(device: torch.device) -> None:
    """Returns when an accelerator has done all work of this thread's stream.

    Not that of the whole device: this would fail, and spoil its capture, while another thread captures a step.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class StepTimer:
    """Times verifying and drafting of rows with about 256 tokens of arbitrary text.

    The text is not read: its keys and values are zeros, which take as long as others.
    """

    def __init__(self, target: TargetModel, drafter: DraftHead) -> None:
        self.target, self.drafter = target, drafter
        self.length = min(TEXT_TOKENS, (target.max_positions or 4 * TEXT_TOKENS) // 2)
        self.long_text_tokens = min(LONG_TEXT_TOKENS, (target.max_positions or 2 * LONG_TEXT_TOKENS) // 2)
        self.bytes_per_token = 0  # of keys and values, known after the first verification
        self.generator = torch.Generator().manual_seed(0)
        self._targets: dict[tuple[int, int], tuple[Runner, list[Row]]] = {}  # by rows and their length; one at a time
        self._drafters: dict[int, HeadSession] = {}
        self.depth = drafter.depth_limit or max(drafter.config.num_heads, _DEPTH)  # of the deepest trees
        self._captured: set[int] = set()  # nodes of steps that have been captured

    @property
    def now(self) -> float:
        wait_for(self.target.device)
        return time.perf_counter()

    @torch.inference_mode()
    def milliseconds(self, part: str, rows: int, nodes: int, *, text_tokens: int | None = None) -> float:
        """Of one part of a step: ``verify``, ``follow``, or drafting a ``static`` or ``dynamic`` tree.

        ``text_tokens`` is the length of each row when it is verified; ``length`` when left out.
        """
        with self.target.computing():
            if part != "verify":
                return 1e3 * self._draft(part, rows, nodes)
            return 1e3 * self._verify(rows, nodes, text_tokens or self.length)

    def _verify(self, rows: int, nodes: int, text_tokens: int) -> float:
        """Verifying, accepting and committing, where two draft tokens are accepted if the tree has as many."""
        self._target(rows, text_tokens)  # new rows have captured nothing
        if self.target.has_static_steps and nodes not in self._captured:
            self._captured.add(nodes)
            for _ in range(2):  # the second time captures
                self._verify_once(rows, nodes, text_tokens)
        return self._verify_once(rows, nodes, text_tokens)

    def _verify_once(self, rows: int, nodes: int, text_tokens: int) -> float:
        runner, texts = self._target(rows, text_tokens)
        settings = self._settings(rows)
        # where trees may have sizes of their own, they do: some are half as large, and others half as large again
        spread = nodes // 2 if rows > 1 and self.target.takes_flat_tokens else 0
        tree = typical_tree(nodes + spread, depth=4, top_k=4)
        draft = Draft.on_tree(tree, self._tokens(rows, tree.num_nodes))
        if spread:
            draft = draft.cut([nodes - spread, tree.num_nodes] * (rows // 2) + [nodes] * (rows % 2))
        uniforms = torch.zeros(rows, draft.max_depth + 1, dtype=torch.float64, device=self.target.device)
        start = self.now
        logits, _ = runner.verify(texts, draft)
        seconds = self.now - start
        for path in ((0,), (0, 0)):
            if path in tree.paths:
                above = tree.paths.index(path[:-1])
                draft.token_ids[:, tree.paths.index(path)] = most_likely(logits[:, above])
        start = self.now
        verdict = accept(draft, logits, settings, uniforms, None)
        runner.commit(texts, verdict, verdict.num_accepted.tolist())
        seconds += self.now - start
        for row in texts:
            row.length = text_tokens
        return seconds

    def _draft(self, part: str, rows: int, nodes: int) -> float:
        return 1e-3 * self.draft_milliseconds(rows, None if part == "follow" else self._shape(part, nodes))

    @torch.inference_mode()
    def draft_milliseconds(self, rows: int, shape: Shape | None) -> float:
        """Of drafting a shape; of None, of reading accepted tokens without drafting."""
        drafter = self._drafter(rows)
        return self._milliseconds(rows, drafter.observe if shape is None else partial(drafter.propose, shape=shape))

    @torch.inference_mode()
    def read_milliseconds(self, rows: int) -> float:
        """Of what comes before the first draft token: layers that read the accepted tokens."""
        return self._milliseconds(rows, self._drafter(rows).root)

    def _milliseconds(self, rows: int, act: Callable[[Context], object]) -> float:
        context = self._context(rows, STEP_TOKENS if self.drafter.needs_history else 1)
        if self.target.device.type == "cpu":  # as in decoding, where the target fills the CPU caches
            self.target.logits(self.target.hidden_states(self._tokens(1, 1)))
        start = self.now
        act(context)
        return 1e3 * (self.now - start)

    def depth_of(self, part: str, nodes: int) -> int | None:
        """How many levels the tree of a part has; None for parts without one."""
        if part not in ("static", "dynamic"):
            return None
        shape = self._shape(part, nodes)
        return shape.max_depth if isinstance(shape, Tree) else min(self.depth, nodes - 1)

    def _shape(self, part: str, nodes: int) -> Shape:
        """A tree such as heads draft on, whatever this one's accuracy."""
        if part == "dynamic":
            return BestFirst(nodes, max_depth=self.depth, min_level_probability=None)  # costs are of whole levels
        top_k = min(self.drafter.config.num_draft_tokens, 4)
        return typical_tree(nodes, depth=min(self.depth, _DEPTH), top_k=top_k)

    def _target(self, rows: int, text_tokens: int) -> tuple[Runner, list[Row]]:
        """Rows with a text of that length, whose keys and values are zeros."""
        if (rows, text_tokens) not in self._targets:
            self._targets.clear()
            self._captured.clear()
            runner = runner_for(self.target, self.drafter.hidden_layers)
            texts, _, _ = runner.prefill(self._tokens(rows, 1).tolist())
            for row in texts:
                row.length = text_tokens
            self.bytes_per_token = bytes_per_slot(self.target)
            self._targets[rows, text_tokens] = runner, texts
        return self._targets[rows, text_tokens]

    def _drafter(self, rows: int) -> HeadSession:
        """A drafter that has read the rows' text, where it reads it at all."""
        if rows not in self._drafters:
            self._drafters.clear()
            self._drafters[rows] = self.drafter.start()
            # not by following, after which a head may have put the text aside
            self._drafters[rows].propose(
                self._context(rows, self.length if self.drafter.needs_history else 1), self._shape("static", 2)
            )
        return self._drafters[rows]

    def _context(self, rows: int, length: int) -> Context:
        device = self.target.device
        dtype = self.target.dtype
        size = max(1, len(self.drafter.hidden_layers)) * self.target.hidden_size
        hidden = torch.randn(rows, length, size, generator=self.generator).to(device, dtype)
        counts = torch.full((rows,), length, device=device)
        return Context(hidden, self._tokens(rows, length), counts, self._tokens(rows, 1)[:, 0], self._settings(rows))

    def _settings(self, rows: int) -> RowSettings:
        target = self.target
        return RowSettings.of([SamplingSettings()] * rows, vocab_size=target.vocab_size, device=target.device)

    def _tokens(self, rows: int, nodes: int) -> Tensor:
        tokens = torch.randint(self.target.vocab_size, (rows, nodes), generator=self.generator)
        return tokens.to(self.target.device)


def typical_tree(num_nodes: int, *, depth: int, top_k: int) -> Tree:
    """Wide at the top and deep on the left, of at most that many nodes.

    >>> typical_tree(6, depth=3, top_k=3).paths
    ((), (0,), (1,), (0, 0), (0, 1), (0, 0, 0))
    """
    paths = chain.from_iterable(product(range(top_k), repeat=level) for level in range(1, depth + 1))
    return Tree.from_paths(sorted(paths, key=lambda path: (len(path) + sum(path), path))[: num_nodes - 1])
