"""How fast each arm learns: area under its accuracy curve, and steps to the baseline's best mean accuracy."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from analysis.captions import setting
from analysis.compare import COUNTED, LAST_SCORE, arm_runs
from analysis.load import Results
from analysis.records import is_searched
from analysis.stats import (
    Reached,
    StepsRatio,
    area_under_curve,
    mean_interval,
    median_steps,
    steps_ratio,
    steps_to_target,
)
from analysis.typeset import Table
from analysis.verdict import label, number

ACCURACY = "eval/accuracy"


def curves(results: Results) -> dict[str, dict[int, pd.DataFrame]]:
    """arm -> seed -> (step, accuracy) of the runs whose end says something of the arm."""
    runs = arm_runs(results)
    counted = runs[runs["outcome"].isin(COUNTED[LAST_SCORE]) & (runs["seed"] >= 0)]
    out: dict[str, dict[int, pd.DataFrame]] = {arm: {} for arm in results.arms}
    if ACCURACY not in results.evals:
        return out
    by_key = dict(list(results.evals[["key", "step", ACCURACY]].groupby("key", sort=False)))
    for key, arm, seed in zip(counted["key"], counted["arm"], counted["seed"], strict=True):
        curve = by_key.get(key)
        if curve is not None and np.isfinite(curve[ACCURACY]).any():
            out[arm][int(seed)] = curve[["step", ACCURACY]]
    return out


def best_mean(curves_of_arm: dict[int, pd.DataFrame]) -> float:
    """The highest mean accuracy over an arm's runs at a step that all of them reached; nan without one."""
    if not curves_of_arm:
        return math.nan
    points = pd.concat(list(curves_of_arm.values()))
    points = points[(points["step"] > 0) & np.isfinite(points[ACCURACY])]
    means = points.groupby("step")[ACCURACY].agg(["mean", "count"])
    whole = means[means["count"] == len(curves_of_arm)]["mean"]
    return float(whole.max()) if len(whole) else math.nan


def learning_table(results: Results) -> Table:
    """Area under the accuracy curve and steps to a target per arm; stopped runs go on at their last score."""
    name, title = "learning", "How fast the arms learn"
    planned = results.runs["steps_planned"]
    horizon = int(planned[planned > 0].min()) if (planned > 0).any() else 0
    found = curves(results)
    if is_searched(results.plan) or not horizon or not any(found.values()):
        why = "A search has no arms to compare." if is_searched(results.plan) else "No held-out accuracy is recorded."
        return Table(name, title, "", pd.DataFrame(), pd.DataFrame(), set(), why)
    target = best_mean(found[results.baseline])
    reached = {arm: {seed: _reached(curve, target) for seed, curve in runs.items()} for arm, runs in found.items()}
    frame, shown = [], []
    for arm in results.arms:
        areas = [_area(curve, horizon) for curve in found[arm].values()]
        area, times = mean_interval(areas), list(reached[arm].values())
        seeds = sorted(set(reached[arm]) & set(reached[results.baseline]))
        ratio = steps_ratio([reached[arm][s] for s in seeds], [reached[results.baseline][s] for s in seeds])
        there, middle = sum(time.reached for time in times), median_steps(times)
        low, high = (math.nan, math.nan) if area.interval is None else (area.interval.low, area.interval.high)
        frame.append(
            {"arm": arm, "area": area.value, "area_n": area.n, "area_low": low, "area_high": high, "target": target}
            | {"reached": there, "runs": len(times), "median_steps": middle, "seeds": " ".join(map(str, seeds))}
            | {"ratio": ratio.ratio, "ratio_bound": ratio.bound}
            | {"ratio_low": ratio.interval.low if ratio.interval else math.nan}
            | {"ratio_high": ratio.interval.high if ratio.interval else math.nan}
        )
        span = f" ({number(low, 2)} to {number(high, 2)})" if area.interval else ""
        shown.append(
            {"Arm": label(arm), "Area under accuracy": number(area.value, 2) + span, "Runs": str(area.n)}
            | {f"Reached {number(target, 2)}": f"{there} of {len(times)}"}
            | {"Median steps": number(middle, 0) if math.isfinite(middle) else f"over {horizon}" if times else "n/a"}
            | {"Steps over baseline's": "1" if arm == results.baseline else ratio_text(ratio)}
        )
    caption = (
        f"Area: mean held-out accuracy over rollout steps 0 to {horizon}, a stopped run going on at its last score; "
        f"95 % t interval over seeds. Target {number(target, 3)}: the best mean accuracy of {label(results.baseline)}, "
        "at the first evaluation that reaches it (one noisy evaluation can). Median: Kaplan-Meier. Steps over "
        "baseline's: same seeds, geometric mean with t interval; a bound without interval where a run never got "
        f"there. {setting(results)}"
    )
    return Table(name, title, caption, pd.DataFrame(frame), pd.DataFrame(shown))


def ratio_text(ratio: StepsRatio) -> str:
    """For instance "0.52 (0.40 to 0.68)", "at most 0.60", "n/a"."""
    if not math.isfinite(ratio.ratio):
        return "n/a"
    if ratio.interval is not None:
        return f"{ratio.ratio:.2f} ({ratio.interval.low:.2f} to {ratio.interval.high:.2f})"
    return {"": f"{ratio.ratio:.2f}", "unclear": "unclear"}.get(ratio.bound, f"{ratio.bound} {ratio.ratio:.2f}")


def _reached(curve: pd.DataFrame, target: float) -> Reached:
    later = curve[curve["step"] > 0]
    return steps_to_target(later["step"], later[ACCURACY], target if math.isfinite(target) else math.inf)


def _area(curve: pd.DataFrame, horizon: int) -> float:
    return area_under_curve(curve["step"], curve[ACCURACY], 0, horizon, carry=True)
