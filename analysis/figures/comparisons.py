"""The comparisons the papers make, one figure each: clip-higher, overlong filter, dynamic sampling, GSPO, GDPO."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from analysis.figures.common import add_note, axis_label, draw_arm, fit_height, say_missing, step_axes
from analysis.figures.curves import (
    curve_figure,
    metric_panel,
    name_arms,
    panels,
    points_of,
    shown_arms,
    updates_per_step,
)
from analysis.load import Results
from analysis.stats import Reached, StepsRatio, steps_ratio, steps_to_target
from analysis.style import INK, arm_styles
from analysis.verdict import label

ACCURACY = "eval/accuracy"
TOKENS = "data/generated_tokens"


def accuracy_entropy(results: Results, figure: Figure | SubFigure) -> pd.DataFrame:
    """Held-out accuracy and policy entropy against steps: the comparison DAPO makes for clip-higher."""
    return curve_figure(results, figure, [ACCURACY, "entropy/mean"])


def overlong(results: Results, figure: Figure | SubFigure) -> pd.DataFrame:
    """Held-out accuracy, entropy and truncated share against steps, overlong filter on and off."""
    return curve_figure(results, figure, [ACCURACY, "entropy/mean", "length/truncated"])


def clip_fraction(results: Results, figure: Figure | SubFigure) -> pd.DataFrame:
    """Share of clipped tokens (logarithmic) and training reward: GSPO clips far more tokens than GRPO."""
    return curve_figure(results, figure, ["clip/fraction", "reward/total"], log=["clip/fraction"])


def reward_parts(results: Results, figure: Figure | SubFigure) -> pd.DataFrame:
    """Every recorded reward part against steps, and held-out accuracy: what GDPO is meant to keep apart."""
    parts = [name for name in results.rows.columns if name.startswith("reward/")]
    parts = [name for name in parts if name not in ("reward/total", "reward/std")]
    shown = sorted(parts, key=lambda name: name != "reward/correctness")[:3] or ["reward/correctness"]
    return curve_figure(results, figure, [*shown, ACCURACY])


def dynamic_sampling(results: Results, figure: Figure | SubFigure, target: float | None = None) -> pd.DataFrame:
    """Held-out accuracy against steps and against generated tokens, with the way to `target` compared.

    `target` defaults to the best mean accuracy of the baseline arm. Returns the curves (the columns of
    `metric_panel`, with tokens) and rows of kind "target": steps, or tokens, of each run to the target, and of
    kind "ratio": arm over baseline with its interval (NaN when a run never got there).
    """
    axes = panels(figure, 2)
    left = metric_panel(axes[0], results, ACCURACY)
    if axes[0].get_gid():
        step_axes(axes[0], updates_per_step(results))
    right, budget = tokens_panel(axes[1], results)
    name_arms(figure, axes, results)
    if left.empty:
        return left
    goal = _goal(left, results.baseline) if target is None else target
    parts = [left, right, _way(axes[0], results, points_of(results, ACCURACY), "step", goal)]
    if not right.empty:
        parts.append(_way(axes[1], results, budget, "tokens", goal))
    return pd.concat([part for part in parts if not part.empty], ignore_index=True)


def tokens_panel(ax: Axes, results: Results) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Held-out accuracy against generated tokens (mean of both over seeds at each evaluation).

    Returns the plotted numbers and the evaluations of every run with their tokens so far.
    """
    ax.set_ylabel(axis_label(ACCURACY))
    ax.set_xlabel("Generated tokens (thousands)")
    points = _with_tokens(results)
    points = points[points["arm"].isin(shown_arms(results))]
    finite = points[np.isfinite(points[ACCURACY]) & np.isfinite(points["tokens"])]
    if finite.empty:
        say_missing(ax, f"{TOKENS} or {ACCURACY} was not recorded.")
        return pd.DataFrame(), finite
    styles, means = arm_styles(shown_arms(results)), []
    for (arm, _), run in finite.groupby(["arm", "key"], sort=False, observed=True):
        ax.plot(run["tokens"] / 1e3, run[ACCURACY], color=styles[arm].colour, linewidth=0.6, alpha=0.38, zorder=2)
    for place, arm in enumerate(shown_arms(results)):
        mine = finite[finite["arm"] == arm]
        if mine.empty:
            continue
        mean = mine.groupby("step").agg(tokens=("tokens", "mean"), mean=(ACCURACY, "mean"), n=("key", "nunique"))
        mean = mean.reset_index().assign(arm=arm, low=math.nan, high=math.nan)
        mean["thousands"] = mean["tokens"] / 1e3
        draw_arm(ax, mean, "thousands", styles[arm], mine["key"].nunique(), len(mean) <= 12, place)
        means.append(mean)
    fit_height(ax, finite[ACCURACY], [], share=True)
    ax.set_xlim(left=0)
    ax.set_gid("tokens:" + ACCURACY)
    mean = pd.concat(means, ignore_index=True).rename(columns={"mean": "value"}).assign(kind="mean over tokens")
    columns = ["kind", "arm", "step", "tokens", "value", "n"]
    return mean[columns].assign(metric=ACCURACY), finite


