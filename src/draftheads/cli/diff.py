"""``draftheads bench diff``: two results of ``bench`` side by side, and which differences are clear."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console

from draftheads.bench.table import ALL, Interval, Row
from draftheads.bench.timing import PLAIN
from draftheads.cli.options.diff import DiffOptions
from draftheads.cli.show import check_json_path, write_json
from draftheads.cli.show_comparison import print_lines
from draftheads.data.json_lines import read_json_lines
from draftheads.errors import DataError
from draftheads.utils.estimates import Estimate, bootstrap
from draftheads.utils.identity import changes

_FORMAT_VERSION = 2
_MIN_QUESTIONS = 3  # for an interval
_POINT = ("batch_size", "temperature", "prompt_tokens")  # settings that plain decoding has, too
_MEASURES = {"tokens_per_step": "tokens/step", "speedup": "× plain", "tokens_per_second": "tokens/s"}
_FACTS = ("model", "precision", "threads", "prompts", "num_prompts")  # of the record
_MACHINE = ("device", "processor", "draftheads", "git_commit", "torch", "transformers")  # of its provenance
_LEGEND = "Unclear: the 95 % interval of the ratio B/A has 1 in it, or those of A and B overlap: no clear difference."
_LOAD = "Tokens/s also depend on what else the machine did, which the intervals do not show; × plain hardly does."

Way = tuple[str, str]  # name and settings
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
    measure: str
    a: float
    b: float
    ratio: float | None  # b / a; None if a is 0
    interval: Interval | None  # of the ratio: 95 %, question by question
    b_is: Literal["higher", "lower", "unclear", "unknown"]  # by this interval, or else by the intervals of a and b


def run(options: DiffOptions) -> None:
    """Compares and prints."""
    check_json_path(options.json)
    a, b = read_result(options.a), read_result(options.b)
    changed = changed_facts(a, b)
    found = list(differences(a, b))
    if not found:
        raise DataError(f"{options.a} and {options.b} have no drafter with the same settings")
    console = Console(highlight=False)
    first = f"B differs from A: {', '.join(changed)}." if changed else "A and B have the same settings and machine."
    console.print(first, markup=False)
    for name, one, other in (("A", a, b), ("B", b, a)):
        if ways := dict.fromkeys(way for way, settings in one.rows if (way, settings) not in other.rows):
            console.print(f"Only in {name}: {', '.join(ways)}.", markup=False)
    print_lines(["drafter", "number", "A", "B", "ratio", "B is"], [_line(one, labels(found)) for one in found], console)
    console.print(f"\n{_LEGEND}\n{_LOAD}")
    write_json(options.json, {"differences": changed, "rows": [asdict(one) for one in found]})


def _line(one: Difference, names: Sequence[str]) -> list[str]:
    settings = [
        f"{name.replace('_', ' ')} {one.settings[name]}" for name in names if one.settings.get(name) is not None
    ]
    ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
    ratio += " ({:.2f}-{:.2f})".format(*one.interval) if one.interval else ""
    numbers = [f"{number:.{2 if number < 10 else 1}f}" for number in (one.a, one.b)]
    return [", ".join([one.name, *settings]), _MEASURES.get(one.measure, one.measure), *numbers, ratio, one.b_is]


def labels(found: Sequence[Difference]) -> list[str]:
    """Names of the settings that tell rows apart."""
    names = dict.fromkeys(name for one in found for name in one.settings)
    return [name for name in names if len({one.settings.get(name) for one in found} - {None}) > 1]


def read_result(path: Path) -> Result:
    """The result in a folder, or of a ``bench.json`` with ``answers.jsonl`` beside it.

    Raises:
        DataError: there is none, or it is damaged.
    """
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
    for _, line in read_json_lines(answers) if file.name == "bench.json" and answers.is_file() else ():
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


def differences(a: Result, b: Result) -> Iterator[Difference]:
    """Of all ways that both have with the same settings."""
    for way, row in a.rows.items():
        for measure in _MEASURES if way in b.rows else ():
            if measure == "speedup" and row.name == PLAIN:
                continue
            before, now = getattr(row, measure), getattr(b.rows[way], measure)
            paired = _paired(a, b, way, measure)
            interval, bounds = None, [getattr(each, f"{measure}_interval", None) for each in (row, b.rows[way])]
            if paired is not None:
                interval, bounds = (paired.low, paired.high), [(1.0, 1.0), (paired.low, paired.high)]
            ratio = now / before if paired is None else paired.value
            yield Difference(row.name, row.settings, measure, before, now, ratio, interval, _compared(*bounds))
        for measure in (name for name in row.quality if way in b.rows and name in b.rows[way].quality):
            before, now = row.quality[measure], b.rows[way].quality[measure]
            bounds = [each.quality_intervals.get(measure) for each in (row, b.rows[way])]
            quotient = now / before if before else None
            yield Difference(row.name, row.settings, measure, before, now, quotient, None, _compared(*bounds))


def _compared(a: Interval | None, b: Interval | None) -> Literal["higher", "lower", "unclear", "unknown"]:
    """What b is, if the intervals do not overlap."""
    if a is None or b is None:
        return "unknown"
    return "higher" if b[0] > a[1] else "lower" if b[1] < a[0] else "unclear"


def _paired(a: Result, b: Result, way: Way, measure: str) -> Estimate | None:
    """B/A over the questions of both; None where there are too few, or their seconds are unknown."""
    if a.record["prompts"] != b.record["prompts"]:  # the same id can be another question
        return None
    ways = [way]
    if measure == "speedup":
        ways.append(_way(PLAIN, {name: a.rows[way].settings.get(name) for name in _POINT}))
    sums = [result.sums.get(each, {}) for each in ways for result in (a, b)]
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
