"""One search over learning rate and clip on the built-in task, four ways to end runs early: what each one saves.

    python benchmarks/early_stop.py --trials 16 --steps 30 --seeds 2

Every way draws the same configurations (random sampler, same seed). "steps" are rollout steps made, of those of a
search that ends nothing; "winner kept" says whether the configuration that wins without any stopping still ran to
its end, "regret" how much held-out accuracy the best one that is left lies below it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

WAYS: dict[str, list[str]] = {
    "nothing": ["alerts=off", "study.pruner=none"],
    "median": ["alerts=off", "study.pruner=median"],
    "successive halving": ["alerts=off", "study.pruner=halving"],
    "alerts": ["alerts=graded", "study.pruner=none"],
}
Point = tuple[float, float]


@dataclass(frozen=True)
class Outcome:
    """What one way made of the search: steps made, runs ended early, and the mean accuracy of what finished."""

    steps: int
    total: int
    ended_early: int
    finished: Mapping[Point, float]


def search(way: str, results: Path, trials: int, steps: int, seeds: int, more: Sequence[str]) -> Outcome:
    """Run the search one way (resuming what is there) and read its outcome from the files."""
    from sweeps.story import read_runs

    name = way.replace(" ", "_")
    seed_list = ",".join(str(seed) for seed in range(seeds))
    command = [sys.executable, "sweep.py", "-m", "study=random", f"study.trials={trials}", "study.seed=0"]
    command += ["study.startup_trials=4", "study.abandon=false", f"seed={seed_list}", f"steps={steps}", "eval.every=5"]
    command += ["optim.lr=tag(log,interval(1e-5,1e-3))", "loss.high=interval(0.2,0.4)"]
    command += [f"sweep.name={name}", f"results={results}", *WAYS[way], *more]
    with (results / f"{name}.txt").open("wb") as log:
        code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT).returncode
    if code:
        raise SystemExit(f"{way} ended with code {code}; see {results / f'{name}.txt'}")
    runs = read_runs(results / name).values()
    values: dict[Point, list[float]] = {}
    whole: dict[Point, bool] = {}
    for run in runs:
        point = (float(run.spec.params["optim.lr"]), float(run.spec.params["loss.high"]))
        whole[point] = whole.get(point, True) and run.status == "finished"
        if run.value is not None:
            values.setdefault(point, []).append(run.value)
    finished = {point: fmean(found) for point, found in values.items() if whole[point]}
    early = sum(run.status == "stopped" for run in runs)
    return Outcome(sum(run.step for run in runs), trials * seeds * steps, early, finished)


def table(outcomes: Mapping[str, Outcome]) -> list[str]:
    """The printed comparison."""
    full = outcomes["nothing"].finished
    winner = max(full, key=lambda point: full[point])
    lines = [f"{'ended by':<20}{'steps':>8}{'of all':>8}{'runs ended':>12}{'winner kept':>13}{'regret':>8}"]
    for way, outcome in outcomes.items():
        kept = "yes" if winner in outcome.finished else "no"
        left = max((full[point] for point in outcome.finished if point in full), default=float("nan"))
        share = f"{100 * outcome.steps / outcome.total:.0f} %"
        regret = f"{full[winner] - left:.3f}"
        lines.append(f"{way:<20}{outcome.steps:>8}{share:>8}{outcome.ended_early:>12}{kept:>13}{regret:>8}")
    lines.append(f"winner without stopping: lr={winner[0]:.3g} high={winner[1]:.3g}, accuracy {full[winner]:.3f}")
    return lines


def main() -> None:
    """Run all four and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--results", type=Path, help="keep the results there (default: a folder that is removed)")
    parser.add_argument("more", nargs="*", help="further overrides for every run")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        results = args.results or Path(scratch)
        results.mkdir(parents=True, exist_ok=True)
        outcomes = {way: search(way, results, args.trials, args.steps, args.seeds, args.more) for way in WAYS}
    print("\n".join(table(outcomes)))


if __name__ == "__main__":
    main()