def _with_tokens(results: Results) -> pd.DataFrame:
    """The evaluations of every run with the tokens generated so far."""
    points = points_of(results, ACCURACY)
    spent = points_of(results, TOKENS)
    if spent.empty or points.empty:
        return points.assign(tokens=math.nan)
    spent = spent.sort_values(["key", "step"])
    spent["tokens"] = spent.groupby("key")[TOKENS].cumsum()
    start = spent.drop_duplicates("key").assign(step=0, tokens=0.0)
    both = pd.concat([start, spent])[["key", "step", "tokens"]]
    return points.merge(both, on=["key", "step"], how="left")


def _goal(numbers: pd.DataFrame, baseline: str) -> float:
    mine = numbers[(numbers["kind"] == "mean") & (numbers["arm"] == baseline)]
    mine = mine if len(mine) else numbers[numbers["kind"] == "mean"]
    return float(mine["value"].max())


def _way(ax: Axes, results: Results, points: pd.DataFrame, unit: str, goal: float) -> pd.DataFrame:
    """Draw the target, write each arm's ratio to the baseline, and return both as rows."""
    reached: dict[str, dict[int, Reached]] = {}
    rows = []
    for (arm, seed, _), run in points.groupby(["arm", "seed", "key"], sort=False, observed=True):
        way = steps_to_target(run[unit], run[ACCURACY], goal)
        reached.setdefault(str(arm), {})[int(seed)] = way
        rows.append({"kind": "target", "arm": arm, "seed": seed, unit: way.at, "value": goal, "code": _word(way)})
    ax.axhline(goal, color=INK, linewidth=0.6, linestyle=(0, (1, 2)), zorder=1.8)
    lines = [f"{'Steps' if unit == 'step' else 'Tokens'} to {goal:.3f}, relative to {label(results.baseline)}"]
    for arm in shown_arms(results):
        seeds = sorted(set(reached.get(arm, {})) & set(reached.get(results.baseline, {})))
        if arm == results.baseline or not seeds:
            continue
        ratio = steps_ratio([reached[arm][s] for s in seeds], [reached[results.baseline][s] for s in seeds])
        span = ratio.interval
        low, high = (span.low, span.high) if span else (math.nan, math.nan)
        rows.append({"kind": "ratio", "arm": arm, "value": ratio.ratio, "low": low, "high": high, "n": ratio.n})
        rows[-1]["code"] = f"{'steps' if unit == 'step' else unit} to target {ratio.bound}".rstrip()
        lines.append(_ratio_text(arm, ratio))
    before = ax.get_title(loc="left")
    add_note(ax, "\n".join([*([before] if before else []), *lines]))
    return pd.DataFrame(rows).assign(metric=ACCURACY)


def _word(way: Reached) -> str:
    return "reached" if way.reached else "not reached"


def _ratio_text(arm: str, ratio: StepsRatio) -> str:
    if not math.isfinite(ratio.ratio):
        return f"{label(arm)}: never there"
    missing = ratio.censored_a + ratio.censored_b
    if ratio.bound == "unclear":
        return f"{label(arm)}: unclear ({missing} of {2 * ratio.n} runs not there in time)"
    bound = {"at most": "≤ ", "at least": "≥ "}.get(ratio.bound, "")
    text = f"{label(arm)}: {bound}{ratio.ratio:.2f}×"
    if ratio.interval:
        return f"{text} ({ratio.interval.low:.2f} to {ratio.interval.high:.2f})"
    return f"{text} ({missing} of {2 * ratio.n} runs not there)" if missing else text
