"""Drafters side by side under one engine: tokens per step on all prompts, speed and cost of drafting on some of them.

Each head drafts on the tree of a given number of nodes that serves it best, which is found on other prompts. Tokens per
step do not depend on the clock: they are counted with several prompts at a time, all prompts. Speeds are taken with one
prompt at a time, the drafters by turns.
"""

import hashlib
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from draftheads.bench.stopwatch import Stopwatch
from draftheads.decode.batch import Batch
from draftheads.decode.engine import Engine, Prompt
from draftheads.decode.plain import NoDraft
from draftheads.decode.step_timer import wait_for
from draftheads.draft import Drafter
from draftheads.drafters.draft_model import DraftModel
from draftheads.errors import DataError, InvalidSettings
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.progress import Progress, counted_stage
from draftheads.sampling import SamplingSettings
from draftheads.search.calibrate import Answer
from draftheads.search.replay import Rehearsal, RehearsalSettings, encoded, own_answers
from draftheads.search.workbook import Workbook
from draftheads.shapes import BestFirst, BestPaths, Sampled, Shape
from draftheads.tree import Tree

PLAIN = "plain"
LEAST_PROMPTS = 3  # for an error
_WARM_UP = 5  # tokens of an answer that is not timed
_SEED = 1 << 30  # of the first sampled answer
# code that has no part in what is counted
_OTHER_ROOMS = ("cli", "data", "distill", "train", "zoo")
_OF_PAGES = ("page.py", "pictures.py")


@dataclass(frozen=True)
class BenchSettings:
    """What is compared, and on how much."""

    num_nodes: int = 24
    """Nodes of every head's tree, root included."""
    max_new_tokens: int = 128
    """Tokens of each answer."""
    temperature: float = 0.7
    """Tokens per step are counted at this temperature, too, with exact and with typical acceptance; 0 for not."""
    num_speed_prompts: int = 16
    """How many of the prompts are timed, spread over all of them."""
    num_sampled_prompts: int = 40
    """How many of the prompts are answered at the temperature, spread over all of them."""
    batch_size: int = 8
    """How many prompts are answered at a time where tokens per step are counted."""
    num_calibration_prompts: int = 64
    """How many of our own prompts the trees are found on."""

    def __post_init__(self) -> None:
        for name, least in (
            ("num_nodes", 2),
            ("max_new_tokens", 2),
            ("num_speed_prompts", 3),
            ("num_sampled_prompts", 3),
            ("batch_size", 1),
            ("num_calibration_prompts", 2),
        ):
            if getattr(self, name) < least:
                raise InvalidSettings(f"{name} is {getattr(self, name)}; it must be at least {least}")
        SamplingSettings(temperature=self.temperature)  # says what is wrong with it

    @property
    def rehearsal(self) -> RehearsalSettings:
        """Of the search for trees."""
        return RehearsalSettings(
            num_prompts=self.num_calibration_prompts, max_new_tokens=self.max_new_tokens, max_nodes=self.num_nodes
        )


@dataclass(frozen=True)
class Contender:
    """Something that drafts, by the name it has in the table."""

    name: str
    drafter: Drafter
    identity: str  # other weights, or another drafter or way of drafting, have another one
    shape: Shape | None = None  # what it always drafts; a head without one gets the tree that is found for it

    @property
    def num_parameters(self) -> int:
        """What it has of its own."""
        drafter = self.drafter
        model = drafter.model.model if isinstance(drafter, DraftModel) else drafter
        return sum(tensor.numel() for tensor in model.parameters()) if isinstance(model, nn.Module) else 0


Share = tuple[float, float]  # something, and what it is divided by


@dataclass(frozen=True)
class Counted:
    """Tokens behind the first one, and steps, of each prompt's answer."""

    tokens: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def tokens_per_step(self) -> float:
        """Of all answers together; 1 where they all ended before a step."""
        return sum(self.tokens) / sum(self.steps) if sum(self.steps) else 1.0

    @property
    def error(self) -> float:
        """One standard error of that, prompts taken as independent (ratio estimator)."""
        ratio, count = self.tokens_per_step, len(self.steps)
        squares = sum((token - ratio * step) ** 2 for token, step in zip(self.tokens, self.steps, strict=True))
        return float((squares * count / max(1, count - 1)) ** 0.5 / max(1, sum(self.steps)))

    def over(self, other: "Counted") -> tuple[float, float]:
        """The ratio of tokens per step to another drafter's on the same prompts, and one standard error (jackknife)."""
        return ratio_with_error(
            list(zip(self.tokens, self.steps, strict=True)), list(zip(other.tokens, other.steps, strict=True))
        )


