"""Estimates from measurements on several prompts: with standard errors or bootstrap intervals, and quartiles."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

_RESAMPLES = 1000
Share = tuple[float, float]  # a count for one prompt, and its divisor: (tokens, steps) or (tokens, seconds)


def ratio_with_error(shares: Sequence[Share], others: Sequence[Share] | None = None) -> tuple[float, float]:
    """The ratio Σa / Σb of pairs (a, b), and its standard error. With ``others``, that ratio over theirs.

    The standard error is the jackknife's: prompts are taken as independent, and each is left out once.

    Args:
        shares: a pair for each prompt. A ratio whose divisors sum to 0 counts as 1.
        others: pairs (c, d) for the same prompts; then the result is (Σa / Σb) / (Σc / Σd).

    >>> ratio_with_error([(10, 5), (30, 10)])[0]
    2.6666666666666665
    >>> ratio_with_error([(10, 5), (30, 10)], [(10, 10), (30, 20)])[0]
    2.0
    """
    ratios = _ratios_with_one_left_out(shares)
    if others is not None:
        ratios = ratios / _ratios_with_one_left_out(others)
    whole, without = ratios[-1], ratios[:-1]
    count = len(without)
    squares = ((without - without.mean()) ** 2).sum() if count else 0.0
    return float(whole), float(np.sqrt(squares * (count - 1) / count)) if count else 0.0


def _ratios_with_one_left_out(shares: Sequence[Share]) -> np.ndarray:
    """(n + 1,): the ratio without the first pair, without the second …, and last the ratio of all."""
    above, below = np.array(shares, dtype=np.float64).reshape(-1, 2).T
    above, below = (np.append(part.sum() - part, part.sum()) for part in (above, below))
    return np.divide(above, below, out=np.ones_like(above), where=below > 0)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile; never outside the values.

    >>> quartiles([3.0, 1.0, 2.0, 5.0, 4.0])
    (2.0, 3.0, 4.0)
    >>> quartiles([2.0])
    (2.0, 2.0, 2.0)
    """
    lower, middle, upper = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return lower, middle, upper


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
