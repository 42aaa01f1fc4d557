"""Measures of answers by references, beside those of ``bench``: ROUGE, and the numbers of GSM8K."""

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Any, Literal

from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]

from draftheads.bench.quality import Item, Measure, Outcome
from draftheads.errors import InvalidSettings
from draftheads_papers.judge import Judge

_NUMBER = re.compile(r"((?<![\w)])[-−][$€£]?)?(\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(\.\d+)?")
_FINAL = re.compile(r"####|answer is", re.IGNORECASE)


class Rouge(Measure):
    """F1 of a last answer against a summary in percent, words by their stems."""

    name = "rouge"
    names = ("ROUGE-1", "ROUGE-2", "ROUGE-L")

    def __init__(self) -> None:
        self._scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)

    def score(self, item: Item) -> Outcome:
        if not isinstance(item.reference, str):
            return "no reference text"
        found = self._scorer.score(item.reference, item.answers[-1])
        return tuple(100 * found[name].fmeasure for name in ("rouge1", "rouge2", "rougeL"))


class Gsm8k(Measure):
    """Whether the number of a last answer is that of the reference: 100 or 0, also without a number."""

    name = "gsm8k"

    def score(self, item: Item) -> Outcome:
        expected = final_number(str(item.reference))
        if expected is None:
            return "no number in the reference"
        return (100.0 * (final_number(item.answers[-1]) == expected),)


def final_number(text: str) -> Decimal | None:
    """The first number after the last "####" or "answer is", else the last number; None if there is none.

    >>> final_number("He has 3 bags, so $1,234.50."), final_number("The answer is 42.0. 3 left"), final_number("none")
    (Decimal('1234.50'), Decimal('42.0'), None)
    """
    *marked, tail = _FINAL.split(text)
    numbers = _numbers(tail)
    return numbers[0] if marked and numbers else next(reversed(_numbers(text)), None)


def _numbers(text: str) -> list[Decimal]:
    found = ((minus, whole.replace(",", "") + part) for minus, whole, part in _NUMBER.findall(text))
    return [Decimal(f"-{digits}" if minus else digits) for minus, digits in found if digits]


def measures_of(names: Sequence[str], judge: Mapping[str, Any]) -> list[Measure | Literal["agreement", "perplexity"]]:
    """The measures with these names; ``judge`` has the arguments of :class:`Judge`."""
    if "judge" in names and "url" not in judge:
        raise InvalidSettings("the measure judge needs an endpoint: url under [judge] in a table of your own")
    kinds: dict[str, Callable[[], Any]] = {"rouge": Rouge, "gsm8k": Gsm8k, "judge": partial(Judge, **judge)}
    found: list[Any] = [kinds[name]() if name in kinds else name for name in names]
    return found
