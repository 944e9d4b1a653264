"""Curves of the arms over training: one panel per metric, mean over seeds, every run behind it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from analysis.compare import arm_runs
from analysis.figures.common import (
    add_note,
    axis_label,
    draw_arm,
    fit_height,
    fit_log_height,
    label_ends,
    mark_stops,
    mean_over_seeds,
    say_missing,
    settle,
    step_axes,
)
from analysis.load import Results
from analysis.records import is_searched
from analysis.style import MUTED, WIDTHS, ArmStyle, arm_styles
from analysis.verdict import label

NUMBERS = ("metric", "kind", "arm", "seed", "step", "gradient_step", "value", "low", "high", "n", "code")
_LABEL_LENGTH = 16  # longer arm names go into a legend above the panels
_MAX_DIRECT = 5
_MOST_ARMS, _BEST_ARMS = 8, 5


def is_narrow(figure: Figure | SubFigure) -> bool:
    """True for a single-column figure: panels are stacked instead of set side by side."""
    return figure.get_figure(root=True).get_figwidth() < (WIDTHS["single"] + WIDTHS["double"]) / 2


def panels(figure: Figure | SubFigure, count: int) -> list[Axes]:
    """`count` panels: in one row on a double-column figure, in one column on a single-column one."""
    grid = (count, 1) if is_narrow(figure) else (1, count)
    return list(np.ravel(figure.subplots(*grid, squeeze=False)))


def shown_arms(results: Results) -> list[str]:
    """The arms that are drawn and named: all, or of more than eight the baseline and the best by final accuracy."""
    arms = results.arms
    if len(arms) <= _MOST_ARMS:
        return arms
    scores = arm_runs(results).groupby("arm", sort=False)["final_accuracy"].mean().sort_values(ascending=False)
    first = [] if is_searched(results.plan) else [results.baseline]
    return list(dict.fromkeys([*first, *map(str, scores.dropna().index), *arms]))[:_BEST_ARMS]


def points_of(results: Results, metric: str) -> pd.DataFrame:
    """key, arm, seed, step, gradient_step and `metric` of every run of the plan, evaluations or step rows."""
    source = results.evals if metric.startswith("eval/") else results.rows
    columns = ["key", "arm", "seed", "step", "gradient_step"]
    if metric not in source.columns:
        return pd.DataFrame(columns=[*columns, metric]).astype({metric: float})
    kept = source[source["key"].isin(arm_runs(results)["key"])]
    return kept[[*columns, metric]].astype({metric: float}).reset_index(drop=True)


def updates_per_step(results: Results) -> float | None:
    """Gradient steps per rollout step when all runs agree on it, else None."""
    ratios = {
        round(grad / step, 6)
        for step, grad in results.rows.groupby("key")[["step", "gradient_step"]].last().itertuples(index=False)
        if step > 0 and math.isfinite(grad)
    }
    return ratios.pop() if len(ratios) == 1 else None


def stops_of(results: Results, points: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Where runs ended before their plan: arm, seed, x (last step), y (last finite value), code."""
    early = arm_runs(results)
    early = early[early["outcome"].isin(("stopped", "failed", "ended", "lost"))]
    last = points[np.isfinite(points[metric])].groupby("key")[["step", metric]].last()
    out = []
    for key, arm, seed, step, outcome, code, error in early[
        ["key", "arm", "seed", "steps_done", "outcome", "reason_code", "error_class"]
    ].itertuples(index=False):
        if key in last.index:
            at, value = last.loc[key]
            row = {"key": key, "arm": arm, "seed": seed, "x": max(step, int(at)), "y": value}
            out.append(row | {"code": str(code or error or outcome)})
    return pd.DataFrame(out, columns=["key", "arm", "seed", "x", "y", "code"])


