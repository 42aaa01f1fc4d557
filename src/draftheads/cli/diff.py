"""``draftheads bench diff``: two results of ``bench`` side by side, and which differences are clear."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console

from draftheads.bench.options import DiffOptions
from draftheads.bench.settings import LOADED
from draftheads.bench.table import ALL, SETTINGS, Interval, Row, namer, setting_in_words, varied_in
from draftheads.bench.timing import PLAIN
from draftheads.cli.show import check_json_path, write_json
from draftheads.cli.show_comparison import print_lines
from draftheads.data.files import read_values
from draftheads.errors import DataError
from draftheads.utils.estimates import Estimate, bootstrap
from draftheads.utils.identity import changes

_FORMAT_VERSION = 3
_MIN_QUESTIONS = 3  # for an interval
_POINT = ("batch_size", "temperature", "prompt_tokens")  # settings that plain decoding has, too
_MEASURES = {"tokens_per_step": "tokens/step", "speedup": "× plain", "tokens_per_second": "tokens/s"}
_FACTS = ("model", "precision", "threads", "prompts", "num_prompts")  # of the record
_MACHINE = ("device", "processor", "draftheads", "git_commit", "torch", "transformers")  # of its provenance
_LEGEND = "Unclear: the 95 % interval of the ratio B/A has 1 in it, or those of A and B overlap: no clear difference."
_LOAD = "Tokens/s also depend on what else the machine did, which the intervals do not show; × plain hardly does."

_BY_COSTS = (
    "With the defaults, trees follow the measured costs of the machine, and tokens/step with them: no verdict on it."
)

Way = tuple[str, str]  # name and settings
BIs = Literal["higher", "lower", "unclear", "unknown", "by costs"]
Sums = dict[str, np.ndarray]  # by question: tokens, seconds, tokens after the first ones, steps


@dataclass(frozen=True)
class Result:
    """What ``bench`` wrote."""

    record: Mapping[str, Any]
    rows: Mapping[Way, Row]  # over all questions
    sums: Mapping[Way, Sums]  # empty without answers

    @property
    def facts(self) -> dict[str, Any]:
        """What decides on the numbers: model, settings and machine."""
        provenance = {name: self.record["provenance"].get(name) for name in _MACHINE}
        return {**{name: self.record[name] for name in _FACTS}, **self.record["settings"], **provenance}


@dataclass(frozen=True)
class Difference:
    """A number of a way in both results."""

    name: str
    settings: Mapping[str, Any]
    b_settings: Mapping[str, Any]  # some can differ
    measure: str
    a: float
    b: float
    ratio: float | None  # b / a; None if a is 0
    interval: Interval | None  # of the ratio: 95 %, question by question
    b_is: BIs  # by this interval, or else by the intervals of a and b


def run(options: DiffOptions) -> None:
    check_json_path(options.json)
    a, b = read_result(options.a), read_result(options.b)
    changed = changed_facts(a, b)
    found = list(differences(a, b))
    if not found:
        raise DataError(f"{options.a} and {options.b} have no drafter of the same name")
    console = Console(highlight=False)
    first = f"B differs from A: {', '.join(changed)}." if changed else "A and B have the same settings and machine."
    console.print(first, markup=False)
    rows, pairs = [*a.rows.values(), *b.rows.values()], same_ways(a, b)
    named, varied = namer(rows), varied_in([row.settings for row in rows])
    for name, one, both in (("A", a, pairs.keys()), ("B", b, pairs.values())):
        if alone := [named(row) for way, row in one.rows.items() if way not in both]:
            console.print(f"Only in {name}: {'; '.join(alone)}.", markup=False)
    print_lines(["drafter", "number", "A", "B", "ratio", "B is"], [_line(one, varied) for one in found], console)
    more = [_BY_COSTS] if any(one.b_is == "by costs" for one in found) else []
    console.print("\n".join(["", _LEGEND, _LOAD, *more]))
    write_json(options.json, {"differences": changed, "rows": [asdict(one) for one in found]})


def _line(one: Difference, varied: Sequence[str]) -> list[str]:
    pairs = ((name, *(setting_in_words(own, name) for own in (one.settings, one.b_settings))) for name in varied)
    words = [
        a if a == b else f"{a or 'none'} → {b.removeprefix(SETTINGS[name]).strip() or 'none'}" for name, a, b in pairs
    ]
    ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
    ratio += " ({:.2f}-{:.2f})".format(*one.interval) if one.interval else ""
    numbers = [f"{number:.{2 if number < 10 else 1}f}" for number in (one.a, one.b)]
    full = ", ".join(filter(None, [one.name, *words]))
    return [full, _MEASURES.get(one.measure, one.measure), *numbers, ratio, one.b_is]


def read_result(path: Path) -> Result:
    """The result in a folder, or of a ``bench.json`` with ``answers.jsonl`` beside it."""
    file = path / "bench.json" if path.is_dir() else path
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        version = record["format_version"]
        rows = [Row(**row) for row in record["rows"]] if version == _FORMAT_VERSION else []
        result = Result(record, {_way(row.name, row.settings): row for row in rows if row.part == ALL}, _sums(file))
        _ = result.facts  # raises where one is missing
    except OSError as error:
        problem = f"cannot be read ({error.strerror}); give an output folder of bench, or its bench.json"
        raise DataError(problem, path=file) from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"this comparison cannot be read: {error!r}", path=file) from error
    if version != _FORMAT_VERSION:
        raise DataError(f"its format version is {version}; this release reads {_FORMAT_VERSION}", path=file)
    return result


def _way(name: str, settings: Mapping[str, Any]) -> Way:
    return name, json.dumps(settings, sort_keys=True)


def _sums(file: Path) -> dict[Way, Sums]:
    """Of the answers beside a record; the seconds of answers in groups are unknown (NaN)."""
    sums: dict[Way, Sums] = {}
    answers = file.with_name("answers.jsonl")
    for *_, line in read_values(answers) if file.name == "bench.json" and answers.is_file() else ():
        tokens, seconds = len(line["token_ids"]), line["seconds"]
        values = (tokens, np.nan if seconds is None else seconds, tokens - 1, len(line["step_tokens"]))
        of_way = sums.setdefault(_way(line["way"], line["settings"]), {})
        of_way[line["question_id"]] = of_way.get(line["question_id"], np.zeros(4)) + values
    return sums


def changed_facts(a: Result, b: Result) -> list[str]:
    """How B's settings, machine and drafters differ from A's, in words."""
    before, now = a.record["drafters"], b.record["drafters"]
    others = [f"{name} has other weights or options" for name in before if name in now and before[name] != now[name]]
    return [*changes(a.facts, b.facts), *others]


def same_ways(a: Result, b: Result) -> dict[Way, Way]:
    """The ways of A with those of B of the same settings, or else of the same name where one setting was changed.

    A setting was changed that has one value in all of these ways of A, and another one in those of B: 8 and 24 nodes.
    """
    pairs = {way: way for way in a.rows if way in b.rows}
    for name in dict.fromkeys(name for name, _ in a.rows):
        ways = [[way for way in one.rows if way[0] == name and way not in pairs] for one in (a, b)]
        left, right = ([one.rows[way].settings for way in own] for one, own in zip((a, b), ways, strict=True))
        values = {key: [{each.get(key) for each in own} - {None} for own in (left, right)] for key in SETTINGS}
        kept = [key for key, (one, other) in values.items() if one == other or max(len(one), len(other)) > 1]
        rest = {tuple(each.get(key) for key in kept): way for each, way in zip(right, ways[1], strict=True)}
        for each, way in zip(left, ways[0], strict=True):
            if other := rest.pop(tuple(each.get(key) for key in kept), None):
                pairs[way] = other
    return {way: pairs[way] for way in a.rows if way in pairs}


def differences(a: Result, b: Result) -> Iterator[Difference]:
    """Of all ways that both have, see :func:`same_ways`."""
    for way, other in same_ways(a, b).items():
        rows = row, now = a.rows[way], b.rows[other]
        common = row.name, row.settings, now.settings
        for measure in _MEASURES:
            if measure == "speedup" and row.name == PLAIN:
                continue
            paired = _paired(a, b, (way, other), measure)
            interval, bounds = None, [each.interval(measure) for each in rows]
            if paired is not None:
                interval, bounds = (paired.low, paired.high), [(1.0, 1.0), (paired.low, paired.high)]
            before, after = (getattr(each, measure) for each in rows)
            ratio = after / before if paired is None else paired.value
            by_costs = measure == "tokens_per_step" and any(each.settings.get("tree") in LOADED for each in rows)
            verdict = "by costs" if by_costs else _compared(*bounds)
            yield Difference(*common, measure, before, after, ratio, interval, verdict)
        for measure in (name for name in row.quality if name in now.quality):
            before, after = (each.quality[measure] for each in rows)
            bounds = [each.interval(measure) for each in rows]
            yield Difference(
                *common, measure, before, after, after / before if before else None, None, _compared(*bounds)
            )


def _compared(a: Interval | None, b: Interval | None) -> BIs:
    """What b is, if the intervals do not overlap."""
    if a is None or b is None:
        return "unknown"
    return "higher" if b[0] > a[1] else "lower" if b[1] < a[0] else "unclear"


def _paired(a: Result, b: Result, ways: tuple[Way, Way], measure: str) -> Estimate | None:
    """B/A over the questions of both; None where there are too few, or their seconds are unknown."""
    if a.record["prompts"] != b.record["prompts"]:  # the same id can be another question
        return None
    pairs = [*zip((a, b), ways, strict=True)]
    if measure == "speedup":
        points = [{name: one.rows[way].settings.get(name) for name in _POINT} for one, way in pairs]
        pairs += [(a, _way(PLAIN, points[0])), (b, _way(PLAIN, points[1]))]
    sums = [one.sums.get(way, {}) for one, way in pairs]
    questions = sorted(set.intersection(*map(set, sums)))
    if len(questions) < _MIN_QUESTIONS:
        return None
    arrays = [np.array([each[question] for question in questions]) for each in sums]  # (Q, 4)

    def number(array: np.ndarray, chosen: np.ndarray) -> Any:
        tokens, seconds, later, steps = array.T
        if measure != "tokens_per_step":
            return (tokens / seconds)[chosen].mean(1)
        above, below = later[chosen].sum(1), steps[chosen].sum(1)
        return np.divide(above, below, out=np.ones_like(above), where=below > 0)

    def ratio(chosen: np.ndarray) -> Any:
        of_a, of_b, *of_plain = (number(array, chosen) for array in arrays)
        return of_b / of_a if not of_plain else of_b / of_a / (of_plain[1] / of_plain[0])

    paired = bootstrap(ratio, len(questions))
    return None if np.isnan(paired.value) else paired
