"""The DAPO ladder: what each piece adds, built up one by one and taken away one by one, beside the paper's values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from analysis.compare import LAST_SCORE, arm_runs, by_seed
from analysis.figures.common import say_missing
from analysis.figures.curves import is_narrow
from analysis.load import Results
from analysis.stats import mean_interval, paired_difference
from analysis.style import INK, MUTED, PALETTE

FILTER, CLIP, SOFT, TOKEN, DYNAMIC = (
    "overlong filter",
    "clip-higher",
    "soft overlong",
    "token-level loss",
    "dynamic sampling",
)
PIECES = (FILTER, CLIP, SOFT, TOKEN, DYNAMIC)
# DAPO, Table 1: AIME24 avg@32 in %, Qwen2.5-32B, one run each; one evaluation carries 1.3 to 2.1 points of noise.
PUBLISHED = (("naive", 30.0), *zip([f"+ {piece}" for piece in PIECES], (36.0, 38.0, 41.0, 42.0, 50.0), strict=True))
NOISE = 2.1
_KEYS = ("overlong.kind", "loss.low", "loss.high", "loss.aggregation", "data.kind")


def pieces_of(results: Results, arm: str) -> frozenset[str]:
    """Which pieces of DAPO an arm's configuration has (the soft punishment includes handling of overlong answers)."""
    runs = arm_runs(results)
    mine = runs[runs["arm"] == arm].iloc[0]
    overlong, low, high, aggregation, data = (mine.get(f"config.{key}") for key in _KEYS)
    found = {FILTER} if overlong == "filter" else {FILTER, SOFT} if overlong == "soft" else set()
    if isinstance(low, int | float) and isinstance(high, int | float) and high > low + 1e-9:
        found.add(CLIP)
    found |= {TOKEN} if aggregation == "token_mean" else set()
    return frozenset(found | ({DYNAMIC} if data == "dynamic_sampling" else set()))


def rungs(results: Results) -> tuple[list[tuple[str, str]], list[tuple[str, str]], str]:
    """(cumulative, leave-one-out, whole): arms with the words of their rung, and the arm that has all pieces.

    Cumulative rungs are arms whose sets of pieces grow one by one from none; the whole is the largest of them.
    """
    sets = {arm: pieces_of(results, arm) for arm in results.arms}
    whole: frozenset[str] = max(sets.values(), key=len, default=frozenset())
    order = [piece for piece in PIECES if piece in whole]
    by_set = {pieces: arm for arm, pieces in reversed(sets.items())}
    steps = [frozenset(order[:count]) for count in range(len(order) + 1)]
    words = ["naive", *(f"+ {piece}" for piece in order)]
    up = [(by_set[step], word) for step, word in zip(steps, words, strict=True) if step in by_set]
    down = []
    for arm, pieces in sets.items():
        missing = whole - pieces
        if pieces < whole and (len(missing) == 1 or missing == {FILTER, SOFT}):
            down.append((arm, f"− {min(missing, key=PIECES.index)}"))
    down.sort(key=lambda rung: PIECES.index(rung[1].removeprefix("− ")))
    return up, down, by_set.get(whole, "")


def is_ladder(results: Results) -> bool:
    """True for a sweep with at least three cumulative rungs."""
    return not results.runs.empty and len(rungs(results)[0]) >= 3


def dapo_ladder(results: Results, figure: Figure | SubFigure) -> pd.DataFrame:
    """Published rungs; cumulative rungs here; leave-one-out here as difference from the whole.

    Held-out accuracy at the end (a stopped run counts as its last score): every seed, mean, 95 % t interval of
    the mean, or of the paired difference. Returns rows of kind "published", "cumulative", "leave one out".
    """
    narrow = is_narrow(figure)
    axes = np.ravel(figure.subplots(3, 1) if narrow else figure.subplots(1, 3))
    tables = [_published(axes[0])]
    up, down, whole = rungs(results) if not results.runs.empty else ([], [], "")
    tables.append(_cumulative(axes[1], results, up))
    tables.append(_leave_one_out(axes[2], results, down, whole))
    return pd.concat([table for table in tables if not table.empty], ignore_index=True)


