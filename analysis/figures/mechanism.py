"""Entropy change as predicted from cov(log pi, A) against what was measured (Cui et al. 2025)."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from scipy.stats import rankdata

from analysis.figures.common import say_missing, step_axes
from analysis.figures.curves import metric_panel, name_arms, panels, points_of, shown_arms, thinned, updates_per_step
from analysis.load import Results
from analysis.style import INK, MUTED, PAPER, arm_styles
from analysis.verdict import label

PREDICTED, MEASURED, COV = "entropy/predicted_change", "entropy/measured_change", "entropy/cov"


def entropy_prediction(results: Results, figure: Figure | SubFigure) -> pd.DataFrame:
    """Predicted against measured entropy change of every step, and the covariance against steps.

    The prediction -lr * cov holds for plain gradient descent; Adam rescales it, so the rank correlation is the
    test and the dotted line of equality only a guide. Returns rows of kind "step" (predicted, measured) and
    "correlation" (Spearman's over all steps of an arm) beside the curves of the covariance.
    """
    axes = panels(figure, 2)
    pairs = _pairs(results)
    table = _scatter(axes[0], results, pairs)
    curves = metric_panel(axes[1], results, COV)
    axes[1].set_ylabel("cov(log π, A) (nats)")
    if axes[1].get_gid():
        step_axes(axes[1], updates_per_step(results))
    name_arms(figure, [axes[1]], results)
    parts = [part for part in (table, curves) if not part.empty]
    return pd.concat(parts, ignore_index=True) if parts else table


def _pairs(results: Results) -> pd.DataFrame:
    predicted, measured = points_of(results, PREDICTED), points_of(results, MEASURED)
    if predicted.empty or measured.empty:
        return pd.DataFrame(columns=["key", "arm", "seed", "step", "predicted", "measured"])
    pairs = predicted.merge(measured[["key", "step", MEASURED]], on=["key", "step"])
    pairs = pairs.rename(columns={PREDICTED: "predicted", MEASURED: "measured"})
    return pairs[np.isfinite(pairs["predicted"]) & np.isfinite(pairs["measured"])]


def _scatter(ax: Axes, results: Results, pairs: pd.DataFrame) -> pd.DataFrame:
    ax.set_xlabel("Predicted ΔH (nats/step)")
    ax.set_ylabel("Measured ΔH (nats/step)")
    if pairs.empty:
        say_missing(ax, f"{PREDICTED} or {MEASURED} was not recorded.")
        return pd.DataFrame()
    drawn, every = thinned(pairs, most=3000)
    styles, lines, rows = arm_styles(shown_arms(results)), [], []
    for arm in shown_arms(results):
        mine = pairs[pairs["arm"] == arm]
        if mine.empty:
            continue
        style = styles[arm]
        dots = drawn[drawn["arm"] == arm]
        ax.plot(dots["predicted"], dots["measured"], linestyle="none", marker=style.marker, color=style.colour)
        ax.lines[-1].set(alpha=0.55, markersize=2.6, markeredgecolor=PAPER, markeredgewidth=0.2)
        rho = spearman(mine["predicted"], mine["measured"])
        ax.lines[-1].set_label(
            f"{label(arm)}: " + (f"ρ = {rho:.2f}, " if np.isfinite(rho) else "") + f"n = {len(mine)}"
        )
        rows.append({"kind": "correlation", "arm": arm, "value": rho, "n": len(mine)})
    ax.axline((0, 0), slope=1, color=INK, linewidth=0.6, linestyle=(0, (1, 2)))
    ax.axhline(0, color=INK, linewidth=0.4)
    ax.axvline(0, color=INK, linewidth=0.4)
    inside = pd.Series(True, index=pairs.index)
    for axis, name in ((ax.set_xlim, "predicted"), (ax.set_ylim, "measured")):
        low, high = (float(pairs[name].quantile(share)) for share in (0.02, 0.98))  # one wild step must not hide all
        room = 0.3 * ((high - low) or abs(high) or 1.0)
        axis(low - room, high + room)
        inside &= pairs[name].between(low - room, high + room)
    if not inside.all():
        lines.append(f"{int((~inside).sum())} steps outside")
    ax.locator_params("x", nbins=4)
    ax.locator_params("y", nbins=5)
    if every > 1:
        lines.append(f"every {every}th step drawn")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, handletextpad=0.2, labelspacing=0.2)
    if lines:
        ax.set_title("; ".join(lines), loc="right", fontsize=6.2, fontweight="normal", color=MUTED, pad=3)
    points = drawn[["arm", "seed", "step", "predicted", "measured"]].assign(kind="step")
    return pd.concat([pd.DataFrame(rows), points], ignore_index=True).assign(metric="entropy change")


def spearman(x: pd.Series, y: pd.Series) -> float:
    """Spearman's rank correlation; nan with fewer than three points or when one of them does not vary."""
    if len(x) < 3 or x.nunique() < 2 or y.nunique() < 2:
        return float("nan")
    return float(np.corrcoef(rankdata(x), rankdata(y))[0, 1])