def metric_panel(
    ax: Axes, results: Results, metric: str, arms: Sequence[str] | None = None, log: bool = False
) -> pd.DataFrame:
    """Draw `metric` against rollout steps for each arm and return the plotted numbers (columns NUMBERS).

    kind is "mean" (low and high: 95 % t interval of the mean over seeds, NaN with one seed), "seed" or "stop".
    `log` sets a logarithmic height; values of zero or below cannot be shown there and are counted on the panel.
    """
    arms = list(shown_arms(results) if arms is None else arms)
    styles = arm_styles([*shown_arms(results), *arms])
    points = points_of(results, metric)
    others = points[~points["arm"].isin(arms)]
    points = points[points["arm"].isin(arms)]
    ax.set_ylabel(axis_label(metric))
    finite = points[np.isfinite(points[metric])]
    hidden = int((finite[metric] <= 0).sum()) if log else 0
    if finite.empty or hidden == len(finite):
        say_missing(ax, _why_empty(results, points, metric))
        return pd.DataFrame(columns=list(NUMBERS))
    faint = 0.38 if finite["step"].nunique() <= 60 else 0.2
    thin, every = thinned(pd.concat([finite, others]) if len(others) else finite)
    named = set(arms)
    for (arm, _), run in thin.groupby(["arm", "key"], sort=False, observed=True):
        colour, width, alpha, order = (styles[arm].colour, 0.6, faint, 2) if arm in named else (MUTED, 0.4, 0.35, 1)
        ax.plot(run["step"], run[metric], color=colour, linewidth=width, alpha=alpha, zorder=order)
    summary = mean_over_seeds(finite, "step", metric)
    seeds = finite.groupby("arm", observed=True)["key"].nunique()
    marked = metric.startswith("eval/") and finite["step"].nunique() <= 12
    for place, arm in enumerate(arms):
        mine = summary[summary["arm"] == arm]
        if log:  # a band that reaches zero goes down to the bottom of the panel
            mine = mine.assign(low=mine["low"].where(~(mine["low"] <= 0), np.finfo(float).tiny))
        if not mine.empty:
            draw_arm(ax, mine, "step", styles[arm], int(seeds[arm]), marked, place)
    lines, bands = [*finite[metric], *others[metric]], [*summary["low"], *summary["high"]]
    if log:
        fit_log_height(ax, lines, bands)
    else:
        fit_height(ax, lines, bands, share=_is_share(metric))
    last = float(finite["step"].max())
    ax.set_xlim(0 if finite["step"].min() <= 1 else None, last * 1.02 if last else 1)
    stops = stops_of(results, points, metric)
    mark_stops(ax, stops, styles)
    ratio = _ratio(points)
    remarks = _remarks(results, points, metric, arms, seeds)
    if len({round(value, 6) for value in ratio.values()}) > 1:
        remarks.append("gradient steps per rollout step differ")
    if others["arm"].nunique():
        remarks.append(f"grey: {others['arm'].nunique()} further arms")
    if every > 1:
        remarks.append(f"thin lines: every {every}th recorded step")
    if hidden:
        remarks.append(f"{hidden} values of 0 not shown")
    if remarks:
        add_note(ax, "; ".join(remarks))
    ax.set_gid(f"panel:{metric}")
    return _numbers(metric, thin[thin["arm"].isin(named)], summary, stops, ratio)


