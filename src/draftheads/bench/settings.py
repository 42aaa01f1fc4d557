"""What a comparison of drafters measures: lists of settings, of which every combination is measured."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Annotated, Literal, get_args

import tyro

from draftheads.errors import InvalidSettings
from draftheads.search.settings import ReplaySettings
from draftheads.settings import AcceptanceRule, OptionGroup, SamplingSettings, at_least

TreeKind = Literal["best", "defaults", "static", "growing", "product", "dense", "chain", "paths", "adaptive"]
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

    trees: tuple[str, ...] = ("best", "defaults")
    """Kinds of trees: best, defaults, static, growing, product, dense, chain, paths, adaptive. best: a head's better
    one of static (of the most frequent paths) and growing (by confidence); product: Medusa's static tree, by
    independent accuracies of the heads; dense: a full tree of random widths; chain; paths: static, as large as n paths
    of the MLP Speculator (n in place of nodes); defaults: as `draftheads.load` drafts, which decides on the size by
    itself and also copies from the text; adaptive: the same without copies."""
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
        for field in fields(self):  # from JSON, or a single value
            value = getattr(self, field.name)
            if isinstance(field.default, tuple) and not isinstance(value, tuple):
                object.__setattr__(self, field.name, tuple(value) if isinstance(value, list) else (value,))
        super().__post_init__()
        for name in ("trees", "num_nodes", "batch_sizes", "temperatures", "acceptance", "epsilons"):
            values = getattr(self, name)
            self._require(name, fine=len(values) > 0, fix="give at least one value")
            self._require(name, fine=len(set(values)) == len(values), fix="each value once")
        kinds = get_args(TreeKind)
        self._require("trees", fine=set(self.trees) <= set(kinds), fix=f"choose among {', '.join(kinds)}")
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
        return ReplaySettings(
            num_prompts=self.num_calibration_prompts,
            max_new_tokens=min(self.max_new_tokens, 128),
            max_nodes=num_nodes,
        )