def _published(ax: Axes) -> pd.DataFrame:
    words, values = zip(*PUBLISHED, strict=True)
    ax.errorbar(values, range(len(values)), xerr=NOISE, fmt="none", ecolor=MUTED, elinewidth=0.8, capsize=2)
    ax.plot(values, range(len(values)), color=INK, marker="o", linestyle=(0, (1, 2)))
    _rows(ax, words, "Published (DAPO)", "AIME24 avg@32 (%)")
    for row, value in enumerate(values):
        ax.annotate(f"{value:.0f}", (value, row), xytext=(3, 3), textcoords="offset points", fontsize=6.2)
    return pd.DataFrame({"kind": "published", "rung": words, "value": values})


def _rows(ax: Axes, words: Sequence[str], title: str, unit: str) -> None:
    ax.set_title(title)
    ax.set_yticks(range(len(words)), words)
    ax.set_ylim(len(words) - 0.5, -0.6)
    ax.tick_params(axis="y", length=0, labelsize=6.8)
    ax.set_xlabel(unit)
    ax.margins(x=0.12)


def _cumulative(ax: Axes, results: Results, up: Sequence[tuple[str, str]]) -> pd.DataFrame:
    if len(up) < 2:
        ax.set_title("Built up, here")
        say_missing(ax, "No two arms of this sweep are rungs of the ladder.")
        return pd.DataFrame()
    runs, rows = arm_runs(results), []
    for row, (arm, word) in enumerate(up):
        values = by_seed(runs, arm, "final_accuracy", LAST_SCORE)
        estimate = mean_interval(values)
        low, high = (estimate.interval.low, estimate.interval.high) if estimate.interval else (math.nan, math.nan)
        _point(ax, row, values.to_numpy(), estimate.value, (low, high), 0)
        rows.append({"rung": word, "arm": arm, "value": estimate.value, "low": low, "high": high, "n": estimate.n})
    _rows(ax, [word for _, word in up], "Built up, here", "Held-out accuracy")
    table = pd.DataFrame(rows).assign(kind="cumulative")
    if table["n"].min() < 2:
        ax.set_xlabel("Held-out accuracy (one seed: no interval)")
    return table


def _leave_one_out(ax: Axes, results: Results, down: Sequence[tuple[str, str]], whole: str) -> pd.DataFrame:
    if not down or not whole or len(rungs(results)[0]) < 2:
        ax.set_title("Taken away, here")
        say_missing(ax, "No arm of this sweep leaves out one piece.")
        return pd.DataFrame()
    runs, rows = arm_runs(results), []
    full = by_seed(runs, whole, "final_accuracy", LAST_SCORE)
    for row, (arm, word) in enumerate(down):
        values = by_seed(runs, arm, "final_accuracy", LAST_SCORE)
        seeds = sorted((set(values.index) & set(full.index)) - {-1})
        paired = paired_difference(values[seeds], full[seeds], np.random.default_rng(0))
        low, high = (paired.t.low, paired.t.high) if paired.t else (math.nan, math.nan)
        _point(ax, row, np.array(paired.differences), paired.mean, (low, high), 1)
        rows.append({"rung": word, "arm": arm, "value": paired.mean, "low": low, "high": high, "n": paired.n})
    ax.axvline(0, color=INK, linewidth=0.6)
    _rows(ax, [word for _, word in down], "Taken away, here", "Change in accuracy")
    return pd.DataFrame(rows).assign(kind="leave one out")


def _point(ax: Axes, row: int, each: np.ndarray, mean: float, span: tuple[float, float], style: int) -> None:
    """Every seed as an open ring, the mean as a filled mark, its interval as a line."""
    look = PALETTE[style]
    ax.plot(each, np.full(len(each), row + 0.22), marker="o", linestyle="none", markersize=2.6, color=MUTED)
    ax.lines[-1].set(markerfacecolor="none", markeredgewidth=0.6)
    if math.isfinite(span[0]):
        ax.plot(span, (row, row), color=look.colour, linewidth=1.4)
    ax.plot([mean], [row], color=look.colour, marker=look.marker, linestyle="none", zorder=4)