def ratio_with_error(own: Sequence[Share], others: Sequence[Share]) -> tuple[float, float]:
    """(Σ a / Σ b) / (Σ c / Σ d) of pairs (a, b) and (c, d) of the same prompts, and one standard error (jackknife)."""

    def ratio(left_out: int | None) -> float:
        sums = [
            math.fsum(share[part] for i, share in enumerate(shares) if i != left_out)
            for shares in (own, others)
            for part in (0, 1)
        ]
        over, under = ((above / below if below else 1.0) for above, below in (sums[:2], sums[2:]))
        return over / under

    count = len(own)
    without = [ratio(i) for i in range(count)]
    mean = statistics.fmean(without)
    return ratio(None), ((count - 1) / count * math.fsum((one - mean) ** 2 for one in without)) ** 0.5


@dataclass(frozen=True)
class BenchRow:
    """A drafter in the table."""

    name: str
    num_parameters: int
    tree: str  # what it drafts on, in words
    tokens_per_step: float
    tokens_per_step_error: float
    over_first: float  # tokens per step over those of the first drafter in the table
    over_first_error: float
    tokens_per_second: float
    speedup: float  # over plain decoding
    speedup_error: float  # one standard error, from prompt to prompt
    draft_milliseconds: float  # of a step
    step_milliseconds: float
    predicted_tokens_per_step: float | None  # by the search for its tree, on other prompts
    sampled_tokens_per_step: float | None  # at the temperature, exact acceptance
    sampled_error: float | None
    typical_tokens_per_step: float | None  # the same, typical acceptance
    typical_error: float | None
    num_different: int  # greedy answers that are not plain decoding's: near-ties where a kernel rounds by size


def check_names(names: Sequence[str]) -> None:
    """Each drafter needs a name of its own.

    Raises:
        InvalidSettings: two have the same, or one is called as plain decoding is.
    """
    if len({PLAIN, *names}) <= len(names):
        raise InvalidSettings(f"drafters are {', '.join(names)}: each needs a name of its own, not {PLAIN!r}")


