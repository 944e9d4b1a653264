"""The configurations of a search as a table: searched values, score over seeds, and how each one ended."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from analysis.compare import arm_runs
from analysis.load import Results, run_folders
from analysis.shapes import items, mapping, number, records

SHUFFLES = 40  # for what chance alone gives
LEAST = 8  # complete configurations below which an importance would be noise
COMPLETE, STOPPED, OPEN = "complete", "stopped", "open"


@dataclass(frozen=True)
class Axis:
    """One searched key: its range or choices as planned."""

    key: str
    low: float | None
    high: float | None
    log: bool
    choices: tuple[Any, ...]

    def place(self, value: Any) -> float:
        """Where a value lies, 0 to 1 (choices in their order); nan when it is not set."""
        if self.choices:
            spelled = list(map(str, self.choices))
            return spelled.index(str(value)) / max(1, len(spelled) - 1) if str(value) in spelled else math.nan
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            return math.nan
        low, high = float(self.low or 0.0), float(self.high or 0.0)
        if self.log and low > 0 and value > 0:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low) if high > low else 0.5


def axes_of(results: Results) -> list[Axis]:
    """The searched keys of the plan, those of its stages too; keys with one possible value left out."""
    plan = results.plan
    entries = records(plan.get("space"))
    for stage in records(plan.get("stages")):
        entries += records(stage.get("space"))
    out: dict[str, Axis] = {}
    for entry in entries:
        choices = tuple(map(_plain, items(entry.get("choices"))))
        low, high = number(entry.get("low")), number(entry.get("high"))
        axis = Axis(str(entry.get("key")), low, high, bool(entry.get("log")) and (low or 0) > 0, choices)
        if len(choices) > 1 or (not choices and low is not None and high is not None and high > low):
            out.setdefault(axis.key, axis)
    return list(out.values())


def objective_of(results: Results) -> tuple[str, bool]:
    """The metric the search was judged by, and whether more of it is better."""
    study = mapping(results.plan.get("study"))
    return str(study.get("metric") or "eval/accuracy"), str(study.get("direction") or "maximize") != "minimize"


def trial_table(results: Results) -> pd.DataFrame:
    """One row per configuration: stage, arm, state, score (mean of its runs' last value), n, and the keys.

    state is "complete" when all its runs finished, "stopped" when one was stopped or failed, else "open".
    """
    axes, runs = axes_of(results), arm_runs(results)
    metric, _ = objective_of(results)
    source = results.evals if metric.startswith("eval/") else results.rows
    last: dict[str, float] = {}
    if metric in source.columns:
        finite = source[np.isfinite(source[metric].astype(float))]
        last = finite.groupby("key")[metric].last().to_dict()
    params = _params(results)
    out = []
    for (stage, arm), part in runs.groupby(["stage", "arm"], sort=False):
        scores = [last[key] for key in part["key"] if key in last]
        first = part.iloc[0]
        row = {"stage": stage, "arm": arm, "state": _state(part), "n": len(scores)}
        row["score"] = float(np.mean(scores)) if scores else math.nan
        row |= {axis.key: _value(axis.key, first, params.get(first["key"], {})) for axis in axes}
        out.append(row)
    columns = ["stage", "arm", "state", "score", "n", *(axis.key for axis in axes)]
    # Objects: pandas would turn a key that is switched off (None) among numbers into nan.
    return pd.DataFrame(out, columns=columns, dtype=object).astype({"score": float, "n": int})


def _state(part: pd.DataFrame) -> str:
    outcomes = set(part["outcome"])
    if outcomes <= {"finished"}:
        return COMPLETE
    return STOPPED if outcomes & {"stopped", "failed", "ended"} else OPEN


def _params(results: Results) -> dict[str, dict[str, Any]]:
    """The searched values of every run, from its own record or from the plan."""
    out = {
        str(run.get("key")): {key: _plain(value) for key, value in mapping(run.get("params")).items()}
        for run in records(results.plan.get("runs"))
    }
    for folder in run_folders(results.path):
        try:
            spec = json.loads((folder / "run.json").read_text())
        except (OSError, ValueError):
            continue
        spec = mapping(spec)
        params = mapping(spec.get("params"))
        out[str(spec.get("key", folder.name))] = {key: _plain(value) for key, value in params.items()}
    return out


def _plain(value: Any) -> Any:
    """A searched value as recorded; a list or object, which no search space holds, as its words."""
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _value(key: str, run: pd.Series, params: Mapping[str, Any]) -> Any:
    if key in params:
        return params[key]
    if params:
        return None  # a key that another one switched off
    for column in (f"config.{key}", f"config.{key}.kind"):
        if column in run.index and not (isinstance(run[column], float) and math.isnan(run[column])):
            return run[column]
    return None


@dataclass(frozen=True)
class Importance:
    """How much each key matters for reaching the best configurations, and what chance alone gives (95 %)."""

    value: dict[str, float]
    chance: dict[str, float]
    used: int
    left_out: int
    best_share: float


def importances(trials: pd.DataFrame, axes: list[Axis], higher: bool) -> Importance | None:
    """PED-ANOVA importances over the complete configurations; None with fewer than LEAST of them.

    The chance level is the 95 % quantile over shuffled scores. Configurations that were stopped have no final
    score and are left out (`left_out` counts them): a key that only decides who is stopped looks unimportant.
    """
    complete = trials[(trials["state"] == COMPLETE) & np.isfinite(trials["score"])]
    if len(complete) < LEAST or not axes:
        return None
    rows = tuple(tuple(row) for row in complete[[axis.key for axis in axes]].itertuples(index=False))
    scores = tuple(float(score) if higher else -float(score) for score in complete["score"])
    value, chance, share = _ped_anova(tuple(axes), rows, scores)
    return Importance(value, chance, len(complete), len(trials) - len(complete), share)


@lru_cache(maxsize=16)
def _ped_anova(
    axes: tuple[Axis, ...], rows: tuple[tuple[Any, ...], ...], scores: tuple[float, ...]
) -> tuple[dict[str, float], dict[str, float], float]:
    import optuna
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    share = max(0.1, min(0.5, 5 / len(scores)))  # PED-ANOVA wants five or more in the best group
    evaluator = PedAnovaImportanceEvaluator(target_quantile=share)
    spaces = {axis.key: _distribution(axis, [row[i] for row in rows]) for i, axis in enumerate(axes)}

    def measure(values: np.ndarray) -> dict[str, float]:
        study = optuna.create_study(direction="maximize")
        for row, value in zip(rows, values, strict=True):
            params = {a.key: v for a, v in zip(axes, row, strict=True) if spaces[a.key] is not None and v is not None}
            given = {key: spaces[key] for key in params}
            study.add_trial(optuna.trial.create_trial(params=params, distributions=given, value=float(value)))
        return get_param_importances(study, evaluator=evaluator)

    values = np.array(scores)
    real = measure(values)
    rng = np.random.default_rng(0)
    drawn = [measure(rng.permutation(values)) for _ in range(SHUFFLES)] if len(real) > 1 else []
    chance = {key: float(np.quantile([draw.get(key, 0.0) for draw in drawn], 0.95)) for key in real} if drawn else {}
    return real, chance, share


def _distribution(axis: Axis, values: list[Any]) -> Any:
    """Optuna's distribution for a key, wide enough for every recorded value; None when nothing was recorded."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    known = [value for value in values if value is not None]
    if not known:
        return None
    if axis.choices:
        return CategoricalDistribution(list(dict.fromkeys([*axis.choices, *known])))
    numbers = [float(value) for value in known]
    low = min([*numbers, float(axis.low)] if axis.low is not None else numbers)
    high = max([*numbers, float(axis.high)] if axis.high is not None else numbers)
    return FloatDistribution(low, high, log=axis.log and low > 0)
