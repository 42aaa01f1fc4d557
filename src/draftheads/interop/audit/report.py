"""What an audit found: a row for each check, the verdict, and everything as JSON."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from draftheads.interop.audit.compare import Comparison, Kind
from draftheads.interop.audit.drafting import Drafting
from draftheads.interop.audit.settings import CheckName
from draftheads.utils.counts import counted

Verdict = Literal["lossless", "wrong", "undecided"]
EXIT_CODES: Mapping[Verdict, int] = {"lossless": 0, "wrong": 1, "undecided": 2}
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
    is_baseline: bool  # the baseline's own answers in parallel, beside those one by one
    comparisons: tuple[Comparison, ...]  # empty where texts cannot be compared
    num_answers: int  # without failed requests
    num_failed: int
    server: Pass
    baseline: Pass | None = None
    num_finished: int | None = None  # JSON texts that were not cut off; None for other checks
    json_problems: tuple[tuple[int, str], ...] = ()  # of finished ones, with the prompt
    num_broken_json: int = 0  # of these, where the reference's JSON is valid
    failure: str = ""  # the first problem of a request

    def count(self, *kinds: Kind) -> int:
        counts = Counter(comparison.kind for comparison in self.comparisons)
        return sum(counts[kind] for kind in kinds)

    @property
    def num_without_pair(self) -> int:
        """Failed requests, those for references included."""
        return max(self.num_failed, self.count("failed"))

    @property
    def first_failure(self) -> str:
        """Its reason; empty if none failed."""
        return self.failure or next((one.reason for one in self.comparisons if one.kind == "failed"), "")

    @property
    def num_wrong(self) -> int:
        return self.count("wrong")

    @property
    def num_characters(self) -> tuple[int, int]:
        """Characters of the references that were compared, and all: after its first difference a text is not."""
        compared = [comparison for comparison in self.comparisons if comparison.kind != "failed"]
        return sum(one.place for one in compared), sum(one.num_characters for one in compared)


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

    @property
    def deviations(self) -> float | None:
        """Standard deviations between the surprise and the expected one."""
        if self.mean_excess is None or self.variance <= 0:
            return None
        return self.excess / math.sqrt(self.variance)


@dataclass(frozen=True)
class SeededRow:
    """Sampled answers of one check."""

    check: CheckName
    server: SampledSide
    baseline: SampledSide | None = None

    @property
    def deviations(self) -> float | None:
        """Between the server and the baseline, else between the server and the model; None if they are not known."""
        one, other = self.server, self.baseline
        if other is None:
            return one.deviations
        if one.mean_excess is None or other.mean_excess is None:
            return None
        variance = one.variance / one.num_tokens**2 + other.variance / other.num_tokens**2
        return (one.mean_excess - other.mean_excess) / math.sqrt(variance) if variance > 0 else None

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
    notes: tuple[str, ...] = ()
    servers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """Wrong if one text is, or if sampled answers have another distribution than the baseline's."""
        own = [row for row in self.rows if not row.is_baseline]
        if any(row.num_wrong or row.num_broken_json for row in own):
            return "wrong"
        if any(row.is_off and row.baseline is not None for row in self.sampled):
            return "wrong"
        failed = any(row.num_without_pair or row.count("unscored", "reference-wrong") for row in own)
        failed |= any(
            row.server.num_failed or row.is_off or (row.baseline is not None and row.baseline.num_failed)
            for row in self.sampled
        )
        compared = sum(row.count("equal", "near-tie") for row in own)
        nothing = not compared and not any(row.deviations is not None for row in self.sampled)
        return "undecided" if failed or nothing else "lossless"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def sentences(self) -> list[str]:
        """The verdict in words, and what it follows from."""
        own = [row for row in self.rows if not row.is_baseline]
        compared = sum(row.count("equal", "near-tie", "wrong") for row in own)
        ties = [c for row in own for c in row.comparisons if c.kind == "near-tie"]
        if self.verdict == "wrong":
            return ["NOT LOSSLESS. " + " ".join(self._wrongs(own, compared))]
        largest = f"; the largest gap is {max(abs(tie.gap or 0.0) for tie in ties):.3f} nats" if ties else ""
        equal = sum(row.count("equal") for row in own)
        counts = (
            f"Of {counted(compared, 'compared text')} {equal} {'is' if equal == 1 else 'are'} equal and {len(ties)} "
            f"{'has' if len(ties) == 1 else 'have'} a near-tie{largest}."
        )
        if self.verdict == "lossless":
            return [f"LOSSLESS, as far as was compared. {counts}"]
        return [f"NOT DECIDED. {counts}", *self._reasons(own)]

    def examples(self, number: int) -> list[tuple[GreedyRow, Comparison]]:
        """Differences to show: wrong texts first, the largest gaps first; none of them twice."""
        order: dict[Kind, int] = {"wrong": 0, "reference-wrong": 1, "unscored": 2, "near-tie": 3}
        found = [(row, one) for row in self.rows if not row.is_baseline for one in row.comparisons if one.kind in order]
        found.sort(key=lambda pair: (order[pair[1].kind], -abs(pair[1].gap or 0.0)))
        distinct = {(one.index, one.place, one.answer, one.reference): (row, one) for row, one in reversed(found)}
        return list(reversed(distinct.values()))[:number]

    def record(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "sentences": self.sentences(),
            "tolerance": self.tolerance,
            "servers": self.servers,
            "notes": list(self.notes),
            "checks": [self._row(row) for row in self.rows],
            "sampled": [{**asdict(row), "deviations": row.deviations, "is_off": row.is_off} for row in self.sampled],
        }

    def _row(self, row: GreedyRow) -> dict[str, Any]:
        compared, characters = row.num_characters
        kinds: Sequence[Kind] = ("equal", "near-tie", "wrong", "reference-wrong", "unscored", "failed")
        record = {**asdict(row), "counts": {kind: row.count(kind) for kind in kinds}}
        record["comparisons"] = [asdict(one) for one in row.comparisons if one.kind != "equal"]
        return {**record, "num_compared_characters": compared, "num_characters": characters}

    def _wrongs(self, own: Sequence[GreedyRow], compared: int) -> list[str]:
        words = []
        if wrong := sum(row.num_wrong for row in own):
            words.append(f"{wrong} of {counted(compared, 'compared text')} wrong.")
        if broken := sum(row.num_broken_json for row in own):
            words.append(f"{counted(broken, 'answer')} not JSON of the schema, where the reference's JSON is valid.")
        words += [
            f"{row.check}: sampled tokens have another distribution than the baseline's."
            for row in self.sampled
            if row.is_off and row.baseline is not None
        ]
        return words

    def _reasons(self, own: Sequence[GreedyRow]) -> list[str]:
        reasons = {one.reason: None for row in own for one in row.comparisons if one.kind == "unscored"}
        lines = [f"Not scored: {reason}." for reason in reasons]
        if any(row.count("reference-wrong") for row in own):
            lines.append("Some references are less likely than the answers: is the reference decoded greedily?")
        failures = [(row.check, row.first_failure, number) for row in own if (number := row.num_without_pair)]
        failures += [
            (row.check, side.failure, side.num_failed)
            for row in self.sampled
            for side in (row.server, row.baseline)
            if side is not None and side.num_failed
        ]
        lines += [f"{check}: {counted(number, 'request')} failed; {failure}" for check, failure, number in failures]
        lines += [
            f"{row.check}: sampled tokens do not have the distribution of --model. The server may have other defaults "
            "(top_k, min_p), or drafting changes it: give --baseline to know."
            for row in self.sampled
            if row.is_off and row.baseline is None
        ]
        if not lines:
            lines.append("No text could be compared.")
        return lines