class Bench:
    """A comparison of drafters for one model.

    What it finds on the way is kept, so that one that was stopped goes on; tokens per step are kept for good, and are
    not counted again when another drafter joins.

    Args:
        target: the model.
        contenders: each with a name of its own; the first is what others' tokens per step are compared with.
        prompts: to answer.
        calibration: other prompts, to find trees on.
        settings: what is compared.
        book: for findings.
        progress: is told how far the work is.
    """

    def __init__(
        self,
        target: TargetModel,
        contenders: Sequence[Contender],
        prompts: Sequence[Prompt],
        calibration: Sequence[Prompt],
        settings: BenchSettings,
        *,
        book: Workbook,
        progress: Progress,
    ) -> None:
        check_names([contender.name for contender in contenders])
        self.target, self.contenders, self.settings = target, contenders, settings
        self.book, self.progress = book, progress
        self._shapes: dict[str, Shape] = {}  # what each drafts on, by its name
        engine = Engine(target)
        self.prompts = [engine.encode(prompt) for prompt in prompts]
        if len(self.prompts) < LEAST_PROMPTS:
            raise DataError(f"{len(self.prompts)} prompts to answer: give at least {LEAST_PROMPTS}, better 80")
        self.calibration = encoded(target, calibration, settings.rehearsal)

    def run(self) -> list[BenchRow]:
        """The table, a row for each drafter."""
        found = {contender.name: self._prepare(contender) for contender in self.contenders}
        greedy = {contender.name: self._count(contender, "greedy", self.prompts) for contender in self.contenders}
        _, texts = self._count(Contender(PLAIN, NoDraft(), PLAIN), "greedy", self.prompts)
        sampled = {contender.name: self._sampled(contender, "exact") for contender in self.contenders}
        typical = {contender.name: self._sampled(contender, "typical") for contender in self.contenders}
        timed = self._timed()
        plain = timed[PLAIN]
        rows = []
        for contender in self.contenders:
            name = contender.name
            counted, own = greedy[name][0], timed[name]
            steps = max(1.0, sum(one.steps for one in own))
            speedup, speedup_error = ratio_with_error([one.share for one in own], [one.share for one in plain])
            over, over_error = counted.over(greedy[self.contenders[0].name][0])
            rows.append(
                BenchRow(
                    name=name,
                    num_parameters=contender.num_parameters,
                    tree=found[name]["words"],
                    tokens_per_step=counted.tokens_per_step,
                    tokens_per_step_error=counted.error,
                    over_first=over,
                    over_first_error=over_error,
                    tokens_per_second=_speed(own),
                    speedup=speedup,
                    speedup_error=speedup_error,
                    draft_milliseconds=1e3 * sum(one.draft_seconds for one in own) / steps,
                    step_milliseconds=1e3 * sum(one.step_seconds for one in own) / steps,
                    predicted_tokens_per_step=found[name]["predicted"],
                    sampled_tokens_per_step=sampled[name][0],
                    sampled_error=sampled[name][1],
                    typical_tokens_per_step=typical[name][0],
                    typical_error=typical[name][1],
                    num_different=sum(a != b for a, b in zip(greedy[name][1], texts, strict=True)),
                )
            )
        for name in self._timings:
            self.book.forget(name)  # measured anew the next time
        return rows

    # --- what each drafts on ---

    def _prepare(self, contender: Contender) -> dict[str, Any]:
        """Gives a drafter its tree; in words, and what the tree promises."""
        drafter, nodes = contender.drafter, self.settings.num_nodes
        if contender.shape is not None and isinstance(drafter, DraftHead | DraftModel):
            self._shapes[contender.name] = contender.shape
            return {"words": _in_words(contender.shape), "predicted": None}
        if isinstance(drafter, DraftModel):
            self._shapes[contender.name] = BestFirst(nodes)
            return {"words": f"growing, {nodes}", "predicted": None}
        if not isinstance(drafter, DraftHead):
            most = getattr(drafter, "most_nodes", None)
            return {"words": f"its own, up to {most}" if most else "its own", "predicted": None}
        found: dict[str, Any] = self.book.get(
            f"tree-{contender.identity}", partial(self._tree, contender.name, drafter)
        )
        beam, confidence = self.settings.rehearsal.beam, tuple(found["confidence"])
        self._shapes[contender.name] = (
            BestFirst(nodes, num_ranks=found["num_ranks"], beam=beam, confidence=confidence)
            if found["grows"]
            else Tree.from_paths(found["paths"])
        )
        return found

    def _tree(self, name: str, head: DraftHead) -> dict[str, Any]:
        """The better one of a growing and a static tree."""
        rehearsal = Rehearsal(self.target, head, self.settings.rehearsal, progress=_Named(self.progress, name))
        found = rehearsal.run(self._answers())
        static, dynamic = found["static"]["expected"], found["dynamic"]["expected"]
        grows = dynamic[-1] >= static[-1]
        paths = found["static"]["paths"]
        size = len(dynamic) if grows else len(static)
        return {
            "confidence": found["confidence"]["temperatures"],
            "num_ranks": rehearsal.num_ranks,
            "grows": grows,
            "paths": paths,
            "words": f"{'growing' if grows else 'static'}, {size}",
            "predicted": (dynamic if grows else static)[-1],
            "static": static[-1],
            "growing": dynamic[-1],
        }

    def _answers(self) -> list[Answer]:
        settings = self.settings.rehearsal
        return own_answers(self.target, self.calibration, settings, book=self.book, progress=self.progress)

    # --- tokens per step ---

    def _count(
        self, contender: Contender, way: str, prompts: Sequence[Sequence[int]], **sampling: Any
    ) -> tuple[Counted, list[list[int]]]:
        """Counts, and the answers themselves."""
        name = f"{way}-{contender.identity}-{_digest(prompts)}"
        self.progress.stage(f"{contender.name}: {way} answers to {len(prompts)} prompts")
        found = self.book.get(name, partial(self._answered, contender, prompts, **sampling))
        return Counted(tuple(found["tokens"]), tuple(found["steps"])), found["texts"]

    def _answered(self, contender: Contender, prompts: Sequence[Sequence[int]], **sampling: Any) -> dict[str, Any]:
        shape = self._shapes.get(contender.name)
        engine = Engine(self.target, contender.drafter, shape=shape, max_batch_size=self.settings.batch_size)
        one = SamplingSettings(max_new_tokens=self.settings.max_new_tokens, **sampling)
        each = [replace(one, seed=_SEED + number) for number in range(len(prompts))]
        results = engine.generate([list(prompt) for prompt in prompts], each)
        return {
            "tokens": [len(result.token_ids) - 1 for result in results],
            "steps": [result.num_steps for result in results],
            "texts": [list(result.token_ids) for result in results],
        }

    def _sampled(self, contender: Contender, acceptance: str) -> tuple[float | None, float | None]:
        """Tokens per step at the temperature, and one standard error."""
        temperature = self.settings.temperature
        if temperature == 0:
            return None, None
        way = f"{acceptance}-at-{temperature:g}"
        prompts = self._spread(self.settings.num_sampled_prompts)
        counted, _ = self._count(contender, way, prompts, temperature=temperature, acceptance=acceptance)
        return counted.tokens_per_step, counted.error

    def _spread(self, most: int) -> list[list[int]]:
        """At most so many of the prompts, from the first to the last kind: files are often sorted by kind."""
        count = min(most, len(self.prompts))
        return [self.prompts[i * len(self.prompts) // count] for i in range(count)]

    # --- speed ---

    @property
    def _timings(self) -> list[str]:
        """What the findings of each timed prompt are called."""
        named = [contender.identity for contender in self.contenders]
        prompts = self._spread(self.settings.num_speed_prompts)
        key = hashlib.sha256(json.dumps([_digest(prompts), named]).encode()).hexdigest()[:12]
        return [f"timed-{key}-{number}" for number in range(len(prompts))]

    def _timed(self) -> "dict[str, list[Timed]]":
        """Every way answers every prompt; who goes first changes, and the direction, so that drifts cancel."""
        prompts = self._spread(self.settings.num_speed_prompts)
        ways: list[tuple[str, Drafter]] = [(PLAIN, NoDraft()), *((one.name, one.drafter) for one in self.contenders)]
        advance = counted_stage(self.progress, f"timing {len(ways)} ways on {len(prompts)} prompts", len(prompts))

        def find(number: int) -> dict[str, dict[str, float]]:
            first, done = number // 2 % len(ways), {}
            turn = [*ways[first:], *ways[:first]]
            for name, drafter in reversed(turn) if number % 2 else turn:
                self._answer(name, drafter, prompts[number], _WARM_UP)  # kernels pack weights for the sizes they meet
                done[name] = asdict(self._answer(name, drafter, prompts[number], self.settings.max_new_tokens))
            return done

        timed: dict[str, list[Timed]] = {name: [] for name, _ in ways}
        for number, name in enumerate(self._timings):
            for way, one in self.book.get(name, partial(find, number)).items():
                timed[way].append(Timed(**one))
            advance()
        return timed

    def _answer(self, name: str, drafter: Drafter, prompt: Sequence[int], max_new_tokens: int) -> "Timed":
        """One prompt, greedily; a drafter may read the prompt in the first step, which counts in the speed alone."""
        watch = Stopwatch(self.target.device)
        batch = Batch(self.target, drafter, shape=self._shapes.get(name), lap=watch.lap)
        (sequence,) = Engine(self.target).sequences([list(prompt)], max_new_tokens=max_new_tokens)
        watch.start()
        started = watch.now
        batch.join([sequence])
        wait_for(self.target.device)
        watch.start()
        draft, stepping = 0.0, watch.now
        while batch.sequences:
            batch.step()
            if sequence.num_steps == 1:
                stepping = watch.now
            else:
                draft += watch.seconds["draft"] + watch.seconds.get("watch", 0.0)
        ended = watch.now
        steps = max(0, sequence.num_steps - 1)
        return Timed(len(sequence.token_ids), steps, ended - started, ended - stepping, draft)


@dataclass(frozen=True)
class Timed:
    """One answer by the clock."""

    tokens: float
    steps: float  # without the first one
    seconds: float  # of all
    step_seconds: float  # of these steps
    draft_seconds: float  # of these steps

    @property
    def share(self) -> Share:
        """Tokens and seconds, reading the prompt included."""
        return self.tokens, self.seconds


def code_digest() -> str:
    """Of the code that decides what is counted: findings of other code are found anew."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        if place.parts[0] not in _OTHER_ROOMS and place.name not in _OF_PAGES:
            digest.update(place.as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _digest(prompts: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:12]


def _in_words(shape: Shape) -> str:
    """What a drafter always fills.

    >>> _in_words(BestPaths((6, 3, 2), 5)), _in_words(Tree.chain(3))
    ('best 5 of 6x3x2, up to 16', 'static, 4')
    """
    if isinstance(shape, BestPaths):
        return f"best {shape.num_paths} of {'x'.join(map(str, shape.widths))}, up to {shape.most_nodes}"
    tree = shape.tree if isinstance(shape, Sampled) else shape
    return f"{'static' if isinstance(tree, Tree) else 'growing'}, {tree.num_nodes}"


def _speed(answers: Sequence[Timed]) -> float:
    return sum(one.tokens for one in answers) / sum(one.seconds for one in answers)


class _Named:
    """Progress whose stages begin with a drafter's name."""

    def __init__(self, inner: Progress, name: str) -> None:
        self.inner, self.name = inner, name

    def stage(self, what: str) -> None:
        """A new stage begins."""
        self.inner.stage(f"{self.name}: {what}")

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Units of the stage are done."""
        self.inner.progress(done, total, note)


def headings(rows: Sequence[BenchRow], settings: BenchSettings) -> list[str]:
    """Of the columns."""
    found = ["drafter", "parameters", "tree", "tokens/step", f"× {rows[0].name}", "tokens/s", "× plain"]
    found += ["draft ms/step", "step ms"]
    if settings.temperature:
        found += [f"exact T={settings.temperature:g}", f"typical T={settings.temperature:g}"]
    return found


def cells(row: BenchRow, settings: BenchSettings, *, errors: bool = True) -> list[str]:
    """What a row of the table holds, as text; errors are one standard error."""

    def number(value: float | None, error: float | None) -> str:
        if value is None:
            return ""
        return f"{value:.2f}" + (f" ± {error:.2f}" if errors and error is not None else "")

    found = [
        row.name,
        f"{row.num_parameters / 1e6:.1f} M" if row.num_parameters else "none",
        row.tree,
        number(row.tokens_per_step, row.tokens_per_step_error),
        number(row.over_first, row.over_first_error),
        f"{row.tokens_per_second:.1f}",
        number(row.speedup, row.speedup_error),
        f"{row.draft_milliseconds:.1f}",
        f"{row.step_milliseconds:.1f}",
    ]
    if settings.temperature:
        found += [
            number(row.sampled_tokens_per_step, row.sampled_error),
            number(row.typical_tokens_per_step, row.typical_error),
        ]
    return found


def told(num_prompts: int, settings: BenchSettings) -> str:
    """On which prompts the columns are found."""
    speeds = f"speeds on {min(num_prompts, settings.num_speed_prompts)}"
    greedy = f"Greedy answers to all {num_prompts} prompts"
    if not settings.temperature:
        return f"{greedy}, {speeds}."
    return f"{greedy}, sampled ones to {min(num_prompts, settings.num_sampled_prompts)} of them, {speeds}."


def markdown(rows: Sequence[BenchRow], settings: BenchSettings, num_prompts: int) -> Iterator[str]:
    """The lines of the table as documents hold it."""
    names = headings(rows, settings)
    yield f"| {' | '.join(names)} |"
    yield "|" + " --- |" * len(names)
    for row in rows:
        yield f"| {' | '.join(cells(row, settings))} |"
    yield ""
    yield f"{told(num_prompts, settings)} ± is one standard error."
