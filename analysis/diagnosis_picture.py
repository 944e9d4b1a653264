"""The curves of one log, with the window of every alert shaded in the panel of the metric it speaks of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.logs import Log
from analysis.style import FORMATS, MUTED, PALETTE, drawing, new_figure, save
from reasonrl.alerts import Alert
from reasonrl.alerts.names import translate_row
from reasonrl.alerts.vocabulary import is_score
from reasonrl.errors import AnalysisError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUBJECT = {
    "A02": "optim/grad_norm", "A03": "entropy/mean", "A04": "entropy/mean", "A05": "groups/flat",
    "A06": "length/mean", "A07": "length/mean", "A08": "length/truncated", "A09": "kl/ref", "A13": "text/repetition",
    "A14": "clip/fraction", "A15": "shift/kl_old", "A16": "entropy/low_share", "A17": "shift/first_ratio_error",
}  # fmt: skip
PANELS = ("reward/total", "entropy/mean", "length/mean", "groups/flat", "kl/ref", "clip/fraction")
COLOURS = {"note": "#9aa0a6", "flag": "#ddaa33", "stop": "#b3261e"}
MOST_PANELS = 10


def draw(log: Log, alerts: Sequence[Alert], target: Path) -> Path:
    """Write the picture (png, pdf or svg by suffix); raises AnalysisError for another suffix or nothing to draw."""
    if target.suffix.lstrip(".") not in FORMATS:
        raise AnalysisError(f"--picture {target}: choose a file ending in .{', .'.join(FORMATS)}.")
    curves = _curves(log)
    alerts = _first_of_each(alerts)
    panels = _panels(curves, alerts)
    if not panels:
        raise AnalysisError(f"{log.path} has no curve to draw.")
    rows = (len(panels) + 1) // 2
    with drawing():
        figure = new_figure("double", 1.5 * rows + 0.4)
        axes = figure.subplots(rows, 2, squeeze=False, sharex=True).flatten()
        for ax, name in zip(axes, panels, strict=False):
            steps, values = curves[name]
            ax.plot(steps, values, color=PALETTE[0].colour, marker="o" if len(steps) < 30 else "", markersize=2)
            ax.set_title(name)
            _shade(ax, [alert for alert in alerts if _subject(alert, curves) == name])
        for ax in axes[len(panels) :]:
            ax.set_visible(False)
        for ax in axes[max(0, len(panels) - 2) : len(panels)]:
            ax.set_xlabel("logged step")
            ax.tick_params(labelbottom=True)
        figure.suptitle(log.path.name, fontsize=8, color=MUTED)
    return save(figure, target.with_suffix(""), [target.suffix.lstrip(".")])[0]


def _first_of_each(alerts: Sequence[Alert]) -> list[Alert]:
    """The first alert of every rule and severity: a finding that worsens forty times is shaded once."""
    first: dict[tuple[str, str, str], Alert] = {}
    for alert in alerts:
        first.setdefault((alert.code, alert.title, alert.severity), alert)
    return list(first.values())


def _curves(log: Log) -> dict[str, tuple[list[float], list[float]]]:
    curves: dict[str, tuple[list[float], list[float]]] = {}
    for step, row in log.rows:
        for name, value in translate_row(row).items():
            if value - value == 0:
                steps, values = curves.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
    return curves


def _panels(curves: dict[str, Any], alerts: Sequence[Alert]) -> list[str]:
    scores = [name for name in curves if is_score(name)]
    subjects = [_subject(alert, curves) for alert in alerts]
    wanted = dict.fromkeys(["reward/total", *subjects, *scores[:3], *PANELS])
    return [name for name in wanted if name in curves][:MOST_PANELS]


def _subject(alert: Alert, curves: dict[str, Any]) -> str:
    """The metric an alert speaks of; the reward when that is none of the curves."""
    for name in (alert.evidence.get("name"), alert.evidence.get("part"), SUBJECT.get(alert.code)):
        if name in curves:
            return str(name)
    if alert.code == "A06" and "length/truncated" in curves:
        return "length/truncated"
    return "reward/total"


def _shade(ax: Axes, alerts: Sequence[Alert]) -> None:
    for place, alert in enumerate(alerts):
        start, end = alert.evidence.get("window", [alert.step, alert.step])
        colour = COLOURS[alert.severity]
        ax.axvspan(start, max(end, start), color=colour, alpha=0.25, lw=0)
        ax.axvline(alert.step, color=colour, lw=0.9)
        ax.annotate(
            f"{alert.code} {alert.severity}", (alert.step, 1), xycoords=("data", "axes fraction"), color=colour,
            xytext=(2, -3 - 8 * (place % 4)), textcoords="offset points", va="top", fontsize=6,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
        )  # fmt: skip
