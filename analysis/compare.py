"""Arms against the baseline, seed by seed, under both readings of a stopped run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.load import Results
from analysis.records import is_searched
from analysis.stats import (
    McNemar,
    Paired,
    ProblemDifference,
    holm,
    mcnemar,
    paired_difference,
    problem_difference,
)

LAST_SCORE = "stopped run = its last score"
FINISHED = "finished runs only"
READINGS = (LAST_SCORE, FINISHED)
COUNTED = {LAST_SCORE: ("finished", "stopped", "failed"), FINISHED: ("finished",)}
ALPHA = 0.05


@dataclass(frozen=True)
class Measure:
    """One number of a run that arms are compared by: column of `runs`, words, unit, decimals.

    `more` and `less` are the words of a verdict, with {} for the size of the difference; `precision` is a
    half width worth planning seeds for.
    """

    column: str
    noun: str
    unit: str
    digits: int
    more: str
    less: str
    precision: float


MEASURES: tuple[Measure, ...] = (
    Measure("final_accuracy", "accuracy", "", 2, "reaches {} higher accuracy", "reaches {} lower accuracy", 0.02),
    Measure(
        "final_entropy",
        "entropy",
        "nats/token",
        2,
        "keeps {} nats more entropy",
        "keeps {} nats less entropy",
        0.02,
    ),
    Measure("final_length", "length", "tokens", 1, "answers {} tokens longer", "answers {} tokens shorter", 1.0),
)


@dataclass(frozen=True)
class Comparison:
    """One arm against the baseline in one measure under one reading.

    `seeds` are those both arms have; `values` and `baseline_values` belong to them. `holm_p` is the t test's
    p value adjusted over the arms of this measure and reading.
    """

    arm: str
    baseline: str
    measure: Measure
    reading: str
    seeds: tuple[int, ...]
    values: tuple[float, ...]
    baseline_values: tuple[float, ...]
    paired: Paired
    holm_p: float = float("nan")

    @property
    def distinguishable(self) -> bool:
        """True when the t interval leaves out 0 and the test holds after Holm's correction over the arms."""
        return self.paired.t is not None and self.paired.t.excludes(0.0) and self.holm_p < ALPHA


def arm_runs(results: Results) -> pd.DataFrame:
    """The runs that count as data of their arm: no forked children, the latest run of each arm and seed."""
    runs = results.runs[results.runs["parent"] == ""]
    known = runs[runs["seed"] >= 0].drop_duplicates(["arm", "stage", "seed"], keep="last")
    return pd.concat([known, runs[runs["seed"] < 0]]).sort_index()


def by_seed(runs: pd.DataFrame, arm: str, column: str, reading: str) -> pd.Series:
    """The arm's finite values of `column` under a reading, indexed by seed (-1: not recorded)."""
    mine = runs[(runs["arm"] == arm) & runs["outcome"].isin(COUNTED[reading])]
    values = pd.Series(mine[column].to_numpy(float), index=mine["seed"].to_numpy(), dtype=float)
    values = values[np.isfinite(values)]
    return values[(values.index < 0) | ~values.index.duplicated(keep="last")]


def compare(
    results: Results,
    rng: np.random.Generator,
    measures: Sequence[Measure] = MEASURES,
    readings: Sequence[str] = READINGS,
) -> list[Comparison]:
    """Every arm against the baseline; none for a search, where configurations are candidates and not arms."""
    if is_searched(results.plan):
        return []
    runs = arm_runs(results)
    others = [arm for arm in results.arms if arm != results.baseline]
    out = []
    for reading in readings:
        for measure in measures:
            family = [_pair(runs, arm, results.baseline, measure, reading, rng) for arm in others]
            adjusted = holm({each.arm: each.paired.t_p for each in family})
            out += [Comparison(**{**vars(each), "holm_p": adjusted[each.arm]}) for each in family]
    return out


def _pair(
    runs: pd.DataFrame, arm: str, baseline: str, measure: Measure, reading: str, rng: np.random.Generator
) -> Comparison:
    a, b = (by_seed(runs, name, measure.column, reading) for name in (arm, baseline))
    seeds = sorted((set(a.index) & set(b.index)) - {-1})
    left, right = tuple(map(float, a[seeds])), tuple(map(float, b[seeds]))
    paired = paired_difference(left, right, rng)
    return Comparison(arm, baseline, measure, reading, tuple(map(int, seeds)), left, right, paired)


@dataclass(frozen=True)
class ProblemComparison:
    """An arm against the baseline on the same held-out problems at each run's last evaluation.

    `tests` has McNemar's test for every shared seed; a problem counts as solved when more than half of its
    samples are right. `skipped` says why seeds are missing.
    """

    arm: str
    baseline: str
    seeds: tuple[int, ...]
    difference: ProblemDifference | None
    tests: tuple[McNemar, ...]
    skipped: str


def compare_problems(results: Results, rng: np.random.Generator) -> list[ProblemComparison]:
    """Problem-level comparison of every arm with the baseline, stopped runs at their last score."""
    if is_searched(results.plan):
        return []
    last = _last_problems(results)
    out = []
    for arm in results.arms:
        if arm == results.baseline:
            continue
        mine, other = last.get(arm, {}), last.get(results.baseline, {})
        shared = sorted(set(mine) & set(other))
        same = [s for s in shared if mine[s][1] == other[s][1] and len(mine[s][0]) == len(other[s][0])]
        sizes = {(len(mine[seed][0]), mine[seed][1]) for seed in same}
        if not same or len(sizes) > 1:
            why = "no seed has results per problem in both arms" if not shared else "the held-out sets differ"
            out.append(ProblemComparison(arm, results.baseline, (), None, (), why))
            continue
        samples = sizes.pop()[1]
        a, b = (np.array([group[seed][0] for seed in same]) for group in (mine, other))
        tests = tuple(mcnemar(x > samples / 2, y > samples / 2) for x, y in zip(a, b, strict=True))
        left_out = sorted(set(shared) - set(same))
        why = f"held-out sets differ for seed {', '.join(map(str, left_out))}" if left_out else ""
        difference = problem_difference(a, b, samples, rng)
        out.append(ProblemComparison(arm, results.baseline, tuple(same), difference, tests, why))
    return out


def _last_problems(results: Results) -> dict[str, dict[int, tuple[np.ndarray, int]]]:
    """arm -> seed -> (right per problem, samples) of the last evaluation of each run that counts."""
    runs = arm_runs(results)
    counted = runs[runs["outcome"].isin(COUNTED[LAST_SCORE]) & (runs["seed"] >= 0)]
    out: dict[str, dict[int, tuple[np.ndarray, int]]] = {}
    if results.evals.empty:
        return out
    final = results.evals.groupby("key", sort=False).tail(1).set_index("key")
    for key, arm, seed in zip(counted["key"], counted["arm"], counted["seed"], strict=True):
        if key in final.index and final.at[key, "problems"] is not None and final.at[key, "samples"] > 0:
            right = np.asarray(final.at[key, "problems"], float)
            out.setdefault(arm, {})[int(seed)] = (right, int(final.at[key, "samples"]))
    return out
