"""What a comparison of drafters measures, every combination of its settings; and the options of ``bench`` and ``demo``.

The sentence under a field is its help.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import tyro

from draftheads.errors import InvalidSettings
from draftheads.search.settings import ReplaySettings
from draftheads.settings import ABOVE_0, AcceptanceRule, OptionGroup, Precision, SamplingSettings, at_least

TreeKind = Literal["best", "defaults", "static", "growing", "dense", "chain", "paths", "adaptive"]
MIN_PROMPTS = 3  # or groups of them, for an interval
LOADED = ("defaults", "adaptive")  # kinds of trees that an engine chooses by itself at each step
DRAWN: tuple[AcceptanceRule, ...] = ("rejection", "block")  # rules for drafts of drawn tokens


@dataclass(frozen=True)
class Point:
    """What all ways have in common that are timed in turn."""

    batch_size: int = 1
    temperature: float = 0.0
    prompt_tokens: int | None = None  # of every prompt; None: as they are


@dataclass(frozen=True)
class Variant:
    """How a drafter drafts, and what is accepted."""

    tree: str = "best"
    num_nodes: int | None = None  # None where the drafter decides
    acceptance: AcceptanceRule = "exact"
    epsilon: float | None = None  # of typical acceptance


@dataclass(frozen=True)
class BenchSettings(OptionGroup):
    """What is compared, on how much; each of several values is measured.

    The command has no options for what few studies need; tables of papers and Python have them.
    """

    trees: tuple[TreeKind, ...] = ("best", "defaults")
    """Kinds of trees. best: a head's better one of static (of the most frequent paths) and growing (by confidence);
    dense: a full tree of random widths; chain; paths: static, as large as n paths of the MLP Speculator (n in place of
    nodes); defaults: as `draftheads.load` drafts, which decides on the size by itself and also copies from the text;
    adaptive: the same without copies."""
    num_nodes: tuple[int, ...] = (24,)
    """Nodes of every head's tree, root included."""
    batch_sizes: tuple[int, ...] = (1,)
    """Prompts that are decoded together."""
    temperatures: tuple[float, ...] = (0.0,)
    """Temperatures; 0 is greedy."""
    acceptance: tuple[AcceptanceRule, ...] = ("exact",)
    """Acceptance. At temperatures above 0. rejection draws drafts from the head, on a static tree; block draws a chain;
    typical changes the distribution."""
    epsilons: tuple[float, ...] = (0.09,)
    """Thresholds ε of typical acceptance."""
    prompt_tokens: tyro.conf.Suppress[tuple[int, ...]] = ()
    """Cut or repeat every prompt to so many tokens. Default: prompts as they are."""
    longest_prompt: tyro.conf.Suppress[Annotated[int | None, at_least(2)]] = None
    """Longer prompts lose their middle. So many tokens are left, such as 2048 for summaries; default: a prompt that the
    model does not take is left out."""
    max_new_tokens: Annotated[int, at_least(2)] = 128
    """Tokens of each answer."""
    ignore_eos: tyro.conf.Suppress[bool] = False
    """Every answer has exactly so many tokens."""
    num_calibration_prompts: tyro.conf.Suppress[Annotated[int, at_least(2)]] = 64
    """Built-in prompts on which the heads' trees are found."""

    def __post_init__(self) -> None:
        for each in fields(self):  # from JSON, or a single value
            value = getattr(self, each.name)
            if isinstance(each.default, tuple) and not isinstance(value, tuple):
                object.__setattr__(self, each.name, tuple(value) if isinstance(value, list) else (value,))
        super().__post_init__()
        for name in ("trees", "num_nodes", "batch_sizes", "temperatures", "acceptance", "epsilons"):
            values = getattr(self, name)
            self._require(name, fine=len(values) > 0, fix="give at least one value")
            self._require(name, fine=len(set(values)) == len(values), fix="each value once")
        fewest = 1 if set(self.trees) <= {"paths", *LOADED} else 2  # a path has further nodes
        self._require("num_nodes", fine=min(self.num_nodes) >= fewest, fix=f"must be at least {fewest}")
        self._require("batch_sizes", fine=min(self.batch_sizes) >= 1, fix="must be at least 1")
        self._require("prompt_tokens", fine=min(self.prompt_tokens, default=1) >= 1, fix="must be at least 1")
        for point, epsilon in product(self.points(), self.epsilons):
            SamplingSettings(temperature=point.temperature, typical_epsilon=epsilon)  # raises what is impossible
        if self.temperatures == (0.0,) and self.acceptance != ("exact",):
            raise InvalidSettings(
                f"acceptance is {' '.join(self.acceptance)}, but greedy answers need no rule: add --temperatures 0.7"
            )

    def points(self) -> Iterator[Point]:
        """Each combination of what all ways have in common."""
        for values in product(self.batch_sizes, self.temperatures, self.prompt_tokens or (None,)):
            yield Point(*values)

    def variants(self, temperature: float) -> Iterator[Variant]:
        """Each combination of what ways can differ in, at a temperature."""
        for tree in self.trees:
            for nodes in (None,) if tree in LOADED else self.num_nodes:
                for rule in self.acceptance if temperature else ("exact",):
                    for epsilon in self.epsilons if rule.startswith("typical") else (None,):
                        yield Variant(tree, nodes, rule, epsilon)

    def sampling(self, point: Point, variant: Variant) -> SamplingSettings:
        """The settings of a request; the seed is added for each prompt."""
        settings = SamplingSettings(
            max_new_tokens=self.max_new_tokens,
            temperature=point.temperature,
            acceptance=variant.acceptance,
            ignore_eos=self.ignore_eos,
        )
        return settings if variant.epsilon is None else replace(settings, typical_epsilon=variant.epsilon)

    def replay(self, num_nodes: int) -> ReplaySettings:
        """Settings of the search for trees."""
        most = min(self.max_new_tokens, 128)
        return ReplaySettings(num_prompts=self.num_calibration_prompts, max_new_tokens=most, max_nodes=num_nodes)


