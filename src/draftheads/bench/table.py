"""The table of a comparison: a row for each way of decoding, the columns, and what they say in sentences.

A column is one entry of :data:`COLUMNS`: terminals, Markdown, JSON, pages and tables of papers have it. Numbers over
plain decoding, with intervals, are fields of :class:`Row`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from draftheads.bench.settings import LOADED, MIN_PROMPTS
from draftheads.bench.timing import PLAIN, STOCK, Answers
from draftheads.utils.counts import counted, short_count

# of a step, with the names of their numbers
PARTS = {
    "drafting": "draft_milliseconds",
    "verification": "verify_milliseconds",
    "accept and rest": "rest_milliseconds",
}
ALL = "all"  # rows over all questions
TURN = "turn "  # so begin the names of rows over single turns
WITH_COPIES = "with copies"  # so ends what a row says of its tree
Interval = tuple[float, float]
_RESAMPLES = 1000  # of a bootstrap interval


class Estimate(NamedTuple):
    """A value with its 95 % bootstrap interval and its standard error."""

    value: float
    low: float
    high: float
    error: float


def bootstrap(statistic: Callable[[np.ndarray], np.ndarray], count: int) -> Estimate:
    """A statistic of independent items, such as prompts, and how much it varies with the choice of items.

    Items are drawn anew 1,000 times, with replacement (Efron's percentile interval). The same count gives the same
    draws, so that intervals do not change from call to call.

    Args:
        statistic: (R, count) indices of items -> (R,) values.
        count: of the items.

    >>> values = np.array([1.0, 2.0, 3.0, 6.0])
    >>> bootstrap(lambda chosen: values[chosen].mean(1), 4).value
    3.0
    """
    value = float(statistic(np.arange(count)[None])[0])
    drawn = statistic(_drawn(count))
    low, high = np.quantile(drawn, (0.025, 0.975)).tolist()
    return Estimate(value, low, high, float(drawn.std()))


@cache
def _drawn(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(count, size=(_RESAMPLES, count))


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a way of decoding did over some prompts. Intervals are 95 % bootstrap intervals. None: was not measured."""

    name: str
    part: str = ALL  # of the questions: all, a category, or "turn 1", "turn 2" …
    settings: Mapping[str, Any] = field(default_factory=dict)  # batch_size, temperature, tree, num_nodes …
    num_answers: int = 0
    num_parameters: int = 0  # of the drafter
    tree: str = ""  # the tree that is drafted, in words
    predicted_tokens_per_step: float | None = None  # by the search for its tree, on other prompts
    tokens_per_step: float  # the token after the accepted ones counts
    tokens_per_step_interval: Interval | None = None
    tokens_per_second: float  # mean over prompts (with several at a time, over groups), reading prompts included
    tokens_per_second_interval: Interval | None = None
    speedup: float  # over plain decoding: ratio of these means, as in Spec-Bench
    speedup_interval: Interval | None = None
    speedup_error: float = 0.0  # one standard error
    decode_speedup: float | None = None  # without the time in which prompts are read: ratio of sums
    decode_speedup_interval: Interval | None = None
    decode_tokens_per_second: float | None = None
    decode_tokens_per_second_interval: Interval | None = None
    overhead: float | None = None  # time of a step over that of plain decoding; tokens per step / it = decode_speedup
    speedup_over_transformers: float | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)  # by name, of columns that compute
    acceptance_by_depth: Sequence[float] = ()  # share of the steps that accepted a draft token at depth 1, 2, …
    steps_by_tokens: Sequence[int] = ()  # how many steps gave 1, 2, … tokens
    num_different: int = 0  # answers that are not the reference's
    num_tokens: int = 0  # of all timed answers
    quality: Mapping[str, float] = field(default_factory=dict)  # by measure
    quality_intervals: Mapping[str, Interval] = field(default_factory=dict)
    quality_counts: Mapping[str, int] = field(default_factory=dict)  # questions that have a value, where some have none

    @property
    def accepted_per_step(self) -> float:
        """Tokens per step without the one after the accepted ones."""
        return self.tokens_per_step - 1

    @property
    def same_text(self) -> str | None:
        """How many answers are plain decoding's; None of those that were drawn."""
        is_drawn = self.name == PLAIN or self.settings.get("temperature")
        return None if is_drawn else f"{self.num_answers - self.num_different} of {self.num_answers}"

    @property
    def parts(self) -> dict[str, float]:
        """Milliseconds of the parts of a step, by name."""
        return {part: self.numbers.get(name, 0.0) for part, name in PARTS.items()}

    def number(self, name: str) -> Any:
        """A measure of quality, one of the numbers, or a field; None: was not measured."""
        found = {**self.numbers, **self.quality}
        return found[name] if name in found else getattr(self, name, None)

    def interval(self, name: str) -> Interval | None:
        """The interval of the number with that name; None where it has none."""
        if name in self.quality:
            return self.quality_intervals.get(name)
        found: Interval | None = getattr(self, f"{name}_interval", None)
        return found


