"""How many tokens another engine should draft at each batch size: from a head's acceptance and that engine's own times.

Engines are told by hand, or search by trial. Here a head's chain, as it was replayed on recorded answers, says what a
step of k draft tokens gives, and a few times that were measured in the engine say what it costs.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike

import numpy as np

from draftheads.errors import DataError, InvalidSettings
from draftheads.speculation.acceptance_profile import AcceptanceProfile
from draftheads.utils.counts import counted
from draftheads.utils.files import user_path

_COLUMNS = ("batch", "draft_tokens", "milliseconds")


@dataclass(frozen=True)
class Measured:
    """The time of a step."""

    batch: int  # requests that are decoded together
    draft_tokens: int  # of each; 0 is plain decoding
    milliseconds: float  # of the whole step, drafting included


@dataclass(frozen=True)
class Choice:
    """What is fastest at a batch size."""

    batch: int
    draft_tokens: int
    tokens_per_step: float
    speed_up: float  # over plain decoding at the same batch size


def chain_tokens(profile: AcceptanceProfile) -> list[float]:
    """Tokens per step of chains of 0, 1, … draft tokens, as far as the profile knows them.

    >>> chain_tokens(AcceptanceProfile.assumed(2))
    [1.0, 1.5, 1.75]
    """
    gains = dict(zip(map(tuple, profile.paths), np.diff(profile.static_tokens), strict=True))
    tokens = [1.0]
    while (path := (0,) * len(tokens)) in gains:
        tokens.append(tokens[-1] + float(gains[path]))
    return tokens


def read_costs(path: str | PathLike[str]) -> list[Measured]:
    """Times from a CSV file with the columns batch, draft_tokens and milliseconds.

    Several rows of a batch size and number of draft tokens are measurements of one time.

    Raises:
        DataError: it cannot be read, a column is missing, or a value is no number or too small.
    """
    file = user_path(path)
    try:
        rows = list(csv.DictReader(file.read_text(encoding="utf-8-sig").splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: {error}") from None
    if not rows or set(_COLUMNS) - set(rows[0]):
        raise DataError(
            f"{file} has the columns {', '.join(rows[0]) if rows else 'none'}; needed: {', '.join(_COLUMNS)}"
        )
    costs = []
    for number, row in enumerate(rows, start=2):
        try:
            cost = Measured(int(row["batch"]), int(row["draft_tokens"]), float(row["milliseconds"]))
        except (TypeError, ValueError):
            raise DataError(f"{file}, line {number}: {dict(row)} are not three numbers") from None
        if cost.batch < 1 or cost.draft_tokens < 0 or not 0 < cost.milliseconds < float("inf"):
            raise DataError(
                f"{file}, line {number}: batch ≥ 1, draft_tokens ≥ 0 and milliseconds > 0 are needed, not {row}"
            )
        costs.append(cost)
    return costs


def plan(profile: AcceptanceProfile, costs: Sequence[Measured]) -> list[Choice]:
    """The fastest number of draft tokens at each batch size that was measured, ascending.

    Of times that were measured more than once the mean counts. Times between measured numbers of draft tokens are on a
    line; beyond the largest one nothing is drafted.

    Raises:
        InvalidSettings: a batch size was not measured without drafts, or only without.
    """
    tokens = chain_tokens(profile)
    choices = []
    for batch in sorted({cost.batch for cost in costs}):
        measured: dict[int, list[float]] = {}
        for cost in sorted(costs, key=lambda cost: cost.draft_tokens):
            if cost.batch == batch:
                measured.setdefault(cost.draft_tokens, []).append(cost.milliseconds)
        times = {drafted: float(np.mean(each)) for drafted, each in measured.items()}
        if 0 not in times or len(times) < 2:
            raise InvalidSettings(
                f"for a batch of {batch}, {counted(len(times), 'time')} with {', '.join(map(str, times))} draft tokens "
                "were given; measure it with 0 and with at least one other number"
            )
        drafted = range(min(max(times), len(tokens) - 1) + 1)
        rates = [tokens[k] / float(np.interp(k, list(times), list(times.values()))) for k in drafted]
        best = int(np.argmax(rates))
        choices.append(Choice(batch, best, tokens[best], rates[best] / rates[0]))
    return choices


def for_vllm(choices: Sequence[Choice]) -> list[tuple[int, int, int]]:
    """As ``num_speculative_tokens_per_batch_size``: first and last batch size, and draft tokens.

    A batch size that was not measured is as the next smaller one that was; the last range is open.

    >>> for_vllm([Choice(1, 4, 2.0, 1.5), Choice(4, 4, 2.0, 1.4), Choice(8, 0, 1.0, 1.0)])
    [(1, 7, 4), (8, 1024, 0)]
    """
    ranges: list[tuple[int, int, int]] = []
    for place, choice in enumerate(choices):
        first = 1 if place == 0 else choice.batch
        last = choices[place + 1].batch - 1 if place + 1 < len(choices) else max(1024, choice.batch)
        if ranges and ranges[-1][2] == choice.draft_tokens:
            ranges[-1] = (ranges[-1][0], last, choice.draft_tokens)
        else:
            ranges.append((first, last, choice.draft_tokens))
    return ranges
