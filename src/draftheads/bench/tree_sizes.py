"""Static trees of a head by size, decoded and timed in turn; the fastest is kept (Hydra, section 4, figures 7 to 9).

Also of a head that nobody has trained: its drafting takes the time that an untrained head takes, and its draft tokens
are right as often as somebody says.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, cycle, groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftheads.bench.contenders import Contender
from draftheads.bench.rounds import Bench
from draftheads.bench.settings import BenchSettings
from draftheads.bench.table import Column, Row
from draftheads.bench.timing import spread
from draftheads.checkpoints.checkpoint import resolve_head, save_head
from draftheads.decode.engine import Engine
from draftheads.decode.planner import Planner, rates
from draftheads.decode.step_costs import Floats, StepCosts, StepTimer, machine_of, measure_costs
from draftheads.drafters.mixed import Mixed
from draftheads.heads.base import DraftHead
from draftheads.loading import engine_on, load_target
from draftheads.search.replay import Answer
from draftheads.settings import Precision
from draftheads.speculation.acceptance_profile import AcceptanceProfile
from draftheads.speculation.draft import Context, Draft
from draftheads.speculation.drafter import Drafter, DraftSession
from draftheads.speculation.shapes import Drafting, Shape
from draftheads.speculation.tree import Tree
from draftheads.train.new_head import unfitted_head
from draftheads.train.options import TrainOptions
from draftheads.utils.progress import Progress
from draftheads.utils.provenance import identity_digest

_SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # nodes of the trees that are timed before the largest of the profile
_FEWEST, _PER_ROW = 16, 12  # prompts, so three groups of four prompts for each row
_NEW_TOKENS = 64  # of an answer
# of the table of a batch size; speeds are without the reading of prompts
COLUMNS = (
    Column("num_nodes", "nodes", ".0f"),
    Column("predicted_tokens_per_step", "tokens/step, predicted"),
    Column("tokens_per_step", "tokens/step, measured"),
    Column("predicted_tokens_per_second", "tokens/s, predicted", ".1f"),
    Column("decode_tokens_per_second", "tokens/s, measured", ".1f"),
    Column("predicted_speedup", "× plain, predicted"),
    Column("decode_speedup", "× plain, measured"),
)


def time_trees(
    engine: Engine,
    batch_sizes: Sequence[int],
    prompts: Sequence[list[int]],
    *,
    folder: Path,
    progress: Progress,
    drafter: Drafter | None = None,
) -> tuple[dict[int, list[Row]], list[dict[str, Any]]]:
    """The head decodes with nested trees of up to 11 sizes, without copies, in turn with plain decoding.

    Speeds are predicted by costs that are measured just before and just after, since machines change their speed within
    minutes; with texts as long as the answers are halfway. The mean of both predictions counts.

    Args:
        engine: the model with the head and its profile, as :func:`draftheads.search.tune.tune_head` returns it.
        batch_sizes: prompts that are decoded together; each is measured, and given once.
        prompts: token ids. 16 of them are answered, or 12 for each prompt of the largest batch; spread over all.
        folder: finished answers are saved there until all are, so that a run that was stopped continues.
        progress: receives what is done.
        drafter: what drafts; the engine's where left out.

    Returns:
        By batch size a row for each tree, that of one node (plain decoding) first; its numbers have the predicted
        ones, too. Then what was not measured, and why; nothing is, where no draft token was accepted.
    """
    profile, target = engine.profile, engine.model
    own = engine.drafter.drafter if isinstance(engine.drafter, Mixed) else engine.drafter
    assert profile is not None
    assert isinstance(own, DraftHead)
    drafter = drafter or own
    if len(profile.static_tokens) == 1:
        problem = "no tree is timed: no draft token of the head was accepted, so it has no static tree"
        return {}, [{"question": None, "turn": 0, "problem": f"{problem}; train it on text like these prompts"}]
    sizes = (*(size for size in _SIZES if size < len(profile.static_tokens)), len(profile.static_tokens))
    settings = BenchSettings(("static",), sizes, tuple(batch_sizes), (profile.temperature,), max_new_tokens=_NEW_TOKENS)
    model = [target.model_id, target.weights_fingerprint, machine_of(target)]
    identity = identity_digest([*model, drafter.name, profile.to_json()])
    head, asked = Contender("head", drafter, identity), spread(prompts, max(_FEWEST, _PER_ROW * max(batch_sizes)))
    bench = Bench(target, [head], asked, [], settings, folder=folder / identity, progress=progress)
    bench.trees.profile = profile
    length = round(statistics.median(map(len, asked))) + _NEW_TOKENS // 2

    def planner() -> Planner:
        return Planner(profile, measure_costs(target, own, timer=StepTimer(target, own, length, grows=False)))

    before, rows = planner(), [*bench.run()]
    planners = (before, planner())
    way = max((way for way in before.ways if way.kind == "static"), key=lambda way: way.depth)
    batches = {}
    for size, of_size in groupby(rows, key=lambda row: int(row.settings["batch_size"])):
        speeds = 1e3 * np.mean([rates([way], size, *each.costs_now(size))[0] for each in planners], 0)
        batches[size] = [_with_predicted(row, profile.static_tokens, speeds) for row in of_size]
    for path in bench.saved:
        path.unlink(missing_ok=True)
    return batches, bench.problems


def _with_predicted(row: Row, tokens: Sequence[float], speeds: Floats) -> Row:
    """The row of a tree, with what is predicted; ``tokens`` and ``speeds`` are those of 1, 2, … nodes."""
    nodes = row.settings.get("num_nodes") or 1
    speed = float(speeds[nodes - 1])
    added = {"num_nodes": nodes, "predicted_tokens_per_second": speed, "predicted_speedup": speed / float(speeds[0])}
    return replace(row, predicted_tokens_per_step=tokens[nodes - 1], numbers={**row.numbers, **added})


def fastest_tree(rows: Sequence[Row], number: str = "decode_tokens_per_second") -> tuple[int, Row]:
    """Of one batch size the tree with the most tokens per second: its nodes and its row."""
    best = max(rows, key=lambda row: float(row.number(number)))
    return int(best.numbers["num_nodes"]), best


# --- a head that nobody has trained ---


def forecast(profile: AcceptanceProfile, costs: StepCosts) -> list[Row]:
    """A row for each size of tree of one request, with what is predicted; that of one node is plain decoding."""
    planner = Planner(profile, costs)
    way = max((way for way in planner.ways if way.kind == "static"), key=lambda way: way.depth)
    (speeds,) = rates([way], 1, *planner.costs_now(1))
    plain = Row(name="predicted", tokens_per_step=1.0, tokens_per_second=1.0, speedup=1.0)
    return [
        _with_predicted(replace(plain, settings={"num_nodes": size}), profile.static_tokens, 1e3 * speeds)
        for size in (1, *_SIZES, 64)
        if size <= len(speeds)
    ]


def synthetic_engine(
    model: str, method: str, profile: AcceptanceProfile, folder: Path, precision: Precision = "auto"
) -> Engine:
    """A model with an untrained head of a method, sized as training makes it, and the costs of both on this machine.

    Args:
        model: a name, a folder or a Hugging Face id.
        method: such as ``hydra``.
        profile: what the head's trees gain.
        folder: where the head is written.
        precision: as for :func:`draftheads.load`.

    Raises:
        InvalidSettings: no such method, or heads of it that draft no trees by a profile.
    """
    needed = {"out": folder, "data": (folder,)}  # nothing is read of it
    options = TrainOptions.of(method=method, num_heads=profile.depth, **needed)
    target = load_target(model, precision=precision)
    save_head(unfitted_head(options, target), folder, base=target, profile=profile)
    return engine_on(target, resolve_head(folder, model), Drafting(str(folder), copy=False), max_batch_size=1)


class Synthetic(Drafter):
    """Draft tokens that are right as often as a profile says; the tokens of answers that are known.

    Args:
        head: drafts, too, so that its time is spent; its tokens are not used.
        rates: per depth, as for :meth:`AcceptanceProfile.of_rates`.
        answers: greedy ones. Texts that begin otherwise get wrong draft tokens.
    """

    needs_history = True

    def __init__(self, head: DraftHead, rates: Sequence[float], answers: Sequence[Answer]) -> None:
        self.head, self.rates, self.vocab_size = head, rates, head.config.vocab_size
        self.answers = {answer.prompt_ids: answer.token_ids for answer in answers}
        self.hidden_layers, self.reads_whole_text = head.hidden_layers, head.reads_whole_text
        self.max_depth, self.steps = len(rates), count(1)  # of all rows and answers
        self.ratio = 2.0  # g^(D+1) = g + 1, the golden ratio where D is 1
        for _ in range(50):
            self.ratio = (1.0 + self.ratio) ** (1.0 / (len(rates) + 1))

    @property
    def name(self) -> str:
        return f"synthetic-{'-'.join(map(str, self.rates))}"

    @property
    def bytes_per_slot(self) -> int:
        return self.head.bytes_per_slot

    def start(self) -> "SyntheticSession":
        return SyntheticSession(self)


class SyntheticSession(DraftSession):
    """What is left of each row's answer.

    At step n the numbers in 0 … 1 that decide are n g^-1, n g^-2, … without their whole parts, one for each depth.
    They fill the cube more evenly than random numbers do, so that few steps are as many draws.
    """

    def __init__(self, drafter: Synthetic) -> None:
        self.drafter, self.session = drafter, drafter.head.start()
        self.left: list[Sequence[int]] = []

    def propose(self, context: Context, shape: Shape) -> Draft:
        """The head's draft on a static tree, with other tokens."""
        assert isinstance(shape, Tree)
        drafted = self.session.propose(context, shape)
        self._advance(context)
        root_ids = drafted.token_ids[:, :1]
        tokens = [self._tokens(shape, left) for left in self.left]
        return replace(drafted, token_ids=torch.cat([root_ids, torch.tensor(tokens, device=root_ids.device)], 1))

    def _tokens(self, tree: Tree, left: Sequence[int]) -> list[int]:
        """Of all nodes but the root; wrong ones are not those that are due."""
        number = next(self.drafter.steps)
        right: dict[tuple[int, ...], int] = {}
        path: tuple[int, ...] = ()
        for depth, (rate, token) in enumerate(zip(self.drafter.rates, left, strict=False)):
            chance = number * self.drafter.ratio ** -(depth + 1) % 1.0
            path = (*path, 0 if chance < rate else int(math.log1p(-chance) / math.log1p(-rate)))
            right[path] = token
        due = set(right.values())
        wrong = cycle(each for each in range(self.drafter.vocab_size) if each not in due)
        return [right.get(path, other) for path, other in zip(tree.paths[1:], wrong, strict=False)]

    def observe(self, context: Context) -> None:
        self.session.observe(context)
        self._advance(context)

    def _advance(self, context: Context) -> None:
        """What is left behind each row's root; the rows that have joined bring their prompts."""
        known = len(self.left)
        for row, ids in enumerate(context.ids):
            if row < known:
                self.left[row] = self.left[row][len(ids) - 1 :]
            else:
                self.left.append(self.drafter.answers.get(tuple(ids[:-1]), ())[1:])

    def keep(self, rows: Tensor) -> None:
        self.session.keep(rows)
        self.left = [self.left[row] for row in rows.tolist()]