@dataclass(frozen=True)
class BenchOptions:
    """Compare draft heads, and drafters without a head, on the same prompts.

    Each head drafts on the tree of --num-nodes nodes with the most tokens per step, found on built-in prompts, and with
    the defaults. Options with several values measure each of them. An interrupted comparison continues with the same
    command.
    """

    model: str = "smollm2-135m"
    """The model: a name, a folder or a Hugging Face id."""
    heads: tuple[str, ...] = ()
    """Draft heads: names, folders or Hugging Face ids. prompt-lookup and lookahead need no training. Default: these two
    and all installed heads of the model."""
    draft_model: str | None = None
    """Also compare a smaller model that drafts, on growing trees: a folder or a Hugging Face id."""
    corpus: str | None = None
    """A text file from which heads with the tree "defaults" copy, too."""
    transformers: bool = False
    """Also time transformers' own generate. One prompt at a time."""
    prompts: str | None = None
    """Questions: a file, a folder or a Hugging Face dataset. Or our own: tasks (six categories, some with two turns;
    the default), demo or calibration. MT-Bench, Spec-Bench, SPEED-Bench, GSM8K, HumanEval, AlpacaEval, CNN/DM, XSUM and
    ShareGPT are known by their fields."""
    category: tuple[str, ...] = ()
    """Use only questions of these categories."""
    limit: int | None = None
    """Use only the first LIMIT questions of each category. Default: 4 of our own."""
    accept: str | None = None
    """Show what a head would bring that nobody has trained. Such as 0.8,0.6,0.5: how often its best token is accepted
    at each depth, where those above it were. Static trees of several sizes, predicted and timed; its drafting takes the
    time of an untrained head of the method --heads METHOD (hydra)."""
    costs: Path | None = None
    """With --accept: predict alone, by the milliseconds in a file, as of another machine (examples/costs)."""
    quality: tuple[Literal["agreement", "perplexity"], ...] = ()
    """Measure quality. agreement with plain decoding, and perplexity under the model."""
    out: Path | None = None
    """Folder for bench.json, bench.md, answers.jsonl and bench.html. The numbers, the tables, all answers, and a page
    with plots."""
    json: str | None = None
    """Write all numbers as JSON to this file. - writes them to standard output."""
    settings: tyro.conf.OmitArgPrefixes[BenchSettings] = field(default_factory=BenchSettings)
    precision: Precision = "auto"
    """Number format, as for `draftheads generate`."""
    fresh: bool = False
    """Ignore what an earlier comparison saved. Needed after a change of the code: saved trees and answers of a stopped
    comparison are found again by model, drafter, settings, machine and versions only."""

    def __post_init__(self) -> None:
        if self.accept is None and self.costs is not None:
            raise InvalidSettings(f"costs is {self.costs}, and accept is missing: give --accept 0.8,0.6,0.5")
        _ = self.rates  # raises what is impossible

    @property
    def rates(self) -> list[float]:
        """``accept`` by depth; empty without it."""
        if self.accept is None:
            return []
        try:
            rates = [float(rate) for rate in self.accept.split(",")]
        except ValueError:
            rates = []
        if not rates or not all(0.0 < rate < 1.0 for rate in rates):
            raise InvalidSettings(f"accept is {self.accept!r}; give shares between 0 and 1, such as 0.8,0.6,0.5")
        if len(self.heads) > 1 or self.out or self.transformers or self.quality or self.draft_model or self.corpus:
            raise InvalidSettings(
                "accept is for one method (--heads), --prompts, --limit, --precision and --json alone"
            )
        return rates


@dataclass(frozen=True)
class DemoOptions(OptionGroup):
    """Answer prompts by transformers, by our plain decoding, and with draft heads; compare speed and text.

    A short `draftheads bench` in a time box.
    """

    model: str = "smollm2-135m"
    """The model: a name, a folder or a Hugging Face id."""
    heads: tuple[str, ...] = ("hydra", "medusa")
    """Draft heads: names, folders or Hugging Face ids."""
    prompts: str = "demo"
    """At least three prompts, as for `draftheads bench`. demo: six built-in ones."""
    limit: int | None = None
    """Use only the first LIMIT prompts of each category."""
    max_new_tokens: int = 128
    """Stop an answer after this many tokens."""
    seconds: Annotated[float, ABOVE_0] = 60.0
    """Time for all answers together. On a slow machine, answers get shorter (at least 32 tokens), then fewer. inf: no
    limit."""
    precision: Precision = "auto"
    """Number format, as for `draftheads generate`."""
    json: str | None = None
    """Write all numbers as JSON to this file. - writes them to standard output."""