def thinned(points: pd.DataFrame, most: int = 20_000) -> tuple[pd.DataFrame, int]:
    """At most about `most` points for the thin lines: every n-th of each run, its last one kept; and that n."""
    every = -(-len(points) // most)
    if every <= 1:
        return points, 1
    order = points.groupby("key", sort=False).cumcount()
    left = points.groupby("key", sort=False).cumcount(ascending=False)
    return points[(order % every == 0) | (left == 0)], every


def _is_share(metric: str) -> bool:
    """True for metrics that cannot leave 0 to 1."""
    shares = ("eval/accuracy", "eval/pass_at_k", "eval/majority", "eval/truncated", "length/truncated")
    return metric.startswith(("clip/", "groups/")) or metric in shares


def _ratio(points: pd.DataFrame) -> dict[str, float]:
    """Gradient steps per rollout step of each arm (NaN where its runs differ)."""
    late = points[points["step"] > 0]
    per = (late["gradient_step"] / late["step"]).groupby(late["arm"], observed=True)
    return {str(arm): float(values.iloc[0]) if np.ptp(values) < 1e-6 else math.nan for arm, values in per}


def _numbers(
    metric: str, finite: pd.DataFrame, summary: pd.DataFrame, stops: pd.DataFrame, ratio: dict[str, float]
) -> pd.DataFrame:
    mean = summary.rename(columns={"mean": "value"}).assign(kind="mean")
    seed = finite.rename(columns={metric: "value"})[["arm", "seed", "step", "value"]].assign(kind="seed")
    stop = stops.rename(columns={"x": "step", "y": "value"})[["arm", "seed", "step", "value", "code"]]
    parts = [part for part in (mean, seed, stop.assign(kind="stop")) if not part.empty]
    table = pd.concat(parts, ignore_index=True).assign(metric=metric)
    table["gradient_step"] = table["step"] * table["arm"].map(ratio).astype(float)
    for name in ("seed", "n"):
        table[name] = table[name].astype("Int64")
    return table.reindex(columns=list(NUMBERS))


def _why_empty(results: Results, points: pd.DataFrame, metric: str) -> str:
    if results.runs.empty or (results.rows.empty and results.evals.empty):
        return "No run has recorded anything yet."
    if points.empty:
        return f"{metric} was not recorded."
    if np.isfinite(points[metric]).any():
        return f"{metric} is 0 throughout: nothing to show on a logarithmic axis."
    return f"{metric}: none of its {len(points)} values is finite."


def _remarks(results: Results, points: pd.DataFrame, metric: str, arms: Sequence[str], seeds: pd.Series) -> list[str]:
    """What a reader must know about this panel: absent arms, left-out values, arms without an interval."""
    out = []
    absent = [arm for arm in arms if arm not in seeds.index]
    if absent:
        out.append(f"not recorded: {', '.join(map(label, absent))}")
    bad = int((~np.isfinite(points[metric])).sum()) - _never_recorded(points, metric)
    if bad > 0:
        out.append(f"{bad} value{'s' if bad > 1 else ''} missing or not finite")
    single = [arm for arm in arms if seeds.get(arm, 0) == 1]
    if single:
        out.append(
            "one seed: no interval" if len(single) == len(seeds) else f"one seed: {', '.join(map(label, single))}"
        )
    elif seeds.nunique() > 1:
        out.append("seeds: " + ", ".join(f"{label(arm)} {seeds[arm]}" for arm in arms if arm in seeds.index))
    return out


def _never_recorded(points: pd.DataFrame, metric: str) -> int:
    """Rows of runs that hold no finite value at all: the metric is absent there, not NaN."""
    finite = np.isfinite(points[metric]).groupby(points["key"]).transform("any")
    return int((~finite).sum())


def name_arms(
    figure: Figure | SubFigure, axes: Sequence[Axes], results: Results, arms: Sequence[str] | None = None
) -> None:
    """Name the arms at their line ends when names are few and short, else in a legend above the panels."""
    arms = list(shown_arms(results) if arms is None else arms)
    styles = arm_styles([*shown_arms(results), *arms])
    drawn = [ax for ax in axes if ax.get_gid()]
    if len(arms) < 2 or not drawn:
        return
    beside = 1 if is_narrow(figure) else len(axes)
    longest = max(map(len, arms))
    if len(arms) <= _MAX_DIRECT and longest <= (_LABEL_LENGTH if beside < 3 else _LABEL_LENGTH // 2):
        settle(figure)
        for ax in drawn:
            label_ends(ax, _ends(ax, arms, styles))
        return
    root = figure.get_figure(root=True)
    columns = max(1, int(root.get_figwidth() * 72 // (longest * 4.6 + 44)))  # points: letters, line sample, gaps
    root.set_figheight(root.get_figheight() + 0.15 * math.ceil(len(arms) / columns))  # panels keep their height
    handles = [
        drawn[0].plot([], [], color=styles[arm].colour, linestyle=styles[arm].dash, marker=styles[arm].marker)[0]
        for arm in arms
    ]
    figure.legend(handles, list(map(label, arms)), loc="outside upper left", ncols=columns, handlelength=3)


def _ends(ax: Axes, arms: Sequence[str], styles: dict[str, ArmStyle]) -> list[tuple[str, float, float, ArmStyle]]:
    out = []
    for arm in arms:
        lines = [line for line in ax.lines if line.get_gid() == f"arm:{arm}"]
        path = np.asarray(lines[-1].get_xydata(), float) if lines else np.zeros((0, 2))
        if len(path):
            out.append((label(arm), float(path[-1, 0]), float(path[-1, 1]), styles[arm]))
    return out


def curve_figure(
    results: Results,
    figure: Figure | SubFigure,
    metrics: Sequence[str],
    arms: Sequence[str] | None = None,
    log: Sequence[str] = (),
) -> pd.DataFrame:
    """One panel per metric against both step units; metrics in `log` get a logarithmic height.

    Returns the numbers of all panels.
    """
    axes = panels(figure, len(metrics))
    updates = updates_per_step(results)
    tables = []
    for index, (ax, metric) in enumerate(zip(axes, metrics, strict=True)):
        tables.append(metric_panel(ax, results, metric, arms, metric in log))
        if ax.get_gid():
            narrow = is_narrow(figure)
            step_axes(ax, updates, below=not narrow or index == len(axes) - 1, above=not narrow or index == 0)
    name_arms(figure, axes, results, arms)
    filled = [table for table in tables if not table.empty]
    return pd.concat(filled, ignore_index=True) if filled else tables[0]
