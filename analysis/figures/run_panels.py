"""One run at a glance: all metric families against steps, with the windows of its alerts shaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from analysis.figures.common import free_corner, say_missing, step_axes
from analysis.figures.curves import is_narrow
from analysis.load import Results
from analysis.style import ALERT, MUTED, PALETTE, PAPER
from analysis.verdict import label
from reasonrl.errors import AnalysisError

_SHADES = {"note": (MUTED, 0.12), "flag": (ALERT, 0.10), "stop": (ALERT, 0.2)}


@dataclass(frozen=True)
class Panel:
    """One small plot: title with unit, and the metrics drawn in it with their short names."""

    title: str
    series: tuple[tuple[str, str], ...]


PANELS: tuple[Panel, ...] = (
    Panel("Reward", (("reward/total", "total"), ("reward/correctness", "correctness"), ("reward/format", "format"))),
    Panel("Held-out (share)", (("eval/accuracy", "accuracy"), ("eval/pass_at_k", "pass@k"))),
    Panel("Entropy (nats/token)", (("entropy/mean", "mean"),)),
    Panel("Advantage", (("advantage/std", "std"), ("advantage/mean", "mean"))),
    Panel(
        "Flat groups (share)",
        (("groups/flat", "flat"), ("groups/all_right", "all right"), ("groups/all_wrong", "all wrong")),
    ),
    Panel("Ratio new/old", (("shift/ratio_q99", "99 %"), ("shift/ratio_mean", "mean"), ("shift/ratio_q01", "1 %"))),
    Panel("KL (nats/token)", (("shift/kl_old", "to old policy"), ("kl/ref", "to reference"))),
    Panel("Clipped (share)", (("clip/fraction", "all"), ("clip/high", "high"), ("clip/low", "low"))),
    Panel("Length (tokens)", (("length/mean", "mean"), ("length/max", "max"), ("length/min", "min"))),
    Panel("Text (share)", (("length/truncated", "truncated"), ("text/repetition", "repeated"))),
    Panel("Gradient norm", (("optim/grad_norm", "norm"),)),
    Panel("Speed (tokens/s)", (("speed/tokens_per_s", "generated"),)),
)


def dashboard(results: Results, figure: Figure | SubFigure, run: str | None = None) -> pd.DataFrame:
    """Twelve panels of one run; alert windows shaded, their codes above the first panels.

    `run` is a key or its beginning, or a run's name; default: the first stopped run, else the one with most
    alerts. AnalysisError when no run is called so. Returns rows of kind "value" (metric, step, value) and "alert"
    (code, severity, window).
    """
    columns = 2 if is_narrow(figure) else 3
    chosen = choose_run(results, run)
    if chosen is None:
        say_missing(figure.subplots(), "No run has recorded anything yet.")
        return pd.DataFrame(columns=["kind", "key", "metric", "step", "value"])
    axes = np.ravel(figure.subplots(math.ceil(len(PANELS) / columns), columns, squeeze=False))
    figure.suptitle(_title(chosen), fontsize=8, x=0.01, ha="left")
    rows = results.rows[results.rows["key"] == chosen["key"]]
    evals = results.evals[results.evals["key"] == chosen["key"]]
    alerts = results.alerts[results.alerts["key"] == chosen["key"]]
    steps = [float(frame["step"].max()) for frame in (rows, evals) if len(frame)]
    updates = _updates(rows)
    tables = []
    for index, (ax, panel) in enumerate(zip(axes, PANELS, strict=True)):
        tables.append(_draw_panel(ax, panel, rows, evals))
        if index < columns and len(alerts):
            ax.set_title(panel.title, fontsize=7, pad=9)  # the codes stand between title and panel
        if str(ax.get_gid() or ""):
            _shade(ax, alerts, codes=index < columns)
            ax.set_xlim(0, max(steps, default=1.0) * 1.02)
            step_axes(ax, None, below=index >= len(PANELS) - columns)
            if updates and index >= len(PANELS) - columns:
                ax.set_xlabel(f"Rollout step\n(= {updates:g} gradient steps)", fontsize=6.8)
            ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    windows = pd.DataFrame([_window(alert) for alert in alerts.to_dict("records")])
    parts = [part for part in [*tables, windows.assign(kind="alert")] if not part.empty]
    return pd.concat(parts, ignore_index=True).assign(key=chosen["key"]) if parts else windows


def choose_run(results: Results, run: str | None) -> pd.Series | None:
    """The run meant by `run`, or the one most worth a look; None when nothing is recorded."""
    runs = results.runs[results.runs["steps_done"].astype(float) > 0]
    if run is not None:
        named = results.runs[results.runs["key"].str.startswith(run) | (results.runs["name"] == run)]
        if named.empty:
            known = ", ".join(results.runs["name"].head(12))
            raise AnalysisError(f"run={run}: no such run; there are {known or 'none'}.")
        return named.iloc[0]
    if runs.empty:
        return None
    stopped = runs[runs["outcome"] == "stopped"]
    if len(stopped):
        return stopped.iloc[0]
    counts = results.alerts["key"].value_counts()
    return runs.iloc[int(runs["key"].map(counts).fillna(0).to_numpy().argmax())]


def _updates(rows: pd.DataFrame) -> float:
    """Gradient steps per rollout step of a run; 0 where that is not recorded or changes."""
    per = (rows["gradient_step"] / rows["step"])[rows["step"] > 0].astype(float)
    return round(float(per.iloc[-1]), 6) if len(per) and np.ptp(per) < 1e-6 else 0.0


def _title(run: pd.Series) -> str:
    why = f" by {run['reason_code']} {run['reason_title']}".rstrip() if run["reason_code"] else ""
    return f"{label(str(run['arm']))} seed {run['seed']}: {run['outcome']} at step {run['steps_done']}{why}"


def _draw_panel(ax: Axes, panel: Panel, rows: pd.DataFrame, evals: pd.DataFrame) -> pd.DataFrame:
    ax.set_title(panel.title, fontsize=7)
    ax.tick_params(labelsize=6)
    out, bad = [], 0
    for style, (metric, name) in zip(PALETTE, panel.series, strict=False):
        frame = evals if metric.startswith("eval/") else rows
        if metric not in frame or not np.isfinite(frame[metric].astype(float)).any():
            continue
        values = frame[metric].astype(float)
        bad = max(bad, int((~np.isfinite(values)).sum()))
        every = max(1, math.ceil(len(frame) / 8))
        ax.plot(frame["step"], values.where(np.isfinite(values)), color=style.colour, linestyle=style.dash, label=name)
        ax.lines[-1].set(linewidth=1.0, marker=style.marker, markersize=2.2, markevery=every)
        out.append(pd.DataFrame({"kind": "value", "metric": metric, "step": frame["step"], "value": values}))
    if not out:
        say_missing(ax, "not recorded")
        return pd.DataFrame()
    ax.set_gid("dashboard")
    if len(out) > 1:
        _, _, right, top = free_corner(ax, wide=0.55, tall=0.35)
        # The legend's own "best" would search anew at every draw.
        place: Any = f"{'upper' if top else 'lower'} {'right' if right else 'left'}"
        legend = ax.legend(fontsize=5.6, loc=place, handlelength=2.4, borderpad=0.1, labelspacing=0.2, frameon=True)
        legend.get_frame().set(facecolor=PAPER, alpha=0.75, linewidth=0)
    if bad:
        ax.annotate(
            f"no value at {bad} steps", (0.98, 0.04), xycoords="axes fraction", ha="right", fontsize=5.6, color=ALERT
        )
    return pd.concat(out, ignore_index=True)


def _window(alert: dict[str, object]) -> dict[str, object]:
    evidence = alert.get("evidence")
    window = evidence.get("window") if isinstance(evidence, dict) else None
    start, end = alert["step"], alert["step"]
    if isinstance(window, Sequence) and len(window) == 2 and all(isinstance(edge, int | float) for edge in window):
        start, end = window
    out = {name: alert[name] for name in ("arm", "seed", "step", "code", "severity")}
    return out | {"window_start": start, "window_end": end}


def _shade(ax: Axes, alerts: pd.DataFrame, codes: bool) -> None:
    """Shade every alert's window; `codes` writes which ones end there above the panel."""
    ends: dict[float, list[str]] = {}
    for alert in alerts.to_dict("records"):
        where = _window(alert)
        colour, alpha = _SHADES.get(str(alert["severity"]), _SHADES["note"])
        start, end = float(str(where["window_start"])), float(str(where["window_end"]))
        ax.axvspan(start, end, color=colour, alpha=alpha, linewidth=0, zorder=0.5)
        ax.axvline(end, color=colour, linewidth=0.6, linestyle=(0, (2, 2)), zorder=0.6)
        ends.setdefault(end, []).append(str(alert["code"]))
    for end, raised in ends.items() if codes else ():
        text = ", ".join(dict.fromkeys(raised))
        ax.annotate(text, (end, 1.0), xycoords=("data", "axes fraction"), ha="right", va="bottom")
        ax.texts[-1].set(fontsize=5.8, color=ALERT)
