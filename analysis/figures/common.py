"""What several figures share: mean over seeds, arm lines, stop marks, labels at line ends, the second step axis."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FuncFormatter, LogFormatterSciNotation, LogLocator, MaxNLocator, NullFormatter
from scipy.special import stdtrit

from analysis.style import ALERT, MUTED, PAPER, ArmStyle

LABELS = {
    "eval/accuracy": "Held-out accuracy",
    "eval/pass_at_k": "Held-out pass@k",
    "eval/length": "Held-out length (tokens)",
    "eval/truncated": "Held-out truncated share",
    "entropy/mean": "Policy entropy (nats/token)",
    "reward/total": "Training reward",
    "reward/correctness": "Correctness reward",
    "reward/format": "Format reward",
    "clip/fraction": "Clipped tokens (share)",
    "length/mean": "Response length (tokens)",
    "length/truncated": "Truncated responses (share)",
    "groups/flat": "Flat groups (share)",
    "kl/ref": "KL to reference (nats/token)",
    "shift/kl_old": "Policy shift k3 (nats/token)",
    "optim/grad_norm": "Gradient norm",
    "advantage/std": "Advantage std",
}


def axis_label(metric: str) -> str:
    """Words and unit of a metric for an axis; a reward part or unknown name is spelled as recorded."""
    if metric in LABELS:
        return LABELS[metric]
    group, _, name = metric.partition("/")
    return f"{name.replace('_', ' ').capitalize()} reward" if group == "reward" else metric


def mean_over_seeds(points: pd.DataFrame, x: str, y: str, confidence: float = 0.95) -> pd.DataFrame:
    """Mean of `y` over the seeds of each arm at each `x`, with a t interval of that mean.

    Returns one row per (arm, x): mean, low, high (NaN with fewer than two seeds or no spread), n. Rows without a
    finite `y` do not count.
    """
    usable = points[np.isfinite(points[y].astype(float))]
    grouped = usable.groupby(["arm", x], sort=False, observed=True)[y]
    table = grouped.agg(["mean", "std", "count"]).reset_index().rename(columns={"count": "n"})
    n = table["n"].to_numpy(float)
    with np.errstate(invalid="ignore", divide="ignore"):
        half = stdtrit(n - 1, 0.5 + confidence / 2) * table["std"].to_numpy(float) / np.sqrt(n)
        half[(n < 2) | (table["std"] < 1e-12)] = math.nan  # no spread seen: its size cannot be estimated
    table["low"], table["high"] = table["mean"] - half, table["mean"] + half
    order = {arm: index for index, arm in enumerate(dict.fromkeys(points["arm"]))}
    table = table.sort_values(["arm", x], key=lambda column: column.map(order) if column.name == "arm" else column)
    return table[["arm", x, "mean", "low", "high", "n"]].reset_index(drop=True)


def draw_arm(
    ax: Axes, summary: pd.DataFrame, x: str, style: ArmStyle, seeds: int, marked: bool, place: int = 0
) -> None:
    """One arm: mean line and band; both faint from where one of its `seeds` runs has already left.

    `marked` puts a marker on every point, else on about six, shifted by the arm's `place` so that they do not
    cover each other.
    """
    xs, mean = summary[x].to_numpy(float), summary["mean"].to_numpy(float)
    whole = summary["n"].to_numpy() >= seeds
    last = int(np.flatnonzero(whole)[-1]) + 1 if whole.any() else 0
    every = 1 if marked else max(1, math.ceil(len(xs) / 6))
    look: dict[str, Any] = {"color": style.colour, "marker": style.marker, "linestyle": style.dash}
    look |= {"markeredgecolor": PAPER, "markeredgewidth": 0.4, "gid": f"arm:{summary['arm'].iloc[0]}"}
    look["markevery"] = every if marked else (place * every // 4 % every, every)
    ax.plot(xs[:last], mean[:last], zorder=3, **look)
    tail = slice(max(last - 1, 0), None)
    if last < len(xs):  # survivors only: shown, but not as the arm's mean
        ax.plot(xs[tail], mean[tail], zorder=2.6, alpha=0.55, linewidth=1.0, **look)
    low, high = summary["low"].to_numpy(float), summary["high"].to_numpy(float)
    for part, alpha in ((slice(0, last), 0.14), (tail, 0.05 if last < len(xs) else 0.0)):
        if alpha and np.isfinite(low[part]).any():
            ax.fill_between(xs[part], low[part], high[part], color=style.colour, alpha=alpha, linewidth=0, zorder=1.5)


def fit_height(ax: Axes, lines: Sequence[float], bands: Sequence[float], share: bool = False) -> None:
    """Set the height of a panel by its lines; bands may add a quarter of that range on each side (the interval of two
    seeds is often far wider than all that happens). `share` keeps within 0 to 1."""
    values = np.asarray(lines, float)
    values = values[np.isfinite(values)]
    if not len(values):
        return
    # rounding must not look like a trend
    least = 0.05 if share else 0.02 * max(abs(values.max()), abs(values.min())) or 1.0
    low, high = _height(values, np.asarray(bands, float), least)
    if share:
        low, high = max(low, -0.04 * (high - low)), min(high, 1 + 0.04 * (high - low))
    ax.set_ylim(low, high)


def fit_log_height(ax: Axes, lines: Sequence[float], bands: Sequence[float]) -> None:
    """The same on a logarithmic height, named 1, 2, 5 in plain numbers, or in powers of ten where there are many."""
    values, edges = (np.asarray(numbers, float) for numbers in (lines, bands))
    values, edges = (np.log10(numbers[np.isfinite(numbers) & (numbers > 0)]) for numbers in (values, edges))
    ax.set_yscale("log", nonpositive="mask")
    ax.yaxis.set_minor_formatter(NullFormatter())
    if not len(values):
        return
    low, high = (10**edge for edge in _height(values, edges, 0.3))
    ax.set_ylim(low, high)
    if high > 100 * low:
        return
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    if low > 1e-5:
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6f}".rstrip("0").rstrip(".")))
    else:
        ax.yaxis.set_major_formatter(LogFormatterSciNotation(minor_thresholds=(9, 9)))


def _height(lines: np.ndarray, bands: np.ndarray, least: float) -> tuple[float, float]:
    """Ends of a panel that shows all of `lines`, at least `least` high, and of `bands` as much as is reasonable."""
    low, high = float(lines.min()), float(lines.max())
    if high - low < least:
        low, high = (low + high - least) / 2, (low + high + least) / 2
    room = high - low
    wide = bands[np.isfinite(bands)]
    if len(wide):
        low, high = max(low - room / 4, min(low, wide.min())), min(high + room / 4, max(high, wide.max()))
    return low - 0.06 * room, high + 0.06 * room


def mark_stops(ax: Axes, stops: pd.DataFrame, styles: Mapping[str, ArmStyle]) -> None:
    """A cross and the code where a run was stopped; `stops` has arm, x, y, code. Near ones share one label, which
    stands on the side of the cross where it covers least."""
    if stops.empty:
        return
    for arm, part in stops.groupby("arm", sort=False, observed=True):
        ax.plot(part["x"], part["y"], linestyle="none", marker="x", markersize=5, markeredgewidth=1.4)
        ax.lines[-1].set(color=styles[str(arm)].colour, zorder=5)
    groups: list[tuple[Any, tuple[float, float], dict[str, int]]] = []  # place, (x, y), {code: count}
    places = _inside(ax, stops[["x", "y"]].to_numpy(float))
    for (x, y, code), place in zip(stops[["x", "y", "code"]].itertuples(index=False), places, strict=True):
        near = [codes for where, _, codes in groups if np.abs(where - place).max() < 0.09]
        if near:
            near[0][code] = near[0].get(code, 0) + 1
        else:
            groups.append((place, (x, y), {code: 1}))
    taken = _traces(ax)
    for place, point, codes in groups:
        names = {code: code.replace("_", "-") for code in codes}
        text = ", ".join(names[code] if count == 1 else f"{names[code]} ×{count}" for code, count in codes.items())
        left, above, box = _roomiest_side(ax, place, text, taken)
        taken = np.concatenate([taken, box])
        ax.annotate(
            text,
            point,
            xytext=(-4 if left else 4, 5 if above else -5),
            textcoords="offset points",
            ha="right" if left else "left",
            va="bottom" if above else "top",
            fontsize=6.5,
            color=ALERT,
            zorder=6,
            bbox={"facecolor": PAPER, "edgecolor": "none", "alpha": 0.8, "pad": 0.6},
        )


def _inside(ax: Axes, points: np.ndarray) -> np.ndarray:
    """Data points (n, 2) as fractions of the axes, on linear and logarithmic scales."""
    ax.get_xlim(), ax.get_ylim()  # limits are found lazily, and the transform alone does not ask for them
    return np.asarray(ax.transAxes.inverted().transform(ax.transData.transform(points)))


def _traces(ax: Axes) -> np.ndarray:
    """Points along all lines of a panel in fractions of the axes (n, 2), close enough to see what a label covers."""
    out = [np.zeros((0, 2))]
    for line in ax.lines:
        path = np.asarray(line.get_xydata(), float)
        path = path[np.isfinite(path).all(axis=1)]
        if len(path) > 1 and line.get_linestyle() != "None":
            fine = np.linspace(0, len(path) - 1, max(len(path), 120))
            path = np.stack([np.interp(fine, range(len(path)), column) for column in path.T], axis=1)
        if len(path):
            out.append(_inside(ax, path))
    return np.concatenate(out)


def _roomiest_side(ax: Axes, place: np.ndarray, text: str, taken: np.ndarray) -> tuple[bool, bool, np.ndarray]:
    """Whether a label beside `place` goes left and above, so that it hides least; and its box as points."""
    figure = ax.figure.get_figure(root=True)
    inches = np.asarray(figure.get_size_inches() if isinstance(figure, Figure) else (3.3, 2.0))
    unit = 1 / (np.asarray(ax.get_position().size) * inches * 72)  # a typographic point as fractions of the axes
    wide, tall, away = 3.9 * len(text) * unit[0], 9.0 * unit[1], 4.5 * unit
    best, least = (False, True, np.zeros((0, 2))), math.inf
    for left, above in ((False, True), (False, False), (True, True), (True, False)):
        x = place[0] - away[0] - wide if left else place[0] + away[0]
        y = place[1] + away[1] if above else place[1] - away[1] - tall
        near = (taken >= (x, y)) & (taken <= (x + wide, y + tall))
        outside = max(-x, -y, x + wide - 1.0, y + tall - 1.0, 0.0)
        cost = float(near.all(axis=1).sum()) + (1000 * (1 + outside) if outside else 0)
        if cost < least:
            corners = np.stack(np.meshgrid(np.linspace(x, x + wide, 12), np.linspace(y, y + tall, 4)), axis=-1)
            best, least = (left, above, corners.reshape(-1, 2)), cost
    return best


def label_ends(ax: Axes, ends: Sequence[tuple[str, float, float, ArmStyle]]) -> None:
    """Write each arm's name right of the axes at the height of its line's end, moved apart where they would
    touch; `ends` holds (name, x, y, style). The panel must have its height already (`settle`)."""
    if not ends:
        return
    height_pt = ax.get_window_extent().height * 72 / ax.figure.dpi
    gap = 9.0 / max(height_pt, 1.0)
    places = [ax.transAxes.inverted().transform(ax.transData.transform((x, y))) for _, x, y, _ in ends]
    wanted = [min(max(float(place[1]), 0.0), 1.0) for place in places]
    levels = spread(wanted, gap)
    for (name, x, y, style), place, level, height in zip(ends, places, levels, wanted, strict=True):
        line = None
        if abs(level - height) > 0.01 or place[0] < 0.95:
            line = {"arrowstyle": "-", "color": style.colour, "linewidth": 0.5, "linestyle": ":"}
            line |= {"relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 3}
        ax.annotate(
            name,
            (x, y),
            xytext=(1.03, level),
            textcoords="axes fraction",
            va="center",
            ha="left",
            fontsize=7,
            color=style.text,
            arrowprops=line,
            annotation_clip=False,
        )


def settle(figure: Figure | SubFigure) -> None:
    """Run the layout now, so that panels have the place they will be drawn at."""
    root = figure.get_figure(root=True)
    engine = root.get_layout_engine() if isinstance(root, Figure) else None
    if isinstance(root, Figure) and engine is not None:
        engine.execute(root)


def spread(wanted: Sequence[float], gap: float, low: float = 0.0, high: float = 1.0) -> list[float]:
    """Positions near `wanted`, at least `gap` apart, inside [low, high] when they fit; order kept.

    The least-squares answer: blocks of touching labels sit at the mean of what their members wanted.
    """
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    blocks: list[tuple[float, list[int]]] = []
    for index in order:
        blocks.append((wanted[index], [index]))
        while len(blocks) > 1 and _bottom(blocks[-1], gap) - _top(blocks[-2], gap) < gap - 1e-12:
            (centre_a, one), (centre_b, two) = blocks[-2], blocks[-1]
            members = one + two
            weight = (centre_a * len(one) + centre_b * len(two)) / len(members)
            blocks[-2:] = [(weight, members)]
    result = [0.0] * len(wanted)
    floor = low
    for block in blocks:
        start = max(_bottom(block, gap), floor)
        for offset, index in enumerate(block[1]):
            result[index] = start + offset * gap
        floor = start + len(block[1]) * gap
    limit = high
    for index in reversed(order):  # push back what was pushed over the top
        result[index] = min(result[index], limit)
        limit = result[index] - gap
    return result


def _bottom(block: tuple[float, list[int]], gap: float) -> float:
    return block[0] - gap * (len(block[1]) - 1) / 2


def _top(block: tuple[float, list[int]], gap: float) -> float:
    return block[0] + gap * (len(block[1]) - 1) / 2


def step_axes(ax: Axes, updates: float | None, below: bool = True, above: bool = True) -> None:
    """Rollout steps below; gradient steps on top when all runs make the same number of updates per step.

    In a column of panels only the lowest is named `below` and only the highest carries the axis `above`.
    """
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    if below:
        ax.set_xlabel("Rollout step")
    if updates is None or not above:
        return
    ratio = updates
    top = ax.secondary_xaxis("top", functions=(lambda x: np.asarray(x) * ratio, lambda x: np.asarray(x) / ratio))
    top.set_xlabel(f"Gradient step ({updates:g} per rollout step)", fontsize=6.5, color=MUTED)
    top.tick_params(labelsize=6.5, colors=MUTED)
    top.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    top.spines["top"].set_color(MUTED)


def say_missing(ax: Axes, text: str) -> None:
    """An empty panel that says what is missing instead of a blank or invented curve."""
    ax.set_xticks([])
    ax.set_yticks([])
    ax.grid(False)
    for spine in ax.spines.values():
        spine.set(visible=True, color=MUTED, linestyle=(0, (2, 2)))
    words = textwrap.fill(text, 28)
    ax.text(0.5, 0.5, words, transform=ax.transAxes, ha="center", va="center", color=MUTED, fontsize=7)


def add_note(ax: Axes, text: str) -> None:
    """A small remark above a panel, where it covers nothing; its lines are wrapped to the panel's width."""
    figure = ax.figure.get_figure(root=True)
    across = ax.get_position().width * figure.get_figwidth() * 72 if isinstance(figure, Figure) else 150.0
    letters = max(20, int(across / 3.3))
    lines = [part for line in text.split("\n") for part in textwrap.wrap(line, letters)]
    ax.set_title("\n".join(lines), loc="left", fontsize=6.2, fontweight="normal", color=MUTED, pad=3)


def free_corner(ax: Axes, wide: float = 0.5, tall: float = 0.25) -> tuple[float, float, bool, bool]:
    """The emptiest corner of a panel: (x, y) in axes fractions, and whether it is right and top."""
    inside = _traces(ax)
    best, fewest = (0.98, 0.03, True, False), math.inf
    for right, top in ((True, False), (False, False), (False, True), (True, True)):
        near_x = inside[:, 0] > 1 - wide if right else inside[:, 0] < wide
        near_y = inside[:, 1] > 1 - tall if top else inside[:, 1] < tall
        count = int((near_x & near_y).sum())
        if count < fewest:
            best, fewest = (0.98 if right else 0.02, 0.97 if top else 0.03, right, top), count
    return best
