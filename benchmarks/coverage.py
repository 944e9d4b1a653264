"""How often the 95 % intervals hold the truth, by simulation, and how often a verdict is wrong.

    python benchmarks/coverage.py [--trials 20000]

Differences between arms are drawn from populations with a known mean: normal; skewed (a gamma); "ruin", where an
arm fails to take off in one run out of five. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy.special import stdtrit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis import stats

SEEDS = (2, 3, 5, 10, 30)
BOOTSTRAP = 2000


def normal(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, float]:
    """Differences that are normal with mean 0."""
    return rng.normal(size=shape), 0.0


def skewed(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, float]:
    """Differences with a long right tail (gamma of shape 2, mean taken out)."""
    return rng.gamma(2.0, size=shape) - 2.0, 0.0


def ruin(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, float]:
    """One arm fails to take off in 20 % of its runs and then loses 0.6; else the arms differ by noise of 0.02."""
    failed = rng.random(shape) < 0.2
    return rng.normal(0.0, 0.02, shape) - 0.6 * failed, -0.12


POPULATIONS: dict[str, Callable[..., tuple[np.ndarray, float]]] = {"normal": normal, "skewed": skewed, "ruin": ruin}


def check_vectorised(rng: np.random.Generator) -> None:
    """The fast formulas below are those of analysis.stats; anything else would measure something else."""
    x = rng.normal(size=(1, 5))
    low, high = t_ends(x)
    one = stats.mean_interval(x[0]).interval
    assert one is not None
    np.testing.assert_allclose([low[0], high[0]], [one.low, one.high])


def t_ends(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ends of the t interval of every row."""
    n = x.shape[1]
    half = stdtrit(n - 1, 0.975) * x.std(axis=1, ddof=1) / np.sqrt(n)
    return x.mean(axis=1) - half, x.mean(axis=1) + half


def share(low: np.ndarray, high: np.ndarray, truth: float) -> float:
    """Share of intervals that hold the truth."""
    return float(np.mean((low <= truth) & (truth <= high)))


def bootstrap_share(x: np.ndarray, truth: float, rng: np.random.Generator) -> float:
    """Coverage of analysis.stats.bootstrap_mean itself, row by row."""
    held = 0
    for row in x:
        interval = stats.bootstrap_mean(row, rng, resamples=BOOTSTRAP)
        held += interval is not None and not interval.excludes(truth)
    return held / len(x)


def seeds_table(trials: int, rng: np.random.Generator) -> list[str]:
    """Coverage of the paired difference by population and number of seeds."""
    lines = ["| differences | seeds | t | percentile bootstrap |", "| --- | --: | --: | --: |"]
    for name, draw in POPULATIONS.items():
        for n in SEEDS:
            x, truth = draw(rng, (trials, n))
            few, _ = draw(rng, (max(1, trials // 10), n))
            boot = bootstrap_share(few, truth, rng)
            lines.append(f"| {name} | {n} | {share(*t_ends(x), truth):.3f} | {boot:.3f} |")
    return lines


def problems_table(trials: int, rng: np.random.Generator) -> list[str]:
    """Coverage of the problem-level bootstrap: over problems (runs held fixed), over both (seeds vary too)."""
    lines = ["| held-out problems | seeds | over problems, runs fixed | over both | over problems, seeds vary |"]
    lines.append("| --: | --: | --: | --: | --: |")
    samples = 4
    for problems, seeds in ((50, 3), (200, 3), (200, 10)):
        fixed, both, naive = 0, 0, 0
        rounds = max(1, trials // 100)
        for _ in range(rounds):
            ease = rng.beta(1.0, 1.0, size=problems)
            for spread in (0.0, 0.05):  # of the arms' true accuracy from seed to seed
                shift = rng.normal(0.0, spread, size=(2, seeds, 1))
                right = rng.binomial(samples, np.clip(ease + shift, 0, 1))
                got = stats.problem_difference(right[0], right[1], samples, rng, resamples=1000)
                assert got.problems is not None and got.both is not None
                if spread == 0.0:
                    fixed += not got.problems.excludes(0.0)
                else:
                    both += not got.both.excludes(0.0)
                    naive += not got.problems.excludes(0.0)
        lines.append(f"| {problems} | {seeds} | {fixed / rounds:.3f} | {both / rounds:.3f} | {naive / rounds:.3f} |")
    return lines


def rates_table(trials: int, rng: np.random.Generator) -> list[str]:
    """Coverage of the Wilson interval of a failure rate."""
    lines = ["| true rate | runs | Wilson |", "| --: | --: | --: |"]
    for rate in (0.05, 0.2, 0.5):
        for n in (3, 5, 10, 30):
            ends = [stats.wilson(k, n).interval for k in range(n + 1)]
            holds = np.array([end is not None and not end.excludes(rate) for end in ends])
            lines.append(f"| {rate} | {n} | {holds[rng.binomial(n, rate, size=trials)].mean():.3f} |")
    return lines


def verdict_table(trials: int, rng: np.random.Generator) -> list[str]:
    """How often at least one of several equal arms is called different, with and without Holm."""
    lines = ["| arms against the baseline | seeds | without Holm | with Holm |", "| --: | --: | --: | --: |"]
    for arms in (2, 5):
        for n in (3, 5):
            plain = corrected = 0
            rounds = max(1, trials // 20)
            for _ in range(rounds):
                runs = rng.normal(size=(arms + 1, n))
                tests = {
                    str(arm): stats.paired_difference(runs[arm], runs[0], rng, resamples=1).t_p
                    for arm in range(1, arms + 1)
                }
                plain += min(tests.values()) < 0.05
                corrected += min(stats.holm(tests).values()) < 0.05
            lines.append(f"| {arms} | {n} | {plain / rounds:.3f} | {corrected / rounds:.3f} |")
    return lines


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20_000, help="simulated sweeps for each line of the first table")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    check_vectorised(rng)
    for title, table in (
        ("Paired difference over seeds: how often the 95 % interval holds the truth", seeds_table),
        ("Same held-out problems, no true difference: how often the interval holds 0", problems_table),
        ("Failure rate", rates_table),
        ("Equal arms called different (wanted: at most 0.05)", verdict_table),
    ):
        print(f"## {title}\n")
        print("\n".join(table(args.trials, rng)), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
