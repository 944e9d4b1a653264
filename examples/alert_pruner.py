"""The alert pruner in an ordinary Optuna script that uses nothing else of this project.

    python examples/alert_pruner.py

Eight trials of a pretended training; where the learning rate is too high, entropy collapses and the reward with it.
Each pruned trial says why, and what to try next. Replace `train` by your own loop.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import optuna

from sweeps.pruner import AlertPruner


def train(lr: float, steps: int, seed: int) -> Iterator[dict[str, float]]:
    """A pretended run: above 3e-4 the policy collapses after step 60."""
    dice = random.Random(seed)
    for step in range(1, steps + 1):
        sick = max(0, step - 60) / 10 if lr > 3e-4 else 0.0
        health = math.exp(-sick)
        yield {
            "reward/total": health * (1 - math.exp(-step * lr * 300)) + dice.gauss(0, 0.01),
            "entropy/mean": 0.6 * health + abs(dice.gauss(0, 0.01)),
            "groups/flat": min(1.0, 0.1 + 0.9 * (1 - health)),
            "optim/grad_norm": 0.5,
        }


def main() -> optuna.Study:
    """Run the search and print what became of every trial."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = AlertPruner()
    sampler = optuna.samplers.RandomSampler(seed=5)
    study = optuna.create_study(direction="maximize", pruner=pruner, sampler=sampler)

    def objective(trial: optuna.Trial) -> float:
        lr = trial.suggest_float("lr", 1e-5, 1e-3, log=True)
        metrics: dict[str, float] = {}
        for step, metrics in enumerate(train(lr, 150, trial.number), start=1):
            trial.report(metrics["reward/total"], step)
            pruner.record(trial, step, metrics)
            if trial.should_prune():
                raise optuna.TrialPruned
        return metrics["reward/total"]

    study.optimize(objective, n_trials=8)
    for trial in study.trials:
        told = trial.user_attrs
        why = ""
        if told.get("code"):
            why = f"{told['code']} {told['title']}: {told['message']} Try {' or '.join(told['intervention'])}."
        print(f"lr={trial.params['lr']:.1e} {trial.state.name.lower()} {why}")
    return study


if __name__ == "__main__":
    main()