@dataclass(frozen=True)
class _Sums:
    """Sums over the answers to each group of prompts; each array is (groups,)."""

    tokens: np.ndarray
    seconds: np.ndarray
    decode_tokens: np.ndarray  # without first tokens
    decode_seconds: np.ndarray
    steps: np.ndarray

    @classmethod
    def of(cls, answers: Sequence[Answers]) -> "_Sums":
        sums: dict[int, np.ndarray] = {}
        for one in answers:
            steps, firsts = sum(one.num_steps), len(one.token_ids)
            values = (one.num_tokens, one.seconds, one.num_tokens - firsts, one.seconds - one.prompt_seconds, steps)
            sums[one.group] = sums.get(one.group, np.zeros(5)) + values
        return cls(*np.array([sums[group] for group in sorted(sums)]).T)

    def speed(self, chosen: np.ndarray) -> np.ndarray:
        """Mean tokens per second of the chosen groups."""
        speeds: np.ndarray = (self.tokens / self.seconds)[chosen].mean(1)
        return speeds

    def decode_speed(self, chosen: np.ndarray) -> np.ndarray:
        """Tokens after the first ones per second after prompts were read."""
        return _ratio(self.decode_tokens[chosen].sum(1), self.decode_seconds[chosen].sum(1))

    def tokens_per_step(self, chosen: np.ndarray) -> np.ndarray:
        """1 where there was no step."""
        return _ratio(self.decode_tokens[chosen].sum(1), self.steps[chosen].sum(1))


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    ratios: np.ndarray = np.divide(above, below, out=np.ones_like(above), where=below > 0)
    return ratios


def timed_row(
    name: str, own: Sequence[Answers], plain: Sequence[Answers], stock: Sequence[Answers] | None = None
) -> Row:
    """The row of a way, from its own answers to each group of prompts, plain decoding's, and those of transformers."""
    sums, of_plain = _Sums.of(own), _Sums.of(plain)
    count = len(sums.tokens)
    found = {
        "tokens_per_step": bootstrap(sums.tokens_per_step, count),
        "tokens_per_second": bootstrap(sums.speed, count),
        "speedup": bootstrap(lambda chosen: sums.speed(chosen) / of_plain.speed(chosen), count),
        "decode_tokens_per_second": bootstrap(sums.decode_speed, count),
        "decode_speedup": bootstrap(
            lambda chosen: _ratio(sums.decode_speed(chosen), of_plain.decode_speed(chosen)), count
        ),
    }
    values = {value: each.value for value, each in found.items()}
    fields: dict[str, Any] = dict(values)
    if count >= MIN_PROMPTS:  # of fewer, an interval would say nothing
        fields |= {f"{value}_interval": (each.low, each.high) for value, each in found.items()}
    steps = max(1, sum(sum(answer.num_steps) for answer in own))
    accepted = map(sum, zip_longest(*(answer.accepted_by_depth for answer in own), fillvalue=0))
    counts = Counter(tokens for answer in own for each in answer.step_tokens for tokens in each)
    return Row(
        name=name,
        num_answers=sum(len(answer.token_ids) for answer in own),
        **fields,
        speedup_error=found["speedup"].error,
        overhead=values["tokens_per_step"] / values["decode_speedup"],
        speedup_over_transformers=(
            values["tokens_per_second"] / float(_Sums.of(stock).speed(np.arange(count)[None])[0]) if stock else None
        ),
        numbers={
            column.name: value for column in COLUMNS if column.compute and (value := column.compute(own)) is not None
        },
        acceptance_by_depth=[number / steps for number in accepted],
        steps_by_tokens=[counts[tokens] for tokens in range(1, max(counts, default=0) + 1)],
        num_tokens=sum(answer.num_tokens for answer in own),
    )


