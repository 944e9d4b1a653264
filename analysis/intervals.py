"""Intervals: what a value with its uncertainty is, and the ways to get one from a handful of numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import chdtri, ndtri, stdtrit

RESAMPLES = 10_000
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A confidence interval and how it was made."""

    low: float
    high: float
    level: float = 0.95
    method: str = "t"

    def excludes(self, value: float = 0.0) -> bool:
        """True when `value` lies outside."""
        return value < self.low or value > self.high


@dataclass(frozen=True)
class Estimate:
    """A value with its sample size, and an interval where one can be had."""

    value: float
    n: int
    interval: Interval | None = None


def mean_interval(values: ArrayLike, level: float = 0.95) -> Estimate:
    """The mean of the finite values with its t interval (None with fewer than two, or with no spread)."""
    x = finite(values)
    if len(x) == 0:
        return Estimate(math.nan, 0)
    mean, sd = float(x.mean()), spread(x)
    if len(x) < 2 or sd == 0:
        return Estimate(mean, len(x))
    half = float(stdtrit(len(x) - 1, 0.5 + level / 2)) * sd / math.sqrt(len(x))
    return Estimate(mean, len(x), Interval(mean - half, mean + half, level, "t"))


def bootstrap_mean(
    values: ArrayLike, rng: np.random.Generator, level: float = 0.95, resamples: int = RESAMPLES
) -> Interval | None:
    """Percentile bootstrap interval of the mean; None with fewer than two values."""
    x = finite(values)
    if len(x) < 2:
        return None
    draws = [x[rng.integers(len(x), size=(size, len(x)))].mean(axis=1) for size in chunks(resamples, len(x))]
    return percentile(np.concatenate(draws), level, "percentile bootstrap over seeds")


def wilson(successes: int, n: int, level: float = 0.95) -> Estimate:
    """A rate with its Wilson score interval (None when n is 0). ValueError unless 0 <= successes <= n."""
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} of {n} is no rate")
    if n == 0:
        return Estimate(math.nan, 0)
    z, p = float(ndtri(0.5 + level / 2)), successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return Estimate(p, n, Interval(low, high, level, "Wilson"))


@dataclass(frozen=True)
class SeedsNeeded:
    """Seeds for a wanted half width: with the spread as estimated, and with its upper 80 % limit."""

    seeds: int
    cautious: int


def seeds_needed(sd: float, half_width: float, n: int, level: float = 0.95) -> SeedsNeeded | None:
    """How many seeds make the t interval of a mean (difference) no wider than +- `half_width`.

    `sd` is the spread of the values (or of the paired differences), estimated from `n` of them; with few, it
    is itself uncertain, hence the second, cautious number. None when n < 2 or the spread is 0 or unknown.
    """
    if half_width <= 0:
        raise ValueError(f"half_width={half_width}: must be above 0")
    if n < 2 or not math.isfinite(sd) or sd <= 0:
        return None
    upper = sd * math.sqrt((n - 1) / float(chdtri(n - 1, 0.8)))
    return SeedsNeeded(_smallest_n(sd, half_width, level), _smallest_n(upper, half_width, level))


def _smallest_n(sd: float, half_width: float, level: float) -> int:
    def wide(n: int) -> bool:
        return float(stdtrit(n - 1, 0.5 + level / 2)) * sd / math.sqrt(n) > half_width

    high = 2
    while wide(high):
        high *= 2
    low = max(2, high // 2)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if wide(middle) else (low, middle)
    return low


def finite(values: ArrayLike) -> Floats:
    """The values that are neither nan nor infinite."""
    x = np.asarray(values, float)
    return x[np.isfinite(x)]


def spread(x: Floats) -> float:
    """Sample std; exactly 0 when all values agree up to rounding."""
    if len(x) < 2:
        return math.nan
    sd = float(x.std(ddof=1))
    return 0.0 if sd <= 1e-12 * max(1.0, float(np.abs(x).max())) else sd


def percentile(draws: Floats, level: float, method: str) -> Interval:
    """The middle `level` of bootstrap draws."""
    low, high = np.quantile(draws, [0.5 - level / 2, 0.5 + level / 2])
    return Interval(float(low), float(high), level, method)


def chunks(total: int, width: int) -> list[int]:
    """Sizes that add up to `total`, each small enough for a (size, width) table of some 8 MB."""
    size = max(1, min(total, 1_000_000 // max(width, 1)))
    return [size] * (total // size) + ([total % size] if total % size else [])
