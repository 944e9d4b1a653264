"""Optuna's samplers and distributions, made from the plan's words for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import Trial

from sweeps.types import SpaceEntry


def parameter_name(stage: str, key: str) -> str:
    """The trial parameter of a searched key; one per stage, since stages may search a key in other ranges."""
    return f"{stage}/{key}" if stage else key


def distribution(entry: SpaceEntry) -> BaseDistribution:
    """Optuna's distribution for a space entry."""
    if entry.kind == "choice":
        return CategoricalDistribution(list(entry.choices))
    if entry.low is None or entry.high is None:
        raise ValueError(f"{entry.key}: an interval needs low and high")
    if entry.kind == "int":
        return IntDistribution(int(entry.low), int(entry.high), log=entry.log, step=int(entry.step or 1))
    return FloatDistribution(entry.low, entry.high, log=entry.log, step=entry.step)


def make_sampler(kind: str, seed: int, settings: Mapping[str, Any]) -> optuna.samplers.BaseSampler:
    """Optuna's sampler of that name; every source of randomness is seeded."""
    startup = int(settings.get("startup_trials", 10))
    if kind == "tpe":
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup, constant_liar=True)
    if kind == "cmaes":
        fallback = optuna.samplers.RandomSampler(seed=seed)
        return optuna.samplers.CmaEsSampler(
            seed=seed, n_startup_trials=startup, independent_sampler=fallback, warn_independent_sampling=False
        )
    if kind == "gp":
        return optuna.samplers.GPSampler(seed=seed, n_startup_trials=startup, warn_independent_sampling=False)
    return optuna.samplers.RandomSampler(seed=seed)


def suggest(trial: Trial, name: str, entry: SpaceEntry) -> Any:
    """A value for the entry, asked for under `name`."""
    if entry.kind == "choice":
        return trial.suggest_categorical(name, list(entry.choices))
    if entry.low is None or entry.high is None:
        raise ValueError(f"{entry.key}: an interval needs low and high")
    if entry.kind == "int":
        step = int(entry.step or 1)
        return trial.suggest_int(name, int(entry.low), int(entry.high), log=entry.log, step=step)
    return trial.suggest_float(name, entry.low, entry.high, log=entry.log, step=entry.step)
