"""What a step costs on this machine: milliseconds of all but its drafting by its tokens, and of that by its levels.

Costs belong to a machine, a model and a head's architecture; they do not depend on acceptance. They are measured once,
in about a second, with steps of the decoding loop, and kept in the user's cache.
"""

import hashlib
import json
import logging
import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftheads.cpu.kernels import PackedLinear
from draftheads.cpu.optimise import kernels_of
from draftheads.decode.batch import Batch
from draftheads.decode.request import Request
from draftheads.errors import CacheWarning, CheckpointCorrupt, CheckpointError, InvalidSettings, StorageError
from draftheads.heads.base import DraftHead, HeadSession
from draftheads.models.model import TargetModel
from draftheads.settings import SamplingSettings
from draftheads.speculation.draft import Context, Draft
from draftheads.speculation.drafter import NoDraft
from draftheads.speculation.sampling import RowSettings
from draftheads.speculation.shapes import BestFirst, Shape
from draftheads.speculation.tree import Tree
from draftheads.utils.cache import cache_folder
from draftheads.utils.files import write_atomic
from draftheads.utils.provenance import provenance
from draftheads.utils.strict_json import checked, read_object

logger = logging.getLogger(__name__)
Floats = npt.NDArray[np.float64]
_VERSION = 13
_PASSES = ((1, 1), (1, 2), (1, 4), (1, 8), (1, 12), (1, 24), (1, 64))  # (rows, nodes)
_TEXTS = (4, 2)  # the same of several texts, with as many tokens as one of them
_DRAFTS = ((1, 1), (1, 4), (4, 1), (4, 4))  # (rows, levels)
_SWEEPS, _MOST_SECONDS = 6, 3.0  # how often all is timed, and when that stops; the median counts
_FEW_TOKENS, _REPEATS = 4, 3  # passes of so few tokens are timed so often in a sweep: they decide whether to draft
_SAME = 1.15  # stored costs hold while a pass of several tokens takes up to so many times as many plain passes as then
TEXT_TOKENS = 256  # of each row, about as many as a short answer and its prompt have
STEP_TOKENS = 3  # that a step adds to a row; of several rows the one with the most counts


@dataclass(frozen=True)
class StepCosts:
    """Straight lines between measured points; beyond the last one the line goes on.

    Raises:
        ValueError: no pass of one token, or a number that is not positive.

    >>> costs = StepCosts(((1, 10.0), (11, 20.0)), ((1, 1, 1.0), (1, 3, 2.0)))
    >>> costs.passes([1, 6, 21]).tolist(), costs.draft(1, 3), costs.draft(1, 5), costs.draft(8, 0)
    ([10.0, 15.0, 30.0], 2.0, 3.0, 0.0)
    """

    of_passes: tuple[tuple[int, float], ...]
    """(tokens of all rows, milliseconds) of a step without its drafting: verifying, accepting, committing, texts."""
    of_drafts: tuple[tuple[int, int, float], ...] = ()
    """(rows, levels, milliseconds) of drafting."""
    of_texts: float = 0.0
    """Milliseconds that each text beyond the first adds to a step of as many tokens."""

    def __post_init__(self) -> None:
        if not self.of_passes or self.of_passes[0][0] != 1:
            raise ValueError("costs need the milliseconds of a pass of one token")
        if any(not 0 < number < math.inf for point in (*self.of_passes, *self.of_drafts) for number in point):
            raise ValueError("each number of costs must be above 0")
        if not 0 <= self.of_texts < math.inf:
            raise ValueError(f"of_texts is {self.of_texts}; these costs must be at least 0")

    def passes(self, tokens: npt.ArrayLike, rows: int = 1) -> Floats:
        """Milliseconds of passes of so many tokens, of all rows together."""
        points = np.array(self.of_passes)
        # fewer tokens cost no more: what disturbs a machine only adds
        points[:, 1] = np.minimum.accumulate(points[::-1, 1])[::-1]
        return _on_lines(np.asarray(tokens, dtype=np.float64), points) + (rows - 1) * self.of_texts

    def draft(self, rows: int, levels: int) -> float:
        """Milliseconds of drafting so many levels; the first one may cost more than each further one."""
        if not levels or not self.of_drafts:
            return 0.0
        lines = []
        for number in sorted({of for of, _, _ in self.of_drafts}):
            (first, one), *more = sorted((depth, ms) for of, depth, ms in self.of_drafts if of == number)
            each = max(0.0, more[-1][1] - one) / (more[-1][0] - first) if more else 0.0
            lines.append((number, one + (levels - first) * each))
        return float(_on_lines(np.array(float(rows)), np.array(lines)))


