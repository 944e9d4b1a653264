"""How fast a curve gets somewhere: area under it, steps to a target with censoring, ratio of two arms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from analysis.intervals import Interval


def area_under_curve(steps: ArrayLike, values: ArrayLike, start: float, stop: float, carry: bool = False) -> float:
    """Mean height of a curve between two steps (trapezoids), in the unit of its values.

    Non-finite points are left out. A curve that does not reach `stop` gives nan; with `carry` its last value
    counts as going on (a stopped run counts as its last score). A curve that begins after `start` gives nan.
    """
    if not stop > start:
        raise ValueError(f"stop={stop} must be above start={start}")
    x, y = _points(steps, values)
    if len(x) == 0 or x[0] > start or (x[-1] < stop and not carry):
        return math.nan
    inside = (x > start) & (x < stop)
    grid = np.concatenate([[start], x[inside], [stop]])
    return float(np.trapezoid(np.interp(grid, x, y), grid) / (stop - start))


@dataclass(frozen=True)
class Reached:
    """When a run came to the target: `at` is that step, or (reached False) the last step it was watched."""

    at: float
    reached: bool


def steps_to_target(steps: ArrayLike, values: ArrayLike, target: float, hold: int = 1) -> Reached:
    """The first step from which `hold` evaluations in a row are at or above `target`.

    One noisy evaluation can cross a target by luck: `hold=2` asks for it twice. Points that are not finite
    do not count. A run without any point was watched until step 0.
    """
    if hold < 1:
        raise ValueError(f"hold={hold}: must be 1 or more")
    x, y = _points(steps, values)
    above = y >= target
    for index in range(len(x) - hold + 1):
        if above[index : index + hold].all():
            return Reached(float(x[index]), True)
    return Reached(float(x[-1]) if len(x) else 0.0, False)


def kaplan_meier(runs: Sequence[Reached]) -> tuple[np.ndarray, np.ndarray]:
    """Steps at which runs reached the target, and the share that had not yet, right after each."""
    times = sorted({run.at for run in runs if run.reached})
    share, left = [], 1.0
    for time in times:
        at_risk = sum(run.at >= time for run in runs)
        hits = sum(run.reached and run.at == time for run in runs)
        left *= 1 - hits / at_risk
        share.append(left)
    return np.array(times), np.array(share)


def median_steps(runs: Sequence[Reached]) -> float:
    """Kaplan-Meier median of the steps to a target; inf when fewer than half of the runs got there."""
    times, share = kaplan_meier(runs)
    below = np.flatnonzero(share <= 0.5 + 1e-12)
    return float(times[below[0]]) if len(below) else math.inf


def restricted_mean(runs: Sequence[Reached], horizon: float) -> float:
    """Mean steps to the target, watched until `horizon` (area under Kaplan-Meier); nan without runs."""
    if not runs:
        return math.nan
    times, share = kaplan_meier(runs)
    grid = np.concatenate([[0.0], times[times < horizon], [horizon]])
    level = np.concatenate([[1.0], share[times < horizon]])
    return float(np.sum(np.diff(grid) * level))


@dataclass(frozen=True)
class StepsRatio:
    """Steps to a target of arm a over those of arm b (below 1: a is faster).

    Without censoring: geometric mean over paired seeds with its t interval. If a run did not get there:
    ratio of restricted means up to the common horizon and no interval; `censored_a`, `censored_b` count the
    runs not there by then. Where only b is censored the true ratio is smaller, where only a is, larger.
    """

    ratio: float
    interval: Interval | None
    n: int
    censored_a: int
    censored_b: int

    @property
    def bound(self) -> str:
        """What censoring does to the ratio: "" (exact), "at most", "at least", or "unclear" (both arms)."""
        if self.censored_a and self.censored_b:
            return "unclear"
        return "at most" if self.censored_b else ("at least" if self.censored_a else "")


def steps_ratio(a: Sequence[Reached], b: Sequence[Reached], level: float = 0.95) -> StepsRatio:
    """Compare the steps to a target; `a[i]` and `b[i]` share a seed. ValueError when the lengths differ."""
    if len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} runs are not pairs")
    if not a:
        return StepsRatio(math.nan, None, 0, 0, 0)
    if any(not run.reached or run.at <= 0 for run in (*a, *b)):
        horizon = min(_known_until(a), _known_until(b), max(run.at for run in (*a, *b)))
        censored = [sum(not run.reached or run.at > horizon for run in runs) for runs in (a, b)]
        below = restricted_mean(b, horizon)
        ratio = restricted_mean(a, horizon) / below if below > 0 else math.nan
        return StepsRatio(ratio, None, len(a), *censored)
    logs = np.log([run.at for run in a]) - np.log([run.at for run in b])
    mean, interval = float(logs.mean()), None
    if len(logs) > 1 and float(logs.std(ddof=1)) > 1e-12:
        half = float(stdtrit(len(logs) - 1, 0.5 + level / 2) * logs.std(ddof=1) / math.sqrt(len(logs)))
        interval = Interval(math.exp(mean - half), math.exp(mean + half), level, "t on log ratios")
    return StepsRatio(math.exp(mean), interval, len(logs), 0, 0)


def _known_until(runs: Sequence[Reached]) -> float:
    """How far an arm's curve is known: for good once every run got there, else as long as one was watched."""
    _, share = kaplan_meier(runs)
    return math.inf if len(share) and share[-1] == 0 else max(run.at for run in runs)


def _points(steps: ArrayLike, values: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.asarray(steps, float), np.asarray(values, float)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"a curve needs as many steps as values, got shapes {x.shape} and {y.shape}")
    good = np.isfinite(x) & np.isfinite(y)
    order = np.argsort(x[good], kind="stable")
    return x[good][order], y[good][order]