class Column(NamedTuple):
    """A column: what it shows of a row, and how that is computed from a way's answers where it is no field of a row."""

    name: str  # in JSON and in tables of papers: a field of a row, one of its numbers, or a measure of quality
    heading: str
    form: str | Callable[[Any], str] = ".2f"
    kind: str = "speed"  # or "time" or "quality": terminals show a table for each
    compute: Callable[[Sequence[Answers]], float | None] | None = None  # None: was not measured

    def cell(self, row: Row, *, intervals: bool = True) -> str:
        """The number of a row, with its interval if there is one."""
        value, form = row.number(self.name), self.form
        if value is None:
            return ""
        if not isinstance(form, str):
            return form(value)
        words, bounds = format(value, form), row.interval(self.name)
        if bounds is not None and intervals:
            words += f" ({bounds[0]:{form}}-{bounds[1]:{form}})"
        count = row.quality_counts.get(self.name)
        return words if count is None else f"{words}, of {count}"


def _of_step(own: Sequence[Answers], *parts: str) -> float | None:
    """Milliseconds of parts of a step."""
    totals = {part: sum(getattr(answer, name) for answer in own) for part, name in PARTS.items()}
    chosen: float = sum(totals[part] for part in parts)
    return chosen / max(1, sum(answer.num_timed_steps for answer in own)) if any(totals.values()) else None


def _latency(own: Sequence[Answers], end: str, share: int, unit: float = 1.0) -> float | None:
    """A percentile of the time until the first or last token of an answer; ``unit``: how many make a second."""
    times = [seconds for answer in own for seconds in getattr(answer, f"{end}_seconds")]
    return unit * float(np.percentile(times, share)) if times else None


def _token(own: Sequence[Answers]) -> float | None:
    firsts, lasts = (sum(sum(getattr(answer, f"{end}_seconds")) for answer in own) for end in ("first", "last"))
    num_later = sum(len(ids) - 1 for answer in own if answer.first_seconds for ids in answer.token_ids)
    return 1e3 * (lasts - firsts) / num_later if num_later else None


def _peak(own: Sequence[Answers]) -> float | None:
    """Of an accelerator."""
    return max(one.peak_bytes for one in own) / 1e9 or None


def _copied(own: Sequence[Answers]) -> float | None:
    copied, drafted = (sum(getattr(answer, f"num_{kind}") for answer in own) for kind in ("copied", "drafted"))
    return 100 * copied / drafted if copied and drafted else None


COLUMNS = (
    Column("tree", "tree", str),
    Column("tokens_per_step", "tokens/step"),
    Column("predicted_tokens_per_step", "predicted"),
    Column("speedup", "× plain"),
    Column("decode_speedup", "× plain, decode"),
    Column("overhead", "overhead"),
    Column("tokens_per_second", "tokens/s", ".1f"),
    Column("speedup_over_transformers", "× transformers"),
    Column("same_text", "same text", str),
    Column("copied_percent", "copied %", ".0f", "time", _copied),  # of accepted draft tokens, those only copies brought
    # median, waiting in the group included
    Column("first_token_milliseconds", "first token ms", ".0f", "time", lambda own: _latency(own, "first", 50, 1e3)),
    # mean time of a token of an answer after its first one
    Column("token_milliseconds", "ms/token", ".1f", "time", _token),
    Column("draft_milliseconds", "draft ms", ".1f", "time", lambda own: _of_step(own, "drafting")),
    Column("verify_milliseconds", "verify ms", ".1f", "time", lambda own: _of_step(own, "verification")),
    Column("rest_milliseconds", "rest ms", ".1f", "time", lambda own: _of_step(own, "accept and rest")),
    Column("step_milliseconds", "step ms", ".1f", "time", lambda own: _of_step(own, *PARTS)),
    Column("p50_seconds", "p50 s", ".2f", "time", lambda own: _latency(own, "last", 50)),
    Column("p90_seconds", "p90 s", ".2f", "time", lambda own: _latency(own, "last", 90)),
    Column("p99_seconds", "p99 s", ".2f", "time", lambda own: _latency(own, "last", 99)),
    Column("peak_gigabytes", "peak memory GB", ".2f", "time", _peak),
    Column("num_parameters", "parameters", lambda count: short_count(count) if count else "", "time"),
)


