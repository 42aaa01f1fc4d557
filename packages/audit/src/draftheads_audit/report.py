"""What an audit found: a row for each check, the verdict, and everything as JSON."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from draftheads.utils.counts import counted
from draftheads_audit.compare import Comparison, Kind
from draftheads_audit.options import CheckName
from draftheads_audit.server import Drafting

Verdict = Literal["lossless", "wrong", "undecided"]
_SURE = 4.5  # standard deviations; by chance 1 of 150,000 audits has more
_FEW_TOKENS = 200  # below, the sum is not normal


@dataclass(frozen=True)
class Pass:
    """How fast a server answered the prompts of one check, and what its drafting did."""

    tokens_per_second: float | None  # None where it does not count tokens
    drafting: Drafting | None


@dataclass(frozen=True)
class GreedyRow:
    """Answers of one check beside their references."""

    check: CheckName
    num_answers: int  # without failed requests
    num_failed: int
    server: Pass
    is_baseline: bool = False  # the baseline's own answers in parallel, beside those one by one
    comparisons: tuple[Comparison, ...] = ()  # empty where texts cannot be compared
    baseline: Pass | None = None
    num_finished: int | None = None  # JSON texts that were not cut off; None for other checks
    json_problems: tuple[tuple[int, str], ...] = ()  # of finished ones, with the prompt
    num_broken_json: int = 0  # of these, where the reference's JSON is valid
    failure: str = ""  # the first problem of a request

    def count(self, kind: Kind) -> int:
        return sum(one.kind == kind for one in self.comparisons)

    @property
    def num_without_pair(self) -> int:
        """Failed requests, those for references included."""
        return max(self.num_failed, self.count("failed"))

    @property
    def num_characters(self) -> tuple[int, int]:
        """Characters of the references that were compared, and all: after its first difference a text is not."""
        return sum(one.place for one in self.comparisons), sum(one.num_characters for one in self.comparisons)

    def record(self) -> dict[str, Any]:
        compared, characters = self.num_characters
        return {
            **asdict(self),
            "counts": {kind: self.count(kind) for kind in get_args(Kind)},
            "comparisons": [asdict(one) for one in self.comparisons if one.kind != "equal"],
            "num_compared_characters": compared,
            "num_characters": characters,
        }


@dataclass(frozen=True)
class SampledSide:
    """Sampled answers of one server."""

    num_repeated: int  # pairs of the same request
    num_equal: int  # pairs of equal answers
    num_failed: int
    run: Pass
    num_tokens: int = 0  # that the model scored
    excess: float = 0.0  # surprise beyond the expected one, nats
    variance: float = 0.0
    failure: str = ""

    @property
    def mean_excess(self) -> float | None:
        """Of a token; None if too few were scored."""
        return self.excess / self.num_tokens if self.num_tokens >= _FEW_TOKENS else None


@dataclass(frozen=True)
class SeededRow:
    """Sampled answers of one check."""

    check: CheckName
    server: SampledSide
    baseline: SampledSide | None = None

    @property
    def deviations(self) -> float | None:
        """Between the server and the baseline, else between the server and the model; None if they are not known."""
        sides = [side for side in (self.server, self.baseline) if side is not None]
        variance = sum(side.variance / max(1, side.num_tokens) ** 2 for side in sides)
        means = [side.mean_excess for side in sides if side.mean_excess is not None]
        if len(means) < len(sides) or variance <= 0:
            return None
        return (means[0] - sum(means[1:])) / math.sqrt(variance)

    @property
    def is_off(self) -> bool:
        """Whether the tokens have another distribution, almost surely."""
        return self.deviations is not None and abs(self.deviations) > _SURE


@dataclass(frozen=True)
class Report:
    """All that was found."""

    rows: tuple[GreedyRow, ...]
    sampled: tuple[SeededRow, ...]
    tolerance: float
    notes: tuple[str, ...]
    servers: Mapping[str, Any]

    @property
    def _own(self) -> list[GreedyRow]:
        return [row for row in self.rows if not row.is_baseline]

    def conclusion(self) -> tuple[Verdict, list[str]]:
        """The verdict, and sentences with what it follows from.

        Wrong if one text is, or if sampled answers have another distribution than the baseline's.
        """
        kinds = Counter(one.kind for row in self._own for one in row.comparisons)
        equal, ties, wrong = kinds["equal"], kinds["near-tie"], kinds["wrong"]
        texts = counted(equal + ties + wrong, "compared text")
        wrongs = [f"{wrong} of {texts} wrong."] * bool(wrong)
        if broken := sum(row.num_broken_json for row in self._own):
            wrongs.append(f"{counted(broken, 'answer')} not JSON of the schema, where the reference's JSON is valid.")
        off = [row.check for row in self.sampled if row.is_off and row.baseline is not None]
        wrongs += [f"{check}: sampled tokens have another distribution than the baseline's." for check in off]
        if wrongs:
            return "wrong", [f"NOT LOSSLESS. {' '.join(wrongs)}"]
        gaps = [abs(one.gap or 0.0) for row in self._own for one in row.comparisons if one.kind == "near-tie"]
        largest = f"; the largest gap is {max(gaps):.3f} nats" if gaps else ""
        counts = (
            f"Of {texts} {equal} {'is' if equal == 1 else 'are'} equal and {ties} {'has' if ties == 1 else 'have'} "
            f"a near-tie{largest}."
        )
        reasons = self._reasons()
        if not reasons and not equal and not ties and all(row.deviations is None for row in self.sampled):
            reasons = ["No text could be compared."]
        if reasons:
            return "undecided", [f"NOT DECIDED. {counts}", *reasons]
        return "lossless", [f"LOSSLESS, as far as was compared. {counts}"]

    def _reasons(self) -> list[str]:
        """Why it is not decided."""
        differences = [one for row in self._own for one in row.comparisons]
        lines = [
            f"Not scored: {reason}." for reason in {one.reason: 0 for one in differences if one.kind == "unscored"}
        ]
        if any(one.kind == "reference-wrong" for one in differences):
            lines.append("Some references are less likely than the answers: is the reference decoded greedily?")
        failures = [
            (row.check, row.failure or next(one.reason for one in row.comparisons if one.kind == "failed"), number)
            for row in self._own
            if (number := row.num_without_pair)
        ]
        sides = [(row.check, side) for row in self.sampled for side in (row.server, row.baseline) if side is not None]
        failures += [(check, side.failure, side.num_failed) for check, side in sides if side.num_failed]
        lines += [f"{check}: {counted(number, 'request')} failed; {failure}" for check, failure, number in failures]
        lines += [
            f"{row.check}: sampled tokens do not have the distribution of --model. The server may have other defaults "
            "(top_k, min_p), or drafting changes it: give --baseline to know."
            for row in self.sampled
            if row.is_off and row.baseline is None
        ]
        return lines

    def examples(self, number: int) -> list[tuple[GreedyRow, Comparison]]:
        """Differences to show: wrong texts first, the largest gaps first; none of them twice."""
        order: Sequence[Kind] = ("wrong", "reference-wrong", "unscored", "near-tie")
        found = [(row, one) for row in self._own for one in row.comparisons if one.kind in order]
        found.sort(key=lambda pair: (order.index(pair[1].kind), -abs(pair[1].gap or 0.0)))
        distinct = {(one.index, one.place, one.answer, one.reference): (row, one) for row, one in reversed(found)}
        return list(reversed(distinct.values()))[:number]

    def record(self) -> dict[str, Any]:
        verdict, sentences = self.conclusion()
        return {
            "verdict": verdict,
            "sentences": sentences,
            "tolerance": self.tolerance,
            "servers": self.servers,
            "notes": list(self.notes),
            "checks": [row.record() for row in self.rows],
            "sampled": [{**asdict(row), "deviations": row.deviations, "is_off": row.is_off} for row in self.sampled],
        }
