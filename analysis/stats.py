"""The numbers behind a comparison, as pure functions; every random draw comes from a given numpy Generator.

With few seeds the percentile bootstrap is too narrow: its 95 % interval holds the truth in 75 % of cases with
three seeds and in 83 % with five (benchmarks/coverage.py), the t interval in 95 %. So the t interval is the
headline and the bootstrap stands beside it. No interval knows of failures it has not met: where one run in five
fails to take off, three seeds meet none half of the time. Where there is no interval, it is None, never a guess.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import bdtr, stdtr

from analysis.intervals import (
    RESAMPLES,
    Estimate,
    Floats,
    Interval,
    SeedsNeeded,
    bootstrap_mean,
    chunks,
    finite,
    mean_interval,
    percentile,
    seeds_needed,
    spread,
    wilson,
)
from analysis.progress import (
    Reached,
    StepsRatio,
    area_under_curve,
    kaplan_meier,
    median_steps,
    restricted_mean,
    steps_ratio,
    steps_to_target,
)

__all__ = [
    "Estimate",
    "Interval",
    "McNemar",
    "Paired",
    "ProblemDifference",
    "Reached",
    "SeedsNeeded",
    "StepsRatio",
    "area_under_curve",
    "bootstrap_mean",
    "holm",
    "iqm",
    "kaplan_meier",
    "mcnemar",
    "mean_interval",
    "median_steps",
    "paired_difference",
    "probability_of_improvement",
    "problem_difference",
    "restricted_mean",
    "seeds_needed",
    "sign_flip_test",
    "steps_ratio",
    "steps_to_target",
    "stratified_bootstrap",
    "wilson",
]
EXACT_SEEDS = 16  # up to so many differences all sign patterns are enumerated (65,536)


@dataclass(frozen=True)
class Paired:
    """The mean of differences `a - b` over `n` pairs (seeds) with everything that can be said about it.

    `t` and `bootstrap` are None with fewer than two pairs, or when all differences are equal (their spread
    cannot be estimated). `t_p` and `sign_flip_p` are two-sided p values (nan likewise); `smallest_p` is the
    least value the sign-flip test can give with so many pairs. `dropped` pairs held a missing or non-finite
    value.
    """

    mean: float
    sd: float
    n: int
    dropped: int
    t: Interval | None
    bootstrap: Interval | None
    t_p: float
    sign_flip_p: float
    smallest_p: float
    differences: tuple[float, ...]


def paired_difference(
    a: ArrayLike,
    b: ArrayLike,
    rng: np.random.Generator,
    level: float = 0.95,
    resamples: int = RESAMPLES,
) -> Paired:
    """Differences `a[i] - b[i]` of pairs (the same seed in two arms); ValueError when the lengths differ."""
    x, y = np.asarray(a, float), np.asarray(b, float)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"pairs need two equally long lists, got shapes {x.shape} and {y.shape}")
    difference = finite(x - y)
    n, dropped = len(difference), len(x) - len(difference)
    if n == 0:
        return Paired(math.nan, math.nan, 0, dropped, None, None, math.nan, math.nan, math.nan, ())
    estimate, sd = mean_interval(difference, level), spread(difference)
    boot, p = None, math.nan
    if estimate.interval is not None:
        boot = bootstrap_mean(difference, rng, level, resamples)
        p = 2 * float(stdtr(n - 1, -abs(estimate.value) / (sd / math.sqrt(n))))
    return Paired(
        mean=estimate.value,
        sd=sd,
        n=n,
        dropped=dropped,
        t=estimate.interval,
        bootstrap=boot,
        t_p=p,
        sign_flip_p=sign_flip_test(difference, rng) if n > 1 else math.nan,
        smallest_p=2.0 ** (1 - n),
        differences=tuple(float(value) for value in difference),
    )


def sign_flip_test(differences: ArrayLike, rng: np.random.Generator | None = None) -> float:
    """Two-sided p value of a zero mean under flipping the sign of each difference.

    Exact (all 2^n patterns) up to EXACT_SEEDS differences, else 100,000 random patterns of `rng`. With n
    differences it cannot fall below 2^(1-n): 0.25 with three seeds.
    """
    x = finite(differences)
    n = len(x)
    if n == 0:
        return math.nan
    observed = abs(x.sum()) * (1 - 1e-12)
    if n <= EXACT_SEEDS:
        bits = (np.arange(2**n)[:, None] >> np.arange(n)) & 1
        return float(np.mean(np.abs((1 - 2 * bits) @ x) >= observed))
    if rng is None:
        raise ValueError(f"{n} differences are too many to enumerate: give a Generator")
    hits, total = 0, 0
    for _ in range(10):
        signs = rng.integers(0, 2, size=(10_000, n)) * 2 - 1
        hits, total = hits + int(np.sum(np.abs(signs @ x) >= observed)), total + 10_000
    return (hits + 1) / (total + 1)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p values; a nan (nothing was tested) stays nan and does not count as a test."""
    tested = sorted((p, name) for name, p in p_values.items() if math.isfinite(p))
    adjusted, worst = dict.fromkeys(p_values, math.nan), 0.0
    for rank, (p, name) in enumerate(tested):
        worst = max(worst, min(1.0, (len(tested) - rank) * p))
        adjusted[name] = worst
    return adjusted