def parts_of(
    answers: Sequence[Answers], labels: Sequence[Sequence[str]]
) -> Iterator[tuple[str, Callable[[Answers], bool]]]:
    """The parts of the questions that have a row, with what tells whether answers belong to a part.

    Single categories, languages and turns have rows where prompts are answered one at a time: groups mix them.
    ``labels`` are of the questions, by their number: the same kinds of labels of each, empty where one is missing.
    """
    yield ALL, lambda _: True
    if any(len(answer.token_ids) > 1 for answer in answers):
        return
    for kind in zip(*labels, strict=True):
        names = dict.fromkeys(filter(None, kind))
        for name in names if len(names) > 1 else ():
            yield name, lambda answer, name=name, kind=kind: kind[answer.questions[0]] == name  # type: ignore[misc]
    if (turns := max(answer.turn for answer in answers)) > 0:
        for turn in range(turns + 1):
            yield f"{TURN}{turn + 1}", lambda answer, turn=turn: answer.turn == turn  # type: ignore[misc]


def table_of(rows: Sequence[Row], *kinds: str, intervals: bool = True) -> tuple[list[str], list[list[str]]]:
    """Headings and lines of the columns of these kinds, or of all, that have a number. Empty without any."""
    measures = dict.fromkeys(measure for row in rows for measure in row.quality)
    every = [*COLUMNS, *(Column(measure, measure, kind="quality") for measure in measures)]
    chosen = [column for column in every if (not kinds or column.kind in kinds) and any(map(column.cell, rows))]
    name = namer(rows)
    lines = [[name(row), *(column.cell(row, intervals=intervals) for column in chosen)] for row in rows]
    return (["drafter", *(column.heading for column in chosen)], lines) if chosen else ([], [])


# settings that can tell rows of one drafter apart, and the words before their values
SETTINGS = {
    "tree": "",
    "num_nodes": "nodes",
    "batch_size": "batch",
    "prompt_tokens": "prompt",
    "temperature": "T",
    "acceptance": "",
    "epsilon": "ε",
    "run": "",
}


def namer(rows: Sequence[Row]) -> Callable[[Row], str]:
    """Gives rows their names, the same in all tables and plots: the drafter, and the settings that vary in ``rows``."""
    varied = [name for name in SETTINGS if len({row.settings.get(name) for row in rows} - {None}) > 1]
    return lambda row: ", ".join(filter(None, [row.name, *(setting_in_words(row.settings, name) for name in varied)]))


def setting_in_words(settings: Mapping[str, Any], name: str) -> str:
    """A setting of a row, such as "batch 4"; the number of paths is the k of the MLP Speculator."""
    value = settings.get(name)
    if value is None:
        return ""
    if (name, settings.get("tree")) == ("num_nodes", "paths"):
        return f"k = {value}"
    return f"{SETTINGS[name]} {value:g}" if isinstance(value, float) else f"{SETTINGS[name]} {value}".strip()


