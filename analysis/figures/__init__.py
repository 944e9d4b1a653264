"""Figures, one function each: `function(results, figure) -> DataFrame of the plotted numbers`.

`FIGURES[name].draw(results, "double")` gives a finished matplotlib Figure and its numbers, and
`analysis.style.save` writes it. Nothing here touches pyplot.
"""

from __future__ import annotations

from analysis.figures.comparisons import (
    accuracy_entropy,
    clip_fraction,
    dynamic_sampling,
    overlong,
    reward_parts,
)
from analysis.figures.curves import curve_figure, metric_panel
from analysis.figures.registry import FIGURES, FigureSpec

__all__ = [
    "FIGURES",
    "FigureSpec",
    "accuracy_entropy",
    "clip_fraction",
    "curve_figure",
    "dynamic_sampling",
    "metric_panel",
    "overlong",
    "reward_parts",
]
