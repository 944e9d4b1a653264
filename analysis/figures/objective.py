"""The clip objective itself, and how far a token can rise before the clip takes its gradient away."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from analysis.compare import arm_runs
from analysis.figures.common import label_ends, settle
from analysis.figures.curves import is_narrow
from analysis.load import Results
from analysis.style import MUTED, PALETTE, ArmStyle

Bounds = tuple[float, float]
DEFAULT: dict[str, Bounds] = {
    "symmetric 0.2/0.2": (0.2, 0.2),
    "clip-higher 0.2/0.28": (0.2, 0.28),
    "0.1/0.3": (0.1, 0.3),
}
OLD = (0.01, 0.6)  # a rare and a common token, the example of the DAPO paper


def clip_bounds(results: Results) -> dict[str, Bounds]:
    """low and high of every arm that uses the clip loss, one entry per pair of bounds; DEFAULT without any."""
    runs = arm_runs(results)
    names = ("config.loss.kind", "config.loss.low", "config.loss.high")
    if not set(names) <= set(runs.columns):
        return DEFAULT
    found: dict[Bounds, list[str]] = {}
    for arm in results.arms:
        kind, low, high = runs.loc[runs["arm"] == arm, list(names)].iloc[0]
        if kind == "clip" and all(isinstance(bound, int | float) and bound == bound for bound in (low, high)):
            found.setdefault((float(low), float(high)), []).append(arm)
    if not found or len(found) > 4:
        return DEFAULT
    return {f"{low:g}/{high:g}": (low, high) for low, high in found}


def clip_objective(
    results: Results, figure: Figure | SubFigure, bounds: Mapping[str, Bounds] | None = None
) -> pd.DataFrame:
    """The objective against the ratio for A = +1 and A = -1, and the probabilities reachable from 0.01 and 0.6.

    Returns rows of kind "objective" (advantage, ratio, value) and "reach" (old, largest probability).
    """
    bounds = clip_bounds(results) if bounds is None else dict(bounds)
    styles = dict(zip(bounds, PALETTE, strict=False))
    if is_narrow(figure):
        grid = figure.subplot_mosaic([["good", "good"], ["bad", "bad"], ["rare", "common"]], height_ratios=(3, 3, 2.2))
    else:
        grid = figure.subplot_mosaic([["good", "bad", "rare"], ["good", "bad", "common"]], width_ratios=(3, 3, 2.4))
    tables = [_objective(grid["good"], bounds, styles, 1.0), _objective(grid["bad"], bounds, styles, -1.0)]
    tables += [_reach(grid[name], bounds, styles, old) for name, old in zip(("rare", "common"), OLD, strict=True)]
    settle(figure)
    label_ends(grid["good"], [(name, 1.6, 1 + high, styles[name]) for name, (_, high) in bounds.items()])
    return pd.concat(tables, ignore_index=True)


def objective(ratio: np.ndarray, advantage: float, low: float, high: float) -> np.ndarray:
    """min(r A, clip(r, 1 - low, 1 + high) A), the minimum for both signs of A (PPO; DAPO eq. 8)."""
    return np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)


def _objective(
    ax: Axes, bounds: Mapping[str, Bounds], styles: Mapping[str, ArmStyle], advantage: float
) -> pd.DataFrame:
    edges = [edge for low, high in bounds.values() for edge in (1 - low, 1 + high)]
    ratio = np.unique(np.concatenate([np.linspace(0.5, 1.6, 45), edges]))
    ax.plot(ratio, ratio * advantage, color=MUTED, linewidth=0.7, linestyle=(0, (1, 2)), gid="unclipped")
    out = [pd.DataFrame({"setting": "unclipped", "ratio": ratio, "value": ratio * advantage})]
    for name, (low, high) in bounds.items():
        value = objective(ratio, advantage, low, high)
        knee = 1 + high if advantage > 0 else 1 - low
        style = styles[name]
        ax.plot(ratio, value, color=style.colour, linestyle=style.dash, gid=f"arm:{name}")
        ax.plot([knee], [knee * advantage], marker=style.marker, color=style.colour, zorder=4)
        out.append(pd.DataFrame({"setting": name, "ratio": ratio, "value": value}))
    ax.axvline(1.0, color=MUTED, linewidth=0.5, zorder=1)
    ax.set_xlim(0.5, 1.6)
    ax.set_ylim((0.45, 1.65) if advantage > 0 else (-1.65, -0.45))
    ax.set_xlabel("Ratio new/old probability")
    ax.set_ylabel("Objective per token")
    ax.set_title("A > 0: raised until 1 + high" if advantage > 0 else "A < 0: lowered until 1 − low")
    return pd.concat(out, ignore_index=True).assign(kind="objective", advantage=advantage)


def _reach(ax: Axes, bounds: Mapping[str, Bounds], styles: Mapping[str, ArmStyle], old: float) -> pd.DataFrame:
    rows = []
    for place, (name, (_, high)) in enumerate(bounds.items()):
        most, style = min(1.0, old * (1 + high)), styles[name]
        ax.plot([old, most], [place, place], color=style.colour, linestyle=style.dash)
        ax.plot([most], [place], color=style.colour, marker=style.marker, linestyle="none")
        ax.annotate(f"{most:.3g}", (most, place), xytext=(4, 0), textcoords="offset points", va="center")
        ax.texts[-1].set(fontsize=6.5, color=style.text)
        rows.append({"kind": "reach", "setting": name, "old": old, "value": most})
    ax.axvline(old, color=MUTED, linewidth=0.6)
    ax.set_xlim(old * 0.97, old * 1.48)
    ax.set_xticks([old])
    ax.set_xticklabels([f"{old:g}"])
    ax.set_ylim(len(bounds) - 0.4, -0.6)
    ax.set_yticks(range(len(bounds)), ["" for _ in bounds])
    ax.tick_params(axis="y", length=0)
    ax.set_title(f"Reach from {old:g}", fontsize=7)
    if old == OLD[-1]:
        ax.set_xlabel("Probability")
    return pd.DataFrame(rows)
