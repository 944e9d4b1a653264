"""What a search found: importances, parallel coordinates, one slice per key, and best values at an edge."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from analysis.figures.common import axis_label, say_missing
from analysis.figures.curves import is_narrow
from analysis.figures.trials import (
    COMPLETE,
    LEAST,
    STOPPED,
    Axis,
    Importance,
    axes_of,
    importances,
    objective_of,
    trial_table,
)
from analysis.load import Results
from analysis.style import ALERT, GRID, MUTED, PALETTE
from reasonrl.alerts.edge import edge_alert

_MOST_KEYS = 8
_BEST = PALETTE[1]


def heights(results: Results) -> Mapping[str, float]:
    """Inches: importances and coordinates above, slices below (two or four in a row)."""
    keys = min(_MOST_KEYS, max(1, len(axes_of(results))))
    return {"single": 4.4 + 1.5 * math.ceil(keys / 2), "double": 2.4 + 1.7 * math.ceil(keys / 4)}


def search(results: Results, figure: Figure | SubFigure) -> pd.DataFrame:
    """Importance of every searched key, all configurations as lines, and score against each key.

    Returns rows of kind "trial" (state, score, the keys), "importance" (value, chance) and "edge" (best value at
    the edge of its range). Stopped configurations are crosses; they have no part in the importances.
    """
    axes = axes_of(results)[:_MOST_KEYS]
    trials = trial_table(results)
    scored = trials[np.isfinite(trials["score"])]
    if not axes or scored.empty:
        why = "This sweep searched nothing." if not axes else "No configuration has a score yet."
        say_missing(figure.subplots(), why)
        return pd.DataFrame(columns=["kind", "arm", "score"])
    metric, higher = objective_of(results)
    columns = min(2 if is_narrow(figure) else 4, len(axes))
    rows = math.ceil(len(axes) / columns)
    narrow = is_narrow(figure)
    above, below = figure.subfigures(2, 1, height_ratios=[4.0 if narrow else 2.2, 1.5 * rows], squeeze=False).ravel()
    top = above.subplots(2, 1) if narrow else above.subplots(1, 2, width_ratios=[1, 1.7])
    found = importances(trials, axes, higher)
    table = [scored.assign(kind="trial"), _importance(top[0], axes, trials, found)]
    best = _best(scored, higher)
    _parallel(top[1], axes, scored, best, metric)
    slices = np.ravel(below.subplots(rows, columns, sharey=True, squeeze=False))
    table.append(_slices(slices, axes, scored, best, metric, columns))
    return pd.concat([part for part in table if not part.empty], ignore_index=True)


def _best(scored: pd.DataFrame, higher: bool) -> pd.Series:
    complete = scored[scored["state"] == COMPLETE]
    pool = complete if len(complete) else scored
    return pool.loc[pool["score"].idxmax() if higher else pool["score"].idxmin()]


def _importance(ax: Axes, axes: list[Axis], trials: pd.DataFrame, found: Importance | None) -> pd.DataFrame:
    complete = int((trials["state"] == COMPLETE).sum())
    if found is None:
        ax.set_title("Importance")
        say_missing(ax, f"{complete} complete configurations:\n{LEAST} are needed.")
        return pd.DataFrame()
    order = sorted(found.value, key=lambda key: found.value[key])
    ax.barh(range(len(order)), [found.value[key] for key in order], height=0.6, color=PALETTE[0].colour)
    for row, key in enumerate(order):
        if key in found.chance:
            ax.plot([found.chance[key]] * 2, [row - 0.38, row + 0.38], color=ALERT, linewidth=1.2)
    ax.set_yticks(range(len(order)), [_tail(key) for key in order])
    ax.set_xlim(0, 1)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(f"Share, for the best {found.best_share:.0%} (line: chance, 95 %)", fontsize=6.5)
    ax.set_title(f"Importance ({found.used} used, {found.left_out} stopped or open)", fontsize=7)
    rows = [{"kind": "importance", "key": k, "value": found.value[k], "chance": found.chance.get(k)} for k in order]
    return pd.DataFrame(rows).assign(used=found.used, left_out=found.left_out)


def _parallel(ax: Axes, axes: list[Axis], scored: pd.DataFrame, best: pd.Series, metric: str) -> None:
    """One line per configuration over all keys and the score; darker is better, dashed red the best."""
    ax.set_title("All configurations")
    low, high = float(scored["score"].min()), float(scored["score"].max())
    positions = range(len(axes) + 1)
    for index, row in scored.sort_values("score").iterrows():
        height = (row["score"] - low) / (high - low) if high > low else 0.5
        places = [*(axis.place(row[axis.key]) for axis in axes), height]
        if index == best.name:
            ax.plot(positions, places, color=_BEST.colour, linestyle=_BEST.dash, marker=_BEST.marker, zorder=4)
        else:
            colour = ALERT if row["state"] == STOPPED else PALETTE[0].colour
            ax.plot(positions, places, color=colour, linewidth=0.7, alpha=0.15 + 0.6 * height)
    for position, axis in enumerate(axes):
        ends = (axis.choices[0], axis.choices[-1]) if axis.choices else (axis.low, axis.high)
        _ends(ax, position, ends)
    _ends(ax, len(axes), (f"{low:.3g}", f"{high:.3g}"))
    names = [_tail(axis.key) for axis in axes]
    ax.set_xticks(list(positions), [*names, metric.rpartition("/")[2]], fontsize=6, rotation=20, ha="right")
    ax.set_ylim(-0.12, 1.12)
    ax.set_yticks([])
    ax.grid(False)
    for position in positions:
        ax.axvline(position, color=GRID, linewidth=1, zorder=0.5)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)


def _ends(ax: Axes, position: int, ends: tuple[object, object]) -> None:
    for text, height, align in ((ends[0], -0.03, "top"), (ends[1], 1.03, "bottom")):
        words = f"{text:.3g}" if isinstance(text, float) else str(text)
        ax.text(position, height, words, fontsize=5.8, color=MUTED, ha="center", va=align)


def _slices(
    panels: np.ndarray, axes: list[Axis], scored: pd.DataFrame, best: pd.Series, metric: str, columns: int
) -> pd.DataFrame:
    edges = []
    for index, ax in enumerate(panels):
        if index >= len(axes):
            ax.set_axis_off()
            continue
        axis = axes[index]
        for state, marker in ((COMPLETE, "o"), (STOPPED, "x"), ("open", "d")):
            part = scored[(scored["state"] == state) & scored[axis.key].notna()]
            ax.plot(_where(axis, part[axis.key]), part["score"], marker=marker, linestyle="none", alpha=0.75)
            ax.lines[-1].set(color=ALERT if state == STOPPED else PALETTE[0].colour, markersize=3.2)
        ax.plot(_where(axis, pd.Series([best[axis.key]])), [best["score"]], marker="*", markersize=9, zorder=5)
        ax.lines[-1].set(color=_BEST.colour, linestyle="none", markeredgecolor="white", markeredgewidth=0.5)
        _scale(ax, axis)
        ax.set_xlabel(_tail(axis.key), fontsize=6.5, labelpad=1)
        if index % columns == 0:
            ax.set_ylabel(axis_label(metric), fontsize=6.5)
        edge = _edge(axis, best[axis.key])
        if edge:
            edges.append({"kind": "edge", "key": axis.key, "value": best[axis.key], "code": "A18", "edge": edge})
            ax.axvline(axis.low if edge == "lower" else axis.high, color=ALERT, linewidth=1.2)
            ax.set_title("best at the edge", fontsize=6.2, color=ALERT, loc="right" if edge == "upper" else "left")
    return pd.DataFrame(edges)


def _where(axis: Axis, values: pd.Series) -> list[float]:
    if not axis.choices:
        return [float(value) if isinstance(value, int | float) else math.nan for value in values]
    spelled = list(map(str, axis.choices))
    return [float(spelled.index(str(value))) if str(value) in spelled else math.nan for value in values]


def _scale(ax: Axes, axis: Axis) -> None:
    ax.tick_params(labelsize=6)
    if axis.choices:
        ax.set_xticks(range(len(axis.choices)), [_short(str(choice)) for choice in axis.choices])
        ax.set_xlim(-0.5, len(axis.choices) - 0.5)
        return
    if axis.log:
        ax.set_xscale("log")
    else:
        ax.locator_params(axis="x", nbins=4)
    if axis.low is not None and axis.high is not None:
        room = (axis.high / axis.low) ** 0.04 if axis.log else 0.04 * (axis.high - axis.low)
        ax.set_xlim(*((axis.low / room, axis.high * room) if axis.log else (axis.low - room, axis.high + room)))


def _edge(axis: Axis, value: object) -> str:
    if axis.low is None or axis.high is None or not isinstance(value, int | float) or isinstance(value, bool):
        return ""
    alert = edge_alert(axis.key, float(value), float(axis.low), float(axis.high), log=axis.log)
    return str(alert.evidence["edge"]) if alert else ""


def _tail(key: str) -> str:
    return _short(key.rpartition(".")[2] if len(key) > 14 else key, 16)


def _short(text: str, most: int = 10) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