def iqm(scores: ArrayLike) -> float:
    """Interquartile mean of all finite scores: a quarter of them (rounded down) is left out at each end."""
    x = np.sort(finite(np.ravel(np.asarray(scores, float))))
    cut = len(x) // 4
    return float(x[cut : len(x) - cut].mean()) if len(x) else math.nan


def probability_of_improvement(x: ArrayLike, y: ArrayLike) -> float:
    """P(a run of x beats a run of y) + half of the ties, averaged over tasks.

    `x` and `y` are (runs, tasks) or (runs,); the numbers of runs may differ, those of tasks may not.
    """
    a, b = _tasks(x), _tasks(y)
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"{a.shape[1]} and {b.shape[1]} tasks cannot be compared")
    per_task = []
    for task in range(a.shape[1]):
        left, right = finite(a[:, task]), finite(b[:, task])
        if len(left) and len(right):
            gap = left[:, None] - right[None, :]
            per_task.append(float(np.mean(gap > 0) + 0.5 * np.mean(gap == 0)))
    return float(np.mean(per_task)) if per_task else math.nan


def stratified_bootstrap(
    statistic: str,
    scores: Sequence[ArrayLike],
    rng: np.random.Generator,
    level: float = 0.95,
    resamples: int = 2000,
) -> Estimate:
    """`statistic` "iqm" (one table) or "improvement" (two), runs drawn anew within each task.

    Tables are (runs, tasks). The interval is None when a table has fewer than two runs.
    """
    functions: dict[str, tuple[Callable[..., float], int]]
    functions = {"iqm": (iqm, 1), "improvement": (probability_of_improvement, 2)}
    if statistic not in functions:
        raise ValueError(f"statistic={statistic!r}: choose {' or '.join(functions)}")
    function, count = functions[statistic]
    tables = [_tasks(table) for table in scores]
    if len(tables) != count:
        raise ValueError(f"{statistic} takes {count} table(s), got {len(tables)}")
    value, runs = float(function(*tables)), min(len(table) for table in tables)
    if runs < 2:
        return Estimate(value, runs)
    draws = np.array([function(*(_redraw(table, rng) for table in tables)) for _ in range(resamples)])
    return Estimate(value, runs, percentile(draws, level, "stratified bootstrap over runs"))


def _redraw(table: Floats, rng: np.random.Generator) -> Floats:
    rows = rng.integers(len(table), size=table.shape)
    return np.take_along_axis(table, rows, axis=0)


def _tasks(scores: ArrayLike) -> Floats:
    table = np.asarray(scores, float)
    return table[:, None] if table.ndim == 1 else table


@dataclass(frozen=True)
class ProblemDifference:
    """Difference in accuracy of two arms on the same held-out problems.

    `problems`: problems drawn anew, these training runs held fixed (is the difference more than luck of the
    test set?). `both`: seeds drawn anew too (None with one seed; too narrow with few).
    """

    mean: float
    num_problems: int
    num_seeds: int
    problems: Interval | None
    both: Interval | None


def problem_difference(
    right_a: ArrayLike,
    right_b: ArrayLike,
    samples: int,
    rng: np.random.Generator,
    level: float = 0.95,
    resamples: int = RESAMPLES,
) -> ProblemDifference:
    """Paired bootstrap over held-out problems.

    `right_a` and `right_b` hold the number of right samples out of `samples`, (seeds, problems) or
    (problems,), row i of both from the same seed. ValueError when the shapes differ.
    """
    a, b = np.atleast_2d(np.asarray(right_a, float)), np.atleast_2d(np.asarray(right_b, float))
    if a.shape != b.shape or samples < 1:
        raise ValueError(f"shapes {a.shape} and {b.shape} with {samples} samples are not the same problems")
    gap = (a - b) / samples
    seeds, problems = gap.shape
    mean = float(gap.mean()) if gap.size else math.nan
    if problems < 2:
        return ProblemDifference(mean, problems, seeds, None, None)
    fixed, both = [], []
    for size in chunks(resamples, problems):
        weights = rng.multinomial(problems, np.full(problems, 1 / problems), size=size) / problems
        fixed.append(weights @ gap.mean(axis=0))
        if seeds > 1:
            rows = rng.multinomial(seeds, np.full(seeds, 1 / seeds), size=size) / seeds
            both.append(np.sum((rows @ gap) * weights, axis=1))
    return ProblemDifference(
        mean,
        problems,
        seeds,
        percentile(np.concatenate(fixed), level, "bootstrap over problems"),
        percentile(np.concatenate(both), level, "bootstrap over seeds and problems") if both else None,
    )


@dataclass(frozen=True)
class McNemar:
    """How many problems only one of two arms solves, and the exact two-sided p value."""

    only_a: int
    only_b: int
    p: float


def mcnemar(solved_a: ArrayLike, solved_b: ArrayLike) -> McNemar:
    """Exact McNemar test on one training run of each arm; arrays of bool, one entry per problem.

    With several samples per problem decide first what "solved" means, for instance more than half right.
    """
    a, b = np.asarray(solved_a, bool), np.asarray(solved_b, bool)
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"shapes {a.shape} and {b.shape} are not the same problems")
    only_a, only_b = int(np.sum(a & ~b)), int(np.sum(b & ~a))
    n = only_a + only_b
    p = min(1.0, 2 * float(bdtr(min(only_a, only_b), n, 0.5))) if n else 1.0
    return McNemar(only_a, only_b, p)
