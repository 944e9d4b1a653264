"""The stop map: every run of a sweep as a bar over its steps, where alerts were raised and why it ended."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from analysis.compare import arm_runs
from analysis.figures.common import say_missing
from analysis.figures.curves import is_narrow
from analysis.load import Results
from analysis.style import ALERT, BAR, INK, MUTED
from analysis.verdict import label

_ROW_IN = 0.145
_MOST_IN = 8.0
_MARKS = {"note": ("|", 5.0, MUTED), "flag": ("^", 3.6, ALERT), "stop": ("X", 5.0, ALERT)}


def heights(results: Results) -> Mapping[str, float]:
    """Inches for the figure: a line per run, at most a page."""
    rows = max(3, len(arm_runs(results)))
    inches = min(_MOST_IN, 0.75 + _ROW_IN * rows)
    return {"single": inches, "double": inches}


def stop_map(results: Results, figure: Figure | SubFigure) -> pd.DataFrame:
    """All runs with the steps they made, the steps a stop saved, and every alert at its step.

    Returns one row per run (kind "run": steps_done, steps_planned, saved, outcome, code) and per alert (kind
    "alert": step, code, severity).
    """
    ax = figure.subplots()
    runs = arm_runs(results)
    runs = runs[runs["steps_planned"].astype(float) > 0].reset_index(drop=True)
    if runs.empty:
        say_missing(ax, "No run is planned or recorded.")
        return pd.DataFrame(columns=["kind", "key", "arm", "seed", "step", "code"])
    runs["saved"] = (runs["steps_planned"] - runs["steps_done"]).clip(lower=0).where(runs["outcome"] == "stopped", 0)
    place = {key: row for row, key in enumerate(runs["key"])}
    _bars(ax, runs)
    alerts = results.alerts[results.alerts["key"].isin(place)]
    for severity, (marker, size, colour) in _MARKS.items():
        mine = alerts[alerts["severity"] == severity]
        rows = [place[key] for key in mine["key"]]
        ax.plot(mine["step"], rows, marker=marker, markersize=size, color=colour, linestyle="none", zorder=4)
        if rows:
            ax.lines[-1].set_label(severity)
    narrow = is_narrow(figure)
    dense = len(runs) * _ROW_IN + 0.75 > _MOST_IN
    if not dense:
        _endings(ax, runs, narrow)
    _name_rows(ax, runs, narrow, dense)
    if ax.get_legend_handles_labels()[0]:
        figure.legend(loc="outside upper right", ncols=3, title="", handletextpad=0.2, columnspacing=1.0)
    return _table(runs, alerts)


def _bars(ax: Axes, runs: pd.DataFrame) -> None:
    rows = range(len(runs))
    ax.barh(rows, runs["steps_done"], height=0.62, color=BAR, linewidth=0, zorder=2)
    left = (runs["steps_planned"] - runs["steps_done"]).clip(lower=0)
    ax.barh(
        rows, left, left=runs["steps_done"], height=0.62, facecolor="none", edgecolor=MUTED, linewidth=0.4, zorder=2
    )
    saved = runs[runs["saved"] > 0]
    hatched: dict[str, Any] = {"facecolor": "none", "edgecolor": MUTED, "hatch": "////", "linewidth": 0.4, "zorder": 2}
    ax.barh(saved.index, saved["saved"], left=saved["steps_done"], height=0.62, **hatched)
    ax.set_ylim(len(runs) - 0.4, -0.6)
    ax.set_xlim(0, float(runs["steps_planned"].max()) * 1.01)
    ax.set_xlabel("Rollout step")
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.grid(axis="y", visible=False)


def _endings(ax: Axes, runs: pd.DataFrame, narrow: bool) -> None:
    """Write beside each early end why it came and what it saved."""
    for row, run in enumerate(runs.to_dict("records")):
        if run["outcome"] in ("finished", "unfinished"):
            continue
        text = label(str(run["reason_code"] or run["error_class"] or run["outcome"]))
        if not narrow and run["reason_title"]:
            text = f"{text} {run['reason_title']}"
        if run["saved"]:
            text += f", {int(run['saved'])} steps saved"
        ax.annotate(text, (1.0, row), xycoords=("axes fraction", "data"), xytext=(4, 0), textcoords="offset points")
        ax.texts[-1].set(fontsize=6, color=ALERT, va="center")


def _name_rows(ax: Axes, runs: pd.DataFrame, narrow: bool, dense: bool) -> None:
    arms = runs["arm"].to_numpy()
    first = [row for row in range(len(runs)) if row == 0 or arms[row] != arms[row - 1]]
    for row in first[1:]:
        ax.axhline(row - 0.5, color=INK, linewidth=0.4)
    if dense:
        ends = [*first[1:], len(runs)]
        middle = [(start + end - 1) / 2 for start, end in zip(first, ends, strict=True)]
        every = max(1, math.ceil(len(first) / 60))
        ax.set_yticks(middle[::every], [_short(arms[row], narrow) for row in first[::every]])
    else:
        names = [
            f"{_short(arm, narrow)}  s{seed}" if row in first else f"s{seed}"
            for row, (arm, seed) in enumerate(zip(arms, runs["seed"], strict=True))
        ]
        ax.set_yticks(range(len(runs)), names)
    ax.tick_params(axis="y", length=0, labelsize=6.2)


def _short(arm: str, narrow: bool) -> str:
    most = 18 if narrow else 30
    name = label(str(arm))
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _table(runs: pd.DataFrame, alerts: pd.DataFrame) -> pd.DataFrame:
    columns = ["key", "arm", "seed", "steps_done", "steps_planned", "saved", "outcome"]
    table = runs[columns].assign(kind="run", step=runs["steps_done"], code=runs["reason_code"])
    raised = alerts[["key", "arm", "seed", "step", "code", "severity"]].assign(kind="alert")
    parts = [part for part in (table, raised) if not part.empty]
    order = [
        "kind",
        "key",
        "arm",
        "seed",
        "step",
        "code",
        "severity",
        "outcome",
        "steps_done",
        "steps_planned",
        "saved",
    ]
    return pd.concat(parts, ignore_index=True).reindex(columns=order)
