"""Figures, one function each: `function(results, figure) -> DataFrame of the plotted numbers`.

`FIGURES[name].draw(results, "double")` gives a finished matplotlib Figure and its numbers; `analysis.style.save`
writes it.
"""

from __future__ import annotations

from analysis.figures.curves import accuracy_entropy, curve_figure, metric_panel, overlong
from analysis.figures.registry import FigureSpec
from analysis.load import Results


def _compares(key: str) -> object:
    """Default for sweeps whose runs differ in the config key."""

    def differs(results: Results) -> bool:
        column = f"config.{key}"
        return column in results.runs and results.runs[column].nunique() > 1

    return differs


FIGURES: dict[str, FigureSpec] = {
    spec.name: spec
    for spec in (
        FigureSpec(
            "accuracy_entropy",
            accuracy_entropy,
            "Held-out accuracy and policy entropy",
            "Mean over seeds (thick), 95 % t interval of that mean (band), every run (thin). A cross marks where a "
            "run was stopped, with the code of the alert; from there on the arm's mean covers the remaining runs "
            "only and is drawn faint.",
            ("eval/accuracy", "entropy/mean"),
            lambda results: True,
        ),
        FigureSpec(
            "overlong",
            overlong,
            "Accuracy, entropy and truncation, by handling of overlong answers",
            "As in the figure of accuracy and entropy; right: share of training responses cut at the length limit.",
            ("eval/accuracy", "entropy/mean", "length/truncated"),
            _compares("overlong.kind"),
            {"single": 5.4, "double": 2.3},
        ),
    )
}

__all__ = ["FIGURES", "FigureSpec", "accuracy_entropy", "curve_figure", "metric_panel", "overlong"]