def by_part(rows: Sequence[Row]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Tables of numbers by part of the questions: titles, headings, and a line for each way. None without parts."""
    name, parts = namer(rows), [part for part in dict.fromkeys(row.part for row in rows) if part != ALL]
    headings = ["drafter", *parts, ALL]
    for value, title in (("speedup", "× plain"), ("tokens_per_step", "Tokens per step")) if parts else ():
        lines: dict[str, dict[str, str]] = {}
        for row in rows:
            lines.setdefault(name(row), {})[row.part] = f"{getattr(row, value):.2f}"
        yield title, headings, [[way, *(own.get(part, "") for part in headings[1:])] for way, own in lines.items()]


def markdown_table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a table in Markdown."""
    yield f"| {' | '.join(headings)} |"
    yield "|" + " --- |" * len(headings)
    for cells in lines:
        yield f"| {' | '.join(cells)} |"


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of the tables in Markdown: all numbers, and speed and tokens per step by part."""
    overall = [row for row in rows if row.part == ALL]
    yield from markdown_table(*table_of(overall))
    yield ""
    yield f"In brackets: 95 % bootstrap intervals over the prompts. {copies_note(overall)}"
    for title, headings, lines in by_part(rows):
        yield from ("", f"{title}, by category and turn:", "", *markdown_table(headings, lines))


def has_copies(row: Row) -> bool:
    """Whether copies from the text are in a head's drafts."""
    return row.tree.endswith(WITH_COPIES)


def copies_note(rows: Iterable[Row]) -> str:
    """A sentence on what is in the drafts of heads."""
    if not any(map(has_copies, rows)):
        return "Heads draft alone, without copies from the text."
    where = f'Where the tree is "… {WITH_COPIES}"'
    return f"{where}, copies from the text are in a head's drafts; elsewhere it drafts alone."


def heads_only(rows: Iterable[Row]) -> list[Row]:
    """Rows over all questions without those of plain decoding and transformers."""
    return [row for row in rows if row.part == ALL and row.name not in (PLAIN, STOCK)]


# --- what the table says in sentences, the same on a terminal and on the page ---


def speed_sentence(name: str, speedup: float, error: float) -> str:
    """The first sentence of every comparison: what is measured with a drafter as it is loaded.

    >>> speed_sentence("hydra", 1.5, 0.125)
    'With the defaults on this machine: 1.50 ± 0.12 × plain decoding (hydra).'
    """
    return f"With the defaults on this machine: {speedup:.2f} ± {error:.2f} × plain decoding ({name})."


def verdict(rows: Iterable[Row]) -> str:
    """One sentence on the fastest drafter, with its standard error."""
    if not (drafters := heads_only(rows)):
        return "There is no drafter to compare."
    best = max(drafters, key=lambda row: row.speedup)
    if best.settings.get("tree") == "defaults":
        copied = best.numbers.get("copied_percent", 0.0)
        copies = f"; {copied:.0f} % of the accepted draft tokens are copies from the text" if copied >= 50 else ""
        return speed_sentence(best.name + copies, best.speedup, best.speedup_error)
    facts = [best.tree]
    if not best.settings.get("temperature"):
        same = best.num_answers - best.num_different
        facts.append(f"with the same text in {same} of {counted(best.num_answers, 'answer')}")
    speed, end = f"{best.speedup:.2f} ± {best.speedup_error:.2f} ×", ", ".join(filter(None, facts))
    if best.speedup - best.speedup_error > 1:
        return f"{best.name} is fastest: {speed} plain decoding ({end})."
    clearly = "clearly " if best.speedup > 1 else ""
    start = f"No drafter is {clearly}faster than plain decoding"
    return f"{start}: the fastest, {best.name}, reaches {speed} its speed ({end})."


def remarks(rows: Iterable[Row]) -> list[str]:
    """Sentences on what limits the verdict."""
    rows = sorted(heads_only(rows), key=lambda row: -row.speedup)
    best, loaded = rows[0], [row for row in rows if row.settings.get("tree") in LOADED]
    near = (row for row in rows if best.speedup - row.speedup < best.speedup_error + row.speedup_error)
    close = list(dict.fromkeys(row.name for row in near if row.name != best.name))
    sentences = []
    if loaded:
        sentences.append("Defaults choose the size of each draft for this machine.")
    if close:
        sentences.append(f"Within the errors, {' and '.join(close)} can be as fast as {best.name}.")
    fixed = any(row.settings.get("num_nodes") and not row.tree.startswith("its own") for row in rows)
    if best.speedup - best.speedup_error <= 1 and fixed:
        sentences.append("Trees may be too large for this machine: try a smaller `--num-nodes`.")
    if slower := dict.fromkeys(row.name for row in loaded if row.speedup < 0.995):
        sentences.append(
            f"Slower than plain decoding here: {', '.join(slower)}. Try `--precision int8`, or measure "
            "trees on your own prompts with `draftheads tune`."
        )
    if any(row.num_different for row in rows):
        sentences.append("Texts can differ where rounding decides between equally probable tokens, in fp32 rarely.")
    if any(row.settings.get("acceptance") == "typical" for row in rows):
        measured = "see its quality beside its speed" if best.quality else "measure it: `--quality`"
        sentences.append(f"Acceptance typical changes the distribution of texts: {measured}.")
    return sentences