def _on_lines(at: Floats, points: Floats) -> Floats:
    """The values at some places of the lines through points (n, 2); the last line goes on."""
    x, y = points.T
    slope = (y[-1] - y[-2]) / (x[-1] - x[-2]) if len(x) > 1 else 0.0
    found: Floats = np.interp(at, x, y) + np.maximum(0.0, at - x[-1]) * slope
    return found


class _Given(NoDraft):
    """Drafts what it is given."""

    draft: Draft

    def propose(self, context: Context, shape: Shape) -> Draft:
        return self.draft


class StepTimer:
    """Times steps and drafting of rows with some arbitrary text.

    The text is not read: its keys and values are zeros, which take as long as others.

    Args:
        target: the model.
        drafter: its head.
        text_tokens: of each row; half of the positions that the model has, where those are fewer.
        grows: whether the trees of :meth:`levels` grow.
    """

    def __init__(
        self, target: TargetModel, drafter: DraftHead, text_tokens: int = TEXT_TOKENS, *, grows: bool = True
    ) -> None:
        self.target, self.drafter, self.grows = target, drafter, grows
        self.length = min(text_tokens, (target.max_positions or 2 * text_tokens) // 2)
        self.generator = torch.Generator().manual_seed(0)
        self._batches: dict[int, tuple[Batch, _Given]] = {}
        self._sessions: dict[int, HeadSession] = {}

    @property
    def now(self) -> float:
        wait_for(self.target.device)
        return time.perf_counter()

    @torch.inference_mode()
    def verify(self, rows: int, nodes: int) -> float:
        """Milliseconds of a greedy step that has drafted trees of so many nodes."""
        if rows not in self._batches:
            self._batches[rows] = self._batch(rows)
        batch, given = self._batches[rows]
        for row in batch.rows:
            row.length = self.length
        given.draft = Draft.on_tree(typical_tree(nodes, depth=4, top_k=4), self._tokens(rows, nodes))
        with self.target.computing():
            start = self.now
            batch.step()
            return 1e3 * (self.now - start)

    @torch.inference_mode()
    def draft(self, rows: int, shape: Shape) -> float:
        """Milliseconds of drafting a shape."""
        session = self._session(rows)
        return self._milliseconds(rows, partial(session.propose, shape=shape))

    @torch.inference_mode()
    def read(self, rows: int) -> float:
        """Milliseconds of what comes before the first draft token: layers that read the accepted tokens."""
        return self._milliseconds(rows, self._session(rows).root)

    def levels(self, rows: int, depth: int) -> float:
        """Milliseconds of drafting a tree of so many levels."""
        if self.grows:
            return self.draft(rows, BestFirst(2 * depth, max_depth=depth, min_level_probability=None))
        paths = {*typical_tree(2 * depth, depth=depth, top_k=4).paths, *Tree.chain(depth).paths}
        return self.draft(rows, Tree.from_paths(paths))

    def _milliseconds(self, rows: int, act: Callable[[Context], object]) -> float:
        context = self._context(rows, STEP_TOKENS if self.drafter.needs_history else 1)
        if self.target.device.type == "cpu":  # as in decoding, where the target fills the CPU caches
            self.target.logits(self.target.hidden_states(self._tokens(1, 1)))
        with self.target.computing():
            start = self.now
            act(context)
            return 1e3 * (self.now - start)

    def _batch(self, rows: int) -> tuple[Batch, _Given]:
        """Requests that never end, and what drafts for them."""
        target, given = self.target, _Given()
        given.hidden_layers = self.drafter.hidden_layers
        batch = Batch(target, given)
        endless = SamplingSettings(max_new_tokens=1 << 30, ignore_eos=True)
        known: dict[str, Any] = {"tokenizer": target.tokenizer, "eos_ids": target.eos_ids, "max_length": None}
        requests = [Request(ids, endless, **known) for ids in self._tokens(rows, 1).tolist()]
        for request in requests:
            request.row, request.read_ids = batch.runner.open(2), request.prompt_ids
        batch.join(batch.read(dict.fromkeys(requests, 1)))
        return batch, given

    def _session(self, rows: int) -> HeadSession:
        """A session that has read the rows' text, where it reads it at all."""
        if rows not in self._sessions:
            self._sessions[rows] = self.drafter.start()
            length = self.length if self.drafter.needs_history else 1
            self._sessions[rows].propose(self._context(rows, length), Tree.chain(1))
        return self._sessions[rows]

    def _context(self, rows: int, length: int) -> Context:
        device, size = self.target.device, max(1, len(self.drafter.hidden_layers)) * self.target.hidden_size
        hidden = torch.randn(rows, length, size, generator=self.generator).to(device, self.target.dtype)
        counts = torch.full((rows,), length, device=device)
        return Context(hidden, self._tokens(rows, length), counts, self._tokens(rows, 1)[:, 0], self._settings(rows))

    def _settings(self, rows: int) -> RowSettings:
        target = self.target
        return RowSettings.of([SamplingSettings()] * rows, vocab_size=target.vocab_size, device=target.device)

    def _tokens(self, rows: int, nodes: int) -> Tensor:
        return torch.randint(self.target.vocab_size, (rows, nodes), generator=self.generator).to(self.target.device)


def wait_for(device: torch.device) -> None:
    """Returns when an accelerator has done all work of this thread's stream.

    Not that of the whole device: this would fail, and spoil its capture, while another thread captures a step.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def typical_tree(num_nodes: int, *, depth: int, top_k: int) -> Tree:
    """Wide at the top and deep on the left, of at most that many nodes.

    >>> typical_tree(6, depth=3, top_k=3).paths
    ((), (0,), (1,), (0, 0), (0, 1), (0, 0, 0))
    """
    paths = chain.from_iterable(product(range(top_k), repeat=level) for level in range(1, depth + 1))
    return Tree.from_paths(sorted(paths, key=lambda path: (len(path) + sum(path), path))[: num_nodes - 1])


def measure_costs(
    target: TargetModel,
    drafter: DraftHead,
    *,
    timer: Any = None,
    sweeps: int = _SWEEPS,
    with_drafts: bool = True,
    usual: Callable[[Sequence[float]], float] = statistics.median,
) -> StepCosts:
    """Times steps and drafting in several sweeps, so that what disturbs the machine for a moment counts nowhere."""
    timer = StepTimer(target, drafter) if timer is None else timer
    depth = drafter.depth_limit or max(drafter.config.num_heads, 4)
    passes: dict[tuple[int, int], list[float]] = {}  # milliseconds of (rows, nodes), and of (rows, levels)
    drafts: dict[tuple[int, int], list[float]] = {}
    places = [(passes, place) for place in (*_PASSES, _TEXTS)]
    if with_drafts:
        places += [(drafts, (rows, min(levels, depth))) for rows, levels in _DRAFTS]
    start = timer.now
    for _ in range(sweeps):
        for found, place in places:
            measure = timer.verify if found is passes else timer.levels
            if place not in found:
                measure(*place)  # kernels are chosen, and memory is reserved
            repeats = _REPEATS if found is passes and math.prod(place) <= _FEW_TOKENS else 1
            found.setdefault(place, []).extend(max(1e-4, measure(*place)) for _ in range(repeats))
        if timer.now - start > _MOST_SECONDS:
            break
    of_passes = [(nodes, round(usual(passes[1, nodes]), 4)) for _, nodes in _PASSES]
    rows, tokens = _TEXTS[0], math.prod(_TEXTS)
    of_texts = max(0.0, round((usual(passes[_TEXTS]) - usual(passes[1, tokens])) / (rows - 1), 4))
    of_drafts = sorted((*place, round(usual(times), 4)) for place, times in drafts.items())
    return StepCosts(tuple(of_passes), tuple(of_drafts), of_texts)


def read_costs(path: Path) -> StepCosts:
    """The costs in a file of the cache, or of another machine, which may say in ``about`` what was measured where.

    Raises:
        CheckpointCorrupt: not such costs.
        CheckpointMismatch: written by a newer version.
        ModelNotFound: there is no such file.
    """
    fields = {"format_version": int, "of_passes": list, "of_drafts": list}
    raw = read_object(path, newest=_VERSION)
    may_be = {name: kind for name, kind in (("about", str), ("of_texts", float)) if name in raw}
    raw = checked(raw, fields | may_be, path)
    try:
        return StepCosts(
            tuple(map(tuple, raw["of_passes"])), tuple(map(tuple, raw["of_drafts"])), raw.get("of_texts", 0.0)
        )
    except (ValueError, TypeError) as error:
        raise CheckpointCorrupt(f"{path}: {error}") from None


# --- the cache ---


def machine_of(target: TargetModel) -> dict[str, str | int]:
    """What speeds depend on besides the sizes of model and head."""
    known, device = provenance(), target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    place: dict[str, str | int] = {"device": name, "threads": torch.get_num_threads(), "precision": target.precision}
    named = {each: str(known[each]) for each in ("processor", "torch", "transformers", "draftheads")}
    return {**place, "kernels": kernels_of(target.model), **named}


def _key(target: TargetModel, drafter: DraftHead) -> str:
    """A digest of what costs depend on; not of weights."""
    packed = ([each for each in of.modules() if isinstance(each, PackedLinear)] for of in (target.model, drafter))
    names = ({f"{each.out_features}x{each.in_features} {each.product.name}" for each in layers} for layers in packed)
    whole = {
        "version": _VERSION,
        "machine": machine_of(target),
        "model": [target.config.model_type, target.hidden_size, target.vocab_size, target.layer_kinds],
        "layers": [target.layer_sizes, getattr(target.config, "num_local_experts", None)],
        "head": {"method": drafter.config.method, **drafter.config.options()},
        "products": list(map(sorted, names)),
    }
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:24]


def costs_of(target: TargetModel, drafter: DraftHead, *, keep: bool = True) -> StepCosts:
    """The costs in the user's cache; measured now, and kept, where there are none or where they are wrong by now.

    A quick look at each load finds those of a busier or quieter machine: what counts is how many plain passes a pass of
    several tokens takes. Without ``keep`` nothing is written, as other work of this process may slow it down.

    Warns:
        CacheWarning: the cache is damaged or cannot be written. Then they are measured anew.
    """
    path, problems = None, []
    try:
        path = cache_folder() / "costs" / f"{_key(target, drafter)}.json"
        if path.exists():
            stored = read_costs(path)
            if _still_right(stored, target, drafter):
                return stored
    except (CheckpointError, ValueError, OSError) as error:
        problems.append(f"the costs of steps cannot be read: {error}")
    except InvalidSettings as error:
        problems.append(f"the costs of steps are not kept: {error}")
    logger.info("measuring the costs of steps (once per machine, model and head)")
    measured = measure_costs(target, drafter)
    if keep and path is not None:
        try:
            write_atomic(path, (json.dumps({"format_version": _VERSION, **asdict(measured)}) + "\n").encode())
        except StorageError as error:
            problems.append(f"the costs of steps are not kept: {error}")
    if problems:
        warnings.warn("; ".join(problems), CacheWarning, stacklevel=3)
    return measured


def _still_right(stored: StepCosts, target: TargetModel, drafter: DraftHead) -> bool:
    now = measure_costs(target, drafter, sweeps=2, with_drafts=False, usual=min)  # of two, a median is the mean
    tokens = [count for count, _ in now.of_passes]
    ratios = (now.passes(tokens) / now.passes(1)) / (stored.passes(tokens) / stored.passes(1))
    return bool(np.all((ratios < _SAME) & (ratios > 1.0 / _SAME)))
